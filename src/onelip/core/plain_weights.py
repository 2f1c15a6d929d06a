"""Plain weights into a parametrized layer: `layer.weight = other.weight`, and the state dict of a plain network.

torch's property takes tensors, but `nn.Module` refuses an `nn.Parameter` under a name that is a property, and
`load_state_dict` knows only the parameter behind the weight. Both are taught to the class that torch makes for each
parametrized layer, not to the layer by hooks: `remove_parametrizations` then leaves nothing behind.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def accept_plain_weights(module: nn.Module) -> None:
    """Let a layer that is parametrized take Parameters by assignment and plain weights from a state dict."""
    kind: Any = type(module)  # torch's own for this layer (and its copies)

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

    kind.register_parameter = register_parameter
    kind._load_from_state_dict = _load_from_state_dict


def _plain_shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """The shape of the plain weight that a map of onelip's was made for; None: the map that decides is another's."""
    return getattr(_maps(module, name)[-1], "weight_shape", None)


def _maps(module: nn.Module, name: str) -> Any:
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    return lists[name]


@torch.no_grad()
def _translate(module: nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> str | None:
    """Exchange a plain weight in a state dict for the parameter behind it; the reason if that cannot be done.

    Whatever else the parametrization has (learned channel weights, vectors of a power iteration) stays as it is: the
    right inverse counts on it.
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
        return None  # nothing to count on: torch will name the keys that are missing
    del state_dict[prefix + name]
    state_dict.update({own + key: value for key, value in kept.items()})
    if W.shape != expected:
        return f"size mismatch for {prefix}{name}: expected a weight of shape {expected}, got {tuple(W.shape)}"
    P = W.to(original.dtype) if original.is_meta else W.to(original)  # meta: with assign=True, W says where it lives
    try:
        for map in reversed(maps):
            P = map.right_inverse(P)
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"{prefix}{name}: expected a weight that {type(maps[-1]).__name__} can take, got {error}"
    state_dict[own + "original"] = P
    return None
