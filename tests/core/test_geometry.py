"""Supported and rejected layers and settings: the bound must hold for every accepted padding and stride."""

import math

import pytest
import torch
from torch import nn

import onelip
from onelip.core.geometry import geometry_of
from onelip.core.parametrization import original_of
from onelip.testing import exact_norm


def conv(kind, kernel, **settings):
    """A layer with one channel and the given kernel, in float64."""
    kernel = torch.tensor(kernel, dtype=torch.float64)
    layer = kind(1, 1, tuple(kernel.shape), bias=False, dtype=torch.float64, **settings)
    with torch.no_grad():
        layer.weight.copy_(kernel[None, None])
    return layer


# Kernels whose AOL sum is exactly 1, so that AOL would not change them; sizes; and their true norms.
COUNTEREXAMPLES = {
    "circular k=1 p=1": (nn.Conv1d, [1.0], {"padding": 1, "padding_mode": "circular"}, (4,), math.sqrt(2)),
    "circular k=2 p=1": (nn.Conv1d, [0.5, 0.5], {"padding": 1, "padding_mode": "circular"}, (4,), 1.1634),
    "circular k=3 p=2": (nn.Conv1d, [0.5, 0.0, 0.5], {"padding": 2, "padding_mode": "circular"}, (8,), 1.1634),
    "reflect n=3": (nn.Conv1d, [0.5, 0.0, 0.5], {"padding": 1, "padding_mode": "reflect"}, (3,), math.sqrt(2)),
    "reflect n=4": (nn.Conv1d, [0.5, 0.0, 0.5], {"padding": 1, "padding_mode": "reflect"}, (4,), 1.1441),
    "reflect n=64": (nn.Conv1d, [0.5, 0.0, 0.5], {"padding": 1, "padding_mode": "reflect"}, (64,), 2 / math.sqrt(3)),
    "replicate n=4": (nn.Conv1d, [0.5, 0.5, 0.0], {"padding": 1, "padding_mode": "replicate"}, (4,), 1.1546),
    "replicate n=64": (nn.Conv1d, [0.5, 0.5, 0.0], {"padding": 1, "padding_mode": "replicate"}, (64,), 1.1547),
    "replicate k=1 p=2": (nn.Conv1d, [1.0], {"padding": 2, "padding_mode": "replicate"}, (4,), math.sqrt(3)),
    "replicate 2d k=1 p=2": (nn.Conv2d, [[1.0]], {"padding": 2, "padding_mode": "replicate"}, (4, 4), 3.0),
    "same reflect": (nn.Conv1d, [0.5, 0.0, 0.5], {"padding": "same", "padding_mode": "reflect"}, (4,), 1.1441),
    "same replicate": (nn.Conv1d, [0.5, 0.5, 0.0], {"padding": "same", "padding_mode": "replicate"}, (4,), 1.1546),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_counterexamples_are_refused_and_would_exceed_one(name):
    kind, kernel, settings, size, norm = COUNTEREXAMPLES[name]
    layer = conv(kind, kernel, **settings)
    assert exact_norm(layer, (1, *size)) == pytest.approx(norm, abs=1e-4)
    # With zero padding, AOL accepts the kernel and changes nothing: only the padding is the problem.
    plain = onelip.aol(conv(kind, kernel))
    assert torch.allclose(plain.weight, layer.weight, atol=1e-15)
    with pytest.raises(onelip.UnsupportedLayer, match=r"expected .* got .*use "):
        onelip.aol(layer)
    assert not hasattr(layer, "parametrizations")
    assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_without_padding_are_harmless(mode):
    layer = onelip.aol(nn.Conv2d(2, 3, 3, padding_mode=mode, dtype=torch.float64))
    assert exact_norm(layer, (2, 5, 5)) <= 1 + 1e-14


def strided_circular():
    """Two outputs that read pixels of different phases, and meet on a circle of odd size only: norm sqrt 2 there."""
    layer = nn.Conv1d(1, 2, 3, stride=2, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]], dtype=torch.float64))
    return layer


