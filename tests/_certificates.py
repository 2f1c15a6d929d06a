"""A second writer of certificates, for the tests of the checker: small, slow, by other ways than checker and library.

Layers are explicit matrices, made index by index. The Schur sums are read off the Gram matrix of the layer on a domain
so large that its middle does not feel the border. `drop` names terms to leave out, everything after them consistent:
what a wrong or dishonest writer would write.
"""

import hashlib
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np

from onelip.checker.certificate import ARITHMETIC, STATEMENT

U, ETA = Fraction(1, 2**53), Fraction(1, 2**500)
SUMMARY_RADII = ("36/255", "72/255", "1")


def up(x):
    y = float(x)
    return Fraction(y) if Fraction(y) >= x else Fraction(math.nextafter(y, math.inf))


def up_root(x):
    y = Fraction(math.sqrt(x))
    for _ in range(3):
        y = Fraction(math.nextafter(float(y), 0.0))
    while y * y < x:
        y = Fraction(math.nextafter(float(y), math.inf))
    return y


def below(x):
    y = float(x)
    return Fraction(y) if Fraction(y) < x else Fraction(math.nextafter(y, -math.inf))


def text(x):
    return float(x).hex()


def exact_sum(array, power=1):
    return sum((abs(Fraction(float(v))) ** power for v in np.ravel(array)), Fraction(0))


