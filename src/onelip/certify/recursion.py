"""The rounding recursion: for every node, three numbers that hold for all inputs x with ||x|| <= rho.

With z the value of the node in real arithmetic and z^ the computed one,

    z is lipschitz-Lipschitz in x,    ||z|| <= norm,    ||z^ - z|| <= error.

For a linear node z = W z_in + b the computed value obeys |z^ - (W z^_in + b)| <= gamma (|W| |z^_in| + |b|) entry by
entry, whatever the order of summation (Note [Arithmetic] in rounding.py), hence with sigma >= ||W||, A >= || |W| ||

    error = sigma error_in + gamma (A (norm_in + error_in) + ||b||) + underflow,

and |W| is bounded by the Schur test, A = sqrt(max row sum * max column sum). Everything is computed in fractions and
rounded up once per number.

A potential z = x - 2 V^T relu(V x + b) is one node, since no sum of norms knows that both V are the same. For any two
inputs z - z' = (I - 2 V^T D V) (x - x') with a diagonal D of entries in [0, 1] (relu rises by at most what it is
given), and 0 <= V^T D V <= sigma^2, so its constant is c = max(1, 2 sigma^2 - 1), also around a circle. Its value at 0
is -2 V^T relu(b), hence norm = c norm_in + 2 sigma ||b||. What the program does starts from a computed x^ of size
s = norm_in + error_in, and each line is the one before with its own rounding:

    V x^ + b      off by d1 = gamma (A s + ||b||) + underflow          as every linear node; relu rounds nothing
    relu          off by d1, and not longer than t = sigma s + ||b|| + d1
    V^T relu      off by sigma d1 + d2,  d2 = gamma' A t + underflow   gamma' of the products in an entry of V^T
    x^ - 2 V^T    off by 2 (sigma d1 + d2) + U (s + 2 (sigma t + d2)) + underflow

where doubling is exact but for underflow, and the last line rounds once what is not longer than s + 2 (sigma t + d2).
That is the distance to the real value at x^; the one at x is another c error_in away.

Domain: images lie in [0, 1]^n and radii are below sqrt(n), so every perturbed image has norm at most
rho = sqrt(4 n), also outside of [0, 1].
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from onelip.certify.exact import is_below, largest_sum, squared_norm
from onelip.certify.program import EXACT, WEIGHTED, Operation, halves
from onelip.certify.rounding import ETA, LIMIT, UNIT, ProofError, gamma, up, up_root


@dataclass(frozen=True)
class State:
    """What is proved of a node; `sigma`, `absolute` and `bias_norm` only of those with a weight, `constant` only of
    those with windows, `mean_norm` of a standardisation.
    """

    lipschitz: float
    norm: float
    error: float
    sigma: float | None = None
    absolute: float | None = None
    bias_norm: float | None = None
    constant: float | None = None
    mean_norm: float | None = None

    @property
    def fractions(self) -> tuple[Fraction, Fraction, Fraction]:
        """lipschitz, norm and error, to compute with."""
        return Fraction(self.lipschitz), Fraction(self.norm), Fraction(self.error)


def propagate(node: Operation, inputs: Sequence[State], square: Fraction | None = None) -> State:
    """The state of a node from those it reads; `square` >= ||W||^2 for those with a weight.

    Raises:
        ProofError: if numbers grow so large that the program could overflow.
    """
    if node.op in WEIGHTED:
        if square is None:
            raise ProofError(f"expected a bound of ||W||^2 for {node.title}, got none")
        state = (_potential if node.op == "potential" else _linear)(node, inputs[0], square)
    elif node.op in _RULES:
        state = _RULES[node.op](node, inputs)
    else:
        raise ProofError(f"expected an operation with a rounding rule, got {node.title}")
    if not (state.norm < LIMIT and state.error < LIMIT and state.lipschitz < LIMIT):
        raise ProofError(
            f"expected numbers below 2^500, got a norm bound of {state.norm:.3g} and an error bound of "
            f"{state.error:.3g} at {node.title}: the program could overflow; use smaller weights"
        )
    return state


def inner_length(node: Operation) -> int:
    """How many products one output of a linear node sums."""
    first, second, *taps = node.weight.shape
    per_group = first // node.settings["groups"] if node.settings.get("transposed") else second
    return per_group * math.prod(taps)


def _input(node: Operation, inputs: Sequence[State]) -> State:
    n = math.prod(node.shape)
    rho = up_root(Fraction(4 * n))
    # Pixels k/255 are rounded once: |x^ - x| <= UNIT |x| in every entry.
    return State(1.0, rho, up(UNIT * Fraction(rho) + ETA * n))


def _linear(node: Operation, before: State, square: Fraction) -> State:
    lipschitz, norm, error = before.fractions
    sigma, absolute, bias = _norms(node, square)
    rounding = _rounding(node, absolute * (norm + error) + bias)
    return State(
        up(sigma * lipschitz),
        up(sigma * norm + bias),
        up(sigma * error + rounding),
        *map(float, (sigma, absolute, bias)),
    )


def _potential(node: Operation, before: State, square: Fraction) -> State:
    forth, back = halves(node)
    lipschitz, norm, error = before.fractions
    sigma, absolute, bias = _norms(forth, square)
    size = norm + error
    first = _rounding(forth, absolute * size + bias)
    inside = sigma * size + bias + first
    second = _rounding(back, absolute * inside)
    reach = size + 2 * (sigma * inside + second)
    _check_sums(node, reach)
    factor = max(Fraction(1), 2 * sigma**2 - 1)
    rounding = 2 * (sigma * first + second) + UNIT * reach + 2 * ETA * math.prod(node.shape)
    return State(
        up(factor * lipschitz),
        up(factor * norm + 2 * sigma * bias),
        up(factor * error + rounding),
        *map(float, (sigma, absolute, bias)),
    )


def _rounding(node: Operation, sums: Fraction) -> Fraction:
    """What rounding does to W x + b, if the sums of absolute terms of all outputs are together at most so long."""
    _check_sums(node, sums)
    terms = inner_length(node)
    return gamma(terms) * sums + (terms + 2) * ETA * math.prod(node.shape)


def _check_sums(node: Operation, sums: Fraction) -> None:
    if not sums < LIMIT:
        raise ProofError(f"expected sums below 2^500, got larger ones at {node.title}; use smaller weights")


def _norms(node: Operation, square: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """Bounds of ||W||, of the norm of |W|, and of the norm of the bias repeated at every position."""
    if not (is_below(node.weight, LIMIT) and is_below(node.bias, LIMIT)):
        raise ProofError(
            f"expected finite weights and biases below 2^500, got others at {node.title}; the program could overflow"
        )
    weight, groups = node.weight, node.settings.get("groups", 1)
    kernel = weight.unflatten(0, (groups, -1))  # (g, first / g, second, *taps)
    by_first = kernel.flatten(2).flatten(0, 1)  # a channel of the first axis in each row
    by_second = kernel.transpose(1, 2).flatten(2).flatten(0, 1)
    # Rows of the operator are outputs, columns inputs; a transposed layer exchanges them, the product stays.
    absolute = up_root(largest_sum(by_first) * largest_sum(by_second))
    positions = math.prod(node.shape[1:])
    bias = 0.0 if node.bias is None else up_root(squared_norm(node.bias) * positions)
    return Fraction(up_root(square)), Fraction(absolute), Fraction(bias)


def _unchanged(node: Operation, inputs: Sequence[State]) -> State:
    (before,) = inputs
    # Windows that tile the image hold each pixel once.
    constant = 1.0 if node.op == "concatenate" else None
    return State(before.lipschitz, before.norm, before.error, constant=constant)


def _max_pool(node: Operation, inputs: Sequence[State]) -> State:
    factor = Fraction(up_root(Fraction(_most_windows(node))))
    lipschitz, norm, error = (up(factor * x) for x in inputs[0].fractions)
    return State(lipschitz, norm, error, constant=float(factor))


def _most_windows(node: Operation) -> int:
    """That one pixel lies in, counted axis by axis: near a border, and in small images, there are fewer."""
    kernel, stride, sizes = (node.settings[key] for key in ("kernel", "stride", "sizes"))
    padding = node.settings.get("padding", [0] * len(kernel))
    dilation = node.settings.get("dilation", [1] * len(kernel))
    most = 1
    for k, s, p, d, n, out in zip(kernel, stride, padding, dilation, sizes, node.shape[1:], strict=True):
        met = Counter(s * o + d * t - p for o in range(out) for t in range(k))
        most *= max(met[pixel] for pixel in range(n))
    return most


def _avg_pool(node: Operation, inputs: Sequence[State]) -> State:
    size = math.prod(node.settings["kernel"])
    scale = _constant(node, "scale")
    # Schur test: rows sum to scale * size, columns to at most scale times the windows that hold a pixel.
    factor = Fraction(up_root(scale**2 * _most_windows(node) * size))
    lipschitz, norm, error = inputs[0].fractions
    # size - 1 sums, a division, a product, and the rounding of the scale itself: below gamma of size + 2 terms.
    underflow = (size + 2) * ETA * math.prod(node.shape)
    return State(
        up(factor * lipschitz),
        up(factor * norm),
        up(factor * error + gamma(size + 2) * factor * (norm + error) + underflow),
        constant=float(factor),
    )


def _normalize(node: Operation, inputs: Sequence[State]) -> State:
    lipschitz, norm, error = inputs[0].fractions
    least = float(node.tensors["std"].min())
    # A deviation of 2^-500 or less could lift what x - mean loses by underflow above ETA.
    if not (least >= 2.0**-500 and is_below(node.tensors["std"], LIMIT) and is_below(node.tensors["mean"], LIMIT)):
        raise ProofError(f"expected deviations above 0 and finite means, all below 2^500, got others at {node.title}")
    least = Fraction(least)
    mean = Fraction(up_root(squared_norm(node.tensors["mean"]) * math.prod(node.shape[1:])))
    size = norm + error + mean
    return State(
        up(lipschitz / least),
        up((norm + mean) / least),
        up((error + gamma(2) * size) / least + 4 * ETA * math.prod(node.shape)),
        mean_norm=float(mean),
    )


def _add(node: Operation, inputs: Sequence[State]) -> State:
    (l1, n1, e1), (l2, n2, e2) = (state.fractions for state in inputs)
    error = e1 + e2 + UNIT * (n1 + n2 + e1 + e2) + ETA * math.prod(node.shape)
    return State(up(l1 + l2), up(n1 + n2), up(error))


def _concat(node: Operation, inputs: Sequence[State]) -> State:
    squares = zip(*([x**2 for x in state.fractions] for state in inputs), strict=True)
    return State(*(up_root(sum(column, Fraction(0))) for column in squares))


def _scale(node: Operation, inputs: Sequence[State]) -> State:
    factor = abs(_constant(node, "factor"))
    lipschitz, norm, error = inputs[0].fractions
    rounding = UNIT * factor * (norm + error) + ETA * math.prod(node.shape)
    return State(up(factor * lipschitz), up(factor * norm), up(factor * error + rounding))


def _constant(node: Operation, name: str) -> Fraction:
    value = float.fromhex(node.settings[name])
    if not abs(value) < LIMIT:
        raise ProofError(f"expected a factor below 2^500, got {value!r} at {node.title}")
    return Fraction(value)


_Rule = Callable[[Operation, Sequence[State]], State]
_RULES: dict[str, _Rule] = {
    "input": _input,
    **dict.fromkeys(EXACT, _unchanged),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "normalize": _normalize,
    "add": _add,
    "concat": _concat,
    "scale": _scale,
}
