"""A second writer of certificates, for the tests of the checker: small, slow, by other ways than checker and library.

`drop` names terms to leave out, everything after them consistent: what a wrong or dishonest writer would write.
"""

import hashlib
import math
from fractions import Fraction

import numpy as np
from _exact_layers import exact_sum, jacobian, root_below, schur_sum, text, up, up_power_root, up_root

from onelip.checker.certificate import ARITHMETIC, STATEMENT

U, ETA = Fraction(1, 2**53), Fraction(1, 2**500)
SUMMARY_RADII = ("0", "36/255", "72/255", "1")


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
        names = dict(zip(("lipschitz", "norm", "error"), map(str, numbers), strict=True))
        place = {"place": "", "shape": list(shape)}
        self.nodes.append({"op": op, "inputs": list(inputs), **place, **settings, **names})
        self.states.append((tuple(shape), *numbers))
        self.runs.append(run)
        return len(self.nodes) - 1

    def _tensor(self, array, kind="F32"):
        self.tensors[f"t{len(self.tensors)}"] = (np.asarray(array, np.float64), kind)
        return f"t{len(self.tensors) - 1}"

    def map(self, weight, bias=None, *, at=-1, kind="schur", side="inputs", steps=1, q=None, claim=None, **conv):
        """A linear layer, or with settings a convolution; weights are integers / 64. `claim` changes sigma."""
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
        bound = {"kind": kind, "side": side}
        if kind == "schur":
            first, second = weight.shape[0] // groups, weight.shape[1] * math.prod(phases)
            columns = second if (side == "inputs") != transposed else first
            q = q or [[3 + (5 * i + 2 * g) % 4 for i in range(columns)] for g in range(groups)]
            bound |= {"steps": steps, "scale": [" ".join(map(str, group)) for group in q]}
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
            sigma = up_power_root(value, 2**steps)
        else:
            sigma = up(Fraction(float(np.linalg.norm(J, 2))) * (1 + Fraction(1, 2**29)))
        sigma = sigma if claim is None else claim(sigma)
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
        self.head = {"P": at, "rows": weight.swapaxes(0, 1) if transposed else weight}
        known = {"sigma": str(sigma), "absolute": str(A), "bias_norm": str(B), "bound": bound}
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
        constant = {} if op == "scale" else {"constant": str(factor)}
        return self._add(op, [at], shape, numbers, run, **constant, **settings)

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
        names = {"mean": self._tensor(mean, "F64"), "std": self._tensor(std, "F64"), "mean_norm": str(M)}
        wide = (-1, *(1,) * (len(shape) - 1))
        m, d = np.reshape(mean, wide), np.reshape(std, wide)
        numbers = up(L / s), up((norm + M) / s), up(off)
        return self._add("normalize", [len(self.nodes) - 1], shape, numbers, lambda x: (x - m) / d, **names)

    def logits(self, x):
        values = [x]
        for node, run in zip(self.nodes[1:], self.runs[1:], strict=True):
            values.append(run(*(values[i] for i in node["inputs"])))
        return values[-1]

    def _slopes(self, pairs):
        """Squares."""
        K = self.states[-1][0][0]
        if not pairs:
            return [[2 * self.states[-1][1] ** 2] * K] * K
        rows = [[Fraction(float(v)) for v in self.head["rows"][k].ravel()] for k in range(K)]
        L = self.states[self.head["P"]][1]
        return [[L**2 * sum((a - b) ** 2 for a, b in zip(r, s, strict=True)) for s in rows] for r in rows]

    def build(self, images, labels=None, *, pairs=True):
        """The certificate without file hashes, and the numbers of the images."""
        squares = self._slopes(pairs)
        K, loss = len(squares), self.term("output error", 8 * self.states[-1][3])
        loss = loss / 2 if self.without("logits of the file") else loss
        cap = root_below(Fraction(self.entries))
        divisor = 255 if images.dtype == np.uint8 else 1
        results = []
        for i, image in enumerate(images):
            logits = self.logits(image.astype(np.float64) / divisor)
            f = [Fraction(float(v)) for v in logits]
            y = int(np.argmax(logits))
            gains = [(f[y] - f[j] - loss, squares[y][j]) for j in range(K) if j != y]
            radius = Fraction(0)
            if all(g > 0 for g, _ in gains):
                least = min((g * g / s for g, s in gains if s), default=Fraction(2500))
                least = up_root(least) if self.without("strictly below") else root_below(least)
                radius = least if self.without("cap") else min(least, cap)
            pixels = int((255 * radius) ** 2) if images.dtype == np.uint8 and radius else None
            results.append(
                {"index": i, "label": None if labels is None else int(labels[i]), "class": y}
                | {"logits": list(map(text, logits)), "radius": text(radius), "pixels": pixels}
            )
        digest = hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()
        return {
            "format": "onelip certificate",
            "version": 3,
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
            "pairs": pairs,
            "results": results,
            "summary": summary_of(results),
        }


def summary_of(results):
    radii = [Fraction(float.fromhex(r["radius"])) for r in results]
    right = [r["class"] == r["label"] for r in results]
    share = {t: sum(a and r >= Fraction(t) for a, r in zip(right, radii, strict=True)) for t in SUMMARY_RADII}
    labelled = results and results[0]["label"] is not None
    return {"count": len(results), "certified": sum(r > 0 for r in radii), "cra": share if labelled else {}}
