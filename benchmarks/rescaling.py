"""The rescaling of AOL, forward and backward, relative to other computations with automatic differentiation."""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _harness import interleaved, publish
from torch import Tensor

from onelip.gram.rescale import rescaled

SHAPES = {
    "dense 1024 -> 1024": (1024, 1024),
    "1x1, 192 -> 192": (192, 192, 1, 1),
    "3x3, 192 -> 192": (192, 192, 3, 3),
    "5x5, 64 -> 64": (64, 64, 5, 5),
    "3x3, 512 -> 512": (512, 512, 3, 3),
}


def self_convolution(P: Tensor) -> Tensor:
    """AOL as other libraries write it: the kernel convolved with itself, input channels as batch."""
    kernel = (P if P.dim() == 4 else P[:, :, None, None]).transpose(0, 1)
    sums = F.conv2d(kernel, kernel, padding=kernel.shape[-1] - 1).abs().sum((1, 2, 3))
    return P * sums.rsqrt().reshape(1, -1, *(1 for _ in P.shape[2:]))


def matrix_product(P: Tensor) -> Tensor:
    """Theorem 1 with torch's own derivative."""
    return P * (P.T @ P).abs().sum(1).rsqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rows = []
    for name, shape in SHAPES.items():
        P = torch.randn(shape).requires_grad_()
        g = torch.randn(shape)

        def both(function, P=P, g=g):
            return lambda: torch.autograd.grad(function(P), P, g)

        ways: dict[str, Callable[[], object]] = {
            "onelip": both(lambda P: rescaled(P[None])[0]),
            "self-convolution": both(self_convolution),
        }
        if len(shape) == 2:
            ways["matrix product"] = both(matrix_product)
        times = interleaved(ways, rounds if P.numel() < 2e6 else max(3, rounds // 4))
        rows += [
            {
                "layer": name,
                "way": way,
                "ratio to onelip": timing.ratio_to(times["onelip"]),
                "milliseconds": 1e3 * timing.median,
            }
            for way, timing in times.items()
        ]
    publish("rescaling", rows, what="forward + backward of W = AOL(P), medians of interleaved runs")


if __name__ == "__main__":
    main()
