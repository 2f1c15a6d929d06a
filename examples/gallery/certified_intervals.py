"""Forecasts of a time series with intervals that hold for every disturbed input, from a proved constant.

    python examples/gallery/certified_intervals.py --out intervals.png

The network sees 64 samples of a signal and forecasts the next one. With the proved constant L, a disturbance of the
window by at most eps (L2: a sensor that drifts, a few wrong samples) moves the forecast by at most L eps.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip

WINDOW = 64


def signals(n: int) -> Tensor:
    """Sums of two sines with random phases and a little noise (n, 1, WINDOW + 1)."""
    t = torch.arange(WINDOW + 1) / 8
    phase = torch.rand(n, 2, 1) * 2 * math.pi
    wave = (t + phase[:, 0]).sin() + 0.5 * (2.3 * t + phase[:, 1]).sin()
    return (wave + 0.05 * torch.randn(n, WINDOW + 1)).unsqueeze(1)


def make_forecaster(width: int = 32) -> nn.Module:
    """Strided convolutions along time; each has constant 1."""
    sizes = [1, width, width, width]
    layers = [
        part
        for a, b in itertools.pairwise(sizes)
        for part in (onelip.nn.AOLConv1d(a, b, 4, stride=4, side="auto"), onelip.nn.MaxMin())
    ]
    return nn.Sequential(*layers, nn.Flatten(), onelip.nn.AOLLinear(width, 1, side="auto"))


def train(steps: int, constant: float, batch: int = 256) -> nn.Module:
    """The factor behind the network is the constant that the forecast may have."""
    model = nn.Sequential(make_forecaster(), Gain(constant))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        x = signals(batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[..., :WINDOW]), x[..., -1]).backward()
        optimizer.step()
        schedule.step()
    return onelip.bake(model).eval()


class Gain(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def disturb(model: nn.Module, x: Tensor, eps: float, sign: float, steps: int = 30) -> Tensor:
    """Windows within eps of x that push the forecast up or down as far as gradients find."""
    moved = x.clone()
    for _ in range(steps):
        moved.requires_grad_()
        (gradient,) = torch.autograd.grad(sign * model(moved).sum(), moved)
        offset = moved.detach() + gradient / gradient.norm(dim=2, keepdim=True).clamp(min=1e-12) * eps / 4 - x
        moved = x + offset * (eps / offset.norm(dim=2, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
    return moved.detach()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, prove, and compare the intervals with the worst disturbance that was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--constant", type=float, default=1.0, help="that the forecast may have: small is robust")
    parser.add_argument("--eps", type=float, default=0.2, help="size of the disturbance of a window (L2)")
    parser.add_argument("--out", type=Path, default=None, help="a PNG of forecasts and intervals")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = train(options.steps, options.constant)
    proved = onelip.audit(model, torch.zeros(1, 1, WINDOW)).upper
    assert proved is not None
    x = signals(200)
    window, true = x[..., :WINDOW], x[:, 0, -1]
    with torch.no_grad():
        forecast = model(window).squeeze(1)
    ends = [model(disturb(model, window, options.eps, sign)).detach().squeeze(1) for sign in (-1.0, 1.0)]
    half = proved * options.eps
    found = {
        "constant": proved,
        "error": float((forecast - true).square().mean().sqrt()),
        "half": half,
        "worst": float(torch.stack([forecast - ends[0], ends[1] - forecast]).max()),
    }
    print(f"proved constant {proved:.6f}; root mean squared error of forecasts {found['error']:.3f}")
    print(f"a disturbance of {options.eps:g} moves a forecast by at most {half:.4f} (proved), ", end="")
    print(f"and by {found['worst']:.4f} in the worst case that was found")
    if options.out is not None:
        _draw(forecast[:40], true[:40], half, options.out)
    return found


def _draw(forecast: Tensor, true: Tensor, half: float, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    order = forecast.argsort()
    shown, wanted = forecast[order].numpy(), true[order].numpy()
    places = range(len(order))
    axes.errorbar(places, shown, yerr=half, fmt="none", color="tab:orange", label="certified interval")
    axes.scatter(places, wanted, s=10, color="tab:gray", label="next sample", zorder=3)
    axes.set(xlabel="series", ylabel="value")
    axes.legend()
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
