"""From the nodes of a program to a radius: three numbers for each node, in exact fractions, rounded up once each.

For every input of norm at most 2 sqrt(n), z the value of a node in real arithmetic and z^ that of the program,

    z is lipschitz-Lipschitz in the input,    ||z|| <= norm,    ||z^ - z|| <= error.

Images lie in [0, 1]^n, and no radius is above sqrt(n), so no perturbed image is longer than 2 sqrt(n).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from .norms import ONE, ZERO, U, below, gamma, matrix, to_integers, up, up_root
from .program import ETA, KINDS, LIMIT, Layer, Rule, Tensors, Told, rule_of
from .reading import Rejected, agree, fit, in_hex, need


class Node(NamedTuple):
    """What is proved of a node, what the file says of it, and what it does."""

    lipschitz: Fraction
    norm: Fraction
    error: Fraction
    told: Told
    rule: Rule


def prove(told: Told, before: list[Node], tensors: Tensors) -> Node:
    """The numbers of a node; those of the file must be the same."""
    op, shape, inputs = told["op"], told["shape"], told["inputs"]
    need((op == "input") == (not before), "expected the input at node 0 and nowhere else")
    need(
        0 < len(shape) <= 8 and 0 < math.prod(shape) <= 2**26, f"shape: expected 1 to 8 axes, 2^26 entries, got {shape}"
    )
    count = {"input": 0, "add": 2, "join": max(1, len(inputs))}.get(op, 1)
    right = len(inputs) == count and all(j < len(before) for j in inputs)
    need(right, f"inputs: expected {count} of the nodes before, got {inputs!r:.80}")
    if op == "input":  # rounded once
        L, norm, error = ONE, up_root(4 * math.prod(shape)), ZERO
        rule = Rule(lambda: np.zeros((*shape, 1)), rounding=U * norm + ETA * math.prod(shape))
    else:  # of a sum, and of entries side by side; of one input they are what they are
        total = (lambda each: sum(each, ZERO)) if op == "add" else (lambda each: up_root(sum(v**2 for v in each)))
        L, norm, error = (total([before[j][k] for j in inputs]) for k in range(3))
        rule = rule_of(told, [before[j].told["shape"] for j in inputs], norm + error, tensors)
    L, norm, error = up(rule.factor * L), up(rule.factor * norm + rule.shift), up(rule.factor * error + rule.rounding)
    value = rule.run(*(np.zeros((*before[j].told["shape"], 1)) for j in inputs))
    need([*value.shape] == [*shape, 1], f"shape: expected {[*value.shape[:-1]]}, got {shape}")
    need(np.isfinite(value).all(), "a window holds no pixel, its maximum is -infinity")
    agree(told, rule.derived | {"lipschitz": in_hex(L), "norm": in_hex(norm), "error": in_hex(error)}, "")
    need(max(L, norm, error) < LIMIT, "numbers beyond 2^500")
    return Node(L, norm, error, told, rule)


def prove_nodes(told: list[Any], tensors: Tensors, say: Callable[[str], None]) -> list[Node]:
    need(len(told) >= 2, "nodes: expected two or more")
    left = 2**28  # entries of all nodes, which a run keeps
    nodes: list[Node] = []
    for i, node in enumerate(told):
        op = str(node.get("op") if type(node) is dict else None)
        where = f"node {i} ({op:.40})"
        need(op in KINDS, f"{where}: no rule for it; of a newer version?")
        try:
            fit(node, f"op inputs place shape lipschitz norm error {KINDS[op]}", "")
            left -= math.prod(node["shape"])
            need(left >= 0, "expected at most 2^28 entries in all nodes")
            nodes.append(prove(node, nodes, tensors))
        except (Rejected, LookupError, ValueError) as error:  # the last two are of numpy, where things do not fit
            raise Rejected(f"{where}: {error if isinstance(error, Rejected) else repr(error)}") from error
        say(f"{where}: {node['shape']}")
    return nodes


class Head(NamedTuple):
    """For logits y and j: f_y - f_j is slope-Lipschitz, and the program's is within loss / 4 of it."""

    slope: list[list[Fraction]]
    loss: list[list[Fraction]]
    tolerance: list[Fraction]  # between two runs of the program, for each logit


