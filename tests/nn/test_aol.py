"""`aol` and the parametrization AOL: options, numerics, assignment, and use with the rest of torch."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip.core.modes import full_precision
from onelip.core.parametrization import original_of
from onelip.nn.aol import find_aol
from onelip.testing import exact_norm


def test_verb_returns_the_module_and_registers_on_it():
    layer = nn.Linear(3, 4)
    assert onelip.aol(layer) is layer
    assert parametrize.is_parametrized(layer, "weight")
    assert isinstance(find_aol(layer), onelip.AOL)
    own = "parametrizations.weight."
    assert set(layer.state_dict()) == {"bias", f"{own}original", f"{own}0._extra_state"}


def test_can_be_removed():
    layer = onelip.aol(nn.Linear(3, 4))
    weight = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, weight)


def test_twice_is_refused():
    layer = onelip.aol(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="already parametrized by AOL"):
        onelip.aol(layer)


def test_after_another_parametrization_the_last_one_decides():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4, dtype=torch.float64))
    onelip.aol(layer)
    assert onelip.summary(layer).constant == 1.0
    assert exact_norm(layer, (5,)) <= 1 + 1e-14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": "rows"}, "expected side to be"),
        ({"steps": 0}, "expected steps"),
        ({"steps": 2.0}, "expected steps"),
        ({"steps": 100}, "expected steps"),
        ({"lipschitz": 0.0}, "a positive number"),
        ({"lipschitz": -1.0}, "a positive number"),
        ({"lipschitz": float("nan")}, "a positive number"),
        ({"lipschitz": float("inf")}, "a positive number"),
        ({"lipschitz": "2"}, "a positive number"),
        ({"lipschitz": 1e60}, "a positive number"),
        ({"name": "bias"}, "'bias' to be a weight of Linear"),
        ({"name": "kernel"}, "'kernel' to be a weight of Linear"),
    ],
)
def test_bad_options(options, message):
    layer = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=message):
        onelip.aol(layer, **options)
    assert not parametrize.is_parametrized(layer)


def test_integer_and_complex_weights_are_refused():
    layer = nn.Linear(3, 4, dtype=torch.complex64)
    with pytest.raises(TypeError, match="real floating-point"):
        onelip.aol(layer)


@pytest.mark.parametrize("lipschitz", [0.25, 3.0])
def test_target_constant(lipschitz):
    torch.manual_seed(0)
    layer = onelip.nn.AOLConv2d(3, 3, 3, padding=1, lipschitz=lipschitz, dtype=torch.float64)
    assert exact_norm(layer, (3, 5, 5)) == pytest.approx(lipschitz, rel=1e-14)
    with torch.no_grad():
        original_of(layer).normal_()
    assert exact_norm(layer, (3, 5, 5)) <= lipschitz * (1 + 1e-14)


def test_sides_are_transposes():
    """AOL of the outputs is AOL of the adjoint layer's inputs, for convolutions the transposed convolution."""
    torch.manual_seed(0)
    P = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    for stride in (1, 2):
        outputs = onelip.aol(nn.Conv2d(3, 4, 3, stride=stride, dtype=torch.float64), side="outputs")
        adjoint = onelip.aol(nn.ConvTranspose2d(4, 3, 3, stride=stride, dtype=torch.float64), side="inputs")
        with torch.no_grad():
            original_of(outputs).copy_(P)
            original_of(adjoint).copy_(P)
        assert torch.allclose(outputs.weight, adjoint.weight, atol=1e-15)


def test_auto_takes_the_smaller_side_and_advice_says_so():
    wide = onelip.aol(nn.Linear(30, 4))
    assert "side='outputs'" in str(find_aol(wide).advice())
    assert find_aol(onelip.aol(nn.Linear(30, 4), side="auto")).side == "outputs"
    assert find_aol(onelip.aol(nn.Linear(4, 30), side="auto")).side == "inputs"
    assert find_aol(onelip.aol(nn.Linear(30, 4), side="auto")).advice() is None
    # 2x2 stride 2: three channels in four phases each are twelve inputs for eight outputs.
    assert find_aol(onelip.aol(nn.Conv2d(3, 8, 2, stride=2), side="auto")).side == "outputs"


def test_outputs_are_tighter_for_wide_layers():
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(30, 4, dtype=torch.float64))
    norms = {}
    for side in ("inputs", "outputs"):
        layer = onelip.aol(nn.Linear(30, 4, bias=False, dtype=torch.float64), side=side)
        with torch.no_grad():
            original_of(layer).copy_(basis.T)
        norms[side] = torch.linalg.svdvals(layer.weight).min().item()
    assert norms["outputs"] == pytest.approx(1)
    assert norms["inputs"] < 0.9


