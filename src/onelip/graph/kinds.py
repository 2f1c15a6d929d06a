"""The kinds of node that a certified program consists of: how a node runs, its rounding, its record in a file.

For every node three numbers hold for all inputs x with ||x|| <= rho. With z the value of the node in real arithmetic
and z^ the computed one,

    z is lipschitz-Lipschitz in x,    ||z|| <= norm,    ||z^ - z|| <= error.

They are computed in fractions from those of its inputs, and rounded up once each. For example, `scale` by 3 of a node
with (lipschitz, norm, error) = (1, 2, 0) has (3, 6, UNIT * 6 + underflow): the product rounds once.

A kind is a class with three parts: its fields, `run` and `bound`. Its record in the file follows from the fields.
docs/certificates.md specifies the records; the checker (`onelip.checker`) has its own version of each rule. A new kind
is a class here and a rule there.

Domain: images lie in [0, 1]^n and radii are below sqrt(n), so every perturbed image has norm at most rho = sqrt(4 n),
also outside of [0, 1].
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import ProofError
from onelip.core.floats import is_below, largest_sum, squared_norm
from onelip.core.geometry import Geometry, geometry_of, padding_of
from onelip.core.rounding import ETA, LIMIT, UNIT, gamma, up, up_root


@dataclass(frozen=True)
class NodeBound:
    """The proved numbers of a node; `facts` are further ones that its record states, by name."""

    lipschitz: float
    norm: float
    error: float
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def fractions(self) -> tuple[Fraction, Fraction, Fraction]:
        """lipschitz, norm and error, to compute with."""
        return Fraction(self.lipschitz), Fraction(self.norm), Fraction(self.error)

    @property
    def computed_norm(self) -> Fraction:
        """A bound of ||z^||."""
        return Fraction(self.norm) + Fraction(self.error)

    def after(
        self, factor: Fraction, shift: Fraction = Fraction(0), rounding: Fraction = Fraction(0), **facts: float
    ) -> "NodeBound":
        """The bound after a `factor`-Lipschitz map f with ||f(0)|| <= shift that is computed up to `rounding`."""
        lipschitz, norm, error = self.fractions
        return NodeBound(up(factor * lipschitz), up(factor * norm + shift), up(factor * error + rounding), facts)


@dataclass(frozen=True)
class Node:
    """One step of a program.

    A subclass states `kind`, its settings as further fields, `run` and `bound`. Shapes are those of one sample.

    Attributes:
        inputs: numbers of the nodes that it reads.
        shape: of its output.
        place: path of the module in which it happens, for messages.
    """

    kind: ClassVar[str]
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    place: str = ""

    @property
    def title(self) -> str:
        """Kind and place, for messages."""
        return f"{self.kind} at {self.place!r}" if self.place else self.kind

    @property
    def entries(self) -> int:
        """Number of entries of one output."""
        return math.prod(self.shape)

    @property
    def tensors(self) -> Mapping[str, "Stored"]:
        """The stored numbers that it uses, by role."""
        own = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in own.items() if isinstance(value, Stored)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in its record: the fields that its kind adds to those of every node."""
        shared = {part.name for part in fields(Node)}
        return {part.name: _written(getattr(self, part.name)) for part in fields(self) if part.name not in shared}

    def record(self) -> dict[str, Any]:
        """The node as it is stored in a certificate file, without its proved numbers."""
        where = {"inputs": list(self.inputs), "place": self.place, "shape": list(self.shape)}
        return {"op": self.kind, **self.settings, **where}

    def run(self, *values: Tensor) -> Tensor:
        """Its value for a batch, from those of its inputs, in the arithmetic that is certified."""
        raise NotImplementedError

    def bound(self, *before: NodeBound) -> NodeBound:
        """The proved numbers of the node, from those of its inputs.

        Raises:
            ProofError: if numbers are so large that the program could overflow.
        """
        raise NotImplementedError


class Stored(NamedTuple):
    """Numbers of a node in float64, and their name in the state dict; None for constants that are not in it."""

    values: Tensor
    name: str | None = None


def _written(setting: Any) -> Any:
    """A setting as a record has it: tensors by name, numbers without rounding."""
    if isinstance(setting, Stored):
        return setting.name
    if isinstance(setting, tuple):
        return [_written(part) for part in setting]
    return setting.hex() if isinstance(setting, float) else setting