def jacobian(
    weight, shape, *, stride, padding, dilation, groups=1, mode="zeros", transposed=False, output_padding=None
):
    """The layer as a matrix, and the shape of its output."""
    taps, sizes = weight.shape[2:], shape[1:]
    axes = range(len(taps))
    if transposed:
        extra = output_padding or [0] * len(taps)
        out = [(sizes[a] - 1) * stride[a] - sum(padding[a]) + dilation[a] * (taps[a] - 1) + extra[a] + 1 for a in axes]
        outputs, inputs = weight.shape[1] * groups, weight.shape[0]
    else:
        out = [(sizes[a] + sum(padding[a]) - dilation[a] * (taps[a] - 1) - 1) // stride[a] + 1 for a in axes]
        outputs, inputs = weight.shape[0], weight.shape[1] * groups
    matrix = np.zeros((outputs, *out, inputs, *sizes), weight.dtype)
    # Of the pair (near, far) the near side is the strided one: far = s near + d t - p.
    near_sizes, far_sizes = (sizes, out) if transposed else (out, sizes)
    for near in itertools.product(*map(range, near_sizes)):
        for t in itertools.product(*map(range, taps)):
            far = [stride[a] * near[a] + dilation[a] * t[a] - padding[a][0] for a in axes]
            if mode == "circular":
                far = [f % n for f, n in zip(far, far_sizes, strict=True)]
            if any(not 0 <= f < n for f, n in zip(far, far_sizes, strict=True)):
                continue
            for first in range(weight.shape[0]):
                group = first // (weight.shape[0] // groups)
                for second in range(weight.shape[1]):
                    other = group * weight.shape[1] + second
                    value = weight[(first, second, *t)]
                    if transposed:
                        matrix[(other, *far, first, *near)] += value
                    else:
                        matrix[(first, *near, other, *far)] += value
    return matrix.reshape(math.prod((outputs, *out)), -1), (outputs, *out)


def schur_sum(whole, q, side, steps, *, stride, dilation, groups, transposed):
    """max over columns of sum |M| q_j / q_i for integer weights, from the middle of a large layer; remembered."""
    key = (whole.shape, whole.tobytes(), json.dumps([q, side, steps, stride, dilation, groups, transposed]))
    if key not in _SUMS:
        _SUMS[key] = _schur_sum(whole, q, side, steps, stride, dilation, groups, transposed)
    return _SUMS[key]


_SUMS = {}


def _schur_sum(whole, q, side, steps, stride, dilation, groups, transposed):
    taps = whole.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, taps, strict=True)]
    phases = [min(s // math.gcd(s, d), k) for s, d, k in zip(stride, dilation, taps, strict=True)]
    # Near is the strided lattice; Gram powers couple what is apart by less than 2^(steps-1) reaches.
    near = [2 * (2 ** (steps - 1) * -(-r // s) + 1) + 1 for r, s in zip(reach, stride, strict=True)]
    far = [s * (n - 1) + r for s, n, r in zip(stride, near, reach, strict=True)]
    shape = (whole.shape[1] * groups, *far)
    settings = {"stride": stride, "dilation": dilation, "padding": [(0, 0)] * len(taps), "groups": groups}
    J, out = jacobian(whole, shape, **settings)  # as a convolution: rows (first, near), columns (second, far)
    columns_far = (side == "inputs") != transposed
    J = J.astype(np.float64)  # exact for these integers, and fast
    M = J.T @ J if columns_far else J @ J.T
    for _ in range(steps - 1):
        M = M @ M
    assert np.abs(M).sum(1).max() < 2**53
    M = M.astype(np.int64)
    channels, sizes = (shape[0], far) if columns_far else (out[0], near)
    index = np.full((channels, *sizes), -1)
    for c in range(channels):
        for place in itertools.product(*map(range, sizes)):
            if not columns_far:
                index[(c, *place)] = c
                continue
            classes = []
            for i, s, d, p in zip(place, stride, dilation, phases, strict=True):
                # The phase of a pixel is that of the taps t with s o + d t = i; a pixel may be read by none.
                classes.append(next((t for t in range(p) if (i - d * t) % s == 0), None))
            if None not in classes:
                flat = int(np.ravel_multi_index(classes, phases)) if phases else 0
                index[(c, *place)] = c * math.prod(phases) + flat
    flat_q = [v for group in q for v in group]
    weights = np.array([flat_q[i] if i >= 0 else 0 for i in index.ravel()], object)
    sums = np.abs(M).astype(object) @ weights
    middle = [range(n // 2, min(n, n // 2 + s)) for n, s in zip(sizes, stride, strict=True)]
    best = Fraction(0)
    for c in range(channels):
        for place in itertools.product(*middle):
            i = int(np.ravel_multi_index((c, *place), (channels, *sizes)))
            if weights[i]:
                best = max(best, Fraction(int(sums[i]), int(weights[i])))
    return best


class Builder:
    """Collects nodes with their numbers; every term that carries a name can be dropped."""

    def __init__(self, shape, drop=()):
        self.drop, self.used = set(drop), set()
        self.tensors, self.nodes, self.runs, self.states = {}, [], [], []
        n = math.prod(shape)
        self.entries = n
        rho = up_root(Fraction(n * (1 if self.without("domain") else 4)))
        error = up(self.term("input rounding", U * rho) + self.term("input underflow", ETA * n))
        self._add("input", [], shape, (Fraction(1), rho, error), None)

    def without(self, name):
        self.used.add(name)
        return name in self.drop

    def term(self, name, value):
        return Fraction(0) if self.without(name) else value

    def _add(self, op, inputs, shape, numbers, run, **settings):
        names = dict(zip(("lipschitz", "norm", "error"), map(text, numbers), strict=True))
        place = {"place": "", "shape": list(shape)}
        self.nodes.append({"op": op, "inputs": list(inputs), **place, **settings, **names})
        self.states.append((tuple(shape), *numbers))
        self.runs.append(run)
        return len(self.nodes) - 1

    def _tensor(self, array, kind="F32"):
        self.tensors[f"t{len(self.tensors)}"] = (np.asarray(array, np.float64), kind)
        return f"t{len(self.tensors) - 1}"

    def map(self, weight, bias=None, *, at=-1, kind="schur", side="inputs", steps=1, q=None, square=None, **conv):
        """A linear layer, or with settings a convolution; weights are integers / 64."""
        at %= len(self.nodes)
        shape, L, norm, error = self.states[at]
        weight = np.asarray(weight, np.float64)
        axes = weight.ndim - 2
        settings = {
            "stride": [1] * axes,
            "padding": [[0, 0]] * axes,
            "dilation": [1] * axes,
            "groups": 1,
            "mode": "zeros",
            "transposed": False,
            "output_padding": [0] * axes,
        } | conv
        J, out = jacobian(weight, shape, **settings)
        groups, transposed = settings["groups"], settings["transposed"]
        whole = (weight * 64).astype(np.int64)
        assert (whole / 64 == weight).all()
        wraps = [settings["mode"] == "circular" and sum(p) > 0 for p in settings["padding"]]
        stride = [
            1 if w and n % s else s for w, n, s in zip(wraps, shape[1:], settings["stride"], strict=True)
        ]  # where phases do not close
        phases = [
            min(s // math.gcd(s, d), k) for s, d, k in zip(stride, settings["dilation"], weight.shape[2:], strict=True)
        ]
        bound = {"kind": kind, "side": side, "steps": steps, "scale": []}
        if kind == "schur":
            first, second = weight.shape[0] // groups, weight.shape[1] * math.prod(phases)
            columns = second if (side == "inputs") != transposed else first
            q = q or [[3 + (5 * i + 2 * g) % 4 for i in range(columns)] for g in range(groups)]
            bound["scale"] = q
            value = schur_sum(
                whole,
                q,
                side,
                steps,
                stride=stride,
                dilation=settings["dilation"],
                groups=groups,
                transposed=transposed,
            ) / Fraction(64) ** (2**steps)
            for _ in range(steps - 1):
                value = up_root(value)
        else:
            value = Fraction(float(np.linalg.norm(J, 2)) ** 2) * (1 + Fraction(1, 2**28))
        square = value if square is None else square(value)
        bound["square"] = f"{square.numerator}/{square.denominator}"
        sigma = up_root(square)
        inner = (weight.shape[0] // groups if transposed else weight.shape[1]) * math.prod(weight.shape[2:])
        G = (inner + 2) * U / (1 - (inner + 2) * U)
        grouped = np.abs(weight).reshape(groups, -1, *weight.shape[1:])
        rows = max(exact_sum(grouped[g, i]) for g in range(groups) for i in range(grouped.shape[1]))
        columns = max(exact_sum(grouped[g, :, i]) for g in range(groups) for i in range(grouped.shape[2]))
        A = up_root(rows * columns)
        bias = None if bias is None else np.asarray(bias, np.float64)
        positions = 1 if self.without("bias positions") else math.prod(out[1:])
        B = Fraction(0) if bias is None else up_root(exact_sum(bias, 2) * positions)
        off = (
            self.term("error carried", sigma * error)
            + self.term("product rounding", G * A * (norm + self.term("error in rounding", error)))
            + self.term("bias rounding", G * B)
            + self.term("underflow", (inner + 2) * ETA * math.prod(out))
        )
        numbers = up(sigma * L), up(sigma * norm + self.term("bias in norm", B)), up(off)
        names = {"weight": self._tensor(weight), "bias": None if bias is None else self._tensor(bias)}
        padding, around = settings["padding"], settings["mode"] == "circular"
        extra = {key: settings[key] for key in ("stride", "dilation", "groups", "transposed")}
        extra |= {"offset": [p[0] for p in padding], "circular": [around and sum(p) > 0 for p in padding]}
        spread = 0.0 if bias is None else np.repeat(bias, math.prod(out[1:]))
        self.head = {
            "P": at,
            "rows": weight.swapaxes(0, 1) if transposed else weight,
            "bias": bias,
            "inner": inner,
            "G": G,
        }
        known = {"sigma": text(sigma), "absolute": text(A), "bias_norm": text(B), "bound": bound}
        self.true_norm = float(np.linalg.norm(J, 2)), float(sigma)
        where = self._add(
            "affine", [at], out, numbers, lambda x: (J @ x.ravel() + spread).reshape(out), **names, **extra, **known
        )
        self.head["node"] = where
        return where

    def exact(self, op, shape, run, *, at=-1, **settings):
        at %= len(self.nodes)
        return self._add(op, [at], shape, self.states[at][1:], run, **settings)

    def scaled(self, op, shape, run, by, /, *, rounding=0, underflow=0, at=-1, **settings):
        """Nodes with a factor on all three numbers, and a relative and an absolute rounding on the last."""
        at %= len(self.nodes)
        _, L, norm, error = self.states[at]
        factor = Fraction(1) if self.without(f"{op} factor") else by
        off = self.term(f"{op} rounding", rounding * factor * (norm + error))
        off += self.term(f"{op} underflow", underflow * ETA * math.prod(shape))
        numbers = up(factor * L), up(factor * norm), up(factor * error + off)
        return self._add(op, [at], shape, numbers, run, **settings)

    def add(self, i, j):
        (shape, *one), (_, *two) = self.states[i], self.states[j]
        L, n, e = (a + b for a, b in zip(one, two, strict=True))
        off = e + self.term("add rounding", U * (n + e)) + self.term("add underflow", ETA * math.prod(shape))
        return self._add("add", [i, j], shape, (up(L), up(n), up(off)), lambda x, y: x + y)

    def concat(self, *nodes):
        shapes = [self.states[i][0] for i in nodes]
        numbers = [up_root(sum(self.states[i][k] ** 2 for i in nodes)) for k in (1, 2, 3)]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        return self._add("join", nodes, shape, numbers, lambda *xs: np.concatenate(xs))

    def normalize(self, mean, std):
        shape, L, norm, error = self.states[-1]
        M = self.term("mean in norm", up_root(exact_sum(mean, 2) * math.prod(shape[1:])))
        s, G = Fraction(float(min(std))), 4 * U / (1 - 4 * U)
        off = (error + self.term("normalize rounding", G * (norm + error + M))) / s
        off += self.term("normalize underflow", 4 * ETA * math.prod(shape))
        names = {"mean": self._tensor(mean, "F64"), "std": self._tensor(std, "F64")}
        wide = (-1, *(1,) * (len(shape) - 1))
        m, d = np.reshape(mean, wide), np.reshape(std, wide)
        numbers = up(L / s), up((norm + M) / s), up(off)
        return self._add("normalize", [len(self.nodes) - 1], shape, numbers, lambda x: (x - m) / d, **names)

    def logits(self, x):
        values = [x]
        for node, run in zip(self.nodes[1:], self.runs[1:], strict=True):
            values.append(run(*(values[i] for i in node["inputs"])))
        return values[-1]

    def _head(self, pairs):
        K = self.states[-1][0][0]
        if not pairs:
            root = up_root(Fraction(2))
            slope = up(root * self.states[-1][1])
            loss = up(self.term("output error", 4 * root * self.states[-1][3]))
            apart = [[text(0 if y == j else root) for j in range(K)] for y in range(K)]
            tables = {"distance": apart, "rounding": [text(0)] * K}
            return {"node": None, **tables}, [[slope] * K] * K, [[loss] * K] * K
        h = self.head
        _, L, norm, error = self.states[h["P"]]
        rows = [[Fraction(float(v)) for v in h["rows"][k].ravel()] for k in range(K)]
        length = [up_root(sum(v * v for v in row)) for row in rows]
        bias = [Fraction(0) if h["bias"] is None else abs(Fraction(float(h["bias"][k]))) for k in range(K)]
        rounding = [
            up(
                self.term("head product", h["G"] * length[k] * (norm + error))
                + self.term("head bias", h["G"] * bias[k])
                + self.term("head underflow", (h["inner"] + 2) * ETA)
            )
            for k in range(K)
        ]
        distance = [[up_root(sum((a - b) ** 2 for a, b in zip(r, s, strict=True))) for s in rows] for r in rows]
        slope = [[up(d * L) for d in row] for row in distance]
        both = [[self.term("head rounding", 4 * (a + b)) for a in rounding] for b in rounding]
        loss = [
            [up(self.term("head error", 4 * distance[y][j] * error) + both[y][j]) for j in range(K)] for y in range(K)
        ]
        tables = {"distance": [list(map(text, row)) for row in distance], "rounding": list(map(text, rounding))}
        return {"node": h["node"], **tables}, slope, loss

    def build(self, images, labels=None, *, pairs=True):
        """The certificate without file hashes, and the numbers of the images."""
        head, slope, loss = self._head(pairs)
        K = len(slope)
        zeroed = [[[t[y][j] if y != j else Fraction(0) for j in range(K)] for y in range(K)] for t in (slope, loss)]
        head |= {n: [list(map(text, r)) for r in t] for n, t in zip(("slope", "loss"), zeroed, strict=True)}
        cap = below(up_root(Fraction(self.entries)))
        divisor = 255 if images.dtype == np.uint8 else 1
        results = []
        for i, image in enumerate(images):
            logits = self.logits(image.astype(np.float64) / divisor)
            f = [Fraction(float(v)) for v in logits]
            y = int(np.argmax(logits))
            gains = [(f[y] - f[j] - loss[y][j], slope[y][j]) for j in range(K) if j != y]
            radius = Fraction(0)
            if all(g > 0 for g, _ in gains):
                least = min((g / s for g, s in gains if s), default=Fraction(50))
                least = up(least) if self.without("strictly below") else below(least)
                radius = max(Fraction(0), least if self.without("cap") else min(least, cap))
            pixels = int((255 * radius) ** 2) if images.dtype == np.uint8 and radius else None
            results.append(
                {"index": i, "label": None if labels is None else int(labels[i]), "class": y}
                | {"logits": list(map(text, logits)), "radius": text(radius), "pixels": pixels}
            )
        digest = hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()
        return {
            "format": "onelip certificate",
            "version": 2,
            "onelip": "0",
            "created": "2026-01-01T00:00:00Z",
            "statement": STATEMENT,
            "arithmetic": ARITHMETIC,
            "weights": {"file": "plain.safetensors", "sha256": ""},
            "config": {"file": "config.json", "sha256": ""},
            "images": {"source": "made", "file": "", "sha256": digest, "dtype": str(images.dtype)}
            | {"count": len(images), "shape": list(images.shape[1:])},
            "preprocessing": {"divide_by": divisor},
            "nodes": self.nodes,
            "head": head,
            "results": results,
            "summary": summary_of(results),
        }


def summary_of(results):
    radii = [Fraction(float.fromhex(r["radius"])) for r in results]
    summary = {"count": len(results), "certified": sum(r > 0 for r in radii)}
    if results and results[0]["label"] is not None:
        right = [r["class"] == r["label"] for r in results]
        share = {t: sum(a and r >= Fraction(t) for a, r in zip(right, radii, strict=True)) for t in SUMMARY_RADII}
        summary["accuracy"] = sum(right) / len(results)
        summary["cra"] = {t: n / len(results) for t, n in share.items()}
    return summary


def safetensors(tensors):
    header, body = {"__metadata__": {"format": "test"}}, b""
    for name, (array, kind) in tensors.items():
        data = array.astype("<f4" if kind == "F32" else "<f8").tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    top = json.dumps(header).encode()
    return len(top).to_bytes(8, "little") + top + body


def sealed(certificate):
    """With the digest of what it says now."""
    body = {key: value for key, value in certificate.items() if key != "digest"}
    data = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return {**body, "digest": hashlib.sha256(data).hexdigest()}


def write(directory: Path, certificate, weights: bytes, config: bytes = b"{}", images=None):
    """All files of a certificate, hashes and digest made to fit; the path of the certificate."""
    directory.mkdir(exist_ok=True)
    (directory / "plain.safetensors").write_bytes(weights)
    (directory / "config.json").write_bytes(config)
    if images is not None:
        np.save(directory / "images.npy", images)
    certificate["weights"]["sha256"] = hashlib.sha256(weights).hexdigest()
    if certificate["config"]:
        certificate["config"]["sha256"] = hashlib.sha256(config).hexdigest()
    path = directory / "cert.json"
    path.write_text(json.dumps(sealed(certificate), indent=1))
    return path
