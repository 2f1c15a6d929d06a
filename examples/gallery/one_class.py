"""One-class detection with certified scores: which images are not the digits that the network was trained on?

    python examples/gallery/one_class.py --out one_class.png

The network is trained with the hinge-KR loss on images of one class against images made from them (noise, shuffled
pixels); it never sees another class. An attack with budget eps moves a score by at most L eps, with the proved L. The
AUROC after each score is moved by that much to the wrong side is therefore a lower bound under any such attack.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip
from onelip.data import load_data, to_float


def negatives(images: Tensor) -> Tensor:
    """Images of no class: pixels shuffled, parts of two images, or heavy noise."""
    n, pixels = len(images), images[0].numel()
    flat = images.flatten(1)
    order = torch.rand(n, pixels).argsort(1)
    mixed = torch.where(torch.rand(n, pixels) < 0.5, flat, flat.roll(1, 0).flip(1))
    noisy = (flat + 0.7 * torch.randn(n, pixels)).clamp(0, 1)
    kind = torch.randint(3, (n, 1))
    made = torch.where(kind == 0, flat.gather(1, order), torch.where(kind == 1, mixed, noisy))
    return made.view_as(images)


def train(images: Tensor, steps: int, batch: int = 64) -> nn.Module:
    sizes = [images[0].numel(), 64, 64, 64]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), onelip.nn.MaxMin())]
    model = onelip.constrain(nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 1)), "cayley")
    loss, labels = onelip.losses.HKRLoss(margin=0.5, weight=10.0), torch.cat([torch.ones(batch), torch.zeros(batch)])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = images[torch.randint(len(images), (batch,))]
        optimizer.zero_grad()
        loss(model(torch.cat([chosen, negatives(chosen)])), labels).backward()
        optimizer.step()
    return onelip.bake(model).eval()


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an image of the class has a higher score than another image; ties count half."""
    difference = inside[:, None] - outside
    return float(((difference > 0).float() + 0.5 * (difference == 0).float()).mean())


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Certified AUROC against the budget of an attacker who may move every image."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--digit", type=int, default=0, choices=range(10), help="the class that is normal")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=None, help="a PNG of scores and of the certified AUROC")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = load_data("digits")
    model = train(to_float(data.train_images[data.train_labels == options.digit]), options.steps)
    constant = onelip.audit(model, torch.zeros(1, 1, 8, 8)).upper
    assert constant is not None
    with torch.no_grad():
        scores = model(to_float(data.test_images)).squeeze(1)
    own = data.test_labels == options.digit
    rows = []
    print(f"proved constant {constant:.6f}; the network never saw a digit other than {options.digit}")
    print(f"{'eps':>6s} {'certified AUROC':>16s}")
    for eps in (0.0, 0.1, 0.2, 0.4):
        shift = constant * eps
        rows.append({"eps": eps, "auroc": auroc(scores[own] - shift, scores[~own] + shift)})
        print(f"{eps:6.2f} {rows[-1]['auroc']:16.3f}")
    if options.out is not None:
        _draw(scores[own], scores[~own], rows, options.out)
    return rows


def _draw(inside: Tensor, outside: Tensor, rows: list[dict[str, float]], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist([inside.numpy(), outside.numpy()], bins=25, density=True, label=["the class", "other digits"])
    left.set(xlabel="score", ylabel="density")
    left.legend()
    right.plot([row["eps"] for row in rows], [row["auroc"] for row in rows], marker="o", color="tab:orange")
    right.set(xlabel="attack budget (L2)", ylabel="certified AUROC", ylim=(0, 1.02))
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