def test_strided_circular_falls_back_to_the_plain_bound():
    raw = strided_circular()
    assert exact_norm(raw, (1, 4)) == pytest.approx(1)
    assert exact_norm(raw, (1, 3)) == pytest.approx(math.sqrt(2))
    layer = onelip.aol(strided_circular())
    for n in range(2, 9):
        assert exact_norm(layer, (1, n)) <= 1 + 1e-14


def test_strided_circular_with_a_promised_size_is_tight_and_keeps_the_promise():
    layer = onelip.aol(strided_circular(), input_size=6)
    assert torch.allclose(layer.weight, strided_circular().weight)
    assert exact_norm(layer, (1, 6)) == pytest.approx(1, abs=1e-14)
    for model in (layer, onelip.bake(layer)):
        with pytest.raises(ValueError, match=r"multiple of \(2,\), got \(5,\)"):
            model(torch.zeros(1, 1, 5, dtype=torch.float64))
        with pytest.raises(ValueError, match="multiple of"):
            model(input=torch.zeros(1, 1, 5, dtype=torch.float64))


def test_promised_size_that_does_not_close_uses_the_plain_bound():
    layer = onelip.aol(strided_circular(), input_size=5)
    assert geometry_of(strided_circular(), 5).phases == (1,)
    assert exact_norm(layer, (1, 5)) <= 1 + 1e-14
    layer(torch.zeros(1, 1, 4, dtype=torch.float64))  # the plain bound promises nothing about sizes


def test_promised_size_per_axis():
    layer = nn.Conv2d(1, 1, 3, stride=2, padding=1, padding_mode="circular")
    assert geometry_of(layer, (4, 5)).phases == (2, 1)
    assert geometry_of(layer, (4, 6)).phases == (2, 2)
    with pytest.raises(ValueError, match="one number or 2 numbers"):
        geometry_of(layer, (4, 4, 4))


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        ({"stride": 2}, (2,)),
        ({"stride": 2, "dilation": 2}, (1,)),
        ({"stride": 4, "dilation": 2}, (2,)),
        ({"stride": 3, "dilation": 2}, (3,)),
        ({"stride": 9}, (5,)),
        ({}, (1,)),
    ],
)
def test_phases(settings, phases):
    assert geometry_of(nn.Conv1d(1, 1, 5, **settings)).phases == phases


@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.BatchNorm2d(3), nn.Bilinear(2, 2, 2), nn.Embedding(3, 4), nn.LSTM(2, 2)]
)
def test_other_modules_are_refused(module):
    with pytest.raises(onelip.UnsupportedLayer, match="expected one of Linear, Conv1d"):
        onelip.aol(module)


def test_lazy_layers_are_refused_until_they_know_their_shape():
    layer = nn.LazyLinear(3)
    with pytest.raises(onelip.UnsupportedLayer, match="run the model once"):
        onelip.aol(layer)
    layer(torch.zeros(1, 4))
    onelip.aol(layer)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 4),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 3), groups=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
        nn.Conv3d(2, 3, (1, 2, 3), stride=(2, 1, 2)),
    ],
)
def test_kernel_form_and_back(layer, side):
    geometry = geometry_of(layer)
    weight = layer.weight.detach()
    kernel = geometry.to_kernel(weight, side)
    assert torch.equal(geometry.to_weight(kernel, side), weight)
    assert tuple(kernel.shape) == geometry.kernel_shape(weight.shape, side)


def test_no_phase_costs_anything_at_run_time():
    """The factors of the phases are multiplied into the taps: the shape of the weight does not change."""
    layer = nn.Conv2d(3, 5, 4, stride=2)
    shape = layer.weight.shape
    assert onelip.aol(layer).weight.shape == shape
    assert original_of(layer).shape == shape
