"""A dose-response curve that increases with the dose for every patient, from few noisy samples.

    python examples/gallery/monotone.py --out monotone.png

No partial derivative of a network with sum-normalised layers is above L in absolute value, so f(dose, age) + L * dose
never decreases with the dose: by construction, at every point, also where there are no samples.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip
from onelip.methods import sum_norm


def response(x: Tensor) -> Tensor:
    """The true response to a dose x[:, 0] at age x[:, 1]: a threshold that depends on the age."""
    return torch.sigmoid(8 * (x[:, 0] - 0.3 - 0.4 * torch.sin(3 * x[:, 1]).square()))


def make(width: int, constant: float | None) -> nn.Module:
    kind = nn.ReLU if constant is None else onelip.nn.MaxMin
    network = nn.Sequential(nn.Linear(2, width), kind(), nn.Linear(width, width), kind(), nn.Linear(width, 1))
    if constant is None:
        return network
    for i in (0, 2, 4):
        sum_norm(network[i], norm="inf" if i else "1-inf", lipschitz=constant ** (1 / 3))
    return onelip.nn.Monotone(network, constant, signs=(1, 0))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    return onelip.bake(model).eval()


@torch.no_grad()
def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train with and without the constraint; count where the response falls with the dose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of both curves")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    x = torch.rand(60, 2)
    y = response(x) + 0.15 * torch.randn(60)
    doses = torch.linspace(0, 1, 101)
    points = torch.cartesian_prod(torch.linspace(0, 1, 21), doses).flip(1)  # (dose, age), sorted by age, then dose
    found, curves = {}, {}
    for name, constant in (("plain", None), ("monotone", 2.0)):
        with torch.enable_grad():
            model = train(make(64, constant), x, y, options.steps)
        predicted = model.double()(points.double()).reshape(21, 101)
        falls = (predicted.diff(dim=1) < -1e-9).double().mean()
        error = (predicted.flatten() - response(points)).square().mean().sqrt()
        found[name], curves[name] = {"error": float(error), "falls": float(falls)}, predicted[10]
        print(f"{name}: error {error:.3f}; the response falls with the dose at {100 * falls:.1f} % of the points")
    if options.out is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(doses.numpy(), curve.numpy(), label=name)
        axes.plot(doses.numpy(), response(points).reshape(21, 101)[10].numpy(), "k--", label="true")
        axes.set(xlabel="dose", ylabel="response at age 0.5")
        axes.legend()
        figure.savefig(options.out, dpi=120)
    return found


if __name__ == "__main__":
    main()
