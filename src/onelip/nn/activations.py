"""Activations with Lipschitz constant 1: MaxMin, GroupSort, Abs, Householder and N-activation."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from onelip.core.errors import check_integer, check_number
from onelip.core.lipschitz_module import LipschitzModule
from onelip.core.modes import is_compiling, is_scripting
from onelip.graph.kinds import Abs as AbsNode, Sort
from onelip.graph.lowering import Lowering, lowers
from onelip.nn.channels import along_axis, axis_length, check_channels

_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _halves(x: Tensor, dim: int, layer: str) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of an axis of even length, as views."""
    n = axis_length(x, dim, layer)
    if n % 2:
        raise ValueError(
            f"{layer} expected an even length of axis {dim}, got {n} (input of shape {tuple(x.shape)}); "
            f"use an even number of channels, or append a zero channel with PadChannels({n + 1}, dim={dim})"
        )
    return x.narrow(dim, 0, n // 2), x.narrow(dim, n // 2, n // 2)


def _swap(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Exchange the halves of `x` where `mask` is set."""
    try:
        return _swap_in_place(x, mask, dim)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # `jacobian(..., vectorize=True)` and tensor subclasses may support neither `out=` nor views of another type.
        return _swap_plain(x, mask, dim)


def _swap_plain(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim, "maxmin")
    return torch.cat([torch.where(mask, b, a), torch.where(mask, a, b)], dim)


def _swap_in_place(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    out = torch.empty_like(x)
    word = _WORD.get(x.element_size())
    if x.device.type != "cpu" or word is None:
        (a, b), (p, q) = _halves(x, dim, "maxmin"), _halves(out, dim, "maxmin")
        torch.where(mask, b, a, out=p)
        torch.where(mask, a, b, out=q)
        return out
    # On a CPU, `where` of torch is not vectorised. The same exchange by exclusive or of the bit patterns takes about a
    # quarter of the time, and moves all values unchanged, also infinities and NaN.
    (a, b), (p, q) = _halves(x.view(word), dim, "maxmin"), _halves(out.view(word), dim, "maxmin")
    torch.bitwise_xor(a, b, out=q)
    q.mul_(mask)
    torch.bitwise_xor(a, q, out=p)
    q.bitwise_xor_(b)
    return out


def _sort(x: Tensor, dim: int) -> Tensor:
    """Like `_swap` with the mask of `x` itself, in two passes; a NaN in a pair makes both values NaN."""
    a, b = _halves(x, dim, "maxmin")
    try:
        out = torch.empty_like(x)  # keeps channels_last
        p, q = _halves(out, dim, "maxmin")
        torch.maximum(a, b, out=p)
        torch.minimum(a, b, out=q)
        return out
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # as in `_swap`; also forward mode and vmap without gradients
        return _sort_plain(x, dim)


def _sort_plain(x: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim, "maxmin")
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], dim)


class _Swap(Function):
    """The swap, which is its own derivative of every order; with `own` the mask is that of `x` itself."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor, dim: int, own: bool) -> Tensor:
        return _sort(x, dim) if own else _swap(x, mask, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: Tensor) -> None:
        _, mask, ctx.dim, _ = inputs
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return _Swap.apply(grad_outputs[0], mask, ctx.dim, False), None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return _Swap.apply(grad_inputs[0], mask, ctx.dim, False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, mask, dim, own = args

        def batched(t: Tensor, axis: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)

        return _Swap.apply(batched(x, in_dims[0]), batched(mask, in_dims[1]), dim + 1, own), 0


def maxmin(x: Tensor, dim: int = 1) -> Tensor:
    """Sort each pair `(x[i], x[i + n/2])` of an axis of even length; see `MaxMin`.

    Args:
        x: the input.
        dim: axis of the channels, of even length $n$.

    Returns:
        A tensor of the shape of `x`: the maxima in the first half of the axis, the minima in the second.

    Raises:
        ValueError: if the axis has an odd length.

    Examples:
        >>> maxmin(torch.tensor([[1.0, 5.0, 3.0, 4.0]]))
        tensor([[3., 5., 1., 4.]])
    """
    a, b = _halves(x, dim, "maxmin")
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return _sort_plain(x, dim)
    if is_compiling():
        # `where` instead of `maximum`, so that the compiled derivative is the same permutation.
        return _swap_plain(x, a < b, dim)
    if not torch.is_grad_enabled():
        return _sort(x, dim)
    return _Swap.apply(x, a < b, dim % x.dim(), True)  # pyright: ignore[reportReturnType]


class MaxMin(LipschitzModule):
    r"""Sort pairs of channels: $(a, b) \mapsto (\max(a, b), \min(a, b))$ for $a = x_i$, $b = x_{i + n/2}$.

    The layer is 1-Lipschitz because sorting both of two pairs never increases their distance (rearrangement
    inequality). It is exact in floating point: values are moved, not computed.

    Given the mask of the pairs that are out of order, the map is a swap $S$: linear, symmetric, a permutation. So the
    derivative of every order is $S$ applied to the gradient, also at ties, where that of `torch.maximum` would halve
    gradients. One bit per pair is stored for the backward pass.

    From Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019; it is the activation of AOL.

    Args:
        dim: axis of the channels, of even length.

    Shape:
        - Input: $(N, C, *)$ with even $C$, or any shape whose axis `dim` has an even length.
        - Output: same shape as the input; the maxima in the first half of the channels, the minima in the second.

    Examples:
        >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 0.0]]))
        tensor([[4., 2., 1., 0.]])
    """

    proved_constant = 1.0
    is_scriptable = True

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():
            a, b = x.chunk(2, self.dim)
            y = torch.cat([torch.maximum(a, b), torch.minimum(a, b)], self.dim)
        else:
            y = maxmin(x, self.dim)
        return y

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


@lowers(MaxMin)
def _lower_maxmin(low: Lowering) -> int:
    return low.emit(Sort, low.source, axis=low.sample_axis, group_size=2)


def groupsort(x: Tensor, group_size: int | None = None, dim: int = 1) -> Tensor:
    """Sort groups of `group_size` elements of axis `dim` in descending order; see `GroupSort`.

    Args:
        x: the input.
        group_size: elements of each group; None or -1 for one group with the whole axis.
        dim: axis that is split into groups.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: if the group size does not divide the length of the axis.

    Examples:
        >>> groupsort(torch.tensor([[1.0, 5.0, 3.0, 4.0]]))
        tensor([[5., 4., 3., 1.]])
        >>> groupsort(torch.tensor([[1.0, 5.0, 3.0, 4.0]]), 2)
        tensor([[3., 5., 1., 4.]])
    """
    n = axis_length(x, dim, "groupsort")
    size = n if group_size is None or group_size == -1 else group_size
    if size == 2 and n % 2 == 0:
        return maxmin(x, dim)
    if size == n:
        return torch.sort(x, dim, descending=True).values
    if n % size:
        raise ValueError(
            f"groupsort expected axis {dim} to be a multiple of the group size {size}, got length {n} "
            f"(input of shape {tuple(x.shape)}); use a divisor of {n}, or append zeros with PadChannels"
        )
    dim = dim % x.dim()
    groups = x.unflatten(dim, (size, n // size))
    return torch.sort(groups, dim, descending=True).values.flatten(dim, dim + 1)


class GroupSort(LipschitzModule):
    r"""Sort each group of channels in descending order.

    Group $j$ of an axis of length $n$ with group size $g$ consists of the elements $j, j + n/g, j + 2n/g, \ldots$, so
    that group size 2 is `MaxMin`. Which elements form a group is only a permutation of the channels.

    The layer is 1-Lipschitz because $\|\mathrm{sort}(x) - \mathrm{sort}(y)\|_2 \le \|x - y\|_2$ (rearrangement
    inequality) in each group. It is exact in floating point, and its Jacobian is a permutation everywhere.

    From Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019.

    Args:
        group_size: elements of each group, a divisor of the number of channels; None or -1 sorts all of them.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape that has the axis `dim`; the group size divides $C$.
        - Output: same shape as the input.

    Examples:
        >>> GroupSort(4)(torch.tensor([[3.0, 1.0, 2.0, 4.0]]))
        tensor([[4., 3., 2., 1.]])
    """

    proved_constant = 1.0

    def __init__(self, group_size: int | None = None, dim: int = 1) -> None:
        super().__init__()
        self.group_size = None if group_size in (None, -1) else check_integer("group_size", group_size)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return groupsort(x, self.group_size, self.dim)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}, dim={self.dim}"


@lowers(GroupSort)
def _lower_groupsort(low: Lowering) -> int:
    axis = low.sample_axis
    return low.emit(Sort, low.source, axis=axis, group_size=low.module.group_size or low.shape[axis])


class Abs(LipschitzModule):
    r"""Absolute value of all channels, or of the first channels only (the $\beta$-Abs of LipNeXt).

    $$y_c = |x_c| \ \text{ for } c < \mathrm{round}(\beta n), \qquad y_c = x_c \ \text{ otherwise}$$

    The layer is 1-Lipschitz because $||a| - |b|| \le |a - b|$. It is exact in floating point. The Jacobian is a
    diagonal matrix of signs, hence orthogonal, except that torch's derivative is 0 at exactly 0. `MaxMin` is `Abs` on
    half of the channels between two fixed rotations.

    Args:
        fraction: $\beta$, the fraction of the channels whose absolute value is taken, from 0 to 1.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape that has the axis `dim`.
        - Output: same shape as the input.

    Raises:
        ValueError: if `fraction` is not in [0, 1].

    Examples:
        >>> Abs()(torch.tensor([[-1.0, 2.0, -3.0, -4.0]]))
        tensor([[1., 2., 3., 4.]])
        >>> Abs(fraction=0.5)(torch.tensor([[-1.0, 2.0, -3.0, -4.0]]))
        tensor([[ 1.,  2., -3., -4.]])
    """

    proved_constant = 1.0
    is_scriptable = True

    def __init__(self, fraction: float = 1.0, dim: int = 1) -> None:
        super().__init__()
        self.fraction = check_number("fraction", fraction, 0, 1)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.fraction == 1.0:
            return x.abs()
        n = x.shape[self.dim] if is_scripting() else axis_length(x, self.dim, "Abs")
        count = int(round(self.fraction * n))  # noqa: RUF046 (in TorchScript a float)
        return torch.cat([x.narrow(self.dim, 0, count).abs(), x.narrow(self.dim, count, n - count)], self.dim)

    def extra_repr(self) -> str:
        return f"fraction={self.fraction:g}, dim={self.dim}"


@lowers(Abs)
def _lower_abs(low: Lowering) -> int:
    return low.emit(AbsNode, low.source) if low.module.fraction == 1.0 else low.refuse()


def _fold(angle: Tensor) -> Tensor:
    """Triangle wave: the identity on [0, 2 pi], even, with period 4 pi."""
    # The clamp only removes rounding errors of the remainder.
    return (torch.remainder(angle + 2 * math.pi, 4 * math.pi) - 2 * math.pi).abs().clamp(max=2 * math.pi)


def _order1(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    stays = x * torch.sin(t / 2) <= y * torch.cos(t / 2)
    c, s = torch.cos(t), torch.sin(t)
    return torch.where(stays, x, c * x + s * y), torch.where(stays, y, s * x - c * y)


def _order2(x: Tensor, y: Tensor, t0: Tensor, t1: Tensor, t2: Tensor) -> tuple[Tensor, Tensor]:
    # phi only selects the piece, so its derivative (undefined at the origin) is not needed.
    phi = torch.remainder(torch.atan2(y.detach(), x.detach()) - t0.detach() / 2, 2 * math.pi)
    first, second, third = phi < t1 / 2, phi < (t1 + t2) / 2, phi < math.pi + t2 / 2

    def choose(identity: Tensor, reflect: Tensor, rotate: Tensor, back: Tensor) -> Tensor:
        return torch.where(first, identity, torch.where(second, reflect, torch.where(third, rotate, back)))

    one, zero = torch.ones_like(t0), torch.zeros_like(t0)
    c = choose(one, torch.cos(t0 + t1), torch.cos(t2), torch.cos(t0))
    s = choose(zero, torch.sin(t0 + t1), torch.sin(t2), torch.sin(t0))
    sign = choose(-one, one, -one, one)  # +1 on reflections, -1 on rotations
    return c * x + s * y, sign * (s * x - c * y)


class Householder(LipschitzModule):
    r"""Fold each pair of channels $(x_i, x_{i + n/2})$ along learned lines of its plane.

    **Order 1**, one angle $t$ per pair: points with $x \sin(t/2) \le y \cos(t/2)$ are unchanged, all others are
    reflected at the line of angle $t/2$. For $t = \pi/2$ this is (min, max).

    **Order 2**, three angles per pair, by the polar angle $\varphi$ relative to $t_0/2$:

    | sector | polar angle of the output | map |
    |---|---|---|
    | $0 \le \varphi < t_1/2$ | $\varphi$ | identity |
    | $t_1/2 \le \varphi < (t_1 + t_2)/2$ | $t_1 - \varphi$ | reflection, angle $t_0 + t_1$ |
    | $(t_1 + t_2)/2 \le \varphi < \pi + t_2/2$ | $\varphi - t_2$ | rotation by $-t_2$ |
    | $\pi + t_2/2 \le \varphi < 2\pi$ | $2\pi - \varphi$ | reflection, angle $t_0$ |

    The sectors have the lengths $t_1/2$, $t_2/2$, $\pi - t_1/2$ and $\pi - t_2/2$, and neighbouring maps agree on the
    borders. So the map is continuous for $t_1, t_2 \in [0, 2\pi]$ and every $t_0$; with $t_2 = 0$ it is order 1.

    The layer is 1-Lipschitz: it is continuous and orthogonal on finitely many pieces, so it does not lengthen the image
    of the segment from $p$ to $q$. The forward pass folds the parameters $t_1, t_2$ into $[0, 2\pi]$ by a triangle
    wave. Its slope is $\pm 1$ everywhere, so that, unlike with clamping, no angle stops training.

    From Singla, Singla, Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.

    Args:
        channels: number of channels, even.
        order: 1 or 2.
        dim: axis of the channels.
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `channels`.
        - Output: same shape as the input.

    Attributes:
        angles: parameter, `(channels / 2,)` for order 1, initialised with $\pi/2$; `(3, channels / 2)` for order 2,
            initialised uniformly in $[0, \pi]$. Do not apply weight decay to it.

    Raises:
        ValueError: for an odd number of channels, and for other orders.

    Examples:
        >>> Householder(2)(torch.tensor([[5.0, 3.0]])).detach()
        tensor([[3.0000, 5.0000]])
    """

    proved_constant = 1.0

    def __init__(
        self,
        channels: int,
        order: int = 1,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if check_integer("channels", channels, 2) % 2:
            raise ValueError(
                f"expected an even number of channels, got {channels}; the layer acts on pairs of channels"
            )
        if order not in (1, 2):
            raise ValueError(f"expected order 1 or 2, got {order!r}")
        self.channels, self.order, self.dim = channels, order, dim
        shape = (channels // 2,) if order == 1 else (3, channels // 2)
        self.angles = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Initialise the angles: $\pi/2$ for order 1, uniform in $[0, \pi]$ for order 2."""
        if self.order == 1:
            nn.init.constant_(self.angles, math.pi / 2)
        else:
            nn.init.uniform_(self.angles, 0.0, math.pi)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"angles": (self.channels // 2,) if self.order == 1 else (3, self.channels // 2)}

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, self.dim, self.channels, "Householder")
        a, b = _halves(x, self.dim, "Householder")
        # In the wider type: in bfloat16 the squares of cosine and sine add up to 1.004.
        dtype = max(x.dtype, self.angles.dtype, key=lambda t: t.itemsize)
        a, b, angles = a.to(dtype), b.to(dtype), along_axis(self.angles.to(dtype), x, self.dim)
        if self.order == 1:
            pair = _order1(a, b, angles)
        else:
            t0, t1, t2 = angles.unbind(0)
            pair = _order2(a, b, t0, _fold(t1), _fold(t2))
        return torch.cat(pair, self.dim).to(x.dtype)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, order={self.order}, dim={self.dim}"


Init = Literal["identity", "absolute", "alternating"]

# "absolute" is |x| for x >= -10; activations of a 1-Lipschitz network on images are rarely below that.
_KINKS: dict[str, tuple[float, float]] = {"identity": (0.0, 0.0), "absolute": (-10.0, 0.0)}


class NActivation(LipschitzModule):
    r"""Piecewise linear activation with slopes $+1, -1, +1$ and two learned kinks $a \le b$ per channel.

    $$f(x) = x - 2\,\mathrm{clamp}(x, a, b) = \begin{cases} x - 2a & x < a \\ -x & a \le x < b \\
    x - 2b & x \ge b\end{cases}$$

    The layer is 1-Lipschitz because $f$ is continuous with slopes $\pm 1$. The forward pass sorts the two parameters of
    each channel, so $a \le b$ holds for every value that training can reach.

    From Prach, Lampert, "1-Lipschitz neural networks are more expressive with N-activations", 2023.

    Args:
        channels: number of channels.
        dim: axis of the channels.
        init: initial kinks: "identity" ($a = b = 0$), "absolute" ($a = -10$, $b = 0$, which is $|x|$ for $x \ge -10$),
            "alternating" (the first half of the channels "absolute", the second half "identity", which is `MaxMin` up
            to rotations), or a pair $(a, b)$ of numbers.
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `channels`.
        - Output: same shape as the input.

    Attributes:
        theta: parameter `(2, channels)`, the pairs in any order. Do not apply weight decay to it; it often needs a
            learning rate of its own.

    Raises:
        ValueError: for an unknown `init`.

    Examples:
        >>> NActivation(1, init=(-1.0, 1.0))(torch.tensor([[-3.0], [0.5], [3.0]])).detach().T
        tensor([[-1.0000, -0.5000,  1.0000]])
    """

    proved_constant = 1.0

    def __init__(
        self,
        channels: int,
        dim: int = 1,
        *,
        init: Init | tuple[float, float] = "identity",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(init, str) and init not in (*_KINKS, "alternating"):
            raise ValueError(
                f"expected init to be 'identity', 'absolute', 'alternating' or a pair of numbers, got {init!r}"
            )
        self.channels = check_integer("channels", channels)
        self.dim = dim
        self.init: Init | tuple[float, float] = init
        self.theta = nn.Parameter(torch.empty(2, channels, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the kinks to the values of `init`."""
        half = self.channels // 2
        start = "absolute" if self.init == "alternating" else self.init
        pair = _KINKS[start] if isinstance(start, str) else start
        self.theta.copy_(self.theta.new_tensor(pair).unsqueeze(1).expand_as(self.theta))
        if self.init == "alternating":
            self.theta[:, half:] = 0.0

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"theta": (2, self.channels)}

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, self.dim, self.channels, "NActivation")
        a, b = along_axis(self.theta.sort(dim=0).values.to(x.dtype), x, self.dim).unbind(0)
        return x - 2 * torch.clamp(x, a, b)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, dim={self.dim}"
