"""Plug-and-play deblurring with a denoiser that is firmly nonexpansive by proof, so the iteration converges.

    python examples/gallery/plug_and_play.py --out plug_and_play.png

The denoiser is D = (I + N) / 2 with N of constant at most 1. Such an operator is firmly nonexpansive, so the iteration
x <- D(x - t A^T (A x - y)) with t < 2 / |A|^2 converges to a fixed point if there is one, and successive steps never
grow. Without a bound of N neither holds, however well the network denoises.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelip
from onelip.data import load_data, to_float


class Denoiser(nn.Module):
    """(I + N) / 2. Any image size: AOL bounds convolutions of all sizes at once."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        sizes = [1] + [width] * depth
        layers = [
            part for a, b in itertools.pairwise(sizes) for part in (nn.Conv2d(a, b, 3, padding=1), onelip.nn.MaxMin())
        ]
        self.n = onelip.constrain(nn.Sequential(*layers, nn.Conv2d(width, 1, 3, padding=1)), "aol")

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.n(x)) / 2


def train(images: Tensor, steps: int, noise: float = 0.15, batch: int = 64) -> nn.Module:
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        clean = images[torch.randint(len(images), (batch,))]
        optimizer.zero_grad()
        F.mse_loss(model(clean + noise * torch.randn_like(clean)), clean).backward()
        optimizer.step()
        schedule.step()
    return onelip.bake(model).double().eval()  # in float32 the last steps would be rounding errors


BLUR = torch.tensor([0.25, 0.5, 0.25])
KERNEL = (BLUR[:, None] * BLUR).view(1, 1, 3, 3)  # nonnegative with sum 1 and zero padding: norm at most 1, symmetric


def blur(x: Tensor) -> Tensor:
    return F.conv2d(x, KERNEL.to(x), padding=1)


@torch.no_grad()
def restore(model: nn.Module, y: Tensor, iterations: int, step: float = 1.0) -> tuple[Tensor, list[float]]:
    """The restored images, and the length of each iteration's step."""
    x, lengths = y, []
    for _ in range(iterations):
        after = model(x - step * blur(blur(x) - y))
        lengths.append(float((after - x).norm()))
        x = after
    return x, lengths


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train a denoiser on digits, prove its constants, deblur new digits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of images and of the length of steps")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = load_data("digits")
    model = train(to_float(data.train_images), options.steps)
    assert isinstance(model, Denoiser)
    proved = onelip.audit(model.n, torch.zeros(1, 1, 8, 8, dtype=torch.float64)).upper
    assert proved is not None
    clean = to_float(data.test_images[:64]).double()
    blurred = blur(clean) + 0.02 * torch.randn_like(clean)
    restored, lengths = restore(model, blurred, options.iterations)
    found = {
        "constant": proved,
        "error_before": float(F.mse_loss(blurred, clean)),
        "error_after": float(F.mse_loss(restored, clean)),
        "last_over_first": lengths[-1] / lengths[0],
        "largest_growth": max(b / a for a, b in itertools.pairwise(lengths)),
    }
    print(f"proved constant of N {proved:.6f}, so (I + N) / 2 is firmly nonexpansive up to {max(proved - 1, 0):.0e}")
    print(f"mean squared error {found['error_before']:.4f} blurred, {found['error_after']:.4f} restored")
    print(f"length of the last step over the first {found['last_over_first']:.1e}; ", end="")
    print(f"largest ratio of a step to the one before {found['largest_growth']:.4f}")
    if options.out is not None:
        _draw([clean[:8], blurred[:8], restored[:8]], lengths, options.out)
    return found


def _draw(rows: list[Tensor], lengths: list[float], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.imshow(torch.cat([torch.cat(list(row[:, 0]), 1) for row in rows]).clamp(0, 1).numpy(), cmap="gray")
    left.set_yticks([4, 12, 20], ["clean", "blurred", "restored"])
    left.set_xticks([])
    right.semilogy(lengths, color="tab:orange")
    right.set(xlabel="iteration", ylabel="length of the step")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
