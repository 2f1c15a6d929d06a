"""From the nodes of a program to a radius: three numbers for each node, in exact fractions, rounded up once each.

For every input of norm at most 2 sqrt(n), z the value of a node in real arithmetic and z^ that of the program,

    z is lipschitz-Lipschitz in the input,    ||z|| <= norm,    ||z^ - z|| <= error.

Images lie in [0, 1]^n, and no radius is above sqrt(n), so no perturbed image is longer than 2 sqrt(n).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .layers import Map, map_of, shape_after, windows_of
from .norms import U, below, gamma, matrix, square_of, squares, to_integers, up, up_root
from .reading import fields, integer, need, same

ZERO, ONE = Fraction(0), Fraction(1)
ETA = Fraction(1, 2**500)  # far above what an underflow can do to one operation
LIMIT = 2**500  # below it nothing overflows


class State(NamedTuple):
    """What is proved of a node."""

    shape: tuple[int, ...]
    lipschitz: Fraction
    norm: Fraction
    error: Fraction


def prove_map(node: SimpleNamespace, layer: Map, x: State) -> tuple[Fraction, Fraction, Fraction]:
    """||W||, the norm of the bias, and what rounding does to W x + b."""
    whole, e = to_integers(np.abs(layer.weight))
    sums = whole.reshape(*whole.shape[:3], -1).sum(axis=3)  # (groups, first, second)
    A = up_root(int(sums.sum(axis=2).max()) * int(sums.sum(axis=1).max()) * Fraction(4) ** e)  # >= || |W| ||, by Schur
    B = up_root(squares(layer.bias) * math.prod(layer.shape[1:]))
    sigma = up_root(square_of(node.bound, layer, f"{node.where}, bound"))
    for key, value in (("sigma", sigma), ("absolute", A), ("bias_norm", B)):
        same(getattr(node, key), value, f"{node.where}, {key}")
    size = A * (x.norm + x.error) + B
    need(size < LIMIT, f"{node.where}: might overflow")
    n = layer.inner + 2
    return sigma, B, gamma(n) * size + n * ETA * math.prod(layer.shape)


def prove(node: SimpleNamespace, xs: list[State]) -> State:
    """Numbers of a node: lipschitz = factor L, norm = factor norm + shift, error = factor error + rounding."""
    if node.op == "input":  # rounded once
        rho = up_root(4 * math.prod(node.shape))
        return State(node.shape, ONE, rho, up(U * rho + ETA * math.prod(node.shape)))
    op, x, layer = node.op, xs[0], None
    if op in ("linear", "conv"):
        layer = map_of(node, x.shape)
    shape = layer.shape if layer else shape_after(node, [y.shape for y in xs])
    outputs, size = math.prod(shape), x.norm + x.error
    factor, shift, rounding = ONE, ZERO, ZERO  # for what moves or chooses values and never computes; 0 goes to 0
    if layer:
        factor, shift, rounding = prove_map(node, layer, x)
    elif op == "concat":
        return State(shape, *(up_root(sum(v**2 for v in each)) for each in list(zip(*xs, strict=True))[1:]))
    elif op == "add":
        _, L, norm, error = (a + b for a, b in zip(*xs, strict=True))
        return State(shape, up(L), up(norm), up(error + U * (norm + error) + ETA * outputs))
    elif op == "max_pool":  # a pixel is read by the taps t with s o + d t = i + p: one in s / gcd(s, d) of them
        factor = up_root(math.prod(-(-k // (s // math.gcd(s, d))) for k, s, _, d in windows_of(node)))
    elif op == "avg_pool":  # row sums scale K, column sums scale times the windows that read a pixel
        K = math.prod(node.kernel)
        factor = up_root(node.scale**2 * K * math.prod(-(-k // s) for k, s, *_ in windows_of(node)))
        rounding = gamma(K + 4) * factor * size + (K + 2) * ETA * outputs
    elif op == "normalize":
        bounded = (np.abs(node.mean) < 2.0**500).all() and ((node.std >= 2.0**-500) & (node.std < 2.0**500)).all()
        need(bounded, f"{node.where}: expected |mean| < 2^500 and a std from 2^-500 to 2^500")
        factor, M = 1 / Fraction(float(node.std.min())), up_root(squares(node.mean) * math.prod(shape[1:]))
        shift, rounding = factor * M, factor * gamma(4) * (size + M) + 4 * ETA * outputs
    elif op == "scale":
        factor = abs(node.factor)
        rounding = U * factor * size + ETA * outputs
    return State(shape, up(factor * x.lipschitz), up(factor * x.norm + shift), up(factor * x.error + rounding))


def prove_nodes(nodes: list[SimpleNamespace], say: Callable[[str], None]) -> list[State]:
    states: list[State] = []
    for node in nodes:
        say(f"{node.where}: {node.shape}")
        found = prove(node, [states[j] for j in node.inputs])
        need(found.shape == node.shape, f"{node.where}: expected shape {found.shape}, got {node.shape}")
        for key, claim in node.claims.items():
            same(claim, getattr(found, key), f"{node.where}, {key}")
        need(max(found[1:]) < LIMIT, f"{node.where}: numbers beyond 2^500")
        states.append(found)
    return states


class Head(NamedTuple):
    """For logits y and j: f_y - f_j is slope-Lipschitz, and the program's is within loss / 2 of it."""

    slope: list[list[Fraction]]
    loss: list[list[Fraction]]
    tolerance: list[Fraction]  # between two runs of the program, for each logit


