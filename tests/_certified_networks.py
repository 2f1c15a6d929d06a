"""Networks with certificates of the second writer (`_certificates`), and single changes of what they say."""

import copy
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from _certificate_files import safetensors, write
from _certificates import ETA, Builder, U
from _exact_layers import exact_sum, jacobian, text, up, up_root

from onelip.checker import Rejected, check
from onelip.cli.check import checked, verdict_text


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


def skew(*shape, seed=0):
    """An integer kernel / 64 with its own negative when channels are exchanged and taps are reversed."""
    half = dyadic(*shape, seed=seed)
    groups = half.reshape(-1, shape[1], shape[1], *shape[2:])
    return (groups - np.flip(groups.swapaxes(1, 2), [*range(3, groups.ndim)])).reshape(shape)


def series(net, weight, bias=None, *, kept, terms=5, factor=1.0, groups=1, **given):
    """factor (x + S x + S S x / 2 + ...) + b in the first channels: S as a map, whose numbers it keeps."""
    (shape, L, norm, error), at = net.states[-1], len(net.nodes) - 1
    channels, sizes = len(weight), shape[1:]
    net.states[at] = ((channels, *sizes), L, norm, error)  # what S reads: with zero channels in each group
    net.map(weight, groups=groups, **given)
    node, _, _ = net.nodes.pop(), net.states.pop(), net.runs.pop()
    net.states[at] = (shape, L, norm, error)
    axes = np.ndim(weight) - 2
    plain = {"stride": [1] * axes, "padding": [[0, 0]] * axes, "dilation": [1] * axes, "groups": groups} | given
    plain = {key: v for key, v in plain.items() if key not in ("kind", "side", "steps", "claim", "q")}
    J, _ = jacobian(np.asarray(weight, float), (channels, *sizes), **plain)
    spread = 0.0 if bias is None else np.repeat(bias, math.prod(sizes)).reshape(kept, *sizes)
    sigma, A = (Fraction(node[key]) for key in ("sigma", "absolute"))
    B = Fraction(0) if bias is None else up_root(exact_sum(bias, 2) * math.prod(sizes))
    inner = np.shape(weight)[1] * math.prod(np.shape(weight)[2:])
    entries, out = channels * math.prod(sizes), (kept, *sizes)
    gammas = {n: n * U / (1 - n * U) for n in (2, 3, inner + 2)}
    term = lambda name, value: net.term(f"exponential: {name}", value)  # noqa: E731
    size, off = norm + term("error in the size", error), Fraction(0)
    length = size
    for j in range(terms, 0, -1):
        one = term("products", gammas[inner + 2] * A * (length + term("error in the products", off)))
        one += term("underflow of products", (inner + 2) * ETA * entries)
        reach = term("x", size) + (term("S v", sigma * (length + term("error in the sum", off))) + term("sum", one)) / j
        carried = term("error carried by S", sigma * off)
        off = (carried + term("rounding of S", one)) / j + term("rounding of the sum", gammas[3] * reach)
        off += term("underflow of the sum", 2 * ETA * entries)
        length = size + term("length", sigma * length / j)
    a = np.sqrt(np.linspace(0, float(sigma) ** 2, 4001))
    G = up_root(gain_squared(terms, sigma))
    assert (np.abs(sum((1j * a) ** j / math.factorial(j) for j in range(terms + 1))) <= float(G) * (1 + 1e-14)).all()
    G = Fraction(1) if net.without("exponential: gain") else G
    f = abs(Fraction(factor))
    last = term("value", f * G * size) + term("error of the value", f * off) + term("bias", B)
    rounding = term("rounding of the series", f * off) + term("rounding at the end", gammas[2] * last)
    rounding += term("underflow at the end", 2 * ETA * math.prod(out))
    numbers = up(f * G * L), up(f * G * norm + term("bias in norm", B)), up(term("error", f * G * error) + rounding)
    same = ("stride", "dilation", "offset", "circular", "groups", "transposed", "weight", "sigma", "absolute", "bound")
    settings = {key: node[key] for key in same} | {"terms": terms, "factor": text(factor), "gain": str(G)}
    settings |= {"bias": None if bias is None else net._tensor(bias), "bias_norm": str(B)}

    def run(x):
        wide = np.zeros((groups, channels // groups, *sizes))
        wide[:, : shape[0] // groups] = x.reshape(groups, -1, *sizes)
        term = total = wide.ravel()
        for j in range(1, terms + 1):
            term = J @ term / j
            total = total + term
        return total.reshape(wide.shape)[:, : kept // groups].reshape(out) * factor + spread

    return net._add("exponential", [at], out, numbers, run, **settings)


def gain_squared(terms, sigma):
    """1 + the largest x^m q(x) over steps of 1/256 in x up to sigma^2, where |p(i a)|^2 = 1 + x^m q(x), x = a^2."""
    even = [Fraction((-1) ** j, math.factorial(2 * j)) for j in range(terms // 2 + 1)]  # real part, in powers of x
    odd = [Fraction((-1) ** j, math.factorial(2 * j + 1)) for j in range((terms + 1) // 2)]  # imaginary part / a
    square = [Fraction(0)] * (terms + 1)
    for part, shift in ((even, 0), (odd, 1)):
        for i, one in enumerate(part):
            for j, other in enumerate(part):
                square[i + j + shift] += one * other
    m = next(j for j in range(1, terms + 1) if square[j])
    most, i = Fraction(0), 0
    while Fraction(i, 256) < sigma**2:
        lo, hi = Fraction(i, 256), Fraction(i + 1, 256)
        most = max(most, hi**m * sum(c * (hi if c > 0 else lo) ** j for j, c in enumerate(square[m:])))
        i += 1
    return 1 + most


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
