"""Björck's iteration: its formula, its rounding, its derivatives, where it ends."""

import pytest
import torch
from _orthogonal import DOUBLE, randn
from torch import nn
from torch.nn import functional as F

from onelip.core.parametrization import bound_by_construction
from onelip.methods import bjorck
from onelip.methods.orthogonal import steps as iteration
from onelip.methods.orthogonal.steps import bjorck_steps


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    bjorck(layer, steps=steps)
    constant = bound_by_construction(layer).constant
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
    G = iteration.symmetric_gram(X)
    torch.testing.assert_close(G, X.mT @ X, rtol=0, atol=1e-12)
    off_diagonal = G.triu(300)
    assert torch.equal(off_diagonal, G.tril(-300).mT)  # the same bits: multiplied out once


def test_stops_where_it_is_orthogonal(monkeypatch):
    Q = torch.linalg.qr(randn(20, 20)).Q[None]
    torch.testing.assert_close(bjorck_steps(Q, 50), Q, rtol=0, atol=1e-13)
    taken = []
    apply = iteration._Step.apply
    monkeypatch.setattr(iteration._Step, "apply", lambda *args: taken.append(args) or apply(*args))
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


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 12, 30])
@pytest.mark.parametrize("columns", [5, 70, 260])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_tall_matrices_miss_one_by_no_more_than_stated(steps, columns, spread):
    """Products in float32 for 70 columns, in float64 for others; singular values from 10^-spread to 1."""
    rows = 2 * columns + 1
    U, V = torch.linalg.qr(randn(rows, columns)).Q, torch.linalg.qr(randn(columns, columns)).Q
    M = (U * torch.logspace(-spread, 0, columns, dtype=torch.float64)) @ V.T
    W = bjorck_steps(M[None].float(), steps)[0]
    assert W.dtype == torch.float64
    assert torch.linalg.matrix_norm(W, 2) <= 1 + iteration.excess_of_steps(rows, columns)


@pytest.mark.parametrize(("shape", "function"), [((300, 70), "_Product"), ((96, 96), "_Step")])
def test_next_to_orthogonal_few_products_suffice(shape, function, monkeypatch):
    """A tenth of noise: four steps. A weaker bound of the norm would shrink the matrix and need two more."""
    noise = 0.1 * randn(*shape, dtype=torch.float32) / shape[0] ** 0.5
    M = torch.eye(*shape) + noise
    calls, kind = [], getattr(iteration, function)
    apply = kind.apply
    monkeypatch.setattr(kind, "apply", lambda *args: calls.append(args) or apply(*args))
    W = bjorck_steps(M[None], 12)[0]
    torch.testing.assert_close(W.T @ W, torch.eye(shape[1], dtype=torch.float64), rtol=0, atol=1e-6)
    assert len(calls) <= (1 if function == "_Product" else 4)


def test_bounds_on_gram_matrices():
    for shape in [(4, 4), (30, 20), (200, 100)]:
        for M in (randn(*shape), randn(*shape).abs(), torch.eye(*shape, dtype=torch.float64)):
            G = (M.T @ M)[None]
            norm = torch.linalg.matrix_norm(G, 2)
            assert norm * (1 - 1e-13) <= iteration._bound(G) <= iteration._simple_bound(G)


@pytest.mark.parametrize("size", [1.4e-45, 1e-42, 1e-38, 1e-22, 1e23, 1e38])
@pytest.mark.parametrize("steps", [1, 2, 12])
def test_tall_matrices_of_any_size_are_bounded_and_have_derivatives(size, steps):
    """The bounds of the norm take eighth powers: below 1e-41 those are out of the range of float64."""
    M = torch.stack([torch.full((128, 64), size), size * torch.outer(torch.arange(128) % 3, torch.ones(64))])
    norms = torch.linalg.matrix_norm(bjorck_steps(M, steps), 2)
    assert bool((norms <= 1 + iteration.excess_of_steps(128, 64)).all())
    assert bool((norms > 0.4).all())
    if 1e-38 <= size <= 1e23:
        P = (size * randn(1, 12, 5)).float().requires_grad_()
        exact = P.detach().double().requires_grad_()
        weights = randn(1, 12, 5)
        (gradient,) = torch.autograd.grad((bjorck_steps(P, steps) * weights).sum() * size, P)
        (wanted,) = torch.autograd.grad((bjorck_steps(exact, steps) * weights).sum() * size, exact)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