@pytest.mark.parametrize("steps", [1, 2])
def test_weights_q_learn(steps):
    """The gradient of q is not zero, and moving q moves the weight (elsewhere q cancels)."""
    torch.manual_seed(0)
    layer = onelip.aol(nn.Conv2d(4, 5, 3, dtype=torch.float64), learn_weights=True, steps=steps)
    log_q = find_aol(layer).log_q
    before = layer.weight.detach().clone()
    layer(torch.randn(2, 4, 6, 6, dtype=torch.float64)).square().sum().backward()
    assert log_q.grad.abs().max() > 1e-3
    with torch.no_grad():
        log_q.add_(torch.randn_like(log_q))
    assert (layer.weight - before).abs().max() > 1e-3
    assert exact_norm(layer, (4, 6, 6)) <= 1 + 1e-14


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [6, 40])
def test_weights_q_of_any_size_are_sound(steps, columns):
    torch.manual_seed(0)
    layer = onelip.aol(nn.Linear(columns, columns), learn_weights=True, steps=steps)
    for matrix in (torch.eye(columns), torch.randn(columns, columns)):
        for size in (1.0, 50.0, 52.0, 110.0, 1e30):
            with torch.no_grad():
                original_of(layer).copy_(matrix)
                original_of(layer)[1, 1] = 1.3
                find_aol(layer).log_q.copy_(torch.linspace(-size, 0, columns)[None])
            assert exact_norm(layer, (columns,)) <= 1 + 1e-6


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("small", [1e-1, 1e-3, 1e-5])
def test_uneven_columns_survive_several_steps(steps, small):
    """Powers of the Gram matrix amplify differences in column norms; orthogonal columns still become unit vectors."""
    layer = onelip.aol(nn.Linear(40, 40, bias=False), steps=steps)
    with torch.no_grad():
        original_of(layer).copy_(torch.eye(40))
        original_of(layer)[3, 3] = small
        original_of(layer)[7, 7] = 0
    expected = torch.eye(40)
    expected[7, 7] = 0
    assert torch.allclose(layer.weight, expected, atol=1e-6)


def test_zero_weights_give_zero_with_finite_gradients():
    for layer in (nn.Linear(3, 4), nn.Conv2d(3, 4, 3)):
        with torch.no_grad():
            layer.weight.zero_()
        onelip.aol(layer)
        assert not layer.weight.any()
        layer.weight.sum().backward()
        assert original_of(layer).grad.isfinite().all()


def test_zero_column_gets_gradient_zero_and_its_neighbours_do_not():
    layer = onelip.aol(nn.Linear(4, 5, dtype=torch.float64))
    with torch.no_grad():
        original_of(layer).normal_()
        original_of(layer)[:, 2] = 0
    (layer.weight * torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    grad = original_of(layer).grad
    assert grad.isfinite().all()
    assert grad[:, [0, 1, 3]].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(dtype):
    torch.manual_seed(0)
    layer = onelip.aol(nn.Conv2d(8, 8, 3, dtype=dtype))
    assert layer.weight.dtype == dtype
    # The weight is the float32 result rounded once, not something computed in eight bits.
    wide = onelip.aol(nn.Conv2d(8, 8, 3))
    with torch.no_grad():
        original_of(wide).copy_(original_of(layer))
    assert torch.equal(layer.weight, wide.weight.to(dtype))
    constant = onelip.summary(layer).constant
    assert constant is not None
    assert exact_norm(layer, (8, 6, 6)) <= constant <= 1 + 8.5 * torch.finfo(dtype).eps / 2
    layer.weight.float().sum().backward()
    assert original_of(layer).grad.isfinite().all()


def test_autocast_leaves_gram_and_gradient_in_full_precision():
    torch.manual_seed(0)
    layer = onelip.aol(nn.Linear(64, 64))
    g = torch.randn(64, 64)
    expected = torch.autograd.grad(layer.weight, original_of(layer), g)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = layer.weight
        got = torch.autograd.grad(weight, original_of(layer), g)[0]
    assert weight.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_matmul_precision_is_kept_away_and_restored(precision):
    """torch.set_float32_matmul_precision may turn float32 products into TF32 or bfloat16."""
    before = torch.get_float32_matmul_precision()
    seen = []
    try:
        torch.set_float32_matmul_precision(precision)
        with full_precision(torch.device("cpu")):
            seen.append((torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision))
        outside = torch.backends.mkldnn.matmul.fp32_precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("ieee", "ieee")]
    assert outside in ("tf32", "bf16")


