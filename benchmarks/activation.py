"""MaxMin, forward and backward, relative to torch.maximum and torch.minimum of halves."""

import argparse

import torch
from _harness import interleaved, publish
from torch import Tensor

from onelip.nn.activations import maxmin


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    rows = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(250, 192, 8, 8).contiguous(memory_format=layout).requires_grad_()
        g = torch.randn(250, 192, 8, 8).contiguous(memory_format=layout)
        ways = {"onelip": maxmin, "maximum and minimum": halves}
        times = interleaved({n: lambda f=f, x=x, g=g: torch.autograd.grad(f(x), x, g) for n, f in ways.items()}, rounds)
        rows += [
            {
                "layout": str(layout).removeprefix("torch."),
                "way": way,
                "ratio to onelip": timing.ratio_to(times["onelip"]),
                "milliseconds": 1e3 * timing.median,
            }
            for way, timing in times.items()
        ]
    publish("activation", rows, what="forward + backward of MaxMin on 250x192x8x8, medians of interleaved runs")


if __name__ == "__main__":
    main()
