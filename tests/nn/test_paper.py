"""The paper's theorem and lemmas, computed naively beside ours."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelip
from onelip.core.parametrization import original_of
from onelip.testing import exact_jacobian, exact_norm


def theorem_1(P):
    """W = P D, D_ii = (sum_j |P^T P|_ij)^(-1/2), 0 where the sum is 0; written as in the paper."""
    sums = (P.T @ P).abs().sum(1)
    return P * torch.where(sums > 0, sums**-0.5, 0.0)


def lemma_2(P):
    """d_c of the paper for a kernel (out, in, k, k), by the sum over offsets written out."""
    out, inputs, k, _ = P.shape
    d = torch.zeros(inputs, dtype=P.dtype)
    padded = F.pad(P, (k - 1,) * 4)
    for i in range(2 * k - 1):
        for j in range(2 * k - 1):
            window = padded[:, :, i : i + k, j : j + k]
            products = torch.einsum("bapq,bcpq->ac", window, P)
            d += products.abs().sum(0)
    assert out == P.shape[0]
    return P * (d**-0.5)[None, :, None, None]


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (7, 7), (1, 4), (4, 1), (300, 260)])
def test_dense_is_theorem_1(shape):
    layer = onelip.aol(nn.Linear(shape[1], shape[0], dtype=torch.float64))
    with torch.no_grad():
        original_of(layer).normal_()
    assert torch.allclose(layer.weight, theorem_1(original_of(layer)), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("out", "inputs", "k"), [(4, 3, 3), (3, 4, 2), (2, 2, 5), (6, 2, 1), (1, 3, 4)])
@pytest.mark.parametrize("settings", [{}, {"padding": 1}, {"padding": 7}, {"dilation": 2}])
def test_convolution_is_lemma_2(out, inputs, k, settings):
    layer = onelip.aol(nn.Conv2d(inputs, out, k, dtype=torch.float64, **settings))
    with torch.no_grad():
        original_of(layer).normal_()
    assert torch.allclose(layer.weight, lemma_2(original_of(layer)), rtol=1e-12, atol=0)


def test_theorem_1_zero_column_has_factor_zero():
    layer = onelip.aol(nn.Linear(3, 3, bias=False, dtype=torch.float64))
    P = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        original_of(layer).copy_(P)
    assert torch.allclose(layer.weight, theorem_1(P))
    assert layer.weight[:, 1].eq(0).all()


def test_orthogonal_columns_of_any_length_become_orthonormal():
    Q, _ = torch.linalg.qr(torch.randn(8, 5, dtype=torch.float64))
    layer = onelip.aol(nn.Linear(5, 8, bias=False, dtype=torch.float64))
    with torch.no_grad():
        original_of(layer).copy_(Q * torch.tensor([1e-3, 0.5, 1.0, 7.0, 4e5], dtype=torch.float64))
    assert torch.allclose(layer.weight, Q, atol=1e-14)


def test_one_by_one_convolution_is_the_dense_layer():
    dense = onelip.aol(nn.Linear(6, 4, dtype=torch.float64))
    conv = onelip.aol(nn.Conv2d(6, 4, 1, dtype=torch.float64))
    with torch.no_grad():
        original_of(dense).normal_()
        original_of(conv).copy_(original_of(dense)[:, :, None, None])
    assert torch.equal(conv.weight[:, :, 0, 0], dense.weight)


def test_strided_orthogonal_convolution_stays_as_it_is():
    """Where plain AOL halves all singular values."""
    Q, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    kernel = Q.reshape(12, 3, 2, 2)
    layer = nn.Conv2d(3, 12, 2, stride=2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(kernel)
    onelip.aol(layer)
    assert torch.allclose(layer.weight, kernel, atol=1e-14)
    singular = torch.linalg.svdvals(exact_jacobian(layer, (3, 6, 4)))
    assert torch.allclose(singular, torch.ones_like(singular), atol=1e-13)

    plain = nn.Conv2d(3, 12, 2, stride=2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(lemma_2(kernel))
    assert exact_norm(plain, (3, 6, 4)) < 0.75


@pytest.mark.parametrize(("k", "s"), [(2, 2), (3, 2), (4, 2), (5, 3), (1, 2), (3, 3)])
def test_stride_is_concatenation_pooling(k, s):
    """The stride-aware bound is AOL behind the paper's concatenation pooling, tap by tap."""
    layer = onelip.aol(nn.Conv2d(2, 5, k, stride=s, dtype=torch.float64))
    with torch.no_grad():
        original_of(layer).normal_()
    padded = F.pad(original_of(layer), (0, -k % s, 0, -k % s))
    unshuffled = lemma_2_allowing_zero_columns(F.pixel_unshuffle(padded, s))
    expected = F.pixel_shuffle(unshuffled, s)[..., :k, :k]
    assert torch.allclose(layer.weight, expected, rtol=1e-12, atol=1e-15)


def lemma_2_allowing_zero_columns(P):
    used = P.abs().sum((0, 2, 3)) > 0
    W = torch.zeros_like(P)
    W[:, used] = lemma_2(P[:, used])
    return W


def test_training_toward_a_large_norm_reaches_one():
    """The bound is tight for orthogonal columns, and optimisation finds them."""
    torch.manual_seed(0)
    layer = onelip.aol(nn.Conv2d(3, 6, 3, padding=1, bias=False, dtype=torch.float64))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    for _ in range(400):
        optimizer.zero_grad()
        (-layer(x).square().sum()).backward()
        optimizer.step()
    assert 0.97 < exact_norm(layer, (3, 8, 8)) <= 1 + 1e-14
