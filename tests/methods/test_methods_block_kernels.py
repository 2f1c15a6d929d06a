"""BCOP and AOC against their papers and against exact Jacobians."""

import math

import pytest
import torch
from _orthogonal import CIRCULAR, DOUBLE, randn, randomised, values
from torch import nn
from torch.nn import functional as F

from onelip.core.errors import UnsupportedLayer
from onelip.core.parametrization import bound_by_construction, find_parametrization, original_of
from onelip.methods import aoc, bcop
from onelip.methods.orthogonal.block_kernels import grown
from onelip.methods.orthogonal.steps import bjorck_steps


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def block_convolution(A, B):
    """(A * B)[i, j] = sum of A[a, b] B[i - a, j - b], kernels (h, w, c, c)."""
    result = torch.zeros(A.shape[0] + B.shape[0] - 1, A.shape[1] + B.shape[1] - 1, A.shape[2], B.shape[3], **DOUBLE)
    for a in range(A.shape[0]):
        for b in range(A.shape[1]):
            result[a : a + B.shape[0], b : b + B.shape[1]] += A[a, b] @ B
    return result


def test_bcop_is_the_block_convolution_of_its_paper():
    c = 4
    layer = randomised(bcop(nn.Conv2d(c, c, 3, **DOUBLE), steps=40))
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
    (bcop, nn.Conv2d(4, 4, 3, padding=1, **CIRCULAR), (5, 6), None),
    (bcop, nn.Conv2d(3, 5, 3, padding=1, **CIRCULAR), (4, 6), None),
    (bcop, nn.Conv2d(5, 3, 3, padding=1, **CIRCULAR), (4, 6), None),
    (bcop, nn.Conv2d(4, 4, 2, padding=1, **DOUBLE), (5, 4), None),
    (bcop, nn.Conv1d(3, 3, 5, padding=4, **DOUBLE), (7,), None),
    (bcop, nn.Conv3d(2, 2, (3, 2, 1), padding=(2, 1, 0), **DOUBLE), (3, 3, 2), None),
    (bcop, nn.Conv2d(2, 8, 4, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc, nn.Conv2d(2, 8, 3, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc, nn.Conv2d(4, 8, 3, stride=2, padding=1, **CIRCULAR), (6, 6), 6),
    (aoc, nn.Conv1d(2, 9, 5, stride=2, padding=2, **CIRCULAR), (8,), 8),
    (aoc, nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2, **CIRCULAR), (6, 6), None),
    (aoc, nn.ConvTranspose2d(8, 2, 3, stride=2, **DOUBLE), (3, 3), None),
    (aoc, nn.ConvTranspose1d(6, 4, 5, stride=2, dilation=3, groups=2, **DOUBLE), (4,), None),
]


@pytest.mark.parametrize(("apply", "layer", "size", "promised"), ORTHOGONAL, ids=range(len(ORTHOGONAL)))
def test_every_singular_value_is_one(apply, layer, size, promised):
    layer = randomised(apply(layer, steps=60, input_size=promised))
    found = values(layer, *size)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-12)
    assert found.max() <= bound_by_construction(layer).constant + 1e-14  # of the singular values' own rounding


def test_same_zero_padding_is_not_isometric_but_sound():
    layer = randomised(bcop(nn.Conv2d(4, 4, 3, padding=1, **DOUBLE), steps=60))
    found = values(layer, 6, 6)
    assert found.max() <= bound_by_construction(layer).constant
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
    layer = randomised(aoc(nn.Conv2d(3, 8, 5, stride=2, padding=3, bias=False, **DOUBLE)))
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


@pytest.mark.parametrize("apply", [bcop, aoc])
def test_starts_as_one_matrix_in_the_middle(apply):
    layer = nn.Conv2d(5, 5, (3, 5), padding=(1, 2), **DOUBLE)
    U, _, Vh = torch.linalg.svd(layer.weight.detach().sum((2, 3)))
    apply(layer)
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
    aoc(layer)
    layer.weight = weight
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=1e-12)


def test_refusals_of_block_kernels():
    with pytest.raises(UnsupportedLayer, match=r"multiple of the stride, got kernel size \(3, 3\).*use aoc"):
        bcop(nn.Conv2d(4, 4, 3, stride=2))
    for apply in (bcop, aoc):
        with pytest.raises(UnsupportedLayer, match="expected at least 2 channels"):
            apply(nn.Conv2d(1, 1, 3))
        with pytest.raises(UnsupportedLayer, match="at least 2 channels"):
            apply(nn.Conv2d(4, 4, 3, groups=4))
        with pytest.raises(UnsupportedLayer, match="zero or circular padding"):
            apply(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))
        apply(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="expected a weight of shape"):
        find_parametrization(bcop(nn.Conv2d(4, 4, 3))).right_inverse(torch.zeros(4, 4))


def test_cutting_taps_off_would_be_wrong():
    """Why BCOP refuses kernel 3 with stride 2: a kernel of size 4 without its last taps can have a norm above 1."""
    worst = 0.0
    for _ in range(20):
        layer = randomised(bcop(nn.Conv1d(2, 2, 4, stride=2, bias=False, **DOUBLE), steps=40))
        cut = nn.Conv1d(2, 2, 3, stride=2, bias=False, **DOUBLE)
        with torch.no_grad():
            cut.weight.copy_(layer.weight[..., :3])
        worst = max(worst, float(values(cut, 21).max()))
    assert worst > 1.05
