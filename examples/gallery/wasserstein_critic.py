"""Wasserstein-1 distances from below, by critics with a proved Lipschitz constant; and a small WGAN.

    python examples/gallery/wasserstein_critic.py --out wasserstein.png

A 1-Lipschitz critic can only underestimate the distance, so the number it gives is a lower bound up to the sampling
error of the means. The WGAN needs no clipping and no gradient penalty: the constraint is in the layers.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip

Sampler = Callable[[int], Tensor]


def ring(n: int, radius: float = 2.0) -> Tensor:
    angle = torch.rand(n) * 2 * math.pi
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


def blobs(n: int) -> Tensor:
    """Eight Gaussian blobs on a circle, which generators like to leave out."""
    angle = torch.randint(8, (n,)) * math.pi / 4
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2)


# Pairs of distributions whose distance is known.
PAIRS: dict[str, tuple[Sampler, Sampler, float]] = {
    "blob, shifted by 3": (lambda n: torch.randn(n, 2) + torch.tensor([3.0, 0.0]), lambda n: torch.randn(n, 2), 3.0),
    "ring of radius 2, its centre": (ring, lambda n: torch.zeros(n, 2), 2.0),
    "rings of radius 2 and 1": (ring, lambda n: ring(n, 1.0), 1.0),
}


def make_critic(width: int = 64, depth: int = 3) -> nn.Module:
    """Orthogonal layers keep gradients at norm 1, which the best critic has almost everywhere."""
    sizes = [2] + [width] * depth
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), onelip.nn.MaxMin())]
    return onelip.constrain(nn.Sequential(*layers, nn.Linear(width, 1)), "cayley")


def distance(p: Sampler, q: Sampler, steps: int, batch: int = 512) -> tuple[float, float]:
    """A lower estimate of W1 on fresh samples, and the constant that is proved of the trained critic."""
    critic, loss = make_critic(), onelip.losses.KRLoss()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    labels = torch.cat([torch.ones(batch), torch.zeros(batch)])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(critic(torch.cat([p(batch), q(batch)])), labels).backward()
        optimizer.step()
        schedule.step()
    plain = onelip.bake(critic).eval()
    proved = onelip.audit(plain, torch.zeros(1, 2)).upper
    assert proved is not None
    with torch.no_grad():
        gap = float(plain(p(20_000)).mean() - plain(q(20_000)).mean())
    return gap / proved, proved


def train_gan(steps: int, batch: int = 256) -> nn.Module:
    """A generator of the eight blobs."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic, loss = make_critic(), onelip.losses.KRLoss()
    fakes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
    labels = torch.cat([torch.ones(batch), torch.zeros(batch)])
    for _ in range(steps):
        for _ in range(3):
            with torch.no_grad():
                fake = generator(torch.randn(batch, 8))
            judge.zero_grad()
            loss(critic(torch.cat([blobs(batch), fake])), labels).backward()
            judge.step()
        fakes.zero_grad()
        (-critic(generator(torch.randn(batch, 8))).mean()).backward()
        fakes.step()
    return generator.eval()


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float, float]]:
    """Print the distances; draw what the generator makes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of each critic")
    parser.add_argument("--gan-steps", type=int, default=800, help="of the generator; 0 for no WGAN")
    parser.add_argument("--out", type=Path, default=None, help="a PNG of the generated samples")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found = {}
    print(f"{'distributions':32s} {'true W1':>8s} {'from below':>11s} {'proved constant':>16s}")
    for name, (p, q, true) in PAIRS.items():
        estimate, proved = distance(p, q, options.steps)
        found[name] = (true, estimate, proved)
        print(f"{name:32s} {true:8.3f} {estimate:11.3f} {proved:16.7f}")
    if options.gan_steps:
        generator = train_gan(options.gan_steps)
        with torch.no_grad():
            samples = generator(torch.randn(2000, 8))
        angle = torch.arange(8) * math.pi / 4
        near = torch.cdist(samples, 2 * torch.stack([angle.cos(), angle.sin()], 1))
        covered = int((torch.bincount(near.argmin(1)[near.amin(1) < 0.4], minlength=8) > 50).sum())
        print(f"WGAN: {covered} of 8 blobs covered")
        if options.out is not None:
            _draw(samples, options.out)
    return found


def _draw(samples: Tensor, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*blobs(2000).T.numpy(), s=2, label="data", color="tab:gray")
    axes.scatter(*samples.T.numpy(), s=2, label="generated", color="tab:orange")
    axes.set_aspect("equal")
    axes.legend(loc="center")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
