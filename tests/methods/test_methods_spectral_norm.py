"""Power iteration on the true operator in training, a proof in evaluation."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import onelip
from onelip.core.geometry import geometry_of
from onelip.core.parametrization import find_parametrization, original_of
from onelip.graph.modules import bound_module
from onelip.methods import numerics
from onelip.methods.power_iteration import (
    Operator,
    estimated_norm,
    iterate,
    overlap_of_rows,
    spectral_norm,
    spectral_norm_reshaped,
)
from onelip.testing import exact_norm

CASES = {
    "linear": (lambda: nn.Linear(5, 7), (5,)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
    "same": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 9)),
    "strided": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 7, 7)),
    "grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=2, dilation=2), (4, 12)),
    "circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), (3, 5, 5)),
    "3d": (lambda: nn.Conv3d(2, 2, 2), (2, 4, 4, 4)),
}


@pytest.fixture(params=CASES, name="case")
def make_case(request):
    torch.manual_seed(0)
    make, shape = CASES[request.param]
    return make().double(), shape


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_the_operator_is_the_layer_and_iteration_finds_its_norm(case):
    layer, shape = case
    operator = Operator(layer, shape[1:] or None)
    assert operator.input_shape == shape
    x = torch.randn(2, *shape, dtype=torch.float64)
    layer.bias = None
    assert torch.equal(operator(x, layer.weight), layer(x))
    v = iterate(operator, layer.weight, operator.start(layer.weight), 500)
    found = float(estimated_norm(operator, layer.weight, v).detach())
    norm = exact_norm(layer, shape)
    assert norm * (1 - 1e-3) <= found <= norm * (1 + 1e-12)


def test_derivative_of_the_estimate_is_that_of_the_norm():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    operator = Operator(layer)
    v = iterate(operator, layer.weight, operator.start(layer.weight), 800)
    estimated_norm(operator, layer.weight, v).backward()
    W = layer.weight.detach().clone().requires_grad_()
    torch.linalg.matrix_norm(W, 2).backward()
    assert torch.allclose(layer.weight.grad, W.grad, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_training_comes_near_one_and_evaluation_is_never_above(case):
    layer, shape = case
    with torch.no_grad():
        layer.weight.mul_(17)
    spectral_norm(layer, input_size=shape[1:] or None)
    weight = layer.weight
    for _ in range(150):
        weight = layer.weight  # each access is an iteration
    plain = onelip.bake(layer)
    with torch.no_grad():
        plain.weight.copy_(weight)
    assert exact_norm(plain, shape) == pytest.approx(1, abs=1e-2)
    assert 0.5 < exact_norm(layer.eval(), shape) <= 1 + 1e-12
    assert 1 < bound_module(layer).constant < 1 + 1e-14  # storing the weight rounds it


def test_evaluation_is_sound_with_a_vector_that_is_wrong():
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(8, 8).double())
    with torch.no_grad():
        original_of(layer).normal_()
        v = find_parametrization(layer).v
        # Orthogonal to everything that matters: the estimate is far too small.
        v.copy_(torch.linalg.svd(original_of(layer)).Vh[-1])
    assert exact_norm(layer.eval(), (8,)) <= 1 + 1e-12


@pytest.mark.parametrize(("overlap", "constant"), [(False, 3.0), (True, 1.0)])
def test_the_reshaped_norm_is_not_the_norm(overlap, constant):
    """A constant kernel: reshaped it has 1 / 3 of the layer's norm. The stated constant is attained, in both modes."""
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular").double()
    nn.init.constant_(layer.weight, 0.3)
    spectral_norm_reshaped(layer, overlap=overlap)
    plain = onelip.bake(layer)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    assert exact_norm(plain, (1, 6, 6)) == pytest.approx(constant)
    assert exact_norm(layer.eval(), (1, 6, 6)) == pytest.approx(constant, rel=1e-6)
    assert exact_norm(layer, (1, 6, 6)) <= constant * (1 + 1e-12)
    constant = bound_module(layer).constant
    assert (constant is not None and 1 < constant < 1 + 1e-14) if overlap else constant is None


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_zero_kernel_has_finite_gradients():
    """A bound of zero, rounded up by one unit of the smallest float, made them infinite."""
    layer = nn.Conv2d(2, 2, 3)
    nn.init.zeros_(layer.weight)
    spectral_norm_reshaped(layer, overlap=True).eval()
    layer(torch.ones(1, 2, 4, 4)).sum().backward()
    assert original_of(layer).grad.isfinite().all()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_reshaped_norm_bounds_the_layer_by_the_root_of_its_overlap(case, overlap):
    layer, shape = case
    spectral_norm_reshaped(layer, overlap=overlap)
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            # From rows of ones, which overlap as much as can be, to random ones.
            original_of(layer).normal_(std=seed / 20).add_(1.0)
        bound = 1 if overlap else overlap_of_rows(geometry_of(layer), layer.weight.shape) ** 0.5
        assert exact_norm(layer.eval(), shape) <= bound * (1 + 1e-12)


