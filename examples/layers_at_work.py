"""Exact norms of layers: plain, with AOL, and with the parametrizations of torch.

Each norm is the largest singular value of the Jacobian of the layer, by SVD in float64. Run it with
`python examples/layers_at_work.py`; it takes a few seconds.
"""

import copy

import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

import onelip
from onelip.testing import exact_jacobian

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear 256 -> 128": (nn.Linear(256, 128, bias=False), (256,)),
    "Conv1d, 8 -> 16, 5 taps, stride 2": (nn.Conv1d(8, 16, 5, stride=2, padding=2, bias=False), (8, 64)),
    "Conv2d, 8 -> 8, 3x3": (nn.Conv2d(8, 8, 3, padding=1, bias=False), (8, 8, 8)),
    "Conv2d, 3 -> 12, 2x2, stride 2": (nn.Conv2d(3, 12, 2, stride=2, bias=False), (3, 16, 16)),
    "Conv2d, 8 -> 8, 3x3, dilated, circular": (
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="circular", bias=False),
        (8, 9, 9),
    ),
    "Conv2d, 8 -> 16, 4x4, 4 groups": (nn.Conv2d(8, 16, 4, padding=2, groups=4, bias=False), (8, 8, 8)),
    "Conv3d, 2 -> 4, 3x3x3": (nn.Conv3d(2, 4, 3, padding=1, bias=False), (2, 5, 5, 5)),
    "ConvTranspose2d, 8 -> 4, 4x4, stride 2": (nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, bias=False), (8, 6, 6)),
}


def norm_and_spread(layer: nn.Module, shape: tuple[int, ...]) -> tuple[float, float]:
    values = torch.linalg.svdvals(exact_jacobian(layer, shape))
    return float(values.max()), float(values.mean())


def optimised(layer: nn.Module, shape: tuple[int, ...], steps: int = 150) -> nn.Module:
    """Train the layer to maximise the norm of its output for random inputs: it becomes almost orthogonal."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        (-layer(torch.randn(16, *shape)).square().mean()).backward()
        optimizer.step()
    return layer


def main() -> None:
    torch.manual_seed(0)
    print("Largest (mean) singular value of the exact Jacobian, float64\n")
    print(f"{'layer':40s} {'plain torch':>15s} {'AOL':>15s} {'AOL, trained':>15s}")
    for name, (layer, shape) in LAYERS.items():
        columns = [norm_and_spread(layer, shape)]
        constrained = onelip.aol(copy.deepcopy(layer), side="auto")
        columns.append(norm_and_spread(constrained, shape))
        columns.append(norm_and_spread(optimised(constrained, shape), shape))
        print(f"{name:40s} " + " ".join(f"{top:7.4f} ({mean:.3f})" for top, mean in columns))

    print("\nParametrizations of torch on the same convolution (8 -> 8, 3x3) do not bound its norm:")
    layer, shape = LAYERS["Conv2d, 8 -> 8, 3x3"]
    for parametrize in (spectral_norm, orthogonal):
        top, _ = norm_and_spread(parametrize(copy.deepcopy(layer)).eval(), shape)
        print(f"  {'torch ' + parametrize.__name__:38s} {top:15.4f}")

    print("\nA whole model:\n")
    model = nn.Sequential(
        nn.Conv2d(3, 12, 2, stride=2), onelip.nn.MaxMin(), nn.Conv2d(12, 12, 3, padding=1), onelip.nn.MaxMin(),
        nn.Flatten(), nn.Linear(192, 10),
    )  # fmt: skip
    onelip.constrain(model, "aol", side="auto")
    print(onelip.summary(model))
    plain = onelip.bake(model)
    images = torch.rand(4, 3, 8, 8)
    difference = float((model(images) - plain(images)).detach().abs().max())
    print(f"\nThe baked network has the keys {', '.join(list(plain.state_dict())[:2])}, ...")
    print(f"Largest difference of its outputs: {difference}")


if __name__ == "__main__":
    main()