@dataclass(frozen=True)
class Input(Node):
    """The image itself."""

    kind = "input"

    def bound(self, *before: NodeBound) -> NodeBound:
        rho = up_root(Fraction(4 * self.entries))
        # Pixels k/255 are rounded once: |x^ - x| <= UNIT |x| in every entry.
        return NodeBound(1.0, rho, up(UNIT * Fraction(rho) + ETA * self.entries))


@dataclass(frozen=True)
class _Exact(Node):
    """1-Lipschitz, zero to zero, and without any rounding: moves, compares or selects numbers."""

    def bound(self, *before: NodeBound) -> NodeBound:
        return replace(before[0], facts={})


@dataclass(frozen=True)
class Relu(_Exact):
    """max(x, 0)."""

    kind = "relu"

    def run(self, *values: Tensor) -> Tensor:
        return values[0].clamp(min=0)


@dataclass(frozen=True)
class Abs(_Exact):
    """|x|."""

    kind = "abs"

    def run(self, *values: Tensor) -> Tensor:
        return values[0].abs()


@dataclass(frozen=True)
class Sort(_Exact):
    """Groups of entries along an axis, in falling order; a group takes every (length / group_size)-th entry."""

    kind = "sort"
    axis: int = 0
    group_size: int = 2

    def run(self, *values: Tensor) -> Tensor:
        axis = self.axis + 1
        groups = values[0].unflatten(axis, (self.group_size, -1))
        if self.group_size == 2:  # faster than to sort
            one, other = groups.unbind(axis)
            return torch.cat([torch.maximum(one, other), torch.minimum(one, other)], axis)
        return groups.sort(axis, descending=True).values.flatten(axis, axis + 1)


@dataclass(frozen=True)
class Join(Node):
    """All entries, one input after the other, cut or filled up with zeros to the entries of `shape`."""

    kind = "join"

    def run(self, *values: Tensor) -> Tensor:
        flat = torch.cat([value.flatten(1) for value in values], 1)[:, : self.entries]
        return F.pad(flat, (0, self.entries - flat.shape[1])).reshape(-1, *self.shape)

    def bound(self, *before: NodeBound) -> NodeBound:
        if len(before) == 1:
            return replace(before[0], facts={})
        squares = zip(*([x**2 for x in bound.fractions] for bound in before), strict=True)
        lipschitz, norm, error = (up_root(sum(column, Fraction(0))) for column in squares)
        return NodeBound(lipschitz, norm, error)


@dataclass(frozen=True)
class Windows(Node):
    """Windows of pixels, in each channel: take[k][i] is the k-th pixel of window i, -1 beyond the border."""

    take: tuple[tuple[int, ...], ...] = ()

    @property
    def most_windows(self) -> int:
        """The largest number of windows that contain one pixel."""
        return max(Counter(i for row in self.take for i in row if i >= 0).values())

    def seen(self, x: Tensor, beyond: float) -> Tensor:
        """The pixels (batch, channels, k, windows)."""
        return F.pad(x.flatten(2), (0, 1), value=beyond)[:, :, torch.tensor(self.take)]


@dataclass(frozen=True)
class Max(Windows):
    """The largest pixel of each window; windows of one pixel move it."""

    kind = "max"

    def run(self, *values: Tensor) -> Tensor:
        return self.seen(values[0], -math.inf).amax(2).reshape(-1, *self.shape)

    def bound(self, *before: NodeBound) -> NodeBound:
        constant = up_root(Fraction(self.most_windows))
        return before[0].after(Fraction(constant), constant=constant)


@dataclass(frozen=True)
class Sum(Windows):
    """The sum of each window times a factor."""

    kind = "sum"
    factor: float = 1.0

    def run(self, *values: Tensor) -> Tensor:
        return (self.seen(values[0], 0.0).sum(2) * self.factor).reshape(-1, *self.shape)

    def bound(self, *before: NodeBound) -> NodeBound:
        size, factor = len(self.take), _below_limit(self, self.factor)
        # Schur test: rows sum to factor * size, columns to at most factor times the windows that hold a pixel.
        constant = Fraction(up_root(factor**2 * self.most_windows * size))
        # size - 1 sums, a division, a product, and the rounding of the factor itself: below size + 4 roundings.
        rounding = gamma(size + 4) * constant * before[0].computed_norm + (size + 2) * ETA * self.entries
        return before[0].after(constant, rounding=rounding, constant=float(constant))


