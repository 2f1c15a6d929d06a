"""An invertible residual block with a proved contraction: density of two moons by change of variables.

    python examples/gallery/invertible_block.py --out flow.png

x + g(x) has an inverse if g has a constant below 1. The inverse is the limit of x <- y - g(x), and after k steps the
error is at most c^k / (1 - c) times the first step, with the proved c. In two dimensions the log-determinant is exact.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import onelip

CONTRACTION = 0.9


def moons(n: int) -> Tensor:
    angle = torch.rand(n) * math.pi
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.08 * torch.randn(n, 2)


class Block(nn.Module):
    """x + g(x), where g has a constant of at most `CONTRACTION`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        g = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.g = onelip.constrain(g, "cayley")

    def residual(self, x: Tensor) -> Tensor:
        return CONTRACTION * self.g(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det dy/dx|, exact, sample by sample."""
        jacobian = vmap(jacrev(lambda one: self.residual(one[None])[0]))(x)
        return x + self.residual(x), torch.linalg.slogdet(torch.eye(2) + jacobian)[1]

    @torch.no_grad()
    def inverse(self, y: Tensor, constant: float, tolerance: float = 1e-6) -> Tensor:
        """Fixed-point iteration with as many steps as the proved constant asks for."""
        first = float(self.residual(y).norm(dim=1).max())
        steps = math.ceil(math.log(max(first, tolerance) / (tolerance * (1 - constant))) / -math.log(constant))
        x = y
        for _ in range(steps):
            x = y - self.residual(x)
        return x


class Flow(nn.Module):
    """Blocks in turn; `log_prob` of data under a standard normal distribution behind them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def log_prob(self, x: Tensor) -> Tensor:
        x, total = x * self.scale.exp(), self.scale.sum()
        for block in self.blocks:
            x, log_det = block(x)
            total = total + log_det
        return total - x.square().sum(1) / 2 - math.log(2 * math.pi)

    def sample(self, n: int, constants: list[float]) -> Tensor:
        y = torch.randn(n, 2)
        for block, constant in zip(reversed(self.blocks), reversed(constants), strict=True):
            assert isinstance(block, Block)
            y = block.inverse(y, constant)
        return y / self.scale.detach().exp()


class Residual(nn.Module):
    """g alone, for the audit."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.g = block.g

    def forward(self, x: Tensor) -> Tensor:
        return CONTRACTION * self.g(x)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, prove the contraction of each block, invert, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of the density and of samples")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    flow = Flow(options.blocks)
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, options.steps)
    for _ in range(options.steps):
        optimizer.zero_grad()
        (-flow.log_prob(moons(256)).mean()).backward()
        optimizer.step()
        schedule.step()
    flow.eval()
    constants = []
    for block in flow.blocks:
        assert isinstance(block, Block)
        proved = onelip.audit(Residual(block), torch.zeros(1, 2)).upper
        assert proved is not None
        assert proved < 1
        constants.append(proved)
    with torch.no_grad():
        likelihood = float(flow.log_prob(moons(5000)).mean())
        x = moons(500)
        y = x
        for block in flow.blocks:
            y = block(y)[0]
        back = y
        for block, constant in zip(reversed(flow.blocks), reversed(constants), strict=True):
            assert isinstance(block, Block)
            back = block.inverse(back, constant)
    error = float((back - x).norm(dim=1).max())
    print(f"proved contraction of each block: at most {max(constants):.6f}")
    print(f"mean log-likelihood of new samples {likelihood:.3f}; largest error of the inverse {error:.1e}")
    if options.out is not None:
        _draw(flow, constants, options.out)
    return {"contraction": max(constants), "likelihood": likelihood, "inverse_error": error}


def _draw(flow: Flow, constants: list[float], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    side = 101
    grid = torch.cartesian_prod(torch.linspace(-2, 2, side), torch.linspace(-1.5, 1.5, side))
    with torch.no_grad():
        density = flow.log_prob(grid).exp()
    left.pcolormesh(*(part.reshape(side, side).numpy() for part in (grid[:, 0], grid[:, 1], density)), cmap="magma")
    left.set_title("density")
    right.scatter(*moons(1500).T.numpy(), s=2, color="tab:gray", label="data")
    right.scatter(*flow.sample(1500, constants).T.numpy(), s=2, color="tab:orange", label="samples")
    right.set_xlim(-2, 2)
    right.set_ylim(-1.5, 1.5)
    right.legend(loc="upper right")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
