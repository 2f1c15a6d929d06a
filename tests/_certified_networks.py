"""Networks with certificates of the second writer (`_certificates`), and single changes of what they say."""

import copy
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from _certificate_files import safetensors, write
from _certificates import ETA, Builder, U
from _exact_layers import jacobian, text, up

from onelip.checker import Rejected, check
from onelip.cli._verdict import checked, verdict_text


def dyadic(*shape, seed=0, low=-12, high=13):
    return np.random.default_rng(seed + sum(shape)).integers(low, high, shape) / 64


def pixels(shape, count=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def maxmin(x):
    a, b = np.split(x, 2)
    return np.concatenate([np.maximum(a, b), np.minimum(a, b)])


def windows(sizes, starts, reach):
    """By place in the window: the pixel of each window, row-major; -1 beyond the border."""
    number = np.pad(np.arange(math.prod(sizes)).reshape(sizes), 9, constant_values=-1)
    spots = [np.stack(np.meshgrid(*each, indexing="ij"), -1).reshape(-1, len(sizes)) for each in (starts, reach)]
    return [[int(number[tuple(start + step + 9)]) for start in spots[0]] for step in spots[1]]


def avg_pool(net, scale=0.75):
    """Windows of 2 x 2 without overlap: row sums 4 scale, column sums scale."""
    c, h, w = net.states[-1][0]
    n = 8 * U / (1 - 8 * U)
    pixels = windows((h, w), (range(0, h, 2), range(0, w, 2)), (range(2), range(2)))
    pool = lambda x: x.reshape(c, h // 2, 2, w // 2, 2).sum((2, 4)) * scale  # noqa: E731
    settings = {"take": pixels, "factor": text(scale)}
    return net.scaled("sum", (c, h // 2, w // 2), pool, Fraction(2 * scale), rounding=n, underflow=6, **settings)


def max_pool(net):
    """3 x 3 with stride 1 and padding 1: nine windows read a pixel."""
    shape = net.states[-1][0]

    def pool(x):
        x = np.pad(x, [(0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2)).max((3, 4))

    pixels = windows(shape[1:], [range(-1, n - 1) for n in shape[1:]], (range(3), range(3)))
    return net.scaled("max", shape, pool, Fraction(3), take=pixels)


def scale(net, factor):
    shape = net.states[-1][0]
    return net.scaled(
        "scale", shape, lambda x: x * factor, abs(Fraction(factor)), rounding=U, underflow=1, factor=text(factor)
    )


def potential(net, weight, bias=None, **given):
    """x - 2 V^T relu(V x + b): V as a map, whose numbers it keeps, and the transpose of its matrix."""
    shape, L, norm, error = net.states[-1]
    net.map(weight, bias, **given)
    node, (out, *_), _ = net.nodes.pop(), net.states.pop(), net.runs.pop()
    same = ("stride", "dilation", "offset", "circular", "groups", "transposed")
    settings = {key: node[key] for key in same}
    axes = np.ndim(weight) - 2
    plain = {"stride": [1] * axes, "padding": [[0, 0]] * axes, "dilation": [1] * axes} | given
    plain = {key: v for key, v in plain.items() if key not in ("kind", "side", "steps")}
    J, _ = jacobian(np.asarray(weight, float), shape, **plain)
    spread = 0.0 if bias is None else np.repeat(bias, math.prod(out[1:]))
    sigma, A, B = (Fraction(node[key]) for key in ("sigma", "absolute", "bias_norm"))
    first, second, *taps = np.shape(weight)
    forth, back = (n * math.prod(taps) + 2 for n in (second, first // settings["groups"]))
    gammas = [n * U / (1 - n * U) for n in (forth, back)]
    term = lambda name, value: net.term(f"potential: {name}", value)  # noqa: E731
    size, entries = norm + error, math.prod(shape)
    one = term("products of V", gammas[0] * A * size) + term("bias", gammas[0] * B)
    one += term("underflow of V", forth * ETA * math.prod(out))
    inside = term("V x", sigma * size) + term("bias inside", B) + term("rounding inside", one)
    two = term("products of the adjoint", gammas[1] * A * inside) + term(
        "underflow of the adjoint", back * ETA * entries
    )
    reach = term("x", size) + 2 * (term("what is taken away", sigma * inside) + term("rounding of it", two))
    factor = 2 * sigma**2 - 1 if sigma > 1 and not net.without("potential: factor") else Fraction(1)
    off = term("error carried", factor * error) + 2 * (term("rounding of V", sigma * one) + term("of the adjoint", two))
    off += term("difference", U * reach) + term("underflow of the difference", 2 * ETA * entries)
    numbers = up(factor * L), up(factor * norm + term("value at 0", 2 * sigma * B)), up(off)
    names = {key: node[key] for key in ("weight", "bias", "sigma", "absolute", "bias_norm", "bound")}
    run = lambda x: x - 2 * (J.T @ np.maximum(J @ x.ravel() + spread, 0)).reshape(shape)  # noqa: E731
    return net._add("potential", node["inputs"], shape, numbers, run, **names, **settings)


def everything(drop=()):
    """(4, 4, 4) to 3 logits through every kind of node that rounds."""
    net = Builder((4, 4, 4), drop)
    net.normalize([0.5, 0.25, 0.125, 0.75], [0.5, 0.3, 0.25, 1.0])
    net.map(dyadic(4, 4, 3, 3), dyadic(4, seed=1), padding=[[1, 1], [1, 1]], steps=2)
    net.exact("sort", (4, 4, 4), maxmin, axis=0, group_size=2)
    max_pool(net)
    a = avg_pool(net)
    b = net.map(dyadic(4, 4, 1, 1), dyadic(4, seed=2), kind="cholesky")
    c = net.add(a, b)
    scale(net, -0.4)
    net.concat(c, len(net.nodes) - 1)
    net.exact("join", (32,), np.ravel)
    net.map(dyadic(8, 32), dyadic(8, seed=3), kind="cholesky", side="outputs")
    net.exact("relu", (8,), lambda x: np.maximum(x, 0))
    net.map(dyadic(4, 8), dyadic(4, seed=4))
    net.exact("join", (3,), lambda x: x[:3])
    return net


def quiet(drop=()):
    """Zero weights: only the underflow terms are left, so that each of them shows; and no slope, so the cap does."""
    net = Builder((4,), drop)
    net.map(np.zeros((4, 4)))
    net.normalize([0.0] * 4, [0.5] * 4)
    net.exact("join", (1, 2, 2), lambda x: x.reshape(1, 2, 2))
    avg_pool(net)
    net.exact("join", (1,), np.ravel)
    scale(net, 0.5)
    net.add(len(net.nodes) - 1, len(net.nodes) - 1)
    net.map(np.ones((2, 1)) / 64)
    net.map(np.zeros((3, 2)), [0.5, -0.25, 0.0])
    return net


def no_head(drop=()):
    net = Builder((6,), drop)
    net.map(dyadic(4, 6), dyadic(4))
    net.exact("abs", (4,), np.abs)
    return net


def small(drop=()):
    net = Builder((6,), drop)
    net.map(dyadic(4, 6), dyadic(4), kind="cholesky", side="outputs")
    net.exact("sort", (4,), maxmin, axis=0, group_size=2)
    net.map(dyadic(3, 4), dyadic(3), steps=2)
    return net


def files(net, directory, *, pairs=True, labels=True, images=None, edit=None):
    images = pixels(net.states[0][0]) if images is None else images
    content = net.build(images, [i % 2 for i in range(len(images))] if labels else None, pairs=pairs)
    content = copy.deepcopy(content)
    if edit:
        edit(content)
    return write(directory, content, safetensors(net.tensors), images=images)


def built(net, directory):
    """What the certificate of a network says, and the network."""
    return json.loads(files(net, directory).read_text()), net


def changed(right, directory, edit):
    """The path of what `built` gave, changed, with hashes and digest that fit."""
    content, net = right
    edit(content := copy.deepcopy(content))
    return write(directory, content, safetensors(net.tensors))


def rejected(path, reason, **given):
    with pytest.raises(Rejected, match=reason):
        check(path, **given)


def report(path, *files):
    """What `onelip check` prints, and its exit code."""
    verdict, code = checked(path, *files)
    return verdict_text(verdict, code), code


def at(content, *path):
    for key in path:
        content = content[key]
    return content


def change(*path, to=None, by=None):
    """An edit of one place of a certificate."""

    def edit(content):
        place = at(content, *path[:-1])
        place[path[-1]] = by(place[path[-1]]) if by else to

    return edit


def more(number):
    return _next(number, math.inf)


def less(number):
    return _next(number, -math.inf)


def _next(number, direction):
    """Of a float in hexadecimal, or of a fraction that is one, written alike."""
    if "0x" in number:
        return text(math.nextafter(float.fromhex(number), direction))
    return str(Fraction(math.nextafter(float(Fraction(number)), direction)))


def without_node(index):
    """One node less; those behind refer to the node before it."""

    def edit(content):
        del content["nodes"][index]
        for node in content["nodes"][1:]:
            node["inputs"] = [i - 1 if i >= index else i for i in node["inputs"]]

    return edit
