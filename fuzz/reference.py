"""A second reader of certificates, written from docs/certificates.md alone: is what a file states true?

`problems` derives everything from weights and images: norms of dense matrices, the three numbers of each node,
slopes, radii, logits. A file that states less than is true has no problem; a file that states more has. `settle` makes
a file consistent again after a change, as a forger would: all that follows from the proved constants of the nodes.

Values are flat numpy arrays of one sample, of float64 or of fractions.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from fuzz import oracle

U, ETA = Fraction(1, 2**53), Fraction(1, 2**500)
Tensors = dict[str, np.ndarray]
ROOM = 1 - 1e-9  # of numbers that are compared as float64


def up(value: Fraction, power: int = 1) -> Fraction:
    """The smallest float64 whose power is not below the value."""
    if value <= 0:
        return Fraction(0)
    size = (value.numerator.bit_length() - value.denominator.bit_length()) // power  # keeps the guess in range
    guess = math.ldexp(float(value / Fraction(2) ** (size * power)) ** (1 / power), size)
    while Fraction(guess) ** power >= value and guess > 0:
        guess = math.nextafter(guess, 0.0)
    while Fraction(guess) ** power < value:
        guess = math.nextafter(guess, math.inf)
    return Fraction(guess)


def gamma(n: int) -> Fraction:
    return (n + 2) * U / (1 - (n + 2) * U)


def matrix(node: dict[str, Any], shape: list[int], tensors: Tensors, exact: bool = False) -> np.ndarray:
    """W as a dense matrix (outputs, inputs)."""
    weight, groups, transposed = tensors[node["weight"]], node["groups"], node["transposed"]
    weight = np.vectorize(Fraction, otypes=[object])(weight) if exact and weight.size else weight
    first, second, *kernel = weight.shape
    there = node["shape"][1:]  # the pixels of a potential's V are those of its result
    near, far = (shape[1:], there) if transposed else (there, shape[1:])
    part = first // groups
    W = np.full((groups, part, *near, groups, second, *far), Fraction(0) if exact else 0.0)
    for o in np.ndindex(*near):
        for t in np.ndindex(*kernel):
            i = [
                s * a + d * b - q
                for s, a, d, b, q in zip(node["stride"], o, node["dilation"], t, node["offset"], strict=True)
            ]
            i = [a % n if wraps else a for a, n, wraps in zip(i, far, node["circular"], strict=True)]
            if all(0 <= a < n for a, n in zip(i, far, strict=True)):
                for g in range(groups):
                    W[(g, slice(None), *o, g, slice(None), *i)] += weight[
                        (slice(g * part, (g + 1) * part), slice(None), *t)
                    ]
    W = W.reshape(first * math.prod(near), -1)
    return W.T if transposed else W


def bias(node: dict[str, Any], outputs: int, tensors: Tensors) -> np.ndarray:
    if node["bias"] is None:
        return np.zeros(outputs)
    return np.repeat(tensors[node["bias"]], outputs // len(tensors[node["bias"]]))


class Program:
    """The nodes of a certificate with their weights."""

    def __init__(self, content: dict[str, Any], tensors: Tensors, exact: bool = False) -> None:
        self.nodes, self.tensors, self.exact = content["nodes"], tensors, exact
        self.matrices = {
            i: matrix(node, self.nodes[node["inputs"][0]]["shape"], tensors, exact)
            for i, node in enumerate(self.nodes)
            if node["op"] in ("affine", "potential", "exponential")
        }

    def run(self, x: np.ndarray) -> np.ndarray:
        """The value of the last node (batch, entries) for images (batch, entries)."""
        values, needed = [x], {len(self.nodes) - 1}
        for i in range(len(self.nodes) - 1, 0, -1):
            needed |= {*self.nodes[i]["inputs"]} if i in needed else set()
        for i, node in enumerate(self.nodes[1:], 1):
            values.append(self._value(i, node, [values[j] for j in node["inputs"]]) if i in needed else x)
        return values[-1]

    def _value(self, i: int, node: dict[str, Any], xs: list[np.ndarray]) -> np.ndarray:
        op, x, shape = node["op"], xs[0], node["shape"]
        if op == "exponential":
            return self._series(node, self.matrices[i], x)
        if op in ("affine", "potential"):
            W = self.matrices[i]
            y = x.dot(W.T) + self._number(bias(node, len(W), self.tensors))
            return y if op == "affine" else x - 2 * np.maximum(y, 0 * y).dot(W)
        if op == "join":
            flat, n = np.concatenate(xs, axis=1), math.prod(shape)
            return np.concatenate([flat[:, :n], 0 * flat[:, :1].repeat(max(0, n - flat.shape[1]), axis=1)], axis=1)
        if op in ("max", "sum"):
            before = x.reshape(len(x), self.nodes[node["inputs"][0]]["shape"][0], -1)
            rows = []
            for window in np.array(node["take"]).T:
                seen = before[:, :, window[window >= 0]]
                rows.append(
                    seen.max(axis=2) if op == "max" else seen.sum(axis=2) * self._number(float.fromhex(node["factor"]))
                )
            return np.stack(rows, axis=2).reshape(len(x), -1)
        if op == "sort":
            axis, size = node["axis"], node["group_size"]
            split = [*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :]]
            return -np.sort(-x.reshape(len(x), *split), axis=axis + 1).reshape(len(x), -1)
        if op == "normalize":
            mean, std = (
                np.repeat(self._number(self.tensors[node[key]]), math.prod(shape[1:])) for key in ("mean", "std")
            )
            return (x - mean) / std
        if op == "scale":
            return x * self._number(float.fromhex(node["factor"]))
        if op == "add":
            return xs[0] + xs[1]
        if op not in ("relu", "abs"):
            raise AssertionError(f"the reference has no kind {op!r}")
        return np.abs(x) if op == "abs" else np.maximum(x, 0 * x)

    def _series(self, node: dict[str, Any], S: np.ndarray, x: np.ndarray) -> np.ndarray:
        """factor (x + S x + S S x / 2 + ...) + b; the first channels of each group are those of x, and are kept."""
        groups, channels, kept = node["groups"], self.tensors[node["weight"]].shape[1], node["shape"][0]
        wide = np.zeros((len(x), groups, channels, math.prod(node["shape"][1:])), x.dtype) + 0 * x[:, :1, None, None]
        before = x.reshape(len(x), groups, -1, wide.shape[-1])
        wide[:, :, : before.shape[2]] = before
        term = total = wide.reshape(len(x), -1)
        for j in range(1, node["terms"] + 1):
            term = term.dot(S.T) / j
            total = total + term
        first = total.reshape(wide.shape)[:, :, : kept // groups].reshape(len(x), -1)
        shift = bias(node, first.shape[1], self.tensors)
        return first * self._number(float.fromhex(node["factor"])) + self._number(shift)

    def _number(self, value: Any) -> Any:
        if not self.exact:
            return value
        return Fraction(value) if isinstance(value, float) else np.vectorize(Fraction, otypes=[object])(value)


def constants(program: Program, i: int) -> dict[str, Fraction]:
    """What is proved of a node by itself, from its weights: the true norm instead of a bound of it."""
    node, tensors = program.nodes[i], program.tensors
    if node["op"] in ("affine", "potential", "exponential"):
        W = program.matrices[i]
        b = bias(node, math.prod(node["shape"]) if node["op"] == "exponential" else len(W), tensors)
        values = oracle.norm_of(W)[0], oracle.norm_of(np.abs(W))[0], float(np.linalg.norm(b))
        found: dict[str, Fraction] = dict(zip(("sigma", "absolute", "bias_norm"), map(Fraction, values), strict=True))
        if node["op"] == "exponential":
            term = series = np.eye(len(W))
            for j in range(1, node["terms"] + 1):
                term = term @ W / j
                series = series + term
            found["gain"] = Fraction(oracle.norm_of(series)[0])
        return found
    if node["op"] in ("max", "sum"):
        take = np.array(node["take"])
        m, K = int(np.unique(take[take >= 0], return_counts=True)[1].max()), len(take)
        square = Fraction(m) if node["op"] == "max" else Fraction(float.fromhex(node["factor"])) ** 2 * m * K
        return {"constant": up(square, 2)}
    if node["op"] == "normalize":
        entries = math.prod(node["shape"][1:])
        return {
            "mean_norm": up(sum((Fraction(v) ** 2 for v in tensors[node["mean"]].tolist()), Fraction(0)) * entries, 2)
        }
    return {}


def numbers(
    node: dict[str, Any], inputs: list[Any], own: dict[str, Fraction], shape: list[int], tensors: Tensors
) -> Any:
    """(L, r, e) of a node, by the table of the document; not rounded, joins squared."""
    op, n = node["op"], math.prod(node["shape"])
    if op == "input":
        rho = up(Fraction(4 * n), 2)
        return Fraction(1), rho, U * rho + ETA * n
    L, r, e = inputs[0]
    if op in ("affine", "potential", "exponential"):
        sigma, A, B = own["sigma"], own["absolute"], own["bias_norm"]
        first, second, *kernel = tensors[node["weight"]].shape
        taps = math.prod(kernel)
        inner, back = second * taps, first // node["groups"] * taps
        if op == "exponential":
            f, s, wide = abs(Fraction(float.fromhex(node["factor"]))), r + e, first * math.prod(node["shape"][1:])
            length, off = s, Fraction(0)
            for j in range(node["terms"], 0, -1):
                one = gamma(inner) * A * (length + off) + (inner + 2) * ETA * wide
                step = gamma(1) * (s + (sigma * (length + off) + one) / j)
                length, off = s + sigma * length / j, (sigma * off + one) / j + step + 2 * ETA * wide
            fG = f * own["gain"]
            return fG * L, fG * r + B, fG * e + f * off + gamma(0) * (fG * s + f * off + B) + 2 * ETA * n
        if op == "affine":
            inner = back if node["transposed"] else inner
            return sigma * L, sigma * r + B, sigma * e + gamma(inner) * (A * (r + e) + B) + (inner + 2) * ETA * n
        hidden = first * math.prod(node["shape"][1:])
        c, s = max(Fraction(1), 2 * sigma**2 - 1), r + e
        one = gamma(inner) * (A * s + B) + (inner + 2) * ETA * hidden
        t = sigma * s + B + one
        two = gamma(back) * A * t + (back + 2) * ETA * n
        error = c * e + 2 * (sigma * one + two) + U * (s + 2 * (sigma * t + two)) + 2 * ETA * n
        return c * L, c * r + 2 * sigma * B, error
    if op == "max":
        return tuple(own["constant"] * v for v in (L, r, e))
    if op == "sum":
        F, K = own["constant"], len(node["take"])
        return F * L, F * r, F * e + gamma(K + 2) * F * (r + e) + (K + 2) * ETA * n
    if op == "normalize":
        s, M = Fraction(float(tensors[node["std"]].min())), own["mean_norm"]
        return L / s, (r + M) / s, (e + gamma(2) * (r + e + M)) / s + 4 * ETA * n
    if op == "scale":
        c = abs(Fraction(float.fromhex(node["factor"])))
        return c * L, c * r, c * e + U * c * (r + e) + ETA * n
    if op == "add":
        both = [a + b for a, b in zip(*inputs, strict=True)]
        return both[0], both[1], both[2] + U * (both[1] + both[2]) + ETA * n
    if op == "join":
        return tuple(sum((v**2 for v in column), Fraction(0)) for column in zip(*inputs, strict=True))
    if op not in ("relu", "abs", "sort"):
        raise AssertionError(f"the reference has no kind {op!r}")
    return L, r, e


def _rounded(node: dict[str, Any], values: Any) -> tuple[Fraction, Fraction, Fraction]:
    L, r, e = (up(value, 2 if node["op"] == "join" else 1) for value in values)
    return L, r, e


def slopes(content: dict[str, Any], tensors: Tensors, lipschitz: list[Fraction]) -> list[list[Fraction]]:
    """Squares of the slope of each pair of logits."""
    nodes, K = content["nodes"], math.prod(content["nodes"][-1]["shape"])
    if not content["pairs"]:
        return [[2 * lipschitz[-1] ** 2] * K] * K
    at = len(nodes) - 1
    while nodes[at]["op"] == "join" and len(nodes[at]["inputs"]) == 1:
        (at,) = nodes[at]["inputs"]
    node = nodes[at]
    rows = matrix(node, nodes[node["inputs"][0]]["shape"], tensors, exact=True)[:K]
    P = lipschitz[node["inputs"][0]] ** 2
    return [[P * sum((a - b) ** 2 for a, b in zip(rows[y], rows[j], strict=True)) for j in range(K)] for y in range(K)]


def radius(logits: list[Fraction], squares: list[list[Fraction]], error: Fraction, n: int) -> float:
    """The largest float64 that is certified, 0 if there is none."""
    y = logits.index(max(logits))
    pairs = [(logits[y] - f - 8 * error, squares[y][j]) for j, f in enumerate(logits) if j != y]
    if not all(margin > 0 for margin, _ in pairs):
        return 0.0
    limit = min([margin**2 / square for margin, square in pairs if square] + [Fraction(n)])
    guess = float(up(limit, 2))
    while guess > 0 and Fraction(guess) ** 2 >= limit:
        guess = math.nextafter(guess, 0.0)
    return guess


_MOST = 2**16  # values of a node


def settle(content: dict[str, Any], tensors: Tensors, images: np.ndarray, rerun: bool, kept: Any = ()) -> None:
    """Makes all that follows from the constants of the nodes follow again; with `rerun` from the images, too.

    Numbers named in `kept`, as (node, key), stay as they are, and the rest follows from them.
    """
    if any(math.prod(node["shape"]) > _MOST for node in content["nodes"]):
        raise ValueError(f"more than {_MOST} values in a node take minutes in fractions")
    names, states = ("lipschitz", "norm", "error"), []
    for i, node in enumerate(content["nodes"]):
        own = {
            key: Fraction(node[key])
            for key in ("sigma", "absolute", "bias_norm", "constant", "mean_norm", "gain")
            if key in node
        }
        shape = content["nodes"][node["inputs"][0]]["shape"] if node["inputs"] else []
        derived = _rounded(node, numbers(node, [states[j] for j in node["inputs"]], own, shape, tensors))
        node |= {name: str(value) for name, value in zip(names, derived, strict=True) if (i, name) not in kept}
        states.append([Fraction(node[name]) for name in names])
    squares = slopes(content, tensors, [state[0] for state in states])
    program, n = Program(content, tensors), math.prod(content["nodes"][0]["shape"])
    for result, image in zip(content["results"], images, strict=True):
        if rerun:
            x = image.astype(np.float64).reshape(1, -1) / content["preprocessing"]["divide_by"]
            result["logits"] = [float(v).hex() for v in program.run(x)[0]]
        logits = [Fraction(float.fromhex(v)) for v in result["logits"]]
        found = radius(logits, squares, states[-1][2], n)
        result |= {"class": logits.index(max(logits)), "radius": found.hex()}
        is_counted = content["images"]["dtype"] == "uint8" and found > 0
        result["pixels"] = math.floor((255 * Fraction(found)) ** 2) if is_counted else None
    content["summary"] = summary(content)


def summary(content: dict[str, Any]) -> dict[str, Any]:
    radii = [Fraction(float.fromhex(result["radius"])) for result in content["results"]]
    hits = [r for r, result in zip(radii, content["results"], strict=True) if result["class"] == result["label"]]
    cra = {text: sum(r >= Fraction(text) for r in hits) for text in content["summary"]["cra"]}
    return {"count": len(radii), "certified": sum(r > 0 for r in radii), "cra": cra}


def problems(content: dict[str, Any], tensors: Tensors, images: np.ndarray, exact: bool = False) -> str | None:
    """The first statement of a certificate that is not true, or None; with `exact` attacked in fractions, too."""
    program, states = Program(content, tensors), []
    if not all(np.isfinite(t).all() for t in tensors.values()):
        return "weights that are not finite"
    for i, node in enumerate(content["nodes"]):
        own = constants(program, i)
        for key, value in own.items():
            if not Fraction(node[key]) >= value * Fraction(ROOM):
                return f"node {i} ({node['op']}): {key} is {float(Fraction(node[key]))!r}, in truth {float(value)!r}"
        shape = content["nodes"][node["inputs"][0]]["shape"] if node["inputs"] else []
        states.append(_rounded(node, numbers(node, [states[j] for j in node["inputs"]], own, shape, tensors)))
        for key, value in zip(("lipschitz", "norm", "error"), states[-1], strict=True):
            if not Fraction(node[key]) >= value * Fraction(ROOM):
                return f"node {i} ({node['op']}): {key} is {float(Fraction(node[key]))!r}, derived {float(value)!r}"
    if [*images.shape] != [len(content["results"]), *content["nodes"][0]["shape"]]:
        return f"images of shape {images.shape}"
    squares = slopes(content, tensors, [state[0] for state in states])
    error = Fraction(content["nodes"][-1]["error"])
    for i, (result, image) in enumerate(zip(content["results"], images, strict=True)):
        x = image.astype(np.float64).ravel() / {"uint8": 255}.get(str(images.dtype), 1)
        runs = [program.run, Program(content, tensors, exact=True).run] if exact else [program.run]
        found = _result_problem(result, x, runs, squares, error)
        if found is not None:
            return f"result {i}: {found}"
    if content["summary"] != summary(content):
        return f"summary {content['summary']}, derived {summary(content)}"
    return None


def _result_problem(result: Any, x: np.ndarray, runs: list[Any], squares: Any, error: Fraction) -> str | None:
    own, logits = runs[0](x[None])[0], [Fraction(float.fromhex(v)) for v in result["logits"]]
    off = max(abs(Fraction(float(a)) - b) for a, b in zip(own, logits, strict=True))
    if not off <= 4 * error:
        return f"logits are off by {float(off)!r}, the error is {float(error)!r}"
    y, R = result["class"], float.fromhex(result["radius"])
    if logits[y] != max(logits):
        return f"class {y} is not the largest logit"
    if radius(logits, squares, error * Fraction(ROOM), len(x)) * (1 + 1e-9) < R:
        return f"radius {R!r}, derived {radius(logits, squares, error, len(x))!r}"
    if result["pixels"] is not None and not Fraction(result["pixels"]) <= (255 * Fraction(R)) ** 2:
        return f"pixels {result['pixels']} with a radius of {R!r}"
    if R > 0 and (found := attack(runs, x, y, R)) is not None:
        return f"radius {R!r}, but the class changes at a distance of {found!r}"
    return None


def attack(runs: list[Any], x: np.ndarray, y: int, R: float, steps: int = 3) -> float | None:
    """The distance of a point not farther than R with another class, or with a tie; None if none was found.

    `runs` computes logits: the first in float64, by which points are found; all of them must keep the class there.
    """
    for j in range(runs[0](x[None]).shape[1]):
        point = x
        for _ in range(steps if j != y else 0):
            values = runs[0](np.concatenate([point[None], point + 1e-6 * np.eye(len(x))]))
            margins = values[:, j] - values[:, y]
            slope = margins[1:] - margins[0]
            length = np.linalg.norm(slope)
            if not 0 < length < math.inf:
                break
            point = inside(x, x + R * slope / length, R)
            for run in runs:
                there = run((point if run is runs[0] else np.vectorize(Fraction, otypes=[object])(point))[None])[0]
                if not there[y] > there[j]:
                    return float(np.linalg.norm(point - x))
    return None


def is_inside(x: np.ndarray, point: np.ndarray, R: float) -> bool:
    """Whether the distance is at most R, in whole numbers."""
    a, e = oracle.whole(np.concatenate([x, point]))
    return sum(int(v) ** 2 for v in a[: len(x)] - a[len(x) :]) * Fraction(4) ** e <= Fraction(R) ** 2


def inside(x: np.ndarray, point: np.ndarray, R: float) -> np.ndarray:
    """The point, moved towards x until its true distance is not above R."""
    for shorter in (0.0, 2.0**-52, 2.0**-50, 2.0**-46, 2.0**-40):
        moved = x + (point - x) * (1 - shorter)
        if is_inside(x, moved, R):
            return moved
    return x
