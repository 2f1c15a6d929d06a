"""Retraction, tangent and orthogonalisation against dense matrices of each layer on a torus."""

import pytest
import torch
from _torus import LAYERS, name
from torch.utils._python_dispatch import TorchDispatchMode

import onelip
from onelip.optim import orthogonalize, retract, retract_after, tangent


def dense_r1(M):
    return 1.5 * M - 0.5 * M @ (M.T @ M)


def dense_aol(M):
    return M / (M.T @ M).abs().sum(1).sqrt().clamp(min=1e-300)  # some inputs may not be read: zero columns


def is_tall(torus):
    return torus.kernel_of(torus.random()).shape[1] >= torus.kernel_of(torus.random()).shape[2]


TALL = [torus for torus in LAYERS if is_tall(torus)]
every_layer = pytest.mark.parametrize("torus", TALL, ids=name)


def test_the_layers_have_all_kinds():
    kinds = {"Linear", *(f"Conv{t}{d}d" for t in ("", "Transpose") for d in (1, 2, 3))}
    assert {torus.kind for torus in TALL} == kinds


@every_layer
def test_r1_is_the_dense_step_cut_back(torus):
    P = torus.random()
    expected = torus.weight(dense_r1(torus.matrix(P)))
    assert torch.allclose(torus.weight_of(retract(torus.kernel_of(P), "r1")), expected, atol=1e-12)


@every_layer
def test_r2_is_the_dense_step_cut_back(torus):
    P = torus.random()
    expected = torus.weight(dense_r1(dense_aol(torus.matrix(P))))
    assert torch.allclose(torus.weight_of(retract(torus.kernel_of(P), "r2")), expected, atol=1e-12)


@every_layer
def test_tangent_is_the_dense_projection_cut_back(torus):
    P, D = torus.random(), torus.random()
    J, T = torus.matrix(P), torus.matrix(D)
    X = J.T @ T
    expected = torus.weight(T - J @ (X + X.T) / 2)
    found = torus.weight_of(tangent(torus.kernel_of(P), torus.kernel_of(D)))
    assert torch.allclose(found, expected, atol=1e-12)


@every_layer
def test_tangent_beside_sgd_is_that_projection(torus):
    layer = onelip.aol(torus.layer.double(), side=torus.side)
    P = layer.parametrizations.weight.original
    before, D = P.detach().clone(), torus.random()
    optimizer = torch.optim.SGD([P], lr=1.0)
    retract_after(optimizer, layer, retraction=None, tangent=True)
    P.grad = D.clone()
    optimizer.step()
    projected = torus.weight_of(tangent(torus.kernel_of(before), torus.kernel_of(D)))
    assert torch.allclose(before - P, projected, atol=1e-12)


@pytest.mark.parametrize("torus", [t for t in TALL if t.kernel == t.stride], ids=name)
@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, 1e3, 1e200])
def test_r2_has_norm_at_most_one_for_every_matrix(torus, scale):
    P = torus.random() * scale
    J = torus.matrix(torus.weight_of(retract(torus.kernel_of(P))))
    assert torch.linalg.matrix_norm(J, 2) <= 1 + 1e-12
    for _ in range(60):
        P = torus.weight_of(retract(torus.kernel_of(P)))
    s = torch.linalg.svdvals(torus.matrix(P))
    assert s.min() > 1 - 1e-6  # and converges to orthonormal columns


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 3e38])
def test_r2_in_float32_at_the_ends_of_its_range(scale):
    torch.manual_seed(0)
    P = torch.randn(1, 12, 8).clamp(-1, 1) * scale
    s = torch.linalg.svdvals(retract(P))
    assert s.isfinite().all()
    assert 0.1 < s.max() <= 1 + 1e-6


@pytest.mark.parametrize("kind", ["r1", "r2"])
def test_zero_and_empty_kernels(kind):
    assert not retract(torch.zeros(1, 4, 3), kind).any()
    assert retract(torch.zeros(1, 0, 3), kind).shape == (1, 0, 3)
    P = torch.eye(3)[None].clone()
    P[:, :, 1] = 0
    assert torch.equal(retract(P, kind), P)


