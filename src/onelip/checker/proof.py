"""Compute a radius from the nodes of a program: three numbers per node, in exact fractions, each rounded up once.

For every input of norm at most 2 sqrt(n), with z the value of a node in real arithmetic and z^ the computed one,

    z is lipschitz-Lipschitz in the input,    ||z|| <= norm,    ||z^ - z|| <= error.

Images lie in [0, 1]^n and radii are below sqrt(n), so no perturbed image has a norm above 2 sqrt(n).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .norms import U, least, matrix, to_integers
from .program import ETA, LIMIT, Layer, Operation, operation_of
from .reading import TrackedDict, context, ints, require, title

Table = list[list[Fraction]]


class Proved(NamedTuple):
    """The three numbers of a node, and its program."""

    lipschitz: Fraction
    norm: Fraction
    error: Fraction
    shape: list[int]
    run: Callable[..., np.ndarray]


def check_graph(nodes: list[TrackedDict]) -> None:
    """Raise Rejected unless node 0 is the input, each other node has earlier inputs, and all but the last are used."""
    require(type(nodes) is list and nodes, "nodes: expected a list")
    shape: list[int] = []
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            op, shape, inputs = node["op"], ints(node["shape"], 1), ints(node["inputs"], 0)
            small = 0 < len(shape) <= 8 and math.prod(shape) <= 2**26
            require(small, f"shape: expected 1 to 8 axes and at most 2^26 entries, got {shape!r:.80}")
            require((op == "input") == (i == 0), "expected op input at node 0 and nowhere else")
            count = {"input": 0, "add": 2, "join": max(1, len(inputs))}.get(op, 1)
            right = len(inputs) == count and all(j < i for j in inputs)
            require(right, f"inputs: expected {count} earlier nodes, got {inputs!r:.80}")
    unused = {*range(len(nodes) - 1)}.difference(*(node["inputs"] for node in nodes))
    require(not unused, f"unused nodes: {sorted(unused)!r:.80}")
    require(2 <= math.prod(shape) <= 2**12, f"expected 2 to 4096 logits, got {math.prod(shape)}")


def prove(node: TrackedDict, before: list[Proved], tensors: TrackedDict) -> Proved:
    """Return the three numbers of a node; those in the file must be equal to them."""
    op, shape, inputs = node["op"], node["shape"], [before[j] for j in node["inputs"]]
    n = math.prod(shape)
    if op == "input":  # rounded once
        operation, powers = Operation(lambda: np.zeros((*shape, 1))), (1, 2, 1)
        bounds = 1, 4 * n, U * least(node, "norm", 4 * n, 2) + ETA * n
    else:
        L, norm, error = (sum((of[k] for of in inputs), Fraction(0)) for k in range(3))
        operation, powers = operation_of(node, [of.shape for of in inputs], norm + error, tensors), (1, 1, 1)
        _, factor, shift, rounding = operation
        bounds = factor * L, factor * norm + shift, factor * error + rounding
    if op == "join":  # squared norms add up
        bounds, powers = [sum(of[k] ** 2 for of in inputs) for k in range(3)], (2, 2, 2)
    L, norm, error = map(least, [node] * 3, ("lipschitz", "norm", "error"), bounds, powers)
    require(max(L, norm, error) < LIMIT, "numbers beyond 2^500")
    value = operation.run(*(np.zeros((*of.shape, 1)) for of in inputs))
    require([*value.shape] == [*shape, 1], f"shape: expected {[*value.shape[:-1]]}, got {shape}")
    require(np.isfinite(value).all(), "take: a window without pixels has no maximum")
    return Proved(L, norm, error, shape, operation.run)


def prove_nodes(nodes: list[TrackedDict], tensors: TrackedDict, log: Callable[[str, str], None]) -> list[Proved]:
    proved: list[Proved] = []
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            proved.append(prove(node, proved, tensors))
        log("node", f"node {i} ({node['op']}): {node['shape']}")
    return proved


def squared_slopes(pairs: bool, nodes: list[TrackedDict], proved: list[Proved], tensors: TrackedDict) -> Table:
    """Return, for logits y and j (entries of the last node), the square of a Lipschitz constant of f_y - f_j."""
    at, K = len(proved) - 1, math.prod(proved[-1].shape)
    require(
        type(pairs) is bool and (K <= 2**7 or not pairs), "pairs: expected true or false, true for up to 128 logits"
    )
    if not pairs:  # |z_y - z_j| <= sqrt(2) ||z||
        return [[2 * proved[-1].lipschitz ** 2] * K] * K
    while nodes[at]["op"] == "join" and len(nodes[at]["inputs"]) == 1:  # keeps the first entries
        (at,) = nodes[at]["inputs"]
        require(math.prod(proved[at].shape) >= K, "pairs: expected logits that are rows of one layer")
    require(nodes[at]["op"] == "affine", "pairs: expected a linear layer or convolution at the end")
    last, before = nodes[at], proved[nodes[at]["inputs"][0]]
    layer = Layer(last, before.shape, tensors)
    # On a circle several taps may read one pixel, and the norm of a row may exceed that of its taps.
    single = math.prod(last["shape"][1:]) == len(layer.weight) == 1 and not any(last["circular"])
    require(single, "pairs: expected a last layer of one pixel and one group, not circular")
    table, e = to_integers(layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])
    rows, unit = table[:K].reshape(K, -1), Fraction(4) ** e * before.lipschitz**2
    dot = matrix(rows) * matrix(rows.T)
    return [[int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit for j in range(K)] for y in range(K)]


def is_radius(r: Fraction, logits: list[Fraction], y: int, squares: list[Fraction], error: Fraction, n: int) -> bool:
    """Whether class y is proved up to the distance r.

    The logits of the file are within 2 error of a run, which is within error of the real values. So is the run at
    distance r, where a margin in real arithmetic is smaller by at most slope r.
    """
    margins = [(logits[y] - logit - 8 * error, squares[j]) for j, logit in enumerate(logits) if j != y]
    return r >= 0 and r**2 < n and all(margin > 0 and margin**2 > r**2 * square for margin, square in margins)
