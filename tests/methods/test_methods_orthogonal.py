"""Orthogonal layers by matrices, against the formulas of their papers and against exact Jacobians."""

import copy
import math

import pytest
import torch
from _orthogonal import CIRCULAR, DOUBLE, randn, randomised, values
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import NonFiniteWeight, UnsupportedLayer
from onelip.core.parametrization import bound_by_construction, find_parametrization, original_of
from onelip.methods import aoc, bcop, bjorck, cholesky, get_method, last_layer, oni, soc

METHODS = [get_method(name) for name in ("bjorck", "oni", "cholesky", "bcop", "aoc", "soc", "lln")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lipschitz", [1.0, 1e-3, 7.0])
@pytest.mark.parametrize("apply", [bjorck, cholesky, bcop, aoc, soc])
def test_stored_weights_never_exceed_the_stated_constant(apply, dtype, lipschitz):
    layer = apply(nn.Linear(24, 24, bias=False, dtype=dtype), lipschitz=lipschitz)
    assert torch.linalg.matrix_norm(layer.weight.double(), 2) <= bound_by_construction(layer).constant
    assert bound_by_construction(layer).constant <= lipschitz * (1 + 8 * torch.finfo(dtype).eps) * (1 + 1e-6) + 1e-4 * (
        dtype == torch.float16
    )


# ---- reshaped kernels


def test_the_factor_of_reshaped_kernels_is_needed():
    """A constant kernel attains it: all of the norm 1 is used, and without the factor it would be 3."""
    layer = nn.Conv2d(1, 1, 3, padding=1, **CIRCULAR)
    nn.init.ones_(layer.weight)
    bjorck(layer)
    torch.testing.assert_close(values(layer, 5, 5).max(), torch.tensor(1.0, **DOUBLE), rtol=0, atol=1e-14)
    assert "sqrt(9)" in find_parametrization(layer).describe()


def test_reshaped_kernels_start_as_the_identity_divided_by_the_root_of_the_taps():
    layer = bjorck(nn.Conv2d(4, 4, 3, padding=1, bias=False, **CIRCULAR))
    find_parametrization(layer).reset(original_of(layer))
    x = randn(1, 4, 5, 5)
    torch.testing.assert_close(layer(x), x / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("apply", [bjorck, oni, cholesky, aoc])
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1), (3, 3)),
        (nn.ConvTranspose1d(2, 3, 5, stride=2, **DOUBLE), (6,)),
        (nn.ConvTranspose1d(4, 6, 5, stride=4, groups=2, dilation=2, **DOUBLE), (6,)),
        (nn.ConvTranspose2d(3, 2, (3, 5), stride=(2, 3), **DOUBLE), (4, 3)),
        (nn.ConvTranspose3d(2, 2, (1, 3, 2), stride=(1, 2, 2), **DOUBLE), (2, 3, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_transposed_kernels_that_are_no_multiple_of_the_stride(apply, layer, size):
    """Phases without all taps: single entries of an orthogonal matrix must not be dropped. Norms were up to 1.24."""
    layer = apply(copy.deepcopy(layer))
    for fill in (nn.init.ones_, nn.init.normal_, lambda P: nn.init.normal_(P[:, :1]).expand_as(P)):
        with torch.no_grad():
            P = original_of(layer)
            P.copy_(fill(P.clone()))
        assert values(layer, *size).max() <= bound_by_construction(layer).constant


@pytest.mark.parametrize("apply", [bjorck, oni, cholesky, bcop, aoc, soc])
def test_windows_that_do_not_overlap_are_orthogonal(apply):
    steps = {} if apply in (cholesky, soc) else {"steps": 40}
    layer = apply(nn.Conv2d(2, 8, 2, stride=2, **DOUBLE), **steps)
    found = values(randomised(layer), 4, 4)
    room = {cholesky: 0.2, soc: 0.02}.get(apply, 1e-12)
    assert found.max() <= bound_by_construction(layer).constant
    assert found.min() > 1 - room


# ---- ONI, Cholesky


def test_oni_is_newtons_iteration():
    Z = randn(4, 9)
    S = Z @ Z.T
    size = S.norm()
    B = torch.eye(4, **DOUBLE)
    for _ in range(5):
        B = 1.5 * B - 0.5 * B @ B @ B @ S / size
    layer = nn.Linear(9, 4, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(Z)
    torch.testing.assert_close(oni(layer).weight, B @ Z / size.sqrt(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_cholesky_is_its_formula(shape):
    X = randn(*shape)
    wide = X if shape[0] <= shape[1] else X.T
    S = wide @ wide.T
    e = 1e-2 * S.diagonal().mean()
    C = torch.linalg.cholesky(S + e * torch.eye(4, **DOUBLE))
    expected = torch.linalg.inv(C) @ wide
    layer = nn.Linear(shape[1], shape[0], **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(X)
    W = cholesky(layer, relative=1e-2).weight
    W = W if shape[0] <= shape[1] else W.T
    torch.testing.assert_close(W, expected, rtol=0, atol=1e-13)
    inverse = torch.linalg.inv(C)
    torch.testing.assert_close(W @ W.T, torch.eye(4, **DOUBLE) - e * inverse @ inverse.T, rtol=0, atol=1e-13)


# ---- last-layer normalisation


def test_rows_of_length_one():
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        layer.weight[1] = 0
        layer.weight[2] *= 1e-30
        layer.weight[3] *= 1e30
    W = last_layer.lln(layer).weight
    assert not W[1].any()
    torch.testing.assert_close(W.norm(dim=1)[[0, 2, 3, 4]], torch.ones(4))
    constant = bound_by_construction(layer).constant
    assert math.sqrt(5) <= constant <= math.sqrt(5) * (1 + 1e-6)


def test_unit_rows_are_not_1_lipschitz():
    layer = nn.Linear(4, 9, **DOUBLE)
    nn.init.ones_(layer.weight)
    norm = torch.linalg.matrix_norm(last_layer.lln(layer).weight, 2)
    assert 3 - 1e-12 <= norm <= bound_by_construction(layer).constant


def test_rows_of_convolutions_are_not_normalised():
    with pytest.raises(UnsupportedLayer, match="expected Linear for last-layer normalisation, got Conv2d"):
        last_layer.lln(nn.Conv2d(1, 1, 1))


# ---- all


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_nan_is_never_turned_into_a_number(method):
    layer = nn.Linear(3, 3) if method.name == "lln" else nn.Conv2d(3, 3, 3, padding=1)
    made = method.apply(layer)
    with torch.no_grad():
        next(p for name, p in made.named_parameters() if "original" in name).view(-1)[0] = torch.inf
    with pytest.raises(NonFiniteWeight):
        bake(made)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_models_without_memory_can_be_asked(method):
    layer = nn.Linear(3, 3, device="meta")
    assert method.apply(layer) is layer


@pytest.mark.parametrize(
    ("apply", "options", "message"),
    [
        (bjorck, {"steps": 0}, "steps to be an integer"),
        (oni, {"steps": True}, "steps to be an integer"),
        (bcop, {"steps": 2.0}, "steps to be an integer"),
        (cholesky, {"relative": 0.0}, "relative to be a number"),
        (cholesky, {"relative": math.nan}, "relative to be a number"),
        (soc, {"terms": 0}, "terms to be an integer"),
        (soc, {"norm": math.inf}, "norm to be a number"),
        (aoc, {"lipschitz": 0}, "lipschitz to be a positive number"),
    ],
)
def test_wrong_options(apply, options, message):
    with pytest.raises(ValueError, match=message):
        apply(nn.Linear(3, 3), **options)