def test_a_wide_kernel_is_rescaled_only():
    P = torch.randn(1, 3, 5, dtype=torch.float64)
    assert torch.allclose(retract(P)[0], dense_aol(P[0]))
    assert torch.equal(retract(P, "r1"), P)


def test_an_orthogonal_operator_stays():
    Q = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0][None]
    for kind in ("r1", "r2"):
        assert torch.allclose(retract(Q, kind), Q, atol=1e-12)


def test_unknown_retraction():
    with pytest.raises(ValueError, match="'r1' or 'r2', got 'r3'"):
        retract(torch.eye(2)[None], "r3")


@pytest.mark.parametrize("shape", [(1, 9, 4), (1, 4, 9), (2, 5, 5), (1, 3, 4, 3, 3), (2, 6, 2, 2)])
@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_orthogonalize_is_the_quintic_of_the_singular_values(shape, iterations):
    torch.manual_seed(1)
    D = torch.randn(shape, dtype=torch.float64)
    for group, X in zip(D, orthogonalize(D, iterations), strict=True):
        M = group.flatten(1)
        M = M if len(M) >= M.shape[1] else M.T
        U, s, V = torch.linalg.svd(dense_aol(M), full_matrices=False)
        for _ in range(iterations):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        expected = (U * s) @ V
        found = X.flatten(1)
        assert torch.allclose(found if len(found) >= found.shape[1] else found.T, expected, atol=1e-10)


def test_orthogonalize_does_not_depend_on_the_scale():
    D = torch.randn(1, 20, 10)
    for scale in (2.0**-100, 2.0**100):
        assert torch.equal(orthogonalize(D * scale), orthogonalize(D))
    assert not orthogonalize(torch.zeros(1, 4, 3)).any()


def test_products_in_bfloat16_are_near():
    torch.manual_seed(0)
    P, D = torch.linalg.qr(torch.randn(1, 64, 32))[0], torch.randn(1, 64, 32)
    for low, full in (
        (tangent(P, D, dtype=torch.bfloat16), tangent(P, D)),
        (orthogonalize(D, dtype=torch.bfloat16), orthogonalize(D)),
    ):
        assert low.dtype == torch.float32
        assert (low - full).norm() < 0.02 * full.norm()


class Products(TorchDispatchMode):
    """Records the types of the factors of all products of matrices."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            self.types |= {argument.dtype for argument in args if isinstance(argument, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [1, 2])
def test_products_in_bfloat16_really_are(groups):
    P, D = torch.randn(groups, 64, 32), torch.randn(groups, 64, 32)
    with Products() as products:
        orthogonalize(D, dtype=torch.bfloat16)
        tangent(P, D, dtype=torch.bfloat16)
    assert products.types == {torch.bfloat16}


@pytest.mark.parametrize("is_nilpotent", [True, False])
def test_kernels_leave_the_centre_only_along_nilpotent_directions(is_nilpotent):
    """I + e (A z - A^T / z) is near an orthogonal kernel of three taps only if A^2 = 0; see docs/training.md."""
    torch.manual_seed(0)
    n, e = 16, 0.8
    A = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    if is_nilpotent:
        half = torch.zeros_like(A)
        half[: n // 2, n // 2 :] = torch.linalg.qr(torch.randn(n // 2, n // 2, dtype=torch.float64))[0]
        A = A @ half @ A.T
    P = torch.stack([-e * A.T, torch.eye(n, dtype=torch.float64), e * A], 2)[None]
    for _ in range(100):
        P = retract(P)
    energy = P.square().sum((0, 1, 2)) / P.square().sum()
    assert energy[1] < 0.62 if is_nilpotent else energy[1] > 0.95
    if is_nilpotent:
        z = torch.exp(2j * torch.pi * torch.arange(8, dtype=torch.float64) / 8)[:, None, None]
        K = P[0, ..., 0] / z + P[0, ..., 1] + P[0, ..., 2] * z
        assert torch.allclose(torch.linalg.svdvals(K), torch.ones(1, dtype=torch.float64), atol=1e-9)
