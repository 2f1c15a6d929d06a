"""Orthogonal layers by matrices, against the formulas of their papers and against exact Jacobians."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onelip.export import NonFiniteWeight, bake
from onelip.geometry import UnsupportedLayer
from onelip.methods import _bjorck_steps, aoc, bcop, bjorck, cholesky, last_layer, oni, soc
from onelip.methods._bjorck_steps import bjorck_steps
from onelip.methods._block_kernels import grown
from onelip.methods._parametrization import claim_of, find_parametrization, original_of
from onelip.methods._skew import exponential, gain, skew_kernel, skew_norm_bound
from onelip.nn._base import UnknownLipschitzConstant
from onelip.testing import check_contract
from onelip.testing.norms import exact_jacobian

METHODS = [module.METHOD for module in (bjorck, oni, cholesky, bcop, aoc, soc, last_layer)]
DOUBLE = {"dtype": torch.float64}
CIRCULAR = {"padding_mode": "circular", **DOUBLE}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def values(layer, *size):
    channels = layer.in_channels if hasattr(layer, "in_channels") else layer.in_features
    return torch.linalg.svdvals(exact_jacobian(layer, (channels, *size)))


def randomised(layer):
    with torch.no_grad():
        original_of(layer).normal_()
    return layer


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("check", ["norm within claim", "gradients finite", "gradients right", "bakes"])
def test_contract(method, check):
    check_contract(method, checks=(check,), options={}, examples=0.08)


# ---- the iteration


def naive_bjorck(X, steps, scaling):
    G = X.T @ X
    a, n = G.trace() / len(G), len(G)
    rest = G - a * torch.eye(n, **DOUBLE)
    spread = ((1 - 1 / n) * rest.square().sum()).sqrt()
    R = rest @ rest
    bound = min(G.norm(), G.abs().sum(1).max(), a + spread, a + R.norm().sqrt(), a + R.abs().sum(1).max().sqrt())
    assert bound >= torch.linalg.matrix_norm(G, 2) * (1 - 1e-14)
    X = X / (G.norm() if scaling == "frobenius" else max(a, bound / 2)).sqrt()
    for _ in range(steps):
        X = 1.5 * X - 0.5 * X @ X.T @ X
    return X


@pytest.mark.parametrize("shape", [(5, 5), (12, 5), (15, 5), (6, 13), (1, 4)])
@pytest.mark.parametrize("steps", [1, 2, 4, 9])
@pytest.mark.parametrize("scaling", ["tight", "frobenius"])
def test_steps_are_those_of_the_formula(shape, steps, scaling):
    M = randn(*shape)
    tall = M if shape[0] >= shape[1] else M.T
    expected = naive_bjorck(tall, steps, scaling)
    expected = expected if shape[0] >= shape[1] else expected.T
    torch.testing.assert_close(bjorck_steps(M[None], steps, scaling)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["gaussian", "positive", "repeated", "diagonal"])
@pytest.mark.parametrize("shape", [(96, 96), (300, 70), (70, 200)])
@pytest.mark.parametrize("steps", [1, 5, 25])
def test_norm_with_float32_steps(kind, shape, steps):
    """Wide enough for steps in float32; what is stored never exceeds what is stated, whatever the rounding was."""
    M = randn(*shape, dtype=torch.float32)
    if kind == "positive":
        M = M.abs()
    elif kind == "repeated":
        M = M[:, :1].expand(shape) + 1e-6 * M
    elif kind == "diagonal":
        M = torch.diag_embed(torch.logspace(-6, 6, min(shape)))
        M = F.pad(M, (0, shape[1] - M.shape[1], 0, shape[0] - M.shape[0]))
    layer = nn.Linear(shape[1], shape[0])
    with torch.no_grad():
        layer.weight.copy_(M)
    bjorck.bjorck(layer, steps=steps)
    constant = claim_of(layer).constant
    assert 1 < constant < 1 + 1e-6
    assert torch.linalg.matrix_norm(layer.weight.double(), 2) <= constant


def test_converges_to_the_polar_factor():
    for shape in [(9, 9), (9, 4), (80, 80)]:
        M = torch.eye(*shape, dtype=torch.float64) + 0.02 * randn(*shape)
        U, _, Vh = torch.linalg.svd(M, full_matrices=False)
        torch.testing.assert_close(bjorck_steps(M[None], 30)[0], U @ Vh, rtol=0, atol=1e-12)
        torch.testing.assert_close(bjorck_steps(M[None].float(), 30)[0], U @ Vh, rtol=0, atol=1e-6)


def test_derivatives_where_steps_end_early():
    M = (torch.eye(6, dtype=torch.float64) + 0.02 * randn(6, 6))[None].requires_grad_()
    assert torch.autograd.gradcheck(lambda M: bjorck_steps(M, 30), M)
    assert torch.autograd.gradgradcheck(lambda M: bjorck_steps(M, 30), M)
    g = randn(1, 6, 6)
    (expected,) = torch.autograd.grad(bjorck_steps(M, 30), M, g)
    (found,) = torch.autograd.grad(bjorck_steps(M.float(), 30).double(), M, g)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_gram_matrix_of_half_of_the_blocks():
    X = randn(2, 30, 600)
    G = _bjorck_steps.symmetric_gram(X)
    torch.testing.assert_close(G, X.mT @ X, rtol=0, atol=1e-12)
    off_diagonal = G.triu(300)
    assert torch.equal(off_diagonal, G.tril(-300).mT)  # the same bits: multiplied out once


def test_stops_where_it_is_orthogonal(monkeypatch):
    Q = torch.linalg.qr(randn(20, 20)).Q[None]
    torch.testing.assert_close(bjorck_steps(Q, 50), Q, rtol=0, atol=1e-13)
    taken = []
    apply = _bjorck_steps._Step.apply
    monkeypatch.setattr(_bjorck_steps._Step, "apply", lambda *args: taken.append(args) or apply(*args))
    bjorck_steps(Q, 50)
    assert len(taken) == 1
    bjorck_steps(randn(1, 96, 96, dtype=torch.float32), 4)
    assert [dtype for _, _, dtype, _ in taken[1:]] == [torch.float32] * 3 + [torch.float64]  # what the bound rests on


@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 3, 7), (1, 9, 3)])
@pytest.mark.parametrize("scaling", ["tight", "frobenius"])
def test_derivatives_of_the_steps(shape, scaling):
    M = randn(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda M: bjorck_steps(M, 4, scaling), M)
    if M.numel() <= 16:
        assert torch.autograd.gradgradcheck(lambda M: bjorck_steps(M, 2, scaling), M)


def test_no_dependence_on_scale_and_zero_and_nan():
    M = randn(3, 6, 4, dtype=torch.float32)
    expected = bjorck_steps(M, 6)
    for exponent in (-130, -100, 100, 120):
        scaled = M * 2.0**exponent
        tolerance = 0.0 if exponent > -126 else 1e-5  # subnormal numbers are rounded
        torch.testing.assert_close(bjorck_steps(scaled, 6), expected, rtol=0, atol=tolerance)
    mixed = torch.stack([M[0], torch.zeros(6, 4), torch.full((6, 4), torch.nan), M[1]])
    result = bjorck_steps(mixed, 6)
    assert torch.equal(result[[0, 3]], expected[:2])
    assert not result[1].any()
    assert result[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lipschitz", [1.0, 1e-3, 7.0])
@pytest.mark.parametrize("verb", [bjorck.bjorck, cholesky.cholesky, bcop.bcop, aoc.aoc, soc.soc])
def test_stored_weights_never_exceed_the_stated_constant(verb, dtype, lipschitz):
    layer = verb(nn.Linear(24, 24, bias=False, dtype=dtype), lipschitz=lipschitz)
    assert torch.linalg.matrix_norm(layer.weight.double(), 2) <= claim_of(layer).constant
    assert claim_of(layer).constant <= lipschitz * (1 + 8 * torch.finfo(dtype).eps) * (1 + 1e-6) + 1e-4 * (
        dtype == torch.float16
    )


# ---- reshaped kernels


def test_the_factor_of_reshaped_kernels_is_needed():
    """A constant kernel attains it: all of the norm 1 is used, and without the factor it would be 3."""
    layer = nn.Conv2d(1, 1, 3, padding=1, **CIRCULAR)
    nn.init.ones_(layer.weight)
    bjorck.bjorck(layer)
    torch.testing.assert_close(values(layer, 5, 5).max(), torch.tensor(1.0, **DOUBLE), rtol=0, atol=1e-14)
    assert "sqrt(9)" in find_parametrization(layer).describe()


def test_reshaped_kernels_start_as_the_identity_divided_by_the_root_of_the_taps():
    layer = bjorck.bjorck(nn.Conv2d(4, 4, 3, padding=1, bias=False, **CIRCULAR))
    find_parametrization(layer).reset(original_of(layer))
    x = randn(1, 4, 5, 5)
    torch.testing.assert_close(layer(x), x / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("verb", [bjorck.bjorck, oni.oni, cholesky.cholesky, bcop.bcop, aoc.aoc, soc.soc])
def test_windows_that_do_not_overlap_are_orthogonal(verb):
    steps = {} if verb in (cholesky.cholesky, soc.soc) else {"steps": 40}
    layer = verb(nn.Conv2d(2, 8, 2, stride=2, **DOUBLE), **steps)
    found = values(randomised(layer), 4, 4)
    room = {cholesky.cholesky: 0.2, soc.soc: 0.02}.get(verb, 1e-12)
    assert found.max() <= claim_of(layer).constant
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
    torch.testing.assert_close(oni.oni(layer).weight, B @ Z / size.sqrt(), rtol=0, atol=1e-13)


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
    W = cholesky.cholesky(layer, relative=1e-2).weight
    W = W if shape[0] <= shape[1] else W.T
    torch.testing.assert_close(W, expected, rtol=0, atol=1e-13)
    inverse = torch.linalg.inv(C)
    torch.testing.assert_close(W @ W.T, torch.eye(4, **DOUBLE) - e * inverse @ inverse.T, rtol=0, atol=1e-13)


# ---- BCOP and AOC


def block_convolution(A, B):
    """(A * B)[i, j] = sum of A[a, b] B[i - a, j - b], kernels (h, w, c, c)."""
    result = torch.zeros(A.shape[0] + B.shape[0] - 1, A.shape[1] + B.shape[1] - 1, A.shape[2], B.shape[3], **DOUBLE)
    for a in range(A.shape[0]):
        for b in range(A.shape[1]):
            result[a : a + B.shape[0], b : b + B.shape[1]] += A[a, b] @ B
    return result


def test_bcop_is_the_block_convolution_of_its_paper():
    c = 4
    layer = randomised(bcop.bcop(nn.Conv2d(c, c, 3, **DOUBLE), steps=40))
    P = original_of(layer).detach()[0]
    H = bjorck_steps(P[:, :c].T[None], 40)[0]
    V = [bjorck_steps(P[:, c + 2 * i : c + 2 * i + 2][None], 40)[0] for i in range(4)]
    projections = [v @ v.T for v in V]
    one = torch.eye(c, **DOUBLE)
    kernel = H[None, None]
    for down, across in (projections[:2], projections[2:]):
        rows = [torch.stack([half @ across, half @ (one - across)]) for half in (down, one - down)]
        kernel = block_convolution(kernel, torch.stack(rows))
    torch.testing.assert_close(layer.weight, kernel.permute(2, 3, 0, 1), rtol=0, atol=1e-12)


ORTHOGONAL = [
    (bcop.bcop, nn.Conv2d(4, 4, 3, padding=1, **CIRCULAR), (5, 6), None),
    (bcop.bcop, nn.Conv2d(3, 5, 3, padding=1, **CIRCULAR), (4, 6), None),
    (bcop.bcop, nn.Conv2d(5, 3, 3, padding=1, **CIRCULAR), (4, 6), None),
    (bcop.bcop, nn.Conv2d(4, 4, 2, padding=1, **DOUBLE), (5, 4), None),
    (bcop.bcop, nn.Conv1d(3, 3, 5, padding=4, **DOUBLE), (7,), None),
    (bcop.bcop, nn.Conv3d(2, 2, (3, 2, 1), padding=(2, 1, 0), **DOUBLE), (3, 3, 2), None),
    (bcop.bcop, nn.Conv2d(2, 8, 4, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc.aoc, nn.Conv2d(2, 8, 3, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc.aoc, nn.Conv2d(4, 8, 3, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc.aoc, nn.Conv1d(2, 9, 5, stride=2, padding=2, **CIRCULAR), (8,), 8),
    (aoc.aoc, nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2, **CIRCULAR), (6, 6), None),
    (aoc.aoc, nn.ConvTranspose2d(8, 2, 3, stride=2, **DOUBLE), (3, 3), None),
    (aoc.aoc, nn.ConvTranspose1d(6, 4, 5, stride=2, dilation=3, groups=2, **DOUBLE), (4,), None),
]


@pytest.mark.parametrize(("verb", "layer", "size", "promised"), ORTHOGONAL, ids=range(len(ORTHOGONAL)))
def test_every_singular_value_is_one(verb, layer, size, promised):
    layer = randomised(verb(layer, steps=60, input_size=promised))
    found = values(layer, *size)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-12)
    assert found.max() <= claim_of(layer).constant + 1e-14  # of the singular values' own rounding


def test_same_zero_padding_is_not_isometric_but_sound():
    layer = randomised(bcop.bcop(nn.Conv2d(4, 4, 3, padding=1, **DOUBLE), steps=60))
    found = values(layer, 6, 6)
    assert found.max() <= claim_of(layer).constant
    assert found.min() < 0.5


@pytest.mark.parametrize("size", [0.0, 0.3, 0.9, 1.0])
def test_a_factor_needs_no_projection(size):
    """P + (I - P) z has norm at most 1 for any V of norm at most 1, and not beyond."""

    def norm(length):
        V = length * torch.linalg.qr(randn(4, 2)).Q
        kernel = grown(torch.eye(4, **DOUBLE)[None, :, None], V[None], 0)[0].permute(0, 2, 1)
        z = torch.exp(2j * math.pi * torch.arange(16, **DOUBLE) / 16)
        return max(float(torch.linalg.matrix_norm(kernel[..., 0] + kernel[..., 1] * w, 2)) for w in z)

    assert norm(size) <= 1 + 1e-14
    assert norm(1.1) > 1.1


def test_aoc_is_two_convolutions():
    layer = randomised(aoc.aoc(nn.Conv2d(3, 8, 5, stride=2, padding=3, bias=False, **DOUBLE)))
    P = original_of(layer).detach()
    R, Vs = find_parametrization(layer)._split(P)
    R = bjorck_steps(R, 12).reshape(8, 2, 2, 3).permute(0, 3, 1, 2)
    inner = torch.eye(3, **DOUBLE)[None, :, None, None]
    for (axis, _), V in zip(find_parametrization(layer).factors, Vs, strict=True):
        inner = grown(inner, bjorck_steps(V, 12), axis)
    inner = inner[0].permute(0, 3, 1, 2)
    x = randn(2, 3, 8, 8)
    expected = F.conv2d(F.conv2d(x, inner, padding=3), R, stride=2)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("verb", [bcop.bcop, aoc.aoc])
def test_starts_as_one_matrix_in_the_middle(verb):
    layer = nn.Conv2d(5, 5, (3, 5), padding=(1, 2), **DOUBLE)
    U, _, Vh = torch.linalg.svd(layer.weight.detach().sum((2, 3)))
    verb(layer)
    expected = torch.zeros_like(layer.weight)
    expected[:, :, 1, 2] = U @ Vh
    torch.testing.assert_close(layer.weight, expected, rtol=0, atol=1e-12)
    find_parametrization(layer).reset(original_of(layer))
    x = randn(1, 5, 6, 6)
    torch.testing.assert_close(layer(x) - layer.bias[:, None, None], x, rtol=0, atol=1e-12)
    layer(x).square().sum().backward()
    assert original_of(layer).grad.flatten(0, 1)[:, 5:].any()  # the factors do learn from there


@pytest.mark.parametrize("size", [2, 4])
def test_strided_layers_keep_an_orthogonal_weight_in_their_middle(size):
    layer = nn.Conv2d(2, 8, size, stride=2, **DOUBLE)
    weight = torch.zeros_like(layer.weight)
    middle = slice((size - 2) // 2, (size + 2) // 2)
    weight[:, :, middle, middle] = torch.linalg.qr(randn(8, 8)).Q.reshape(8, 2, 2, 2)
    aoc.aoc(layer)
    layer.weight = weight
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=1e-12)


def test_refusals_of_block_kernels():
    with pytest.raises(UnsupportedLayer, match=r"multiple of the stride, got kernel size \(3, 3\).*use aoc"):
        bcop.bcop(nn.Conv2d(4, 4, 3, stride=2))
    for verb in (bcop.bcop, aoc.aoc):
        with pytest.raises(UnsupportedLayer, match="expected at least 2 channels"):
            verb(nn.Conv2d(1, 1, 3))
        with pytest.raises(UnsupportedLayer, match="at least 2 channels"):
            verb(nn.Conv2d(4, 4, 3, groups=4))
        with pytest.raises(UnsupportedLayer, match="zero or circular padding"):
            verb(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))
        verb(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="expected a weight of shape"):
        find_parametrization(bcop.bcop(nn.Conv2d(4, 4, 3))).right_inverse(torch.zeros(4, 4))


def test_cutting_taps_off_would_be_wrong():
    """Why BCOP refuses kernel 3 with stride 2: a kernel of size 4 without its last taps can have a norm above 1."""
    worst = 0.0
    for _ in range(20):
        layer = randomised(bcop.bcop(nn.Conv1d(2, 2, 4, stride=2, bias=False, **DOUBLE), steps=40))
        cut = nn.Conv1d(2, 2, 3, stride=2, bias=False, **DOUBLE)
        with torch.no_grad():
            cut.weight.copy_(layer.weight[..., :3])
        worst = max(worst, float(values(cut, 21).max()))
    assert worst > 1.05


# ---- SOC


def jacobian_of_kernel(layer, *size):
    """The Jacobian of one application of the skew kernel, by torch's own convolution."""
    weight = layer.weight.detach()
    convolution = getattr(nn, f"Conv{len(size)}d")
    padding = [d * (k // 2) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    plain = convolution(
        weight.shape[0],
        weight.shape[0],
        layer.kernel_size,
        padding=padding,
        dilation=layer.dilation,
        groups=layer.groups,
        padding_mode=layer.padding_mode,
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
    module = soc.soc(layer, terms=terms)
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
        module = bake(soc.soc(nn.Conv2d(6, 6, 3, padding=1, groups=groups, padding_mode="circular")))
        kernel = module.weight.detach().unflatten(0, (groups, -1))
        bound = skew_norm_bound(kernel)
        norm = float(torch.linalg.matrix_norm(jacobian_of_kernel(module, 6, 6), 2))
        assert norm <= bound <= 2.01
        assert skew_norm_bound(kernel * 2.0**-500) >= norm * 2.0**-500
        assert skew_norm_bound(kernel * 0) <= 1e-29
        assert skew_norm_bound(kernel + 1e-3) == math.inf
        assert skew_norm_bound(kernel * torch.nan) == math.inf


def test_a_baked_soc_vouches_for_what_is_stored():
    module = bake(soc.soc(nn.Conv2d(4, 4, 3, padding=1)))
    assert module.lipschitz_constant == 1.0
    with torch.no_grad():
        module.weight.mul_(1.8)
    found = float(values(module, 5, 5).max())
    assert 1.0 < module.lipschitz_constant < 5
    assert found <= module.lipschitz_constant
    with torch.no_grad():
        module.weight[0, 0, 0, 0] += 1
    with pytest.raises(UnknownLipschitzConstant, match="skew kernel"):
        _ = module.lipschitz_constant


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
    module = soc.soc(layer)
    assert module(randn(1, layer.in_channels, *size)).shape == expected == (1, *shape)
    found = values(module, *size)
    assert found.max() <= 1.0
    assert found.max() > 0.9


def test_refusals_of_soc():
    for layer, message in [
        (nn.Conv2d(4, 4, 3), "expected padding that keeps the size .* 1 on both sides"),
        (nn.Conv2d(4, 4, 2, padding="same"), "expected odd kernel sizes"),
        (nn.Conv2d(4, 4, 3, stride=2, padding=2, dilation=2), "expected dilation with stride 1 only"),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), "expected Conv1d, Conv2d or Conv3d"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"), "zero or circular padding"),
    ]:
        with pytest.raises(UnsupportedLayer, match=message):
            soc.soc(layer)
    module = soc.soc(nn.Conv2d(4, 4, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"multiple of the stride \(2, 2\), got \(5, 6\)"):
        module(torch.zeros(1, 4, 5, 6))
    with pytest.raises(ValueError, match="expected an input"):
        module(torch.zeros(1, 3, 6, 6))


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
    constant = claim_of(layer).constant
    assert math.sqrt(5) <= constant <= math.sqrt(5) * (1 + 1e-6)


def test_unit_rows_are_not_1_lipschitz():
    layer = nn.Linear(4, 9, **DOUBLE)
    nn.init.ones_(layer.weight)
    norm = torch.linalg.matrix_norm(last_layer.lln(layer).weight, 2)
    assert 3 - 1e-12 <= norm <= claim_of(layer).constant


def test_pair_distances_are_rounded_up():
    rows = torch.randint(-5, 6, (7, 11)).double() / 8
    found = last_layer.pair_distances(rows)
    torch.testing.assert_close(found, torch.cdist(rows, rows))
    for i in range(7):
        for j in range(7):
            pairs = zip(rows[i].tolist(), rows[j].tolist(), strict=True)
            square = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs)
            assert Fraction(float(found[i, j])) ** 2 >= square
    assert last_layer.pair_distances(rows * torch.nan).isnan().all()


def test_normalise_the_last_layer_of_a_model():
    model = nn.Sequential(bjorck.bjorck(nn.Linear(4, 4)), nn.ReLU(), bjorck.bjorck(nn.Linear(4, 6)))
    assert last_layer.normalise_last_layer(model) is model
    assert isinstance(find_parametrization(model[2]), last_layer.UnitRows)
    assert isinstance(find_parametrization(model[0]), bjorck.Bjorck)
    with pytest.raises(UnsupportedLayer, match="Linear layer at its end"):
        last_layer.normalise_last_layer(nn.Conv2d(1, 1, 1))
    with pytest.raises(UnsupportedLayer, match="last Linear layer"):
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
    ("verb", "options", "message"),
    [
        (bjorck.bjorck, {"steps": 0}, "steps to be a whole number"),
        (oni.oni, {"steps": True}, "steps to be a whole number"),
        (bcop.bcop, {"steps": 2.0}, "steps to be a whole number"),
        (cholesky.cholesky, {"relative": 0.0}, "relative to be a number"),
        (cholesky.cholesky, {"relative": math.nan}, "relative to be a number"),
        (soc.soc, {"terms": 0}, "terms to be a whole number"),
        (soc.soc, {"norm": math.inf}, "norm to be a number"),
        (aoc.aoc, {"lipschitz": 0}, "lipschitz to be a positive number"),
    ],
)
def test_wrong_options(verb, options, message):
    with pytest.raises(ValueError, match=message):
        verb(nn.Linear(3, 3), **options)
