"""The exponential of ECO, against torch's own in float64; and its derivatives."""

import math

import pytest
import torch

from onelip.methods import eco
from onelip.methods.fourier.matrix_functions import _POWERS, _UNIT, skew_exponential


def skew(b, n, dtype, norm):
    M = torch.randn(b, n, n, dtype=dtype)
    S = (M - M.mH) / 2
    return (
        S * (norm / torch.linalg.matrix_norm(S.to(wide(dtype)), 2).clamp(min=1e-30)).to(dtype.to_real())[:, None, None]
    )


def wide(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_the_polynomial_is_the_series_of_the_exponential():
    def times(a, b):
        product = [0.0] * (len(a) + len(b) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                product[i + j] += x * y
        return product

    def plus(a, b):
        size = max(len(a), len(b))
        return [x + y for x, y in zip(a + [0.0] * (size - len(a)), b + [0.0] * (size - len(b)), strict=True)]

    B = [[unit, one, two, three, 0.0, 0.0, six] for unit, (one, two, three, six) in zip(_UNIT, _POWERS, strict=True)]
    C = plus(B[3], times(B[0], B[4]))
    T = plus(B[1], times(plus(B[2], C), C))
    for k, coefficient in enumerate(T):
        wanted = 1 if k <= 18 else 0
        assert coefficient * math.factorial(k) == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128])
@pytest.mark.parametrize("norm", [0.0, 1e-20, 1e-3, 1.4, 2.9, 3.1, 17.0])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_values_and_gradients(dtype, norm, n):
    S = skew(3, n, dtype, norm).requires_grad_()
    exact = S.detach().to(wide(dtype)).requires_grad_()
    weights = torch.randn(3, n, n, dtype=dtype)
    Q, wanted = skew_exponential(S), torch.matrix_exp(exact)
    error = 32 * torch.finfo(dtype).eps * max(1.0, norm)
    torch.testing.assert_close(Q.to(wanted.dtype), wanted, rtol=0, atol=error)
    torch.real(Q * weights).sum().backward()
    torch.real(wanted * weights).sum().backward()
    assert S.grad is not None
    gradient = (exact.grad - exact.grad.mH) / 2  # the part that skew matrices have
    torch.testing.assert_close(S.grad.to(gradient.dtype), gradient, rtol=0, atol=4 * error * n**0.5)


def test_matrices_of_different_size_in_one_batch():
    S = torch.cat([skew(1, 6, torch.complex64, norm) for norm in (0.0, 0.1, 30.0)])
    wanted = torch.matrix_exp(S.to(torch.complex128))
    torch.testing.assert_close(skew_exponential(S).to(torch.complex128), wanted, rtol=0, atol=3e-5)


def test_what_is_not_finite_stays_so():
    S = skew(2, 3, torch.float32, 10.0)
    S[0, 0, 1] = torch.nan
    Q = skew_exponential(S)
    assert not Q[0].isfinite().any()
    torch.testing.assert_close(Q[1], torch.matrix_exp(S[1]))
    assert skew_exponential(S[:0]).shape == (0, 3, 3)


def test_differentiated_twice_and_by_transforms():
    S = skew(1, 4, torch.float32, 1.0).requires_grad_()
    (first,) = torch.autograd.grad(skew_exponential(S)[0, 0].sum(), S, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), S)
    (own,) = torch.autograd.grad(torch.matrix_exp(S)[0, 0].sum(), S, create_graph=True)
    (wanted,) = torch.autograd.grad(own.square().sum(), S)
    torch.testing.assert_close(second, wanted)
    (batched,) = torch.autograd.grad(skew_exponential(S), S, torch.ones(3, 1, 4, 4), is_grads_batched=True)
    (single,) = torch.autograd.grad(torch.matrix_exp(S), S, torch.ones(1, 4, 4))
    torch.testing.assert_close(batched[1], (single - single.mT) / 2)
    jacobian = torch.func.jacrev(lambda s: skew_exponential(s[None]))(S[0].detach())
    assert jacobian.shape == (1, 4, 4, 4, 4)
    mapped = torch.func.vmap(skew_exponential)(S.detach().expand(3, 1, 4, 4))
    torch.testing.assert_close(mapped[1], torch.matrix_exp(S.detach()))


def test_eco_trains_with_what_it_evaluates_with():
    """Wide layers train in float32, evaluation is in float64."""
    layer = eco(torch.nn.Conv2d(40, 40, 3, padding=1, padding_mode="circular"), input_size=6)
    x = torch.randn(2, 40, 6, 6)
    trained = layer.train()(x)
    assert trained.requires_grad
    torch.testing.assert_close(layer.eval()(x), trained, rtol=0, atol=2e-5)
