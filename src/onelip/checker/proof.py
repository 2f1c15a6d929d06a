"""From the nodes of a program to a radius: three numbers for each node, in exact fractions, rounded up once each.

For every input of norm at most 2 sqrt(n), z the value of a node in real arithmetic and z^ that of the program,

    z is lipschitz-Lipschitz in the input,    ||z|| <= norm,    ||z^ - z|| <= error.

Images lie in [0, 1]^n, and no radius is above sqrt(n), so no perturbed image is longer than 2 sqrt(n).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .norms import U, least, matrix, to_integers
from .program import ETA, LIMIT, Layer, Rule, Tensors, rule_of
from .reading import Told, about, ints, need


class Node(NamedTuple):
    """What is proved of a node, and its program."""

    lipschitz: Fraction
    norm: Fraction
    error: Fraction
    shape: list[int]
    run: Callable[..., np.ndarray]


def prove(told: Told, before: list[Node], tensors: Tensors) -> Node:
    """The numbers of a node; those of the file must be the same."""
    op, shape = told["op"], ints(told["shape"], 1)
    small = 0 < len(shape) <= 8 and math.prod(shape) <= 2**26
    need(small, f"shape: expected at most 8 axes and 2^26 entries, got {shape!r:.80}")
    n = math.prod(shape)
    need(all(j < len(before) for j in ints(told["inputs"], 0)), "inputs: expected nodes before this one")
    inputs = [before[j] for j in told["inputs"]]
    need(len(inputs) == {"input": 0, "add": 2, "join": len(inputs)}.get(op, 1), "inputs: expected others")
    need((op == "input") == (not before), "expected the input at node 0 and nowhere else")
    if op == "input":  # rounded once
        rule, powers = Rule(lambda: np.zeros((*shape, 1))), (1, 2, 1)
        bounds = 1, 4 * n, U * least(told, "norm", 4 * n, 2) + ETA * n
    else:
        L, norm, error = (sum((node[k] for node in inputs), Fraction(0)) for k in range(3))
        rule, powers = rule_of(told, [node.shape for node in inputs], norm + error, tensors), (1, 1, 1)
        bounds = rule.factor * L, rule.factor * norm + rule.shift, rule.factor * error + rule.rounding
    if op == "join":  # entries side by side
        bounds, powers = [sum(node[k] ** 2 for node in inputs) for k in range(3)], (2, 2, 2)
    L, norm, error = map(least, [told] * 3, ("lipschitz", "norm", "error"), bounds, powers)
    need(max(L, norm, error) < LIMIT, "numbers beyond 2^500")
    value = rule.run(*(np.zeros((*node.shape, 1)) for node in inputs))
    need([*value.shape] == [*shape, 1], f"shape: expected {[*value.shape[:-1]]}, got {shape}")
    need(np.isfinite(value).all(), "a window holds no pixel, its maximum is -infinity")
    return Node(L, norm, error, shape, rule.run)


def prove_nodes(told: list[Told], tensors: Tensors, say: Callable[[str], None]) -> list[Node]:
    nodes: list[Node] = []
    for i, node in enumerate(told):
        with about(f"node {i} ({node['op']!r:.40} at {node['place']!r:.80})"):
            nodes.append(prove(node, nodes, tensors))
        say(f"node {i} ({node['op']}): {node['shape']}")
    return nodes


def squared_slopes(pairs: bool, told: list[Told], nodes: list[Node], tensors: Tensors) -> list[list[Fraction]]:
    """For logits y and j, the entries of the last node: f_y - f_j is Lipschitz in the input with the root of this."""
    at, K = len(nodes) - 1, math.prod(nodes[-1].shape)
    need(2 <= K <= 2**12 and type(pairs) is bool, f"expected 2 to 4096 logits, got {K}; pairs: true or false")
    if not pairs:  # |z_y - z_j| <= sqrt(2) ||z||
        return [[2 * nodes[-1].lipschitz ** 2] * K] * K
    while told[at]["op"] == "join" and len(told[at]["inputs"]) == 1:  # keeps the first entries
        (at,) = told[at]["inputs"]
        need(math.prod(nodes[at].shape) >= K, "pairs: some logits are no rows")
    last, before = told[at], nodes[told[at]["inputs"][0]]
    layer = Layer(last, before.shape[1:], tensors)
    # Around a circle several taps may read one pixel, and a row may be longer than its taps.
    single = math.prod(last["shape"][1:]) == len(layer.weight) == 1 and not any(last["circular"])
    need(last["op"] == "affine" and single, "pairs: expected a last layer of one pixel and one group, not circular")
    table, e = to_integers(layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])
    rows, unit = table[:K].reshape(K, -1), Fraction(4) ** e * before.lipschitz**2
    dot = matrix(rows) * matrix(rows.T)
    return [[int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit for j in range(K)] for y in range(K)]


def is_radius(r: Fraction, logits: list[Fraction], y: int, squares: list[Fraction], error: Fraction, n: int) -> bool:
    """Whether the class y holds up to the distance r. The logits of the file are within 2 error of a run, which is
    within error of the real ones; so is the run at distance r, where a real margin has fallen by at most slope r.
    """
    margins = [(logits[y] - logit - 8 * error, squares[j]) for j, logit in enumerate(logits) if j != y]
    return r >= 0 and r**2 < n and all(margin > 0 and margin**2 > r**2 * square for margin, square in margins)
