"""Work and memory of a certificate, estimated from shapes and bit lengths before anything is computed.

Work is counted in seconds of one core. docs/certificates.md compares the estimates with measurements.
"""

import math
from typing import Any

import numpy as np

from .norms import odd_parts, witness
from .program import Layer, terms_of
from .reading import TrackedDict, context, title


def product(rows: int, inner: int, columns: int, bits: float) -> float:
    """Seconds of a product of integer matrices: directly, or modulo primes of 59 bits, as FLINT does."""
    primes, n = 2 + 2 * bits / 59, rows * inner * columns
    modular = n * primes * 4e-10 + (rows * inner + inner * columns + rows * columns) * primes * (6e-8 + 2e-9 * primes)
    return 2e-7 + min(n * (1 + bits / 64) ** 1.3 * 5e-9, modular)


def matrices(entries: float, bits: float) -> float:
    """Bytes of FLINT matrices."""
    return entries * (8 if bits < 62 else 48 + bits / 8)


def bit_length(array: np.ndarray) -> float:
    """Bit length of the largest entry, with all entries as integer multiples of one power of two."""
    top, low, flat = -math.inf, math.inf, array.reshape(-1)
    for first in range(0, len(flat), 2**20):  # in little memory: the limit is not checked yet
        part = flat[first : first + 2**20]
        m, t = odd_parts(part[part != 0])
        if m.size:
            top, low = max(top, float((np.frexp(m.astype(float))[1] + t).max())), min(low, float(t.min()))
    return top - low if low < math.inf else 1.0


def cost_of_sigma(node: TrackedDict, layer: Layer, bits: float) -> tuple[float, float]:
    """Seconds and bytes of `norms.prove_sigma` for weights with this number of bits."""
    (kind, side, steps), (groups, first, second, *kernel) = witness(node), layer.weight.shape
    size = layer.weight.size
    far, lengths = second * math.prod(layer.phases), [-(-k // p) for k, p in zip(kernel, layer.phases, strict=True)]
    n, inner = (far, first) if (side == "inputs") != layer.transposed else (first, far)
    taps, work, held = math.prod(lengths), 0.0, 0.0
    if kind == "frequencies":  # complex matrices in float64: two products and a Cholesky factor at each point
        each = (
            3e-4
            + 4e-8 * sum(length**2 for length in lengths)
            + groups * (5e-6 + n**2 * (inner + 1.4 * n) * 4e-10 + taps * n * inner * 4e-9)
        )
        return steps * each + size * 1e-6, 16 * groups * (2 * taps * n * inner + 8 * n**2) + size * 200
    if kind == "cholesky":
        work = product(n, inner, n, bits) + product(n, n, n, 53) + n**3 * 2e-10 + n**2 * 1e-6
        held = matrices(3 * n**2, 2 * bits + 64)
    for _ in range(steps):  # products of all pairs of taps, half of which are computed
        held = matrices(2 * taps * n * inner, bits)
        work += taps**2 * (2e-6 + (product(n, inner, n, bits) + n**2 * (5e-8 + bits * 2e-10)) / 2)
        bits, lengths = 2 * bits + math.log2(inner * taps), [2 * length - 1 for length in lengths]
        taps, inner = math.prod(lengths), n
    held += matrices(taps * n**2, bits) if kind == "schur" else 0
    work += taps * n**2 * (1.3e-6 + bits * 3e-10)  # absolute row sums
    return groups * work + size * 1e-6, held + size * (200 + bits / 4) + n**2 * 200


def cost_of(node: TrackedDict, shapes: list[list[int]], tensors: TrackedDict, bits: dict[str, float]) -> list[float]:
    """Seconds and bytes of the proof of a node, seconds for each batch and for each image, bytes for each image."""
    op, held = node["op"], math.prod(node["shape"]) + sum(map(math.prod, shapes))
    if op in ("affine", "potential", "exponential"):
        layer, times = Layer(node, shapes[0], tensors), {"affine": 1, "potential": 2}.get(op) or terms_of(node)
        (groups, first, second, *kernel), near, far = layer.weight.shape, math.prod(layer.near), math.prod(layer.far)
        taps, channels, size = math.prod(kernel), groups * (first + second), layer.weight.size
        proof, memory = cost_of_sigma(node, layer, bits[node["weight"]])
        batch = times * taps * (3e-5 + 3e-9 * (far + 3 * near))
        image = times * near * (size * 1e-10 + taps * channels * 5e-9)
        copies = min(2 * times - 1, 5)
        proof += 0.005 * times if op == "exponential" else 0
        return [1e-3 + proof, memory, batch, image, 8 * (2 * held + copies * (channels + 4) * near + far)]
    listed = sum(map(len, node["take"])) if op in ("max", "sum") else 0
    held += 3 * shapes[0][0] * listed if listed else 0
    proof = 1e-3 + 5e-5 * len(shapes) + 5e-7 * (listed + (shapes[0][0] if op == "normalize" else 0))
    return [proof, listed * 100, 2e-5 + 1e-6 * len(shapes), held * (2e-8 if op == "sort" else 5e-9), 8 * held]


def estimate(nodes: list[TrackedDict], tensors: TrackedDict, results: int, images: int) -> tuple[Any, ...]:
    """Seconds of one core, bytes, number of images to run together, and the nodes with the most work and memory."""
    shapes, costs, live, peak = [node["shape"] for node in nodes], [], 0, []
    bits = {name: bit_length(tensor) for name, tensor in tensors.items()}  # once: nodes may share tensors
    last = {j: i for i, node in enumerate(nodes) for j in node["inputs"]}  # where each value is used last
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            costs.append(cost_of(node, [shapes[j] for j in node["inputs"]], tensors, bits))
        live += 8 * math.prod(shapes[i])
        peak.append(live + costs[i][-1])
        live -= sum(8 * math.prod(shapes[j]) for j in {*node["inputs"]} if last[j] == i)
    size = int(min(100, max(1, 2**28 // max(peak))))
    work = [proof + (2 + images // size) * batch + (1 + images) * image for proof, _, batch, image, _ in costs]
    memory = [max(cost[1] + cost[-1], size * run) for cost, run in zip(costs, peak, strict=True)]
    slowest, largest = (title(i := each.index(max(each)), nodes[i]) for each in (work, memory))
    logits, rows = math.prod(shapes[-1]), max((tensor.size for tensor in tensors.values()), default=0)
    return sum(work) + logits * (results * 6e-5 + rows * 2e-8), 5e7 + max(memory), size, slowest, largest
