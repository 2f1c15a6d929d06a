"""Row sums of the Gram operator and their derivatives, against explicit formulas."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from onelip.core.floats import power_of_two
from onelip.core.modes import rounding_room
from onelip.gram.products import absolute_row_sums, self_correlation
from onelip.gram.rescale import one_step, perron_vector, rescaled

SHAPES = [
    (1, 4, 5),
    (2, 3, 4),
    (1, 3, 4, 3),
    (2, 3, 2, 2, 3),
    (1, 2, 3, 3, 2, 2),
    (1, 4, 3, 1, 1),
    (1, 4, 3, 1, 3),
    (3, 1, 1, 3),
]


def explicit_gram(P):
    """Dense matrix of P^T P on a periodic grid too large for wrapping: entry by entry what the bound is about."""
    g, _, C, *taps = P.shape
    G = torch.zeros(g, C, C, *(2 * k - 1 for k in taps), dtype=P.dtype)
    for delta in (
        torch.cartesian_prod(*(torch.arange(2 * k - 1) for k in taps)).reshape(-1, len(taps)) if taps else [[]]
    ):
        low = [max(0, int(d) - k + 1) for d, k in zip(delta, taps, strict=True)]
        high = [min(k, int(d) + 1) for d, k in zip(delta, taps, strict=True)]
        shifted = P[(..., *(slice(a, b) for a, b in zip(low, high, strict=True)))]
        base = P[(..., *(slice(k - b, k - a) for a, b, k in zip(low, high, taps, strict=True)))]
        G[(..., *(int(d) for d in delta))] = torch.einsum(
            "grat,grct->gac", shifted.reshape(*P.shape[:3], -1), base.reshape(*P.shape[:3], -1)
        )
    return G


@pytest.mark.parametrize("shape", SHAPES)
def test_row_sums(shape):
    P = torch.randn(shape, dtype=torch.float64)
    w = torch.rand(shape[0], shape[2], dtype=torch.float64)
    T = explicit_gram(P).abs().flatten(3).sum(3) if len(shape) > 3 else (P.mT @ P).abs()
    assert torch.allclose(absolute_row_sums(P, w), (T @ w[:, :, None]).squeeze(-1))
    assert torch.allclose(self_correlation(P), explicit_gram(P))


@pytest.mark.parametrize("columns", [1, 127, 128, 300, 1100])
def test_row_sums_in_blocks(columns):
    P = torch.randn(1, 20, columns, dtype=torch.float64, requires_grad=True)
    g = torch.randn(1, columns, dtype=torch.float64)
    ours = torch.autograd.grad(absolute_row_sums(P), P, g)[0]
    naive = torch.autograd.grad((P.mT @ P).abs().sum(1), P, g)[0]
    assert torch.allclose(ours, naive)


@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_of_row_sums(shape):
    P = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.rand(shape[0], shape[2], dtype=torch.float64)
    assert gradcheck(lambda P: absolute_row_sums(P, w), P)
    assert gradgradcheck(lambda P: absolute_row_sums(P, w), P)


@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_of_the_rescaling(shape):
    P = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    log_q = torch.randn(shape[0], shape[2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(rescaled, P)
    assert gradgradcheck(rescaled, P)
    assert gradcheck(lambda P, log_q: rescaled(P, log_q=log_q), (P, log_q))


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 3, 2, 2), (1, 2, 2, 2, 2)])
def test_derivatives_of_more_steps(shape, steps):
    P = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    log_q = torch.randn(shape[0], shape[2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda P, log_q: rescaled(P, steps=steps, log_q=log_q), (P, log_q))
    assert gradgradcheck(lambda P: rescaled(P, steps=steps), P)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 200, 300)])
def test_fused_function_is_the_written_out_one(shape):
    P = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(rescaled(P), one_step(P))
    fused, written = (torch.autograd.grad(f(P), P, g)[0] for f in (rescaled, one_step))
    assert torch.allclose(fused, written, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_more_steps_formula(steps):
    """W = P diag(sum_j |(P^T P)^m|)^(-1/2m), computed with matrix powers."""
    P = torch.randn(20, 30, dtype=torch.float64)
    m = 2 ** (steps - 1)
    sums = torch.linalg.matrix_power(P.T @ P, m).abs().sum(1)
    expected = P * sums ** (-0.5 / m)
    assert torch.allclose(rescaled(P[None], steps=steps)[0], expected, rtol=1e-10)


def test_more_steps_are_tighter():
    torch.manual_seed(0)
    P = torch.randn(1, 20, 30, dtype=torch.float64)
    norms = [float(torch.linalg.matrix_norm(rescaled(P, steps=t), 2)) for t in (1, 2, 3, 4, 5)]
    assert norms == sorted(norms)
    assert norms[0] < 0.9 < 0.99 < norms[-1] <= 1


def test_weights_q_in_the_general_formula():
    """r_i = sum_j |G^m|_ij q_j / q_i, by hand."""
    P, log_q = torch.randn(1, 6, 5, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64)
    q = log_q.exp()[0]
    for steps, m in ((1, 1), (2, 2), (3, 4)):
        G = torch.linalg.matrix_power(P[0].T @ P[0], m).abs()
        expected = P[0] * ((G @ q) / q) ** (-0.5 / m)
        assert torch.allclose(rescaled(P, steps=steps, log_q=log_q)[0], expected, rtol=1e-10)


def test_vmap_and_functional_transforms():
    P = torch.randn(3, 1, 4, 5, 2, dtype=torch.float64)
    mapped = torch.func.vmap(rescaled)(P)
    assert torch.allclose(mapped, torch.stack([rescaled(p) for p in P]))
    jacobian = torch.func.jacrev(rescaled)(P[0])
    assert torch.allclose(jacobian, torch.autograd.functional.jacobian(rescaled, P[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_scale_free(dtype, steps):
    """Multiplying by any power of two changes nothing, as far as the type reaches: exactly."""
    P = torch.randn(1, 5, 4, 3, dtype=torch.float64).to(dtype)
    expected = rescaled(P, steps=steps)
    reach = 100 if dtype == torch.float32 else 900
    for exponent in (-reach, -reach // 2, 1, reach // 2, reach):
        assert torch.equal(rescaled(P * 2.0**exponent, steps=steps), expected)


def test_underflowing_gram_of_the_literature():
    """For (4.5e-23, 999 x 2.6e-23) in float32, the plain formula gives a layer of norm 22."""
    column = torch.full((1, 1000, 1), 2.6e-23)
    column[0, 0] = 4.5e-23
    naive = column / (column.mT @ column).abs().sum(1).sqrt()
    assert float(torch.linalg.matrix_norm(naive.double(), 2)) > 20
    assert float(torch.linalg.matrix_norm(rescaled(column).double(), 2)) == pytest.approx(1, abs=1e-5)
    # The same column beside an ordinary one on other rows; a common scale would not fix it.
    both = torch.zeros(1, 2000, 2)
    both[0, :1000, :1] = column[0]
    both[0, 1000:, 1] = 1.0
    assert torch.linalg.vector_norm(rescaled(both).double(), dim=1).allclose(torch.ones(1, 2).double(), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "columns"), [(10000, 1), (100000, 2), (10000, 16), (3000, 64), (2000, 200), (1, 5000), (4, 6000)]
)
def test_equal_rows_in_float32(rows, columns):
    """Sums of equal numbers round in one direction; the norm must not follow them."""
    for value in (0.1, 0.3, 1 / 3, 0.7, 1.1, 3.3):
        W = rescaled(torch.full((1, rows, columns), value))[0].double()
        # All singular values but one vanish, so the norm is that of the matrix as a vector.
        assert float(W.norm()) <= 1 + (rounding_room(torch.float32) - 1) / 2


@pytest.mark.parametrize("shape", [(1, 100, 80), (1, 40, 50, 3, 3), (2, 30, 40, 4), (1, 33, 34, 2, 2, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("uneven", [False, True])
def test_float32_against_float64(shape, scale, uneven):
    """Wide kernels are computed in float32, with columns left as they are or scaled: both agree with float64."""
    torch.manual_seed(0)
    P = torch.randn(shape) * scale
    if uneven:
        P = P * (2.0 ** torch.randint(-30, 30, shape[2:3])).reshape(-1, *(1 for _ in shape[3:]))
    expected = rescaled(P.double())
    largest = expected.abs().flatten(3).amax(3).amax(1) if len(shape) > 3 else expected.abs().amax(1)
    error = (rescaled(P) - expected).abs()
    error = error.flatten(3).amax(3).amax(1) if len(shape) > 3 else error.amax(1)
    assert (error <= 1e-5 * largest).all()


def test_disjoint_columns_of_any_size_become_units():
    # 40 columns, so that float32 is used; its columns may differ by factors up to about 2^70.
    P = torch.diag(torch.logspace(-10, 10, 40))[None]
    assert torch.allclose(rescaled(P), torch.eye(40)[None], rtol=0, atol=2e-7)


def test_columns_beyond_the_reach_are_shrunk_never_stretched():
    P = torch.zeros(1, 2000, 2)
    P[0, :1000, 0] = 1e30
    P[0, 1000:, 1] = 1e-44  # subnormal, 2^-245 of the other
    norms = torch.linalg.vector_norm(rescaled(P).double(), dim=1)[0]
    assert norms[0] == pytest.approx(1, abs=1e-5)
    assert norms[1] <= 1 + 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("steps", [1, 2])
def test_not_a_number_poisons_everything(bad, steps):
    P = torch.randn(1, 4, 3, 2)
    P[0, 1, 2, 0] = bad
    assert not rescaled(P, steps=steps).isfinite().any()


def test_power_of_two_is_exact():
    for dtype, reach in ((torch.float32, 126), (torch.float64, 1022)):
        exponents = torch.arange(-reach, reach + 1)
        expected = torch.tensor([2.0 ** int(e) for e in exponents], dtype=torch.float64).to(dtype)
        assert torch.equal(power_of_two(exponents, dtype), expected)


def test_perron_vector_by_blocks():
    T = torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[5.0]]), torch.ones(3, 3)).double()[None]
    s = perron_vector(T)[0]
    ratio = (T[0] @ s) / s
    assert (s > 0).all()
    assert torch.allclose(ratio[:2], ratio[0].expand(2), rtol=1e-12)
    assert torch.allclose(ratio[3:], torch.full((3,), 3.0, dtype=torch.float64), rtol=1e-12)
