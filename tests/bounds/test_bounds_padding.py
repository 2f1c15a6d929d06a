"""Padding that copies pixels: multiplicities are counted, and the bound with them is above the truth for every size."""

from fractions import Fraction

import pytest
import torch
from _rational_norms import layer_square_from_below
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip.bounds import bound_layer, exact_bound_layer, padding_factor
from onelip.bounds.linear import geometry_without_copies
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import geometry_of
from onelip.testing import exact_norm


def layer_with(layer, weight):
    layer.weight = nn.Parameter(torch.as_tensor(weight))
    return layer


HAND_KERNELS = [
    ([0.5, 0, 0.5], {"padding": 1, "padding_mode": "reflect"}),
    ([0.5, 0.5, 0], {"padding": 1, "padding_mode": "replicate"}),
    ([1.0], {"padding": 3, "padding_mode": "replicate"}),
    ([1.0], {"padding": 1, "padding_mode": "circular"}),
    ([0.5, 0.5], {"padding": 1, "padding_mode": "circular"}),
    ([0.5, 0, 0.5], {"padding": 2, "padding_mode": "circular"}),
    ([0.5, 0, 0.5], {"padding": "same", "padding_mode": "reflect"}),
    ([1.0, 0.0, 1.0, 0.5], {"padding": 3, "stride": 2, "padding_mode": "circular"}),
    ([1.0, 2.0, 1.0], {"padding": 3, "dilation": 2, "stride": 3, "padding_mode": "replicate"}),
]


@pytest.mark.parametrize(("kernel", "options"), HAND_KERNELS)
def test_padding_that_copies(kernel, options):
    layer = layer_with(
        nn.Conv1d(1, 1, len(kernel), **options), torch.tensor(kernel, dtype=torch.float64).reshape(1, 1, -1)
    )
    for n in range(4, 13):
        truth = layer_square_from_below(layer, (1, n))
        sized, worst = bound_layer(layer, n), bound_layer(layer)
        assert truth <= exact_bound_layer(layer, n).square <= Fraction(sized.value) ** 2
        assert sized.value <= worst.value * (1 + 1e-12)


def test_padding_factors_are_counted():
    def factor(size, k=3, **options):
        return padding_factor(nn.Conv1d(1, 1, k, **options), size)

    assert factor(8) == factor(None, padding=1) == 1
    assert [factor(n, padding=2, padding_mode="replicate") for n in (1, 2, 8, None)] == [5, 3, 3, 5]
    assert [factor(n, padding=1, padding_mode="reflect") for n in (2, 3, 4, 8, None)] == [2, 3, 2, 2, 3]
    assert [factor(n, padding=1, padding_mode="circular") for n in (3, 4, None)] == [1, 1, 1]
    assert [factor(n, padding=2, padding_mode="circular") for n in (2, 3, 8, None)] == [2, 2, 2, 2]
    assert [factor(n, k=1, padding=2, padding_mode="circular") for n in (2, 3, 4, 8, None)] == [3, 3, 2, 2, 3]
    assert factor(9, k=1, padding=1, stride=3, padding_mode="circular") == 2
    assert factor(9, k=1, padding=1, stride=4, padding_mode="circular") == 1
    two = nn.Conv2d(1, 1, 3, padding=(1, 0), padding_mode="replicate")
    assert padding_factor(two, (8, 8)) == 2
    assert padding_factor(nn.Linear(2, 2), None) == 1
    with pytest.raises(UnsupportedLayer, match="below the input size"):
        factor(2, padding=2, padding_mode="reflect")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_factor_is_reached_by_a_kernel(mode):
    """A wide 1x1 kernel shows the copies themselves, so the factor is not only a bound."""
    layer = layer_with(nn.Conv1d(1, 1, 1, padding=2, padding_mode=mode), torch.ones(1, 1, 1))
    for n in (3, 4, 5, 9):
        assert exact_norm(layer, (1, n)) ** 2 == pytest.approx(float(padding_factor(layer, n)))


@pytest.mark.parametrize("size", [None, 3, 4, 6, (6,)])
def test_geometry_is_that_of_the_layer_where_nothing_is_copied(size):
    for stride in (1, 2, 3):
        layer = nn.Conv1d(2, 2, 3, stride=stride, padding=1, padding_mode="circular")
        assert geometry_without_copies(layer, size).phases == geometry_of(layer, size).phases


def test_strided_circular_layers_need_their_size():
    """soundness.md 3.3: K_1 = e_1, K_2 = e_2, stride 2: norm sqrt 2 for odd sizes, 1 for even ones."""
    weight = torch.zeros(2, 1, 3)
    weight[0, 0, 0] = weight[1, 0, 1] = 1
    layer = layer_with(nn.Conv1d(1, 2, 3, stride=2, padding=1, padding_mode="circular"), weight)
    assert bound_layer(layer, 4).value == pytest.approx(1, abs=1e-9)
    for size in (3, 5, None):
        assert bound_layer(layer, size).value >= 2**0.5


def test_a_kernel_size_that_the_weight_does_not_have_is_refused():
    layer = nn.Conv1d(1, 1, 5, padding=2, padding_mode="circular", bias=False)
    layer.weight = nn.Parameter(torch.ones(1, 1, 1))  # of norm sqrt 2: 12 outputs of 8 pixels
    for bound in (bound_layer, exact_bound_layer):
        with pytest.raises(UnsupportedLayer, match=r"kernel_size \(5,\), got \(1,\)"):
            bound(layer, 8)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_parametrized_layers_are_bounded_too(mode):
    layer = nn.Conv1d(1, 1, 2, padding=1, padding_mode=mode)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    plain = nn.Conv1d(1, 1, 2, padding=1, padding_mode=mode)
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    assert bound_layer(layer, (4,)).value == bound_layer(plain, (4,)).value


@pytest.mark.parametrize("mode", ["replicate", "reflect", "circular"])
def test_padding_that_was_changed_later(mode):
    # torch pads by a copy that the constructor makes: 2 pixels on each side, of 3.
    layer = nn.Conv1d(1, 1, 3, padding=2, padding_mode=mode, bias=False).double().requires_grad_(False)
    nn.init.constant_(layer.weight, 1.0)
    layer.padding = (0,)
    true = float(torch.linalg.matrix_norm(layer(torch.eye(3).double()[:, None])[:, 0], 2))
    assert true <= bound_layer(layer, 3).value < 2 * true
    assert true <= bound_layer(layer).value
    assert true <= onelip.audit(nn.Sequential(layer), torch.rand(1, 1, 3).double()).upper