@dataclass(frozen=True)
class Scale(Node):
    """A number times x."""

    kind = "scale"
    factor: float = 1.0

    def run(self, *values: Tensor) -> Tensor:
        return values[0] * self.factor

    def bound(self, *before: NodeBound) -> NodeBound:
        factor = abs(_below_limit(self, self.factor))
        return before[0].after(factor, rounding=UNIT * factor * before[0].computed_norm + ETA * self.entries)


@dataclass(frozen=True)
class Add(Node):
    """x + y, of equal shapes."""

    kind = "add"

    def run(self, *values: Tensor) -> Tensor:
        return values[0] + values[1]

    def bound(self, *before: NodeBound) -> NodeBound:
        (l1, n1, e1), (l2, n2, e2) = (bound.fractions for bound in before)
        error = e1 + e2 + UNIT * (n1 + n2 + e1 + e2) + ETA * self.entries
        return NodeBound(up(l1 + l2), up(n1 + n2), up(error))


@dataclass(frozen=True)
class Normalize(Node):
    """(x - mean) / std, by channel."""

    kind = "normalize"
    mean: Stored = field(kw_only=True)
    std: Stored = field(kw_only=True)

    def run(self, *values: Tensor) -> Tensor:
        x = values[0]
        mean, std = (stored.values.view(-1, *(1,) * (x.dim() - 2)) for stored in (self.mean, self.std))
        return (x - mean) / std

    def bound(self, *before: NodeBound) -> NodeBound:
        mean, std = self.mean.values, self.std.values
        least = float(std.min())
        # Dividing by a deviation of 2^-500 or less could make the underflow of x - mean larger than ETA.
        if not (least >= 2.0**-500 and is_below(std, LIMIT) and is_below(mean, LIMIT)):
            raise ProofError(
                f"expected deviations above 0 and finite means, all below 2^500, got others at {self.title}; "
                "check the numbers of the normalisation"
            )
        factor = 1 / Fraction(least)
        shift = Fraction(up_root(squared_norm(mean) * math.prod(self.shape[1:])))
        rounding = gamma(4) * factor * (before[0].computed_norm + shift) + 4 * ETA * self.entries
        return before[0].after(factor, factor * shift, rounding, mean_norm=float(shift))