def head_map(H: int, nodes: list[SimpleNamespace], states: list[State]) -> Map:
    """The linear map whose first rows are the logits: what comes after it only takes them."""
    at = len(nodes) - 1
    while at > H:
        takes = nodes[at].op in ("first_channels", "flatten", "reshape", "identity")
        need(takes, "head: not the last linear map")
        at = nodes[at].inputs[0]
    need(at == H and nodes[H].op in ("linear", "conv"), "head: not the linear map that gives the logits")
    layer = map_of(nodes[H], states[nodes[H].inputs[0]].shape)
    # Around a circle several taps may read one pixel, and a row may be longer than its taps.
    single = math.prod(layer.shape[1:]) == 1 and len(layer.weight) == 1 and not layer.circular
    need(single, "head: pairs need one output position, one group and zero padding")
    return layer


def prove_head(head: Any, nodes: list[SimpleNamespace], states: list[State]) -> Head:
    fields(head, "head", {"node", "pairs", "classes", "distance", "rounding", "slope", "loss"})
    K = integer(head["classes"], "head, classes", 2, 2**16)
    need(states[-1].shape == (K,), f"head: expected {K} logits, got shape {states[-1].shape}")
    classes = range(K)
    if head["pairs"] is True:
        H = integer(head["node"], "head, node", 1, len(nodes) - 1)
        layer, x = head_map(H, nodes, states), states[nodes[H].inputs[0]]
        rows = (layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])[:K].reshape(K, -1)
        whole, e = to_integers(rows)
        dot, unit = matrix(whole) * matrix(whole.T), Fraction(4) ** e
        length = [up_root(int(dot[k, k]) * unit) for k in classes]
        distance = [[up_root(int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit) for j in classes] for y in classes]
        n, bias = layer.inner + 2, [abs(Fraction(float(b))) for b in layer.bias[:K]]
        rounding = [up(gamma(n) * (length[k] * (x.norm + x.error) + bias[k]) + n * ETA) for k in classes]
        same(head["distance"], distance, "head, distance")
        same(head["rounding"], rounding, "head, rounding")
        slope = [[up(D * x.lipschitz) for D in row] for row in distance]
        losses = [[2 * distance[y][j] * x.error + 2 * (rounding[y] + rounding[j]) for j in classes] for y in classes]
        tolerance = [2 * (length[k] * x.error + rounding[k]) for k in classes]
    else:
        empty = head["node"] is head["distance"] is head["rounding"] is None and head["pairs"] is False
        need(empty, "head: expected pairs to be true, or false and node, distance, rounding null")
        root, last = up_root(2), states[-1]  # |z_y - z_j| <= sqrt(2) ||z||
        slope = [[up(root * last.lipschitz)] * K for _ in classes]
        losses = [[2 * root * last.error] * K for _ in classes]
        tolerance = [2 * last.error] * K
    loss = [[up(v) for v in row] for row in losses]
    for k in classes:
        slope[k][k] = loss[k][k] = ZERO
    same(head["slope"], slope, "head, slope")
    same(head["loss"], loss, "head, loss")
    return Head(slope, loss, tolerance)


def radius_of(logits: list[Fraction], y: int, head: Head, cap: Fraction) -> Fraction:
    """The largest binary64 below every (margin - loss) / slope; 0 where a margin is not above its loss.

    At distance R the real margin falls by at most slope R, and the program is off by loss / 2 here and there.
    """
    gains = [(logits[y] - logit - head.loss[y][j], head.slope[y][j]) for j, logit in enumerate(logits) if j != y]
    if not all(gain > 0 for gain, _ in gains):
        return ZERO
    return max(ZERO, min([cap, *(below(gain / slope) for gain, slope in gains if slope)]))
