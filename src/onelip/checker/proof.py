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

from .layers import Map
from .nodes import ETA, LIMIT, Rule, rule_of
from .norms import ONE, ZERO, U, below, gamma, matrix, to_integers, up, up_root
from .reading import SHAPE, Part, Rejected, in_hex, is_shape, need


class Node(NamedTuple):
    """What is proved of a node, and what it is."""

    lipschitz: Fraction
    norm: Fraction
    error: Fraction
    op: str
    inputs: tuple[int, ...]
    rule: Rule


def prove(node: Part, before: list[Node], tensors: dict[str, np.ndarray]) -> Node:
    """The numbers of a node; those of the file must be the same."""
    op, where = node.text("op"), node.where
    need((op == "input") == (not before), f"{where}: expected the input at node 0 and nowhere else")
    count = {"input": 0, "add": 2, "concat": None}.get(op, 1)
    inputs = node.integers("inputs", count, 0, len(before) - 1)
    need(op != "concat" or len(inputs) >= 2, f"{where}: expected two inputs or more")
    xs = [before[j] for j in inputs]
    L, norm, error = xs[0][:3] if xs else (ONE, ZERO, ZERO)
    if op == "add":
        L, norm, error = (sum(each, ZERO) for each in list(zip(*xs, strict=True))[:3])
    elif op == "concat":
        L, norm, error = (up_root(sum(v**2 for v in each)) for each in list(zip(*xs, strict=True))[:3])
    if op == "input":  # rounded once
        shape = tuple(node.take("shape", is_shape, SHAPE))
        norm = up_root(4 * math.prod(shape))
        rule = Rule(shape, lambda x: x, rounding=U * norm + ETA * math.prod(shape))
    else:
        rule = rule_of(op, node, [x.rule.shape for x in xs], norm + error, tensors)
    need(rule.shape and is_shape([*rule.shape]), f"{where}: expected to make {SHAPE}, got {rule.shape}")
    L, norm, error = up(rule.factor * L), up(rule.factor * norm + rule.shift), up(rule.factor * error + rule.rounding)
    if "place" in node.given:
        node.text("place")
    node.agree(shape=[*rule.shape], lipschitz=in_hex(L), norm=in_hex(norm), error=in_hex(error))
    need(max(L, norm, error) < LIMIT, f"{where}: numbers beyond 2^500")
    return Node(L, norm, error, op, inputs, rule)


def prove_nodes(given: list[Any], tensors: dict[str, np.ndarray], say: Callable[[str], None]) -> list[Node]:
    need(len(given) >= 2, "nodes: expected two or more")
    nodes: list[Node] = []
    for i, one in enumerate(given):
        op = one.get("op") if type(one) is dict else None
        nodes.append(prove(Part(one, f"node {i} ({op!s:.40})"), nodes, tensors))
        say(f"node {i} ({op}): {nodes[i].rule.shape}")
    return nodes


class Head(NamedTuple):
    """For logits y and j: f_y - f_j is slope-Lipschitz, and the program's is within loss / 2 of it."""

    slope: list[list[Fraction]]
    loss: list[list[Fraction]]
    tolerance: list[Fraction]  # between two runs of the program, for each logit


def head_map(H: int, nodes: list[Node]) -> Map:
    """The linear map whose first rows are the logits: what comes after it only takes them."""
    at = len(nodes) - 1
    while at > H:
        takes = nodes[at].op in ("first_channels", "flatten", "reshape", "identity")
        need(takes, "head: not the last linear map")
        at = nodes[at].inputs[0]
    layer = nodes[at].rule.layer
    if at != H or layer is None:
        raise Rejected("head: not the linear map that gives the logits")
    # Around a circle several taps may read one pixel, and a row may be longer than its taps.
    single = math.prod(layer.shape[1:]) == 1 and len(layer.weight) == 1 and not layer.circular
    need(single, "head: pairs need one output position, one group and zero padding")
    return layer


def prove_head(head: Part, nodes: list[Node]) -> Head:
    last, shape = nodes[-1], nodes[-1].rule.shape
    need(len(shape) == 1 and 2 <= shape[0] <= 2**12, f"head: expected 2 to 4096 logits, got shape {shape}")
    K, H, distance, rounding = shape[0], None, None, None
    classes = range(K)
    if head.choice("pairs", True, False):
        H = head.integer("node", 1, len(nodes) - 1)
        layer, x = head_map(H, nodes), nodes[nodes[H].inputs[0]]
        rows = (layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])[:K].reshape(K, -1)
        whole, e = to_integers(rows)
        dot, unit = matrix(whole) * matrix(whole.T), Fraction(4) ** e
        length = [up_root(int(dot[k, k]) * unit) for k in classes]
        distance = [[up_root(int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit) for j in classes] for y in classes]
        n, bias = layer.inner + 2, [abs(Fraction(float(b))) for b in layer.bias[:K]]
        rounding = [up(gamma(n) * (length[k] * (x.norm + x.error) + bias[k]) + n * ETA) for k in classes]
        slope = [[up(D * x.lipschitz) for D in row] for row in distance]
        loss = [[up(2 * (distance[y][j] * x.error + rounding[y] + rounding[j])) for j in classes] for y in classes]
        tolerance = [2 * (length[k] * x.error + rounding[k]) for k in classes]
    else:
        root = up_root(2)  # |z_y - z_j| <= sqrt(2) ||z||
        slope = [[up(root * last.lipschitz)] * K for _ in classes]
        loss = [[up(2 * root * last.error)] * K for _ in classes]
        tolerance = [2 * last.error] * K
    for k in classes:
        slope[k][k] = loss[k][k] = ZERO
    tables = {"distance": distance, "rounding": rounding, "slope": slope, "loss": loss}
    head.agree(node=H, classes=K, **{key: table and in_hex(table) for key, table in tables.items()})
    return Head(slope, loss, tolerance)


def radius_of(logits: list[Fraction], y: int, head: Head, cap: Fraction) -> Fraction:
    """The largest binary64 below every (margin - loss) / slope; 0 where a margin is not above its loss.

    At distance R the real margin falls by at most slope R, and the program is off by loss / 2 here and there.
    """
    gains = [(logits[y] - logit - head.loss[y][j], head.slope[y][j]) for j, logit in enumerate(logits) if j != y]
    if not all(gain > 0 for gain, _ in gains):
        return ZERO
    return max(ZERO, min([cap, *(below(gain / slope) for gain, slope in gains if slope)]))
