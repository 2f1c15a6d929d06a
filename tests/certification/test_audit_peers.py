"""Audits of models of other libraries, deel-torchlip and orthogonium: proved, and tight."""

import pytest
import torch
from deel import torchlip
from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d
from orthogonium.layers.conv.AOL import AOLConv2D
from orthogonium.layers.conv.SLL import SDPBasedLipschitzResBlock
from orthogonium.layers.custom_activations import Abs, HouseHolder, MaxMin, SoftHuber
from orthogonium.layers.linear import OrthoLinear, UnitNormLinear
from orthogonium.layers.normalization import LayerCentering2D
from orthogonium.layers.residual import ConcatResidual
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip.core.errors import CannotTrace

IMAGE, VECTOR = (4, 8, 8), (12,)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def trained(model, shape):
    """One call in training mode, which those libraries need for their power iterations."""
    with torch.no_grad():
        model.train()(torch.rand(2, *shape))
    return model.eval()


def stored(model):
    """The model with the weights that its parametrizations have made."""
    for module in model.modules():
        for name in list(getattr(module, "parametrizations", {})):
            parametrize.remove_parametrizations(module, name)
    return model


# Spectral normalisation with a few steps of Björck is near 1, not at 1; all else by construction.
LAYERS = {
    "SpectralConv2d": (torchlip.SpectralConv2d, (4, 6, 3), {"padding": 1}, IMAGE),
    "SpectralConvTranspose2d": (torchlip.SpectralConvTranspose2d, (4, 6, 2), {"stride": 2}, IMAGE),
    "FrobeniusConv2d": (torchlip.FrobeniusConv2d, (4, 6, 3), {"padding": 1}, IMAGE),
    "FrobeniusLinear": (torchlip.FrobeniusLinear, (12, 7), {}, VECTOR),
    "FullSort": (torchlip.FullSort, (), {}, VECTOR),
    "GroupSort": (torchlip.GroupSort, (3,), {}, VECTOR),
    "MaxMin of torchlip": (torchlip.MaxMin, (), {}, VECTOR),
    "HouseHolder of torchlip": (torchlip.HouseHolder, (4,), {}, IMAGE),
    "LPReLU": (torchlip.LPReLU, (4,), {}, IMAGE),
    "ScaledAvgPool2d": (torchlip.ScaledAvgPool2d, (2,), {}, IMAGE),
    "ScaledAdaptiveAvgPool2d": (torchlip.ScaledAdaptiveAvgPool2d, ((1, 1),), {}, IMAGE),
    "ScaledAdaptativeL2NormPool2d": (torchlip.ScaledAdaptativeL2NormPool2d, ((1, 1),), {}, IMAGE),
    "LayerCentering": (torchlip.LayerCentering, (), {}, IMAGE),
    "UnitNormLinear": (UnitNormLinear, (12, 7), {}, VECTOR),
    "MaxMin": (MaxMin, (), {}, IMAGE),
    "HouseHolder": (HouseHolder, (4,), {}, IMAGE),
    "Abs": (Abs, (), {}, IMAGE),
    "SoftHuber": (SoftHuber, (), {}, IMAGE),
    "AOLConv2D": (AOLConv2D, (4, 6, 3), {"padding": 1}, IMAGE),
    "SLL": (SDPBasedLipschitzResBlock, (4, 2, 3), {}, IMAGE),
    "LayerCentering2D": (LayerCentering2D, (4,), {}, IMAGE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    kind, arguments, options, shape = LAYERS[name]
    model = trained(kind(*arguments, **options), shape)
    found = onelip.audit(model, torch.rand(1, *shape))
    rows_of_norm_one = name == "UnitNormLinear"  # the norm of all of them is more
    assert found.upper is not None
    assert found.lower is not None
    assert found.lower <= found.upper <= (2 if rows_of_norm_one else 1 + 1e-5)
    # Bounds of stored convolutions are for every size of image; what is measured is for this one.
    assert found.upper <= found.lower * (1.35 if "Conv" in name else 1.01)


def test_a_network_of_torchlip():
    model = nn.Sequential(
        torchlip.SpectralConv2d(3, 8, 3, padding=1),
        torchlip.GroupSort2(),
        torchlip.ScaledL2NormPool2d(2),
        torchlip.SpectralConv2d(8, 8, 3, padding=1),
        torchlip.HouseHolder(8),
        torchlip.ScaledAvgPool2d(2),
        nn.Flatten(),
        torchlip.SpectralLinear(32, 16),
        torchlip.GroupSort2(),
        torchlip.FrobeniusLinear(16, 1),
    )
    found = onelip.audit(trained(model, (3, 8, 8)), torch.rand(1, 3, 8, 8))
    assert found.upper is not None
    assert found.upper <= 1 + 1e-5


def test_twelve_layers_of_groupsort():
    """Halves that are sorted and put together again: each layer has the constant 1, not the root of 2."""
    layers = [layer for _ in range(12) for layer in (torchlip.SpectralLinear(16, 16), torchlip.GroupSort2())]
    found = onelip.audit(trained(nn.Sequential(*layers), (16,)), torch.rand(1, 16))
    assert found.upper is not None
    assert found.lower is not None
    assert found.lower <= found.upper <= 1 + 1e-4


class HalfAbs(nn.Module):
    """|x| on the first half of the channels, by slices."""

    def forward(self, x):
        half = x.shape[1] // 2
        return torch.cat([x[:, :half].abs(), x[:, half:]], 1)


def test_a_network_of_orthogonium():
    """Its power iterations go on in eval mode: refused as it is, bounded with the weights stored."""
    layers = [AdaptiveOrthoConv2d(3, 8, 3, padding=1), MaxMin(), AdaptiveOrthoConv2d(8, 8, 4, stride=2, padding=1)]
    layers += [layer for _ in range(4) for layer in (HalfAbs(), AdaptiveOrthoConv2d(8, 8, 3, padding=1))]
    model = nn.Sequential(*layers, MaxMin(), nn.Flatten(), OrthoLinear(128, 10))
    model, x = trained(model, (3, 8, 8)), torch.rand(1, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CannotTrace, match=r"'0.parametrizations.weight.*remove_parametrizations\(layer"):
        onelip.audit(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = onelip.audit(stored(model), x)
    assert found.upper is not None
    assert found.lower is not None
    assert found.lower <= found.upper <= 1 + 1e-4
    assert found.lower > 0.5  # 128 numbers become 10


def test_a_residual_part_of_the_channels():
    model = stored(trained(ConcatResidual(AdaptiveOrthoConv2d(2, 2, 3, padding=1)), IMAGE))
    found = onelip.audit(model, torch.rand(1, *IMAGE))
    assert found.upper is not None
    assert found.upper <= 1 + 1e-5
