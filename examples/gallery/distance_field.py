"""Signed distance field of a polygon, and sphere tracing that cannot step through the surface.

    python examples/gallery/distance_field.py --out distance_field.png --onnx distance_field.onnx

A ray that is at distance d of the surface may step by d. A network f with f = 0 on its surface and a proved constant L
satisfies |f(x)| / L <= distance of x to that surface, so a step of |f(x)| / L never crosses it, however f was trained.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip

STAR = torch.tensor(
    [[r * math.cos(k * math.pi / 5), r * math.sin(k * math.pi / 5)] for k, r in enumerate([0.8, 0.4] * 5)]
)


def signed_distance(x: Tensor, corners: Tensor = STAR) -> Tensor:
    """The exact distance of points (n, 2) to a polygon; negative inside."""
    a, b = corners, corners.roll(-1, 0)
    edge, away = b - a, x[:, None] - a  # (k, 2), (n, k, 2)
    along = ((away * edge).sum(2) / edge.square().sum(1)).clamp(0, 1)
    distance = (away - along[..., None] * edge).norm(dim=2).amin(1)
    # A ray to the right crosses the boundary an odd number of times from inside.
    above = (a[:, 1] > x[:, 1:]) != (b[:, 1] > x[:, 1:])
    crossing = a[:, 0] + (x[:, 1:] - a[:, 1]) * edge[:, 0] / edge[:, 1]
    inside = (above & (x[:, :1] < crossing)).sum(1) % 2 == 1
    return torch.where(inside, -distance, distance)


def make_field(width: int = 64, depth: int = 5) -> nn.Module:
    sizes = [2] + [width] * depth
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), onelip.nn.MaxMin())]
    return onelip.constrain(nn.Sequential(*layers, nn.Linear(width, 1)), "cayley")


def sample(n: int) -> Tensor:
    """Points of the square, half of them near the surface."""
    side, t = torch.randint(len(STAR), (n // 2,)), torch.rand(n // 2, 1)
    near = STAR[side] * (1 - t) + STAR.roll(-1, 0)[side] * t + 0.05 * torch.randn(n // 2, 2)
    return torch.cat([near, torch.rand(n - n // 2, 2) * 2.4 - 1.2])


def train(steps: int, batch: int = 512) -> nn.Module:
    """Regression on exact distances. Where only inside and outside are known, `onelip.losses.HKRLoss` does instead."""
    field = make_field()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        x = sample(batch)
        optimizer.zero_grad()
        nn.functional.l1_loss(field(x).squeeze(1), signed_distance(x)).backward()
        optimizer.step()
        schedule.step()
    return onelip.bake(field).eval()


@torch.no_grad()
def trace_rays(field: nn.Module, constant: float, starts: Tensor, directions: Tensor, steps: int = 200) -> Tensor:
    """Points where rays meet the surface of the field, from outside; steps are |f| / L, rounded down a little."""
    x = starts.clone()
    for _ in range(steps):
        x = x + (field(x).clamp(min=0) / constant * (1 - 1e-5)) * directions
    return x


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, prove, trace, measure; draw and export if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of the field and the rays")
    parser.add_argument("--onnx", type=Path, default=None, help="export the field")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    field = train(options.steps)
    constant = onelip.audit(field, torch.zeros(1, 2)).upper
    assert constant is not None
    angle = torch.linspace(0, 2 * math.pi, 181)[:-1]
    starts = 1.2 * torch.stack([angle.cos(), angle.sin()], 1)
    ends = trace_rays(field, constant, starts, -starts / starts.norm(dim=1, keepdim=True))
    grid = torch.cartesian_prod(torch.linspace(-1.2, 1.2, 121), torch.linspace(-1.2, 1.2, 121))
    with torch.no_grad():
        values = field(grid).squeeze(1)
        overshoot = float((-field(ends)).clamp(min=0).max())
        started = time.perf_counter()
        for _ in range(20):
            field(grid)
        query = (time.perf_counter() - started) / 20
    true = signed_distance(grid)
    found = {
        "constant": constant,
        "overshoot": overshoot,
        "mean_error": float((values - true).abs().mean()),
        "wrong_side": float(((values > 0) != (true > 0)).float().mean()),
    }
    print(f"proved constant {constant:.7f}; 180 rays, deepest point inside the surface {overshoot:.1e}")
    print(f"against the exact distance: mean error {found['mean_error']:.4f}, wrong side {found['wrong_side']:.2%}")
    print(f"a query of {len(grid)} points takes {1000 * query:.2f} ms (baked, this machine)")
    if options.onnx is not None:
        onelip.export_onnx(field, options.onnx, (2,))
        print(f"exported: {options.onnx}")
    if options.out is not None:
        _draw(grid, values, ends, options.out)
    return found


def _draw(grid: Tensor, values: Tensor, ends: Tensor, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    side = math.isqrt(len(grid))
    x, y, z = (part.reshape(side, side).numpy() for part in (grid[:, 0], grid[:, 1], values))
    drawn = axes.contourf(x, y, z, levels=20, cmap="RdBu")
    axes.contour(x, y, z, levels=[0.0], colors="black")
    axes.plot(*torch.cat([STAR, STAR[:1]]).T.numpy(), color="black", linestyle=":", linewidth=1)
    axes.scatter(*ends.T.numpy(), s=4, color="tab:orange", zorder=3)
    axes.set_aspect("equal")
    figure.colorbar(drawn, label="signed distance")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
