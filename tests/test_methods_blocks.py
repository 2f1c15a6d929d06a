"""SLL, CPL and the other residual layers: against their published formulas, and their constants at tolerance zero."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelip.bounds import bound_weight
from onelip.export import bake
from onelip.geometry import UnsupportedLayer
from onelip.methods import cpl, sll
from onelip.methods._parametrization import find_parametrization, original_of
from onelip.methods._potential import ConvexPotential
from onelip.nn._base import UnknownLipschitzConstant
from onelip.testing import check_contract

METHODS = [module.METHOD for module in (sll, cpl)]
RESIDUAL = [sll.sll, cpl.cpl]
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, **DOUBLE)


def jacobian(layer, x):
    return torch.autograd.functional.jacobian(layer, x).reshape(-1, x.numel())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(
    "check", ["norm within claim", "gradients finite", "gradients right", "bakes", "copies and loads"]
)
def test_contract(method, check):
    check_contract(method, checks=(check,), options={}, examples=0.15)


# ---- the formulas


def test_sll_is_the_published_layer():
    layer = sll.sll(nn.Linear(3, 3, **DOUBLE), hidden=5)
    found, W, b = find_parametrization(layer), original_of(layer), layer.bias
    with torch.no_grad():
        W.normal_()
        b.normal_()
        found.log_q.normal_()
    q, x = found.log_q.exp().flatten(), randn(4, 3)
    T = 1 / ((W @ W.T).abs() * q[None, :] / q[:, None]).sum(1)
    published = x - 2 * (T * F.relu(x @ W.T + b / T.sqrt())) @ W
    torch.testing.assert_close(layer(x), published)


def test_the_weights_q_act_also_on_convolutions():
    layer = sll.sll(nn.Conv2d(3, 3, 3, padding=1, **DOUBLE))
    before = layer.weight.detach()
    with torch.no_grad():
        find_parametrization(layer).log_q[0, 0] = 2.0
    assert (layer.weight - before).abs().max() > 1e-3
    layer(randn(1, 3, 5, 5)).square().sum().backward()
    assert find_parametrization(layer).log_q.grad.abs().max() > 1e-6


def test_cpl_is_the_published_layer_where_the_bound_is_the_norm():
    layer = cpl.cpl(nn.Linear(4, 4, **DOUBLE)).eval()
    W, x = original_of(layer), randn(3, 4)
    sigma = torch.linalg.matrix_norm(W, 2)
    published = x - 2 / sigma**2 * F.relu(x @ W.T + layer.bias * sigma) @ W
    torch.testing.assert_close(layer(x), published, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(("kernel", "dilation", "groups"), [((3, 3), 1, 1), ((1, 3), 2, 2), ((5, 3), 1, 2)])
def test_the_way_back_is_the_adjoint(mode, kernel, dilation, groups):
    padding = tuple(dilation * (k - 1) // 2 for k in kernel)
    settings = {"padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode, "bias": False}
    inner = nn.Conv2d(4, 6, kernel, **settings, **DOUBLE)
    block = ConvexPotential(inner)
    x, h = randn(1, 4, 5, 7), randn(1, 6, 5, 7)
    forth, back = block._convolution(x, inner.weight), block._adjoint(h, inner.weight)
    torch.testing.assert_close(forth, inner(x))
    torch.testing.assert_close((forth * h).sum(), (x * back).sum())


# ---- constants


@pytest.mark.parametrize("verb", RESIDUAL)
def test_the_constant_of_a_baked_layer_comes_from_what_is_stored(verb):
    plain = bake(verb(nn.Conv2d(2, 2, 3, padding=1), hidden=3).eval())
    assert isinstance(plain, ConvexPotential)
    assert list(plain.state_dict()) == ["weight", "bias"]
    norm = bound_weight(plain.weight.detach(), plain.geometry).value
    assert max(1.0, 2 * norm**2 - 1) <= plain.lipschitz_constant <= 1 + 1e-5
    with torch.no_grad():
        plain.weight.mul_(2)
    assert plain.lipschitz_constant > 3
    x = 10 * torch.randn(1, 2, 5, 5)
    assert torch.linalg.matrix_norm(jacobian(plain, x), 2) <= plain.lipschitz_constant


def test_the_bound_is_attained():
    block = ConvexPotential(nn.Linear(2, 2, bias=False, **DOUBLE), lipschitz=0.5)
    with torch.no_grad():
        block.weight.copy_(1.5 * torch.eye(2))
    measured = torch.linalg.matrix_norm(jacobian(block, torch.ones(1, 2, **DOUBLE)), 2)  # 0.5 (1 - 2 * 2.25)
    assert float(measured) == 1.75
    assert 1.75 <= block.lipschitz_constant < 1.75 * (1 + 1e-8)


def test_what_is_not_proved_is_not_stated():
    block = sll.sll(nn.Linear(2, 2))
    nn.utils.parametrize.register_parametrization(block, "weight", nn.Identity())
    with pytest.raises(UnknownLipschitzConstant, match="expected a parametrization"):
        _ = block.lipschitz_constant
    broken = ConvexPotential(nn.Linear(2, 2))
    with torch.no_grad():
        broken.weight.fill_(math.nan)
    with pytest.raises(UnknownLipschitzConstant):
        _ = broken.lipschitz_constant


# ---- refusals, and whole networks


@pytest.mark.parametrize("verb", RESIDUAL)
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: nn.Linear(3, 4), "PadChannels"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1, stride=2), "ConcatenationPool2d"),
        (lambda: nn.Conv2d(2, 2, 2, padding=1), "odd kernel"),
        (lambda: nn.Conv2d(2, 2, 3), "keep the size"),
        (lambda: nn.ConvTranspose2d(2, 2, 3, padding=1), "got ConvTranspose2d"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "reflect"),
    ],
)
def test_refusals(verb, layer, words):
    with pytest.raises(UnsupportedLayer, match=words):
        verb(layer())


def test_wrong_options_and_inputs():
    with pytest.raises(ValueError, match="multiple of the number of groups, 2, got 3"):
        sll.sll(nn.Conv2d(4, 4, 1, groups=2), hidden=3)
    with pytest.raises(ValueError, match="positive number"):
        sll.sll(nn.Linear(2, 2), lipschitz=-1.0)
    with pytest.raises(ValueError, match=r"expected an input \(batch, 2, 2 spatial axes\)"):
        sll.sll(nn.Conv2d(2, 2, 3, padding=1))(torch.zeros(1, 3, 4, 4))
