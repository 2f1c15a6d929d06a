"""Robust conformal prediction: sets of classes that keep their coverage under attack, from proved constants.

    python examples/gallery/conformal_sets.py --out conformal.png

Split conformal prediction returns all classes whose score is at least a threshold q from calibration images: the true
class is among them with probability 1 - alpha. An attacker with budget eps moves each score by at most L eps, with L
proved. So the set of all classes with a score of at least q - L eps covers the true class of an attacked image, too.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip
from onelip.data import load_data, to_float


def train(epochs: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network for the digits that come with the package; and images and labels that it has not seen."""
    data = load_data("digits")
    images, labels = to_float(data.train_images), data.train_labels
    model = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1)
    loss = onelip.OffsetCrossEntropy(offset=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return onelip.bake(model).eval(), to_float(data.test_images), data.test_labels


def threshold(scores: Tensor, labels: Tensor, alpha: float) -> float:
    """The largest q that keeps 1 - alpha of exchangeable new images, whatever their distribution is."""
    own = scores.gather(1, labels[:, None]).flatten().sort().values
    rank = math.floor(alpha * (len(own) + 1))  # this many calibration scores may lie below
    return float(own[rank - 1]) if rank >= 1 else -math.inf


def attack(model: nn.Module, images: Tensor, labels: Tensor, eps: float, steps: int = 20) -> Tensor:
    """Images within eps (L2) whose true class has a score as low as gradient descent finds."""
    moved = images.clone()
    for _ in range(steps):
        moved.requires_grad_()
        score = model(moved).gather(1, labels[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, moved)
        away = moved.detach() - gradient / gradient.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1) * eps / 4
        offset = away - images
        norm = offset.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
        moved = images + offset * (eps / norm).clamp(max=1.0)
    return moved.detach()


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Coverage and mean size of plain and robust sets, clean and attacked, for several budgets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of coverage against budget")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, images, labels = train(options.epochs)
    constant = onelip.audit(model, images[:1]).upper
    assert constant is not None
    order = torch.randperm(len(images))
    calibration, test = order[: len(order) // 2], order[len(order) // 2 :]
    with torch.no_grad():
        q = threshold(model(images[calibration]), labels[calibration], options.alpha)
    print(f"proved constant {constant:.6f}; {len(calibration)} calibration and {len(test)} test images")
    print(f"{'eps':>6s} {'plain sets, attacked':>22s} {'robust sets, attacked':>23s} {'mean size':>10s}")
    rows = []
    for eps in (0.0, 0.1, 0.2, 0.3, 0.4):
        attacked = attack(model, images[test], labels[test], eps) if eps else images[test]
        with torch.no_grad():
            scores = model(attacked)
        own = scores.gather(1, labels[test][:, None]).flatten()
        robust = scores >= q - constant * eps
        row = {
            "eps": eps,
            "plain": float((own >= q).float().mean()),
            "robust": float((own >= q - constant * eps).float().mean()),
            "size": float(robust.sum(1).float().mean()),
        }
        rows.append(row)
        print(f"{eps:6.2f} {row['plain']:22.1%} {row['robust']:23.1%} {row['size']:10.2f}")
    if options.out is not None:
        _draw(rows, options.alpha, options.out)
    return rows


def _draw(rows: list[dict[str, float]], alpha: float, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    eps = [row["eps"] for row in rows]
    axes.plot(eps, [row["plain"] for row in rows], marker="o", color="tab:gray", label="plain sets")
    axes.plot(eps, [row["robust"] for row in rows], marker="o", color="tab:orange", label="robust sets")
    axes.axhline(1 - alpha, color="black", linewidth=1, linestyle=":", label="promised")
    axes.set(xlabel="attack budget (L2)", ylabel="coverage of the true class", ylim=(0, 1.02))
    axes.legend(loc="lower left")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
