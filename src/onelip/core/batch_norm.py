"""Fold batch normalisation in eval mode into stored weights.

    a = weight / sqrt(running_var + eps),  b = bias - running_mean a,       y = a x + b in each channel,

computed in float64 and rounded once to the dtype of the module. After a linear layer or a convolution it is merged into
that layer, W' = a W and b' = a b_W + b; elsewhere it becomes a `ChannelAffine`. The folded numbers then define the
network that is proved, certified and exported. A layer that is a shift in eval mode (`onelip.nn.BatchCentering`) has
a method `plain_shift` that returns it as a plain layer with a buffer `mean`: a = 1, b = -mean.

Note [Follows]
    A normalisation is merged into a layer only if it reads nothing but the output of that layer, and nothing else reads
    this output. No assumption is made about the forward passes: torch.fx traces them symbolically on a copy, in which
    the layer and the normalisation must each be called exactly once. If torch.fx cannot trace a forward pass (control
    flow that depends on values), the pairs stay separate, which computes the same function. In the copy, layers and
    normalisations are replaced by modules without settings and weights, so a forward pass that reads anything of a
    layer but its output cannot be traced either.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn

from onelip.core.contents import is_library
from onelip.core.errors import check_integer
from onelip.core.lipschitz_module import Bound, LipschitzModule, is_changed
from onelip.core.modes import is_scripting


class ChannelAffine(LipschitzModule):
    r"""Multiply each channel by a factor and add an offset: $y_c = w_c x_c + b_c$.

    `onelip.bake` uses it to replace a batch normalisation that it cannot fold into the preceding layer. Its Lipschitz
    constant is $\max_c |w_c|$.

    Args:
        channels: number of channels.
        axes: number of spatial axes: 1, 2 or 3. With 1, the input may also have none, as for `nn.BatchNorm1d`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - Input: (batch, channels, *sizes)
        - Output: same shape as the input

    Attributes:
        factors: $w$, shaped like the weight of a depthwise convolution: (channels, 1, *ones).
        offsets: $b$, (channels). The names are not those of a batch normalisation, so that a forward pass that reads
            the weight of one fails after `onelip.bake`, instead of using other numbers.

    Examples:
        >>> layer = ChannelAffine(2, axes=1)
        >>> _ = layer.factors.data.copy_(torch.tensor([2.0, -3.0]).reshape(2, 1, 1))
        >>> layer(torch.ones(1, 2)).tolist(), layer.lipschitz_constant
        ([[2.0, -3.0]], 3.0)
    """

    is_scriptable = True

    def __init__(
        self, channels: int, axes: int = 2, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.channels, self.axes = check_integer("channels", channels), check_integer("axes", axes, 1, 3)
        self.factors = nn.Parameter(torch.ones(channels, 1, *(1,) * axes, device=device, dtype=dtype))
        self.offsets = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"factors": (self.channels, 1, *(1,) * self.axes), "offsets": (self.channels,)}

    def bound(self) -> Bound:
        """The largest absolute value of the factors."""
        largest = float(self.factors.detach().double().abs().max())
        is_finite = largest < float("inf")
        return Bound(largest, "largest factor") if is_finite else Bound(None, "the factors contain NaN or infinity")

    def forward(self, x: Tensor) -> Tensor:
        axes = x.dim() - 2
        fits = (axes == self.axes or (axes == 0 and self.axes == 1)) and x.shape[1] == self.channels
        if not is_scripting() and not fits:
            raise ValueError(
                f"expected an input (batch, {self.channels}, {self.axes} spatial axes), got shape {tuple(x.shape)}; "
                "check the layer before it"
            )
        shape = [-1] + [1] * axes
        return x * self.factors.reshape(shape) + self.offsets.reshape(shape)

    def extra_repr(self) -> str:
        return f"{self.channels}, axes={self.axes}"


_AXES: dict[type[nn.Module], int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
_LAYERS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.BatchNorm1d: (nn.Linear, nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}


class Folded(nn.Module):
    """Identity that replaces a batch normalisation after it was folded into the preceding layer.

    Args:
        axes: number of axes of its inputs, including the batch axis. After `nn.Linear` it is 2: with more axes, the
            channel axis of the normalisation is not the feature axis of the layer.
    """

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        if not is_scripting() and x.dim() != self.axes:
            raise ValueError(
                f"expected an input with {self.axes} axes, for which the batch normalisation was folded into the "
                f"preceding layer, got shape {tuple(x.shape)}; use onelip.bake(model, fold=False) to keep it separate"
            )
        return x

    def extra_repr(self) -> str:
        return "batch normalisation, folded into the preceding layer"


def is_foldable(module: nn.Module) -> bool:
    """Whether a module is a torch batch normalisation (no subclass) with finite stored statistics.

    Examples:
        >>> is_foldable(nn.BatchNorm2d(3)), is_foldable(nn.BatchNorm2d(3, track_running_stats=False))
        (True, False)
    """
    if (type(module) not in _AXES and _shift(module) is None) or "forward" in module.__dict__:
        return False
    found = _numbers(module)
    return found is not None and all(numbers.is_meta or bool(numbers.isfinite().all()) for numbers in found)


def fold(model: nn.Module, done: dict[int, Any]) -> list[nn.Module]:
    """Add the plain form of each batch normalisation of a model to `done`.

    Args:
        model: the model; it is not changed.
        done: replacement of each module by its id; contains the plain form of each parametrized layer. Layers that a
            normalisation is folded into are added.

    Returns:
        The normalisations that are replaced.
    """
    norms = [module for module in model.modules() if is_foldable(module)]
    before = _layers_before(model, norms, done) if norms else {}
    for norm in norms:
        numbers, layer = _numbers(norm), before.get(id(norm))
        assert numbers is not None
        if layer is not None:
            plain: Any = done.get(id(layer)) or copy.deepcopy(layer, done)
            _scale_outputs(plain, *numbers)
            made: nn.Module = Folded(plain.weight.dim())
        elif (shift := _shift(norm)) is not None:
            made = shift
        else:
            running: Any = norm.running_var
            made = ChannelAffine(len(running), _AXES[type(norm)], device=running.device, dtype=running.dtype)
            with torch.no_grad():
                made.factors.copy_(numbers[0].reshape(made.factors.shape))
                made.offsets.copy_(numbers[1])
            made.requires_grad_(any(parameter.requires_grad for parameter in norm.parameters()))
        done[id(norm)] = made.train(norm.training)
    return norms


def _numbers(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """a and b in float64, on the CPU or without values on the meta device; None if the module uses batch statistics."""
    if (shift := _shift(norm)) is not None:
        moved = shift.mean
        assert isinstance(moved, Tensor)
        b = -moved.detach().to("meta" if moved.is_meta else "cpu", torch.float64)
        return torch.ones_like(b), b
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        return None
    device = "meta" if mean.is_meta or variance.is_meta else "cpu"
    tensors = {"mean": mean, "variance": variance, "weight": norm.weight, "bias": norm.bias}
    wide = {name: t.detach().to(device, torch.float64) for name, t in tensors.items() if t is not None}
    a = wide.get("weight", torch.ones_like(wide["mean"])) / (wide["variance"] + norm.eps).sqrt()
    return a, wide.get("bias", torch.zeros_like(a)) - wide["mean"] * a


def _shift(module: nn.Module) -> nn.Module | None:
    """A layer that is a shift in eval mode, as a plain one; else None. A subclass may have a forward of its own."""
    plain_shift = vars(type(module)).get("plain_shift")
    return None if plain_shift is None else plain_shift(module)


@torch.no_grad()
def _scale_outputs(layer: Any, a: Tensor, b: Tensor) -> None:
    """Set W' = a W and b' = a b_W + b, each number rounded from float64 once."""
    old, bias = layer.weight, layer.bias
    weight = old.detach().to(a.device, torch.float64)
    if getattr(layer, "transposed", False):  # (inputs, outputs of a group, *kernel), by groups of inputs
        factors = a.reshape(layer.groups, 1, -1, *(1,) * (weight.dim() - 2))
        weight = (weight.unflatten(0, (layer.groups, -1)) * factors).flatten(0, 1)
    else:
        weight = weight * a.reshape(-1, *(1,) * (weight.dim() - 1))
    b = b if bias is None else b + a * bias.detach().to(a.device, torch.float64)
    layer.weight = nn.Parameter(weight.to(old), old.requires_grad)
    layer.bias = nn.Parameter(b.to(old), old.requires_grad if bias is None else bias.requires_grad)


class _Slot(nn.Module):
    """Placeholder for a layer or a normalisation in the copy that torch.fx traces."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Tracer(fx.Tracer):
    """Traces into all modules except slots and layers of torch and onelip: others may read the output of a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _Slot):
            return True
        kind = type(m)
        is_known = is_library(kind.__module__, kind.__qualname__, kind) and is_changed(m) is None
        return is_known and not any(isinstance(part, _Slot) for part in m.modules())


def _layers_before(model: nn.Module, norms: list[nn.Module], done: dict[int, Any]) -> dict[int, nn.Module]:
    """For each normalisation (by its id) that can be folded, the layer before it; see Note [Follows]."""
    layers = [module for module in model.modules() if id(module) in done or _is_layer(module)]
    slots = {id(module): _Slot(number) for number, module in enumerate([*norms, *layers])}
    try:
        follower = copy.deepcopy(model, dict(slots)).eval()
        # Arguments with a default keep it, as in a call without them.
        options = inspect.signature(follower.forward).parameters.values()
        given = {p.name: p.default for p in options if p.default is not inspect.Parameter.empty}
        graph = _Tracer().trace(follower, given)
    except Exception:  # a user's forward may raise anything when it is given a proxy
        return {}
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        module = follower.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, _Slot):
            calls.setdefault(module.number, []).append(node)
    once = {nodes[0]: number for number, nodes in calls.items() if len(nodes) == 1}
    found: dict[int, nn.Module] = {}
    for node, number in once.items():
        source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if number >= len(norms) or not isinstance(source, fx.Node) or len(source.users) != 1:
            continue
        norm, place = norms[number], once.get(source, -1) - len(norms)
        layer = layers[place] if place >= 0 else None
        if layer is not None and _is_bare(norm) and _is_bare(layer) and _fits(done.get(id(layer), layer), norm):
            found[id(norm)] = layer
    return found


def _is_layer(plain: nn.Module) -> bool:
    return any(type(plain) in kinds for kinds in _LAYERS.values())


def _fits(plain: Any, norm: Any) -> bool:
    if not _is_layer(plain) if type(norm) not in _LAYERS else type(plain) not in _LAYERS[type(norm)]:
        return False
    return (plain.out_features if isinstance(plain, nn.Linear) else plain.out_channels) == norm.num_features


def _is_bare(module: nn.Module) -> bool:
    """Whether the module has no hooks and no forward of its own, so nothing else reads its input or output."""
    return is_changed(module) is None and not (module._forward_hooks or module._forward_pre_hooks)