def test_phases_of_a_transposed_layer_are_no_rows():
    """Two taps with one output each: as a matrix of rows it is orthogonal, as a layer it is sqrt(2) long."""
    layer = nn.ConvTranspose1d(1, 2, 2, stride=2).double()
    assert overlap_of_rows(geometry_of(layer), layer.weight.shape) == 2
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2)[None])  # (in, out, taps)
    spectral_norm_reshaped(layer, overlap=True)
    assert exact_norm(layer.eval(), (1, 3)) == pytest.approx(1.0, rel=1e-6)
    assert exact_norm(layer, (1, 3)) <= 1 + 1e-12


@pytest.mark.parametrize("method", ["spectral-norm", "spectral-norm-reshaped"])
def test_evaluation_computes_what_training_did_once_converged(method):
    """Biases too: dividing weights by more than training did would leave the biases after them too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).double()
    onelip.constrain(model, method)
    x = torch.randn(8, 1, 20, 20, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(200):
            model(x)
        trained = model(x)
        change = (model.eval()(x) - trained).abs().max() / trained.abs().max()
    assert float(change) < 0.15  # the layer's own norm is estimated on a small image, and proved for all


def test_the_proof_is_kept_until_the_weight_is_another(monkeypatch):
    calls = []
    real = numerics.bound_weight
    monkeypatch.setattr(numerics, "bound_weight", lambda *a, **k: calls.append(a) or real(*a, **k))
    layer = spectral_norm(nn.Linear(4, 4)).eval()
    first = layer.weight
    assert torch.equal(layer.weight, first)
    assert len(calls) == 1
    original_of(layer).data.mul_(2)  # a version counter does not see this
    assert torch.allclose(layer.weight, first)
    assert len(calls) == 2
    assert exact_norm(layer, (4,)) <= 1 + 1e-6


def test_two_forwards_and_one_backward():
    layer = spectral_norm(nn.Conv2d(2, 2, 3))
    x = torch.randn(1, 2, 5, 5)
    (layer(x).sum() + layer(x).square().sum()).backward()
    assert original_of(layer).grad.isfinite().all()


def test_zero_and_bad_weights():
    layer = nn.Linear(3, 3)
    nn.init.zeros_(layer.weight)
    spectral_norm(layer)
    layer(torch.ones(1, 3)).sum().backward()
    assert original_of(layer).grad.isfinite().all()
    assert not layer.eval().weight.any()
    with torch.no_grad():
        original_of(layer).fill_(torch.nan)
    assert layer.weight.isnan().all()  # never a finite weight out of a broken one


def test_the_vector_is_part_of_the_state():
    layer = spectral_norm(nn.Linear(6, 6))
    with torch.no_grad():
        original_of(layer).normal_()
    other = spectral_norm(nn.Linear(6, 6))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, other.weight)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="integer of at least 1"):
        spectral_norm(nn.Linear(2, 2), iterations=0)
    with pytest.raises(ValueError, match="expected input_size"):
        spectral_norm(nn.Conv2d(2, 2, 3), input_size=(4,))
    with pytest.raises(onelip.UnsupportedLayer):
        spectral_norm(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(ValueError, match="already parametrized by SpectralNorm"):
        spectral_norm(spectral_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize("method", ["spectral-norm", "spectral-norm-reshaped", "lcc"])
def test_the_constant_counts_the_rounding_of_what_is_stored(method):
    """One column: its norm is known exactly, and in float32 it is above 1 more often than not."""
    above = 0
    for seed in range(20):
        torch.manual_seed(seed)
        layer = nn.Linear(1, 7, bias=False)
        with torch.no_grad():
            layer.weight.mul_(3)
        onelip.constrain(nn.Sequential(layer), method)
        layer.eval()
        square = sum(Fraction(float(w)) ** 2 for w in layer.weight.detach().flatten())
        above += square > 1
        assert square <= Fraction(bound_module(layer).constant) ** 2
    assert above  # else the test says nothing