@dataclass(frozen=True)
class Affine(Node):
    r"""W x + b for a linear layer or a convolution; `layer` states its settings and holds no numbers.

    The computed value obeys |z^ - (W z^_in + b)| <= gamma (|W| |z^_in| + |b|) entry by entry, whatever the order of
    summation (Note [Arithmetic] in rounding.py), hence with sigma >= ||W||, A >= || |W| ||

        error = sigma error_in + gamma (A (norm_in + error_in) + ||b||) + underflow,

    and |W| is bounded by the Schur test, A = sqrt(max row sum * max column sum).
    """

    kind = "affine"
    layer: nn.Module = field(kw_only=True)
    weight: Stored = field(kw_only=True)
    bias: Stored | None = None
    pixels: tuple[int, ...] = ()  # of the input
    square: Fraction | None = None  # >= ||W||^2, once it is proved

    @property
    def settings(self) -> dict[str, Any]:
        conv = self.conv
        padding = [] if conv is None else padding_of(conv)
        # Of the padding only the left part is needed: the right part and `output_padding` decide how many pixels there
        # are, which `shape` states.
        return {
            "weight": _written(self.weight),
            "bias": _written(self.bias),
            "stride": [] if conv is None else list(conv.stride),
            "dilation": [] if conv is None else list(conv.dilation),
            "offset": [left for left, _ in padding],
            "circular": [self.is_circular and sum(pair) > 0 for pair in padding],
            "groups": self.groups,
            "transposed": self.transposed,
        }

    @property
    def conv(self) -> nn.modules.conv._ConvNd | None:
        """The layer, if it is a convolution."""
        return self.layer if isinstance(self.layer, nn.modules.conv._ConvNd) else None

    @property
    def groups(self) -> int:
        """Blocks of channels; 1 for a linear layer."""
        return 1 if self.conv is None else self.conv.groups

    @property
    def transposed(self) -> bool:
        """Whether the first axis of the weight counts input channels."""
        return self.conv is not None and self.conv.transposed

    @property
    def is_circular(self) -> bool:
        """Whether the padding wraps around."""
        return self.conv is not None and self.conv.padding_mode == "circular"

    @property
    def geometry(self) -> Geometry:
        """How the weight acts, on images of the size that it has here."""
        return geometry_of(self.layer, self.pixels or None)

    def run(self, *values: Tensor) -> Tensor:
        return self.apply(values[0], None if self.bias is None else self.bias.values)

    def apply(self, x: Tensor, bias: Tensor | None = None, *, adjoint: bool = False) -> Tensor:
        """W x + b; with `adjoint`, for a convolution of stride 1 that keeps the size, W^T x."""
        conv, weight = self.conv, self.weight.values
        if conv is None:
            return F.linear(x, weight, bias)
        dims, padding, is_circular = len(conv.kernel_size), padding_of(conv), self.is_circular
        if conv.transposed or adjoint:
            run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            amounts = [left for left, _ in padding]
            if is_circular:
                # Pixel i reads x[i + left - d t], from i - right to i + left: in the wrapped x those are i to i + both.
                x = F.pad(x, [n for left, right in reversed(padding) for n in (right, left)], mode="circular")
                amounts = [left + right for left, right in padding]
            return run(x, weight, bias, conv.stride, amounts, conv.output_padding, conv.groups, conv.dilation)
        amounts = [n for pair in reversed(padding) for n in pair]
        if any(amounts):
            x = F.pad(x, amounts, mode="circular" if is_circular else "constant")
        return (F.conv1d, F.conv2d, F.conv3d)[dims - 1](x, weight, bias, conv.stride, 0, conv.dilation, conv.groups)

    def bound(self, *before: NodeBound) -> NodeBound:
        sigma, absolute, bias = self.norms()
        sums = absolute * before[0].computed_norm + bias
        rounding = self.rounding(self.products(self.transposed), sums, self.entries)
        return before[0].after(sigma, bias, rounding, **self.facts(sigma, absolute, bias))

    def products(self, transposed: bool) -> int:
        """How many products one output sums, of the layer or of its adjoint."""
        first, second, *taps = self.weight.values.shape
        return (first // self.groups if transposed else second) * math.prod(taps)

    def rounding(self, products: int, sums: Fraction, entries: int) -> Fraction:
        """The rounding error of W x + b, if the sums of absolute terms in each output form a vector of norm `sums`."""
        self.check_sums(sums)
        return gamma(products + 2) * sums + (products + 2) * ETA * entries

    def check_sums(self, sums: Fraction) -> None:
        """Refuse sums that could overflow."""
        if not sums < LIMIT:
            raise ProofError(f"expected sums below 2^500, got larger ones at {self.title}; use smaller weights")

    def norms(self) -> tuple[Fraction, Fraction, Fraction]:
        """Bounds of ||W||, of the norm of |W|, and of the norm of the bias repeated at every position."""
        weight, bias = self.weight.values, None if self.bias is None else self.bias.values
        if self.square is None:
            raise ProofError(f"expected a bound of ||W||^2 for {self.title}, got none")
        if not (is_below(weight, LIMIT) and is_below(bias, LIMIT)):
            raise ProofError(
                f"expected finite weights and biases below 2^500, got others at {self.title}; the program could "
                "overflow"
            )
        kernel = weight.unflatten(0, (self.groups, -1))  # (g, first / g, second, *taps)
        by_first = kernel.flatten(2).flatten(0, 1)  # a channel of the first axis in each row
        by_second = kernel.transpose(1, 2).flatten(2).flatten(0, 1)
        # Rows of the operator are outputs, columns inputs; a transposed layer exchanges them, the product stays.
        absolute = up_root(largest_sum(by_first) * largest_sum(by_second))
        shift = 0.0 if bias is None else up_root(squared_norm(bias) * math.prod(self.shape[1:]))
        return Fraction(up_root(self.square)), Fraction(absolute), Fraction(shift)

    @staticmethod
    def facts(sigma: Fraction, absolute: Fraction, bias: Fraction) -> dict[str, float]:
        """The proved numbers that the record states."""
        return {"sigma": float(sigma), "absolute": float(absolute), "bias_norm": float(bias)}


@dataclass(frozen=True)
class Potential(Affine):
    """x - 2 V^T relu(V x + b) for a convolution V that keeps the size of its input; SLL and CPL blocks.

    It is one node: the bound uses that both V are the same, which a sum of two nodes would not. For any two inputs
    z - z' = (I - 2 V^T D V) (x - x') with a diagonal D of entries in [0, 1] (the slopes of relu),
    and 0 <= V^T D V <= sigma^2, so its constant is c = max(1, 2 sigma^2 - 1), also around a circle. Its value at 0 is
    -2 V^T relu(b), hence norm = c norm_in + 2 sigma ||b||. What the program does starts from a computed x^ of size
    s = norm_in + error_in, and each line is the one before with its own rounding:

        V x^ + b      off by d1 = gamma (A s + ||b||) + underflow          as every affine node; relu rounds nothing
        relu          off by d1, and not longer than t = sigma s + ||b|| + d1
        V^T relu      off by sigma d1 + d2,  d2 = gamma' A t + underflow   gamma' of the products in an entry of V^T
        x^ - 2 V^T    off by 2 (sigma d1 + d2) + UNIT (s + 2 (sigma t + d2)) + underflow

    where doubling is exact but for underflow, and the last line rounds once a vector that is not longer than
    s + 2 (sigma t + d2). That is the distance to the real value at x^; the one at x is another c error_in away.
    """

    kind = "potential"

    def run(self, *values: Tensor) -> Tensor:
        return values[0] - 2 * self.apply(super().run(*values).clamp(min=0), adjoint=True)

    def bound(self, *before: NodeBound) -> NodeBound:
        sigma, absolute, bias = self.norms()
        size, hidden = before[0].computed_norm, self.weight.values.shape[0] * math.prod(self.shape[1:])
        first = self.rounding(self.products(False), absolute * size + bias, hidden)
        inside = sigma * size + bias + first
        second = self.rounding(self.products(True), absolute * inside, self.entries)
        reach = size + 2 * (sigma * inside + second)
        self.check_sums(reach)
        factor = max(Fraction(1), 2 * sigma**2 - 1)
        rounding = 2 * (sigma * first + second) + UNIT * reach + 2 * ETA * self.entries
        return before[0].after(factor, 2 * sigma * bias, rounding, **self.facts(sigma, absolute, bias))


@functools.lru_cache(maxsize=1024)
def gain(terms: int, norm: float) -> float:
    """A float not below max |p(i a)| for |a| <= norm, where p(x) = sum_{j <= terms} x^j / j!.

    So the norm of p(S) is not larger for any skew S of this norm: S is normal with eigenvalues i a. |p(i a)|^2 is
    1 + x^m q(x) for x = a^2, with rational coefficients, m being the first power after 0: the sign of q near 0 decides
    whether the series expands there. In each of many intervals of x the positive terms of q are largest at the end and
    the negative ones at the beginning. All of it is integer arithmetic.

    Examples:
        >>> gain(4, 2.8), round(gain(5, 2.0), 3)
        (1.0, 1.005)
    """
    if not 0 <= norm < math.inf:
        return math.inf
    whole = math.factorial(terms)
    coefficients = [0] * (terms + 1)  # times whole^2
    for j in range(terms + 1):
        for k in range(j % 2, terms + 1, 2):  # i^j conj(i^k) is real only for even j - k
            sign = 1 if (j - k) % 4 == 0 else -1
            coefficients[(j + k) // 2] += sign * (whole // math.factorial(j)) * (whole // math.factorial(k))
    m = next(j for j, c in enumerate(coefficients) if j > 0 and c != 0)
    # In units of 1 / 256 for x, and of 256^-terms for the whole.
    tail = [(c * 256 ** (terms - j), j - m) for j, c in enumerate(coefficients) if j >= m]
    most = 0
    for i in range(math.ceil(256 * Fraction(norm) ** 2)):
        most = max(most, (i + 1) ** m * sum(c * (i + 1 if c > 0 else i) ** j for c, j in tail))
    return up_root(1 + Fraction(most, whole**2 * 256**terms))


@dataclass(frozen=True)
class Exponential(Affine):
    """factor * p(S) x + b with p(S) = sum_{j <= terms} S^j / j!, S a skew convolution that keeps the size; SOC layers.

    Groups of S may have more channels than those of x, which are filled up with zeros, and of the result, which takes
    the first ones. S is skew to the last bit, so it is normal with eigenvalues i a, |a| <= sigma, and ||p(S)|| <= G,
    G = gain(terms, sigma). The program is Horner's rule, v_(j-1) = x + (1/j) S v_j from v_terms = x to v_0 = p(S) x.
    With a computed x^ of size s = norm_in + error_in, and v_j the real values that start from x^,

        ||v_j|| <= n_j,    n_terms = s,    n_(j-1) = s + (sigma / j) n_j
        ||v^_j - v_j|| <= d_j,    d_terms = 0,
        d_(j-1) = (sigma d_j + r_j) / j + gamma(3) (s + (sigma (n_j + d_j) + r_j) / j) + underflow,

    r_j = gamma A (n_j + d_j) + underflow being that of every affine node: 1/j, the product and the sum round once each.
    The factor and the bias round once each. That is the distance to the real value at x^; the one at x is another
    factor G error_in away.
    """

    kind = "exponential"
    terms: int = 1
    factor: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"terms": self.terms, "factor": _written(self.factor)}

    def run(self, *values: Tensor) -> Tensor:
        x = values[0].unflatten(1, (self.groups, -1))
        channels = self.weight.values.shape[1]
        x = F.pad(x, (0, 0) * len(self.pixels) + (0, channels - x.shape[2])).flatten(1, 2)
        z = x
        for j in range(self.terms, 0, -1):
            z = torch.add(x, self.apply(z), alpha=1 / j)
        z = z.unflatten(1, (self.groups, -1))[:, :, : self.shape[0] // self.groups].flatten(1, 2) * self.factor
        return z if self.bias is None else z + self.bias.values.reshape(-1, *(1 for _ in self.pixels))

    def bound(self, *before: NodeBound) -> NodeBound:
        sigma, absolute, bias = self.norms()
        if not self._is_skew() or sigma > 8:
            raise ProofError(f"expected a skew kernel of norm at most 8, got another one at {self.title}")
        factor, size = abs(_below_limit(self, self.factor)), before[0].computed_norm
        entries = self.weight.values.shape[0] * math.prod(self.pixels)
        length, off = size, Fraction(0)  # n_j and d_j
        for j in range(self.terms, 0, -1):
            rounding = self.rounding(self.products(False), absolute * (length + off), entries)
            reach = size + (sigma * (length + off) + rounding) / j
            self.check_sums(reach)
            off = (sigma * off + rounding) / j + gamma(3) * reach + 2 * ETA * entries
            length = size + sigma * length / j
        expansion = Fraction(gain(self.terms, float(sigma)))
        reach = factor * (expansion * size + off) + bias
        self.check_sums(reach)
        rounding = factor * off + gamma(2) * reach + 2 * ETA * self.entries
        facts = self.facts(sigma, absolute, bias)
        return before[0].after(factor * expansion, bias, rounding, **facts, gain=float(expansion))

    def _is_skew(self) -> bool:
        conv, kernel = self.conv, self.weight.values.unflatten(0, (self.groups, -1))  # (g, c, c, *taps)
        if conv is None or conv.transposed or kernel.shape[1] != kernel.shape[2] or any(s != 1 for s in conv.stride):
            return False
        each = zip(conv.kernel_size, conv.dilation, padding_of(conv), strict=True)
        centred = all(left == right and 2 * left == d * (k - 1) for k, d, (left, right) in each)
        return centred and bool((kernel == -kernel.transpose(1, 2).flip(tuple(range(3, kernel.dim())))).all())


def propagate(node: Node, *before: NodeBound) -> NodeBound:
    """The bound of a node from those of its inputs.

    Raises:
        ProofError: if numbers grow so large that the program could overflow.
    """
    bound = node.bound(*before)
    if not (bound.norm < LIMIT and bound.error < LIMIT and bound.lipschitz < LIMIT):
        raise ProofError(
            f"expected numbers below 2^500, got a norm bound of {bound.norm:.3g} and an error bound of "
            f"{bound.error:.3g} at {node.title}: the program could overflow; use smaller weights"
        )
    return bound


def _below_limit(node: Node, value: float) -> Fraction:
    if not abs(value) < LIMIT:
        raise ProofError(f"expected a factor below 2^500, got {value!r} at {node.title}; use a smaller factor")
    return Fraction(value)
