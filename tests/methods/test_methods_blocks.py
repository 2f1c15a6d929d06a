"""SLL, CPL and the other residual layers: against their published formulas, and their constants at tolerance zero."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from onelip.bounds import bound_weight
from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.core.parametrization import find_parametrization, original_of
from onelip.methods import LinearResidual, cpl, liresnet, sandwich, sll
from onelip.methods.registry import METHODS as METHODS_BY_NAME
from onelip.methods.residual import ConvexPotential
from onelip.models import create_model
from onelip.testing.norms import exact_norm

METHODS = [METHODS_BY_NAME[name] for name in ("sll", "cpl", "sandwich", "liresnet")]
RESIDUAL = [sll, cpl]
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, **DOUBLE)


def jacobian(layer, x):
    return torch.autograd.functional.jacobian(layer, x).reshape(-1, x.numel())


# ---- the formulas


def test_sll_is_the_published_layer():
    layer = sll(nn.Linear(3, 3, **DOUBLE), hidden=5)
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
    layer = sll(nn.Conv2d(3, 3, 3, padding=1, **DOUBLE))
    before = layer.weight.detach()
    with torch.no_grad():
        find_parametrization(layer).log_q[0, 0] = 2.0
    assert (layer.weight - before).abs().max() > 1e-3
    layer(randn(1, 3, 5, 5)).square().sum().backward()
    assert find_parametrization(layer).log_q.grad.abs().max() > 1e-6


def test_cpl_is_the_published_layer_where_the_bound_is_the_norm():
    layer = cpl(nn.Linear(4, 4, **DOUBLE)).eval()
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
    assert block.convolution is not None
    forth, back = block.convolution(x, inner.weight), block.convolution.adjoint(h, inner.weight)
    torch.testing.assert_close(forth, inner(x))
    torch.testing.assert_close((forth * h).sum(), (x * back).sum())


# ---- constants


@pytest.mark.parametrize("apply", RESIDUAL)
def test_the_constant_of_a_baked_layer_comes_from_what_is_stored(apply):
    plain = bake(apply(nn.Conv2d(2, 2, 3, padding=1), hidden=3).eval())
    assert isinstance(plain, ConvexPotential)
    assert list(plain.state_dict()) == ["weight", "bias"]
    norm = bound_weight(plain.weight.detach(), plain.geometry, effort="high").value
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
    block = sll(nn.Linear(2, 2))
    nn.utils.parametrize.register_parametrization(block, "weight", nn.Identity())
    assert block.lipschitz_constant is None
    assert block.bound().why == "no parametrization that bounds its weight"
    broken = ConvexPotential(nn.Linear(2, 2))
    with torch.no_grad():
        broken.weight.fill_(math.nan)
    assert broken.lipschitz_constant is None
    assert "NaN" in broken.bound().why


# ---- Sandwich


def test_sandwich_is_the_published_formula():
    layer = sandwich(nn.Linear(4, 3, **DOUBLE), lipschitz=2.0)
    P, x = layer.weight.detach(), randn(5, 4)
    A, B = P[:, :3], P[:, 3:]
    torch.testing.assert_close(A @ A.T + B @ B.T, torch.eye(3, **DOUBLE))
    S, b = randn(3).exp(), randn(3)
    with torch.no_grad():
        layer.bias.copy_(S * b)
    published = math.sqrt(2) * (S * F.relu(math.sqrt(2) * x @ B.T / S + b)) @ A
    torch.testing.assert_close(layer(x), 2 * published)


@pytest.mark.parametrize("size", [(4, 4), (3, 5)])
def test_sandwich_convolutions_are_two_convolutions_with_relu_between(size):
    layer = sandwich(nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular", **DOUBLE), input_size=size, hidden=4).eval()
    assert layer(randn(2, 3, *size)).shape == (2, 2, *size)
    for scale in (0.1, 10.0):
        norm = torch.linalg.matrix_norm(jacobian(layer, scale * randn(1, 3, *size)), 2)
        assert norm <= layer.lipschitz_constant <= 1 + 1e-9
    plain = parametrize.remove_parametrizations(layer, "weight")
    assert plain.lipschitz_constant <= 1 + 1e-6
    with torch.no_grad():
        plain.weight.mul_(3)
    assert 9 <= plain.lipschitz_constant <= 9.001
    assert float(torch.linalg.matrix_norm(jacobian(plain, randn(1, 3, *size)), 2)) > 2


def test_the_bound_of_sandwich_is_attained():
    layer = parametrize.remove_parametrizations(sandwich(nn.Linear(1, 1, bias=False, **DOUBLE)), "weight")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 2.0]]))  # c^2 = 8, and 2 A B = 8
    assert float(jacobian(layer, torch.ones(1, 1, **DOUBLE))) == pytest.approx(8.0, rel=1e-15)
    assert 8 <= layer.lipschitz_constant <= 8 * (1 + 1e-8)


def test_sandwich_refuses():
    with pytest.raises(UnsupportedLayer, match="padding_mode='circular'"):
        sandwich(nn.Conv2d(2, 2, 3, padding=1), input_size=4)
    with pytest.raises(UnsupportedLayer, match="groups=1"):
        sandwich(nn.Conv2d(2, 2, 1, groups=2))
    with pytest.raises(ValueError, match="from 1 to 5, got 6"):
        sandwich(nn.Linear(3, 2), hidden=6)
    layer = sandwich(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), input_size=4)
    with pytest.raises(ValueError, match=r"expected an input with 2 channels and spatial size \(4, 4\)"):
        layer(torch.zeros(1, 2, 5, 4))


# ---- LiResNet


@pytest.mark.parametrize("groups", [1, 2])
def test_liresnet_is_a_residual_layer_in_one_kernel(groups):
    settings = {"padding": 1, "groups": groups, "bias": False, **DOUBLE}
    layer = liresnet(nn.Conv2d(4, 4, 3, **settings), depth=9, input_size=5)
    found, K, x = find_parametrization(layer), original_of(layer), randn(2, 4, 5, 5)
    with torch.no_grad():
        found.gamma.fill_(1.5)
    torch.testing.assert_close(layer(x), x + 1.5 / 3 * F.conv2d(x, K, padding=1, groups=groups))
    layer(x).square().sum().backward()
    assert found.gamma.grad is not None
    plain = bake(layer)
    assert type(plain) is nn.Conv2d
    torch.testing.assert_close(plain(x), layer(x))


def test_liresnet_follows_the_norm_of_the_whole_kernel():
    plain = nn.Conv2d(3, 3, 3, padding=1, **DOUBLE)
    with torch.no_grad():
        plain.weight.abs_()  # one singular value far above the rest
    layer = liresnet(plain, iterations=30, input_size=6)
    estimate = find_parametrization(layer).estimated_constant(original_of(layer))
    assert float(estimate.detach()) == pytest.approx(exact_norm(layer, (3, 6, 6)), rel=1e-6)
    assert find_parametrization(layer).constant_in(torch.float64) is None
    other = liresnet(nn.Conv2d(3, 4, 3, padding=1))
    assert not isinstance(find_parametrization(other), LinearResidual)
    with pytest.raises(ValueError, match="expected depth"):
        liresnet(nn.Conv2d(3, 3, 3, padding=1), depth=0)


# ---- refusals, and whole networks


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_models_of_the_paper_can_have_them(method, monkeypatch):
    monkeypatch.setitem(METHODS_BY_NAME, method.name, method)
    model = create_model("patchwise-tiny", method=method.name, image_size=8, num_classes=4)
    x = torch.rand(2, 3, 8, 8)
    assert not torch.allclose(model(x[:1]), model(x[1:]))
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("apply", RESIDUAL)
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
def test_refusals(apply, layer, words):
    with pytest.raises(UnsupportedLayer, match=words):
        apply(layer())


def test_wrong_options_and_inputs():
    with pytest.raises(ValueError, match="multiple of the number of groups, 2, got 3"):
        sll(nn.Conv2d(4, 4, 1, groups=2), hidden=3)
    with pytest.raises(ValueError, match="positive number"):
        sll(nn.Linear(2, 2), lipschitz=-1.0)
    with pytest.raises(ValueError, match=r"expected an input \(batch, 2, 2 spatial axes\)"):
        sll(nn.Conv2d(2, 2, 3, padding=1))(torch.zeros(1, 3, 4, 4))