def head_of(H: int, nodes: list[Node], K: int) -> Layer:
    """The linear map whose first rows are the logits: what comes after it only keeps its first entries."""
    at = len(nodes) - 1
    while at > H and nodes[at].told["op"] == "join" and len(nodes[at].told["inputs"]) == 1:
        at = nodes[at].told["inputs"][0]
        need(math.prod(nodes[at].told["shape"]) >= K, "head: some logits are no rows")
    layer, (_, *pixels) = nodes[at].rule.layer, nodes[at].told["shape"]
    if at != H or layer is None:
        raise Rejected("head: not the linear map that gives the logits")
    # Around a circle several taps may read one pixel, and a row may be longer than its taps.
    single = math.prod(pixels) == 1 and len(layer.weight) == 1 and not any(nodes[at].told["circular"])
    need(single, "head: pairs need one output position, one group and zero padding")
    return layer


def prove_head(told: Any, nodes: list[Node]) -> Head:
    fit(told, "node distance rounding slope loss", "head, ")
    H, (K, *more) = told["node"], nodes[-1].told["shape"]
    need(not more and 2 <= K <= 2**12, f"head: expected 2 to 4096 logits, got shape {[K, *more]}")
    tables = (told[key] for key in ("distance", "rounding", "slope", "loss"))
    full = all(type(table) is list and len(table) == K for table in tables)
    need(full, f"head: expected tables for {K} logits")  # before many are derived
    classes = range(K)
    if H is None:  # |z_y - z_j| <= sqrt(2) ||z||
        x, length, rounding = nodes[-1], [ONE] * K, [ZERO] * K
        root = up_root(2)
        distance = [[ZERO if y == j else root for j in classes] for y in classes]
    else:
        layer = head_of(H, nodes, K)
        x = nodes[nodes[H].told["inputs"][0]]
        whole, e = to_integers(layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])
        rows, unit = whole[:K].reshape(K, -1), Fraction(4) ** e
        dot = matrix(rows) * matrix(rows.T)
        length = [up_root(int(dot[k, k]) * unit) for k in classes]
        distance = [[up_root(int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit) for j in classes] for y in classes]
        n, bias = layer.products(layer.transposed) + 2, [abs(Fraction(b)) for b in layer.bias.tolist()]
        rounding = [up(gamma(n) * (length[k] * (x.norm + x.error) + bias[k]) + n * ETA) for k in classes]
    slope = [[up(D * x.lipschitz) for D in row] for row in distance]
    each = [[4 * (distance[y][j] * x.error + rounding[y] + rounding[j]) for j in classes] for y in classes]
    loss = [[ZERO if y == j else up(each[y][j]) for j in classes] for y in classes]
    tables = {"distance": distance, "rounding": rounding, "slope": slope, "loss": loss}
    agree(told, {key: in_hex(table) for key, table in tables.items()}, "head, ")
    return Head(slope, loss, [2 * (length[k] * x.error + rounding[k]) for k in classes])


def radius_of(logits: list[Fraction], y: int, head: Head, cap: Fraction) -> Fraction:
    """The largest binary64 below every (margin - loss) / slope; 0 where a margin is not above its loss.

    The logits are those of the file, and their margins off by up to loss / 2 from those of a run (certificate.py). The
    run is off by loss / 4 here, and at distance R, where the real margin has fallen by at most slope R.
    """
    gains = [(logits[y] - logit - head.loss[y][j], head.slope[y][j]) for j, logit in enumerate(logits) if j != y]
    if not all(gain > 0 for gain, _ in gains):
        return ZERO
    return max(ZERO, min([cap, *(below(gain / slope) for gain, slope in gains if slope)]))
