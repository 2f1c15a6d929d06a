"""Norms other than 2, and monotone networks."""

import itertools
import math

import pytest
import torch
from torch import nn

import onelip
from onelip.methods import sum_norm

AXES = {"1": 0, "inf": 1, "1-inf": None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", AXES)
def test_sums_of_the_stored_weight_are_at_most_the_constant(norm, dtype):
    for scale in (1e-3, 1.0, 30.0):
        layer = nn.Linear(33, 57, dtype=dtype)
        nn.init.uniform_(layer.weight, -scale, scale)
        before = layer.weight.detach().clone()
        W = sum_norm(layer, norm=norm, lipschitz=0.3).weight.detach()
        exact = W.double().abs() if AXES[norm] is None else W.double().abs().sum(AXES[norm])
        assert exact.max() <= 0.3  # float64 sums of this type are exact, but for float64 itself: within its room
        assert scale > 1e-3 or torch.equal(W, before)
        assert scale < 30 or exact.max() > 0.3 * (1 - 8 * torch.finfo(dtype).eps - 1e-12)


def test_no_l2_constant_is_claimed():
    layer = nn.Linear(1, 16, bias=False)
    nn.init.ones_(layer.weight)
    model = onelip.constrain(nn.Sequential(layer), sum_norm)
    assert onelip.summary(model).constant is None
    assert 4 - 1e-5 < onelip.audit(onelip.bake(model).eval(), torch.zeros(2, 1)).upper < 4.001
    with pytest.raises(onelip.UnsupportedLayer, match="expected Linear"):
        sum_norm(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="expected norm to be '1', 'inf' or '1-inf', got 2"):
        sum_norm(nn.Linear(1, 1), norm=2)


def test_monotone_networks_are_monotone():
    torch.manual_seed(0)
    sizes, limit = [3, 16, 16, 2], 2.0
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), onelip.nn.MaxMin(-1))]
    network = nn.Sequential(*layers[:-1]).double()
    for i in (0, 2, 4):
        nn.init.normal_(network[i].weight, std=3.0)
        sum_norm(network[i], norm="inf" if i else "1-inf", lipschitz=limit ** (1 / 3))
    model = onelip.nn.Monotone(network, limit, signs=(1, -1, 0)).eval()
    x = torch.randn(200, 3, dtype=torch.float64)
    slopes = torch.func.vmap(torch.func.jacrev(model))(x)  # (points, outputs, inputs)
    assert (slopes[..., 0] >= 0).all()
    assert (slopes[..., 1] <= 0).all()
    assert slopes[..., 2].amin() < 0 < slopes[..., 2].amax()
    free = torch.func.vmap(torch.func.jacrev(network))(x).abs().amax()
    assert 0.05 * limit < free <= limit
    upper = onelip.audit(onelip.bake(model), x).upper
    assert upper is None or upper >= torch.linalg.matrix_norm(slopes, 2).max()
    with pytest.raises(ValueError, match="expected signs"):
        onelip.nn.Monotone(network, signs=(2,))
    with pytest.raises(ValueError, match="lipschitz"):
        onelip.nn.Monotone(network, math.nan)
