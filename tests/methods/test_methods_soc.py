"""SOC: the series of a skew operator, what truncation does to its norm, and what is refused."""

import math

import pytest
import torch
from _orthogonal import CIRCULAR, DOUBLE, randn, values
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.graph.kinds import gain
from onelip.methods import soc
from onelip.methods.orthogonal.soc import exponential, skew_kernel, skew_norm_bound
from onelip.testing.norms import exact_jacobian


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def jacobian_of_kernel(layer, *size):
    """The Jacobian of one application of the skew kernel, by torch's own convolution."""
    weight, skew = layer.weight.detach(), layer.skew
    convolution = getattr(nn, f"Conv{len(size)}d")
    padding = [d * (k // 2) for k, d in zip(skew.kernel_size, skew.dilation, strict=True)]
    plain = convolution(
        weight.shape[0],
        weight.shape[0],
        skew.kernel_size,
        padding=padding,
        dilation=skew.dilation,
        groups=skew.groups,
        padding_mode="circular" if skew.circular else "zeros",
        bias=False,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        plain.weight.copy_(weight)
    return exact_jacobian(plain, (weight.shape[0], *size))


SKEW = [
    (nn.Conv2d(3, 3, 3, padding=1, **DOUBLE), (5, 4)),
    (nn.Conv2d(3, 3, 3, padding=1, **CIRCULAR), (4, 5)),
    (nn.Conv1d(4, 4, 5, padding=4, dilation=2, groups=2, **DOUBLE), (9,)),
    (nn.Conv3d(2, 2, (3, 1, 3), padding=(1, 0, 1), **DOUBLE), (3, 2, 3)),
]


@pytest.mark.parametrize(("layer", "size"), SKEW, ids=range(len(SKEW)))
@pytest.mark.parametrize("terms", [4, 5, 12])
def test_soc_is_the_series_of_a_skew_operator(layer, size, terms):
    module = soc(layer, terms=terms)
    J = jacobian_of_kernel(module, *size)
    assert torch.equal(J, -J.T)
    assert torch.linalg.matrix_norm(J, 2) <= 2 + 1e-14
    term, total = torch.eye(len(J), **DOUBLE), torch.eye(len(J), **DOUBLE)
    for j in range(1, terms + 1):
        term = term @ J / j
        total = total + term
    found = exact_jacobian(module, (layer.in_channels, *size))
    torch.testing.assert_close(found, total * module.factor, rtol=0, atol=1e-12)
    if terms == 12:
        torch.testing.assert_close(found, torch.linalg.matrix_exp(J), rtol=0, atol=1e-5)
    assert module.lipschitz_constant == 1.0
    assert torch.linalg.matrix_norm(found, 2) <= 1 + 1e-14  # of the products that wrote the Jacobian out


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("norm", [0.5, 2.0, 3.0])
def test_gain_is_the_norm_of_the_series(terms, norm):
    angles = torch.linspace(0, norm, 2001, **DOUBLE)
    series = sum((1j * angles) ** j / math.factorial(j) for j in range(terms + 1))
    seen = float(series.abs().max())
    assert seen <= gain(terms, norm) * (1 + 1e-15)
    assert gain(terms, norm) <= max(1.0, seen) * 1.02
    assert gain(terms, math.nan) == math.inf


def test_the_publications_series_expands():
    """Five terms without the division: above 1, as in every network trained that way."""
    L = skew_kernel(randn(1, 6, 6), 1.5)
    assert torch.linalg.matrix_norm(exponential(L, 5)[0], 2) > 1.001


@pytest.mark.parametrize("terms", range(1, 9))
def test_exponential_by_pairs_of_terms(terms):
    L = randn(2, 4, 4)
    expected = sum(torch.linalg.matrix_power(L, j) / math.factorial(j) for j in range(terms + 1))
    torch.testing.assert_close(exponential(L, terms), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("spread", [0, 6])
def test_skew_kernels_keep_their_norm_at_every_scale(scale, spread):
    M = randn(1, 5, 5) * 10.0 ** torch.linspace(-spread, spread, 5, **DOUBLE)[:, None] * scale
    norm = float(torch.linalg.matrix_norm(skew_kernel(M, 2.0)[0], 2))
    assert 0.5 < norm <= 2 + 1e-13


def test_bound_of_a_stored_skew_kernel():
    for groups in (1, 3):
        module = bake(soc(nn.Conv2d(6, 6, 3, padding=1, groups=groups, padding_mode="circular")))
        kernel = module.weight.detach().unflatten(0, (groups, -1))
        bound = skew_norm_bound(kernel)
        norm = float(torch.linalg.matrix_norm(jacobian_of_kernel(module, 6, 6), 2))
        assert norm <= bound <= 2.01
        assert skew_norm_bound(kernel * 2.0**-500) >= norm * 2.0**-500
        assert skew_norm_bound(kernel * 0) <= 1e-29
        assert skew_norm_bound(kernel + 1e-3) == math.inf
        assert skew_norm_bound(kernel * torch.nan) == math.inf


def test_a_baked_soc_bounds_what_is_stored():
    module = bake(soc(nn.Conv2d(4, 4, 3, padding=1)))
    assert module.lipschitz_constant == 1.0
    with torch.no_grad():
        module.weight.mul_(1.8)
    found = float(values(module, 5, 5).max())
    assert 1.0 < module.lipschitz_constant < 5
    assert found <= module.lipschitz_constant
    with torch.no_grad():
        module.weight[0, 0, 0, 0] += 1
    assert module.lipschitz_constant is None
    assert "skew kernel" in module.bound().why


@pytest.mark.parametrize(
    ("layer", "size", "shape"),
    [
        (nn.Conv2d(2, 8, 3, stride=2, padding=1, **DOUBLE), (6, 4), (8, 3, 2)),
        (nn.Conv2d(2, 5, 4, stride=2, padding=1, **CIRCULAR), (6, 6), (5, 3, 3)),
        (nn.Conv2d(3, 7, 3, padding=1, **DOUBLE), (4, 4), (7, 4, 4)),
        (nn.Conv1d(8, 4, 5, padding="same", groups=2, **DOUBLE), (6,), (4, 6)),
    ],
    ids=range(4),
)
def test_soc_with_strides_and_other_channels(layer, size, shape):
    expected = layer(randn(1, layer.in_channels, *size)).shape
    module = soc(layer)
    assert module(randn(1, layer.in_channels, *size)).shape == expected == (1, *shape)
    found = values(module, *size)
    assert found.max() <= 1.0
    assert found.max() > 0.9


def test_refusals_of_soc():
    for layer, message in [
        (nn.Conv2d(4, 4, 3), "expected padding that keeps the size .* 1 on both sides"),
        (nn.Conv2d(4, 4, 2, padding="same"), "expected odd kernel sizes"),
        (nn.Conv2d(4, 4, 3, stride=2, padding=2, dilation=2), "expected dilation with stride 1 only"),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), "expected one of Linear, Conv1d, Conv2d, Conv3d for soc"),
        (nn.ConvTranspose2d(4, 4, 2, stride=2), "expected one of Linear, Conv1d, Conv2d, Conv3d for soc"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"), "zero or circular padding"),
    ]:
        with pytest.raises(UnsupportedLayer, match=message):
            soc(layer)
    module = soc(nn.Conv2d(4, 4, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"multiple of the stride \(2, 2\), got \(5, 6\)"):
        module(torch.zeros(1, 4, 5, 6))
    with pytest.raises(ValueError, match="expected an input"):
        module(torch.zeros(1, 3, 6, 6))
