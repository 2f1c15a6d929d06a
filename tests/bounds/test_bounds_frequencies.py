"""Bounds of convolutions by frequencies: never below the norm, near to it, and proved by no tree that is wrong."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from onelip.bounds import ProofFailed, Witness, _frequencies as frequencies, bound_weight, exact_bound
from onelip.bounds._frequencies import frequency_bound, is_proved
from onelip.bounds._gram import lay_out
from onelip.checker.norms import is_covered
from onelip.core import floats
from onelip.core.geometry import geometry_of

NONE = Fraction(10**9)


def kernel_of(layer, side="inputs"):
    scaled, _ = floats.scaled(floats.read(layer.weight))
    return lay_out(geometry_of(layer).to_kernel(scaled, side))


def supremum(K, points=96):
    """sup ||V||^2 from below, by the singular values on a fine grid and the steepest ones between."""
    kernel = K.numpy()
    _, *taps, rows, columns = kernel.shape
    sizes = [1 if k == 1 else points for k in taps]
    values = np.fft.fftn(kernel, sizes, range(1, 1 + len(taps)))
    return float(np.linalg.svd(values.reshape(-1, rows, columns), compute_uv=False).max()) ** 2


def random_kernel(shape, seed=0):
    K = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    return K / K.abs().max() * 1.5


SHAPES = [
    (1, 3, 2, 2),
    (1, 5, 1, 3),
    (2, 2, 3, 1),
    (1, 3, 3, 4, 4),
    (1, 1, 3, 2, 5),
    (1, 2, 2, 2, 2, 3),
    (3, 4, 2, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_to_the_norm_and_never_below(shape):
    for seed in range(3):
        K = random_kernel(shape, seed)
        found = frequency_bound(K, NONE)
        assert found is not None
        S, tree = found
        largest = supremum(K, 256 if len(shape) < 5 else 48)
        assert largest <= S <= largest * (1 + frequencies._COARSEST) * 1.01
        assert is_proved(K, S, tree)
        assert is_covered(np.moveaxis(K.numpy(), 0, -3), root(S), tree)


def root(S):
    return Fraction(math.isqrt(S.numerator), math.isqrt(S.denominator))


def uniform(K, depth):
    """The tree of arcs that are all halved the given number of times."""
    axes = [k for k in K.shape[1:-2] if k > 1]

    def tree(axis):
        if axis == len(axes):
            return ""
        arc = "1" + tree(axis + 1)
        for _ in range(depth):
            arc = f"0{arc}{arc}"
        return arc * (2 if axis == 0 else 4)

    return tree(0)


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (1, 2, 2, 2), (1, 3, 3, 2, 2), (1, 5, 2, 1)], ids=str)
def test_no_tree_proves_less_than_the_norm(shape):
    """Also where all points of it are far from the largest value: that is what the factor of an arc is for."""
    for seed, depth in itertools.product(range(4), range(5 if len(shape) < 5 else 4)):
        K = random_kernel(shape, seed)
        tree = uniform(K, depth)
        for share in (0.5, 0.9, 0.99, 0.999):
            sigma = Fraction(math.sqrt(supremum(K) * share))
            assert not is_proved(K, sigma**2, tree)
            assert not is_covered(np.moveaxis(K.numpy(), 0, -3), sigma, tree)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_factor_of_an_arc_is_nearly_reached(depth):
    """I + exp(i a) R with a rotation R has the largest value where a and R cancel: here at the end of an arc."""
    c, s = 0.0, 1.0  # of pi / 2, the end of a quarter
    K = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[c, -s], [s, c]]]).double()[None]
    steps = [1 + i / 2000 for i in range(1000)]
    least = next(share for share in steps if is_proved(K, Fraction(math.sqrt(4 * share)) ** 2, uniform(K, depth)))
    w = 2.0 ** -(depth + 1)  # of the arc from 0, the widest one
    assert least <= 1 / (1 - w**2) + 2e-3


def test_trees_that_are_changed():
    K = random_kernel((1, 3, 3, 2, 2))
    found = frequency_bound(K, NONE)
    assert found is not None
    S, tree = found
    kernel = np.moveaxis(K.numpy(), 0, -3)
    wrong = [
        "",
        tree[:-1],
        tree + "1",
        tree + "0",
        "0" + tree,
        "1" * len(tree),
        "x" + tree[1:],
        tree.replace("0", "", 1),
    ]
    for other in wrong:
        assert not is_proved(K, S, other)
        assert not is_covered(kernel, root(S), other)
    for i in range(0, len(tree), 7):  # an arc that was halved, used, or the other way round
        other = tree[:i] + ("0" if tree[i] == "1" else "1") + tree[i + 1 :]
        assert not is_proved(K, S, other)
        assert not is_covered(kernel, root(S), other)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(["normal", "ones", "one hot", "rank one", "alternating", "sparse"]),
    st.integers(0, 99),
)
def test_kernels_of_all_kinds(taps, rows, columns, groups, kind, seed):
    shape = (groups, *taps, rows, columns)
    K = random_kernel(shape, seed)
    if kind == "ones":
        K = torch.ones(shape).double()
    elif kind == "one hot":
        K = torch.zeros(shape).double()
        K.view(-1)[seed % K.numel()] = 1
    elif kind == "rank one":
        K = K[:, ..., :1] * K[..., :1, :]
        K = K / K.abs().max()
    elif kind == "alternating":
        K = torch.ones(math.prod(shape)).double() * torch.tensor([1.0, -1.0]).double().repeat(999)[: math.prod(shape)]
        K = K.reshape(shape)
    elif kind == "sparse":
        K = torch.where(K.abs() > 1, K, 0.0)
        K.view(-1)[0] = 1.5
    found = frequency_bound(K, NONE)
    if found is not None:
        assert found[0] >= supremum(K, 64) * (1 - 1e-12)
        assert is_covered(np.moveaxis(K.numpy(), 0, -3), root(found[0]), found[1])


def test_a_claim_below_the_largest_entry_is_refused():
    """Its size is what the rounding of V is bounded by."""
    K = torch.tensor([1.0, 1.5]).double().reshape(1, 2, 1, 1)
    for sigma in (Fraction(1), Fraction(0)):
        assert not is_proved(K, sigma**2, uniform(K, 3))
        assert not is_covered(np.moveaxis(K.numpy(), 0, -3), sigma, uniform(K, 3))


@pytest.mark.parametrize("unit", [2.0**-399, 2.0**-30, 1.0, 2.0**398])
def test_the_checker_takes_weights_of_any_moderate_size(unit):
    K = random_kernel((1, 3, 2, 2))
    found = frequency_bound(K, NONE)
    assert found is not None
    kernel = np.moveaxis(K.numpy(), 0, -3) * unit
    assert is_covered(kernel, root(found[0]) * Fraction(unit), found[1])
    assert not is_covered(kernel * 1.05, root(found[0]) * Fraction(unit), found[1])


LAYERS = [
    nn.Conv1d(3, 5, 3, padding=1),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
    nn.Conv2d(3, 4, (1, 5)),
    nn.Conv3d(2, 2, 2),
    nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1),
    nn.ConvTranspose1d(2, 6, 3, dilation=2),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layers_of_all_kinds(layer):
    torch.manual_seed(0)
    layer.double().reset_parameters()
    size = (12, 12, 6)[len(layer.kernel_size) - 1]
    geometry = geometry_of(layer, (size,) * len(layer.kernel_size))
    found = bound_weight(layer.weight, geometry, effort="high")
    assert found.witness.kind == "frequencies"
    x = torch.zeros(layer.in_channels, *[size] * len(layer.kernel_size), dtype=torch.float64)
    J = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], x)
    norm = float(torch.linalg.matrix_norm(J.reshape(-1, x.numel()), 2))
    assert norm <= found.value <= 1.1 * norm  # borders make it smaller than that of the convolution
    exact = exact_bound(layer.weight, geometry, found.witness)
    assert exact.value == found.value
    lower = Witness("frequencies", found.witness.side, 1, None, exact.square * Fraction(9, 10) ** 2, found.witness.tree)
    with pytest.raises(ProofFailed, match="by the given frequencies"):
        exact_bound(layer.weight, geometry, lower)


def test_what_is_enough_is_not_improved():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, 3)
    geometry = geometry_of(layer)
    quick = bound_weight(layer.weight, geometry, effort="quick").value
    assert bound_weight(layer.weight, geometry, effort="high", enough=quick).value == quick
    best = bound_weight(layer.weight, geometry, effort="high").value
    wanted = best * (1 - 2.0**-12)
    assert bound_weight(layer.weight, geometry, effort="high", enough=wanted).value == pytest.approx(wanted, rel=1e-12)


def test_a_witness_without_a_tree():
    layer = nn.Conv1d(1, 1, 3)
    for witness in (
        Witness("frequencies", "inputs", 1, None, Fraction(9)),
        Witness("frequencies", "inputs", 1, None, None, ""),
    ):
        with pytest.raises(ProofFailed, match="a tree of frequencies"):
            exact_bound(layer.weight, geometry_of(layer), witness)


def test_many_channels_are_planned_for():
    """A flat spectrum would need many points: the claim is coarser there, or there is none."""
    K = torch.zeros(1, 3, 3, 8, 8).double()
    K[0, 1, 1] = torch.eye(8)
    found = frequency_bound(K + 1e-3 * random_kernel(tuple(K.shape)), Fraction(2))
    assert found is None or found[1].count("1") < 8 * frequencies._points([3, 3])
    assert frequency_bound(K, Fraction(1)) is None
