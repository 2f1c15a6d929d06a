"""The checker accepts what is right: both writers' certificates, for every kind of node and layer."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from _certificate_files import sealed
from _certificates import Builder, summary_of
from _certified_networks import (
    dyadic,
    everything,
    files,
    no_head,
    pixels,
    quiet,
    rejected,
    small,
)
from _exact_layers import up, up_power_root, up_root
from hypothesis import given, settings, strategies as st

from onelip.checker import Rejected, check, norms, program


@pytest.mark.parametrize("make", [everything, quiet, small, no_head])
@pytest.mark.parametrize("kind", ["uint8", "float32", "float64"])
def test_accepts_what_is_right(make, kind, tmp_path):
    net = make()
    images = pixels(net.states[0][0])
    images = images if kind == "uint8" else (images / 255).astype(kind)
    path = files(net, tmp_path, pairs=make is not no_head, images=images)
    verdict = check(path, images=tmp_path / "images.npy")
    assert verdict["certified"] > 0
    assert verdict["logits_apart"] < 1e-12
    assert verdict["lipschitz"] == float(net.states[-1][1])
    unchecked = check(path)["not_checked"]
    assert len(unchecked) == 2 + any("images without radius" in what for what in unchecked)
    assert any("images without radius" in what for what in unchecked) == (verdict["certified"] < len(images))


CONVOLUTIONS = [
    {"padding": [[1, 1], [1, 1]], "mode": "circular"},
    {"stride": [2, 2]},
    {"stride": [2, 2], "padding": [[1, 1], [1, 1]], "mode": "circular"},
    {"stride": [2, 2], "padding": [[1, 1], [1, 1]], "side": "outputs", "steps": 2},
    {"dilation": [2, 1], "stride": [2, 3], "padding": [[2, 1], [0, 1]]},
    {"dilation": [2, 2], "stride": [4, 1], "padding": [[3, 3], [3, 3]]},
    {"stride": [4, 5], "kind": "cholesky"},
    {"transposed": True, "stride": [2, 2], "padding": [[1, 1], [1, 1]], "output_padding": [1, 0]},
    {"transposed": True, "stride": [2, 1], "dilation": [1, 2], "side": "outputs"},
    {"groups": 2, "padding": [[0, 1], [1, 0]]},
    {"groups": 2, "transposed": True, "stride": [3, 2]},
]


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolutions(conv, size, tmp_path):
    """Two derivations of the Schur sums and of the layer itself agree; the true norm is not above."""
    net = Builder((4, size, size))
    half, turned = 4 // conv.get("groups", 1), conv.get("transposed", False)
    net.map(dyadic(4, half, 3, 3), dyadic(2 * half if "groups" in conv else 4), **conv)
    norm, proved = net.true_norm
    assert norm <= proved * (1 + 1e-14)
    n = math.prod(net.states[-1][0])
    net.exact("join", (n,), np.ravel)
    net.map(dyadic(2, n), kind="cholesky", side="outputs")
    check(files(net, tmp_path), images=tmp_path / "images.npy")
    assert turned == net.nodes[1]["transposed"]


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes, tmp_path):
    net = Builder((2, *(3,) * axes))
    net.map(dyadic(3, 2, *(2,) * axes), dyadic(3), stride=[2] * axes, padding=[[1, 0]] * axes, side="outputs")
    n = math.prod(net.states[-1][0])
    net.exact("join", (n,), np.ravel)
    net.map(dyadic(2, n))
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_moving_nodes(tmp_path):
    net = Builder((2, 4, 4))
    unshuffled = lambda x: x.reshape(2, 2, 2, 2, 2).transpose(0, 2, 4, 1, 3).reshape(8, 2, 2)  # noqa: E731
    places = [0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]
    net.scaled("max", (8, 2, 2), unshuffled, Fraction(1), take=[places])
    net.exact("join", (9, 2, 2), lambda x: np.pad(x, [(0, 1), (0, 0), (0, 0)]))
    sort = lambda x: -np.sort(-x.reshape(3, 3, 2, 2), axis=0).reshape(9, 2, 2)  # noqa: E731
    net.exact("sort", (9, 2, 2), sort, axis=0, group_size=3)
    net.exact("join", (9, 2, 2), lambda x: x)
    net.exact("sort", (9, 2, 2), lambda x: np.sort(x, axis=2)[:, :, ::-1], axis=2, group_size=2)
    net.map(dyadic(2, 9, 2, 2), dyadic(2))
    net.exact("join", (2,), np.ravel)
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_dilated_max_pool(tmp_path):
    """With stride 2 and dilation 2 both taps read a pixel."""
    net = Builder((2, 6))
    pixels = [[0, 2], [2, 4]]
    net.scaled("max", (2, 2), lambda x: np.maximum(x[:, :-2:2], x[:, 2::2]), up_root(Fraction(2)), take=pixels)
    net.exact("join", (4,), np.ravel)
    net.map(dyadic(2, 4))
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_ties_and_margins_within_the_loss_are_not_certified(tmp_path):
    net = Builder((2,))
    net.map([[0.5, 0.0], [0.5, 0.0], [0.0, 0.25]])
    path = files(net, tmp_path, images=np.array([[200, 100], [0, 9]], np.uint8))
    content = json.loads(path.read_text())
    assert [r["radius"] for r in content["results"]] == ["0x0.0p+0", content["results"][1]["radius"]]
    assert content["results"][0]["pixels"] is None
    assert check(path, images=tmp_path / "images.npy")["certified"] == 1
    content["results"][0]["class"] = 1
    content["summary"] = summary_of(content["results"])
    path.write_text(json.dumps(sealed(content)))
    rejected(path, "result 0: class: expected 0, got 1")


def test_no_margin_and_no_slope():
    """Where no perturbation matters, a margin that only equals its loss certifies nothing."""
    zero, error = Fraction(0), Fraction(1, 8)
    for margin, good in ((Fraction(1), False), (Fraction(2), True)):
        for radius in (zero, Fraction(4)):
            assert program.is_radius(radius, [margin, zero], 0, [zero, zero], error, 17) == good
        assert not program.is_radius(Fraction(4), [margin, zero], 0, [zero, zero], error, 16)  # it stays below sqrt(n)


def test_radii_are_strict_in_every_pair():
    logits, squares = [Fraction(v) for v in (5, 1, 0)], [Fraction(v) for v in (0, 4, 1)]
    for radius, good in ((2, False), (Fraction(2) - Fraction(1, 2**60), True)):  # 4 / 2 and 5 / 1
        assert program.is_radius(Fraction(radius), logits, 0, squares, Fraction(0), 100) == good
    assert not program.is_radius(Fraction(0), [Fraction(1), Fraction(1)], 0, [Fraction(0)] * 2, Fraction(0), 100)


@settings(max_examples=50)
@given(st.fractions(min_value=0, max_value=10**40), st.integers(-200, 200), st.sampled_from([1, 2, 4, 8]))
def test_numbers_are_the_smallest(x, e, power):
    x *= Fraction(2) ** e
    v = up(x) if power == 1 else up_power_root(x, power)
    assert norms.least({"v": str(v)}, "v", x, power) == v
    wrong = [Fraction(math.nextafter(float(v), math.inf)), v + Fraction(1, 2**1100), -v]
    wrong.append(Fraction(math.nextafter(float(v), 0.0)))
    for other in wrong if v else wrong[:2]:
        with pytest.raises(Rejected, match=r"not the smallest|float64 in lowest terms|a fraction"):
            norms.least({"v": str(other)}, "v", x, power)


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_integers_are_exact(values):
    whole, e = norms.to_integers(np.array(values))
    assert [int(m) * Fraction(2) ** e for m in whole] == [Fraction(v) for v in values]


def layers_of_every_kind():
    from torch import nn

    from onelip import nn as lip

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), lip.MaxMin()

        def forward(self, x):
            import torch

            y = x + self.b(self.act(self.a(x)))
            return torch.cat([x, y], 1)

    circular = {"padding": 1, "padding_mode": "circular"}
    return {
        "tiling": [nn.Conv2d(4, 6, 2, stride=2), lip.GroupSort(3)],
        "circular strided": [nn.Conv2d(4, 6, 3, stride=2, **circular)],
        "circular not closing": [nn.Conv2d(4, 6, 3, stride=4, **circular)],
        "dilated strided": [nn.Conv2d(4, 6, 3, dilation=2, stride=(2, 3), padding=2)],
        "transposed grouped": [nn.ConvTranspose2d(4, 6, 3, stride=(1, 2), groups=2, dilation=(2, 1))],
        "global average": [lip.LipschitzAvgPool2d(None)],
        "maximum": [nn.MaxPool2d(3, stride=2, padding=1)],
        "windows larger than half of the image": [nn.MaxPool2d(5, stride=1), nn.AvgPool2d(2, stride=1)],
        "windows around the image": [nn.MaxPool2d((6, 5), stride=1, padding=(3, 2), dilation=1)],
        "channels": [lip.ConcatenationPool2d(2), lip.PadChannels(18), lip.MaxMin(), lip.FirstChannels(5), lip.Abs()],
        "residual": [Block()],
        "aol": [lip.AOLConv2d(4, 8, 3, padding=1), lip.MaxMin()],
    }


@pytest.mark.parametrize("name", layers_of_every_kind())
def test_certificates_of_the_library(name, tmp_path):
    import torch
    from safetensors.torch import save_file
    from torch import nn

    import onelip
    from onelip.certification.certificate import WeightFile, write_certificate
    from onelip.certification.predict import certify

    torch.manual_seed(0)
    layers = layers_of_every_kind()[name]
    size = math.prod(nn.Sequential(*layers)(torch.zeros(1, 4, 6, 6)).shape)
    model = onelip.bake(nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 3))).double().eval()
    images = torch.randint(0, 256, (3, 4, 6, 6), dtype=torch.uint8)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    found = certify(model, images, torch.tensor([0, 1, 2]), exact=True)
    path = tmp_path / "cert.json"
    write_certificate(path, found, images, WeightFile(tmp_path / "plain.safetensors"), source="random")
    verdict = check(path, images=tmp_path / "images.npy")
    assert verdict["certified"] == int((found.radii > 0).sum())
