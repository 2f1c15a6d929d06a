"""Assign plain weights to a parametrized layer: `layer.weight = other.weight`, and state dicts of plain networks.

torch's property accepts tensors, but `nn.Module` rejects an `nn.Parameter` under a name that is a property, and
`load_state_dict` knows only the parameter of the parametrization. Both methods are overridden in the class that torch
creates for each parametrized layer, not by hooks of the layer, so `remove_parametrizations` removes them too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def accept_plain_weights(module: nn.Module) -> None:
    """Let a parametrized layer accept Parameters by assignment and plain weights from a state dict.

    A layer that is pickled as a whole raises an error that says what to do.
    """
    kind: Any = type(module)  # the class that torch created for this layer and its copies

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and parametrize.is_parametrized(self, name) and _plain_shape(self, name):
            setattr(self, name, param.detach())
        else:
            super(kind, self).register_parameter(name, param)

    def _load_from_state_dict(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, _, _, error_msgs = rest
        lists = self.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        for name in lists:
            if reason := _translate(self, name, state_dict, prefix):
                error_msgs.append(reason)
        super(kind, self)._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self: nn.Module) -> Any:
        raise RuntimeError(
            "a parametrized layer cannot be pickled: save model.state_dict() and load it into a model that is built "
            "the same way, or save the plain network, torch.save(onelip.bake(model), path)"
        )

    kind.__getstate__ = __getstate__
    kind.register_parameter = register_parameter
    kind._load_from_state_dict = _load_from_state_dict


def _plain_shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """Shape of the plain weight, if the last map is a parametrization of onelip; else None."""
    return getattr(_maps(module, name)[-1], "weight_shape", None)


def _maps(module: nn.Module, name: str) -> Any:
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    return lists[name]


@torch.no_grad()
def _translate(module: nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> str | None:
    """Replace a plain weight in a state dict by the parameter that yields it; return an error message if impossible.

    All other state of the parametrization (learned channel weights, vectors of a power iteration) is unchanged: the
    right inverse depends on it.
    """
    maps = _maps(module, name)
    own = f"{prefix}parametrizations.{name}."
    W = state_dict.get(prefix + name)
    expected = _plain_shape(module, name)
    if expected is None or not isinstance(W, Tensor) or any(key.startswith(own) for key in state_dict):
        return None
    kept = maps.state_dict()
    original = kept["original"]
    if any(tensor.is_meta for key, tensor in kept.items() if key != "original" and isinstance(tensor, Tensor)):
        return None  # the right inverse needs their values; torch reports the missing keys
    del state_dict[prefix + name]
    state_dict.update({own + key: value for key, value in kept.items()})
    if W.shape != expected:
        return f"size mismatch for {prefix}{name}: expected a weight of shape {expected}, got {tuple(W.shape)}"
    P = W.to(original.dtype) if original.is_meta else W.to(original)  # meta with assign=True: W decides the device
    try:
        for map in reversed(maps):
            P = map.right_inverse(P)
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"{prefix}{name}: {type(maps[-1]).__name__} cannot represent this weight: {error}"
    state_dict[own + "original"] = P
    return None