def test_settings_survive_threads():
    before = torch.get_float32_matmul_precision()
    layer = onelip.aol(nn.Linear(40, 40))
    try:
        torch.set_float32_matmul_precision("medium")
        expected = torch.backends.mkldnn.matmul.fp32_precision
        threads = [threading.Thread(target=lambda: [layer.weight for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.backends.mkldnn.matmul.fp32_precision == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_stays_one_and_is_refused_by_bake(bad):
    layer = onelip.aol(nn.Conv2d(2, 2, 3))
    with torch.no_grad():
        original_of(layer)[0, 0, 0, 0] = bad
    assert not layer.weight.isfinite().any()
    with pytest.raises(onelip.NonFiniteWeight, match="'weight'"):
        onelip.bake(layer)
    layer.weight = torch.full_like(layer.weight, bad)
    assert not layer.weight.isfinite().any()


LAYERS = {
    "Linear": lambda: nn.Linear(7, 5),
    "Conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2),
    "Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "Conv3d": lambda: nn.Conv3d(2, 3, 2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "options", [{}, {"side": "outputs"}, {"learn_weights": True}, {"steps": 2}, {"lipschitz": 2.0}]
)
def test_assigning_a_weight_of_aol_reproduces_it(name, options):
    torch.manual_seed(0)
    layer = onelip.aol(LAYERS[name]().double(), **options)
    with torch.no_grad():
        original_of(layer).normal_()
    weight = layer.weight.detach().clone()
    layer.weight = weight
    assert torch.allclose(layer.weight, weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["Linear", "Conv1d", "Conv3d", "ConvTranspose2d"])
def test_pretrained_weights_are_kept_up_to_one_factor(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    weight = layer.weight.detach().clone()
    onelip.aol(layer)
    factor = layer.weight / weight
    assert torch.allclose(factor, factor.flatten()[0].expand_as(factor), rtol=1e-9)


def test_assigning_does_not_alias_and_checks_the_shape():
    layer = onelip.aol(nn.Linear(3, 3))
    weight = torch.zeros(3, 3)
    layer.weight = weight
    weight.fill_(1)
    assert not original_of(layer).any()
    with pytest.raises(ValueError, match=r"expected a weight of shape \(3, 3\), got \(2, 3\)"):
        layer.weight = torch.zeros(2, 3)


def test_optimisers_made_before_keep_the_parameter():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    onelip.aol(layer)
    before = layer.weight.detach().clone()
    layer(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_second_derivatives_through_a_layer():
    """A gradient penalty, as a critic needs it."""
    torch.manual_seed(0)
    layer = onelip.aol(nn.Conv2d(2, 3, 3, dtype=torch.float64))
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def penalty(P):
        y = torch.func.functional_call(layer, {"parametrizations.weight.original": P}, (x,))
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return g.square().sum()

    P = original_of(layer).detach().requires_grad_()
    assert torch.autograd.gradcheck(penalty, P)


def test_two_forwards_before_one_backward_and_cached():
    layer = onelip.aol(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    (layer(x) + layer(2 * x)).sum().backward()
    twice = original_of(layer).grad.clone()
    layer.zero_grad()
    with parametrize.cached():
        (layer(x) + layer(2 * x)).sum().backward()
    assert torch.allclose(twice, original_of(layer).grad, atol=1e-6)


def test_life_with_torch():
    layer = onelip.aol(nn.Conv2d(3, 4, 3), learn_weights=True)
    x = torch.randn(2, 3, 6, 6)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    assert torch.equal(averaged(x), expected)
    assert copy.deepcopy(layer).double()(x.double()).dtype == torch.float64
    jacobian = torch.func.vmap(torch.func.jacrev(layer))(x)
    assert jacobian.shape == (2, 4, 4, 4, 3, 6, 6)
    program = torch.export.export(layer, (x,))
    assert torch.allclose(program.module()(x), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_compiles_forward_and_backward():
    torch.manual_seed(0)
    layer = onelip.aol(nn.Conv2d(3, 4, 3))
    x = torch.randn(2, 3, 6, 6)
    layer(x).square().sum().backward()
    expected = original_of(layer).grad.clone()
    layer.zero_grad()
    torch.compile(layer, backend="aot_eager")(x).square().sum().backward()
    assert torch.allclose(original_of(layer).grad, expected, atol=1e-6)


def test_channels_last_is_kept():
    layer = onelip.aol(nn.Conv2d(8, 8, 3, padding=1)).to(memory_format=torch.channels_last)
    assert original_of(layer).is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    layer(torch.randn(2, 8, 6, 6)).sum().backward()
    assert original_of(layer).grad.isfinite().all()


def test_meta_device():
    with torch.device("meta"):
        layer = onelip.nn.AOLConv2d(3, 8, 3)
        assert layer(torch.zeros(1, 3, 8, 8)).shape == (1, 8, 6, 6)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert exact_norm(layer, (3, 5, 5)) == pytest.approx(1, abs=1e-6)


def test_flushed_denormals():
    """torch.set_flush_denormal makes underflow worse; the bound must still hold."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # a processor that cannot do it only makes the test easier
    try:
        layer = onelip.aol(nn.Linear(50, 50))
        with torch.no_grad():
            original_of(layer).mul_(torch.logspace(-37, 0, 50))
        weight = layer.weight.detach().clone()
    finally:
        torch.set_flush_denormal(False)
    assert torch.linalg.matrix_norm(weight.double(), 2) <= 1 + 1e-6
