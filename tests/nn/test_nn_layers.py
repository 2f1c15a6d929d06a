"""Pooling, channels, residual, centering: exact Jacobian norms, tightness, extreme values, errors."""

import copy
import inspect
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import onelip
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.rounding import multiply_up, root_at_most
from onelip.graph.modules import bound_chain, links
from onelip.nn import pooling
from onelip.nn.activations import MaxMin
from onelip.nn.channels import BatchCentering, FirstChannels, LayerCentering, PadChannels
from onelip.nn.residual import ConvexResidual

CONCATENATION = (pooling.ConcatenationPool1d, pooling.ConcatenationPool2d, pooling.ConcatenationPool3d)
AVERAGE = (pooling.LipschitzAvgPool1d, pooling.LipschitzAvgPool2d, pooling.LipschitzAvgPool3d)
L2 = (pooling.L2Pool1d, pooling.L2Pool2d, pooling.L2Pool3d)


def norm(f: nn.Module, x: Tensor) -> float:
    """Exact spectral norm of the Jacobian at x."""
    J = torch.autograd.functional.jacobian(f, x)
    assert isinstance(J, Tensor)
    return float(torch.linalg.matrix_norm(J.reshape(-1, x.numel()), ord=2))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    axes=st.integers(1, 3),
    kernel=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    stride=st.integers(1, 5),
    data=st.data(),
)
def test_pooling_norms_never_exceed_one(axes, kernel, stride, data):
    kernel = kernel[:axes]
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    sizes = [data.draw(st.integers(k, 9 if axes == 1 else 6)) for k in kernel]
    x = normal(1, 1, *sizes)
    assert norm(AVERAGE[axes - 1](kernel, stride, padding), x) <= 1 + 1e-12
    assert norm(L2[axes - 1](kernel, stride), x) <= 1 + 1e-12
    # Constant windows are where averaging and the norm are steepest.
    assert norm(L2[axes - 1](kernel, stride), torch.ones_like(x)) <= 1 + 1e-12


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_pooling_without_overlap_is_tight(axes):
    x = normal(1, 2, *(4,) * axes)
    for layer in (AVERAGE[axes - 1](2), L2[axes - 1](2), AVERAGE[axes - 1](None), L2[axes - 1](None)):
        assert norm(layer, x) == pytest.approx(1, abs=1e-12)
        assert layer.lipschitz_constant == 1.0
    assert norm(AVERAGE[axes - 1](2, 3), normal(1, 1, *(5,) * axes)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("k", "s"), [(2, 1), (3, 1), (3, 2), (5, 2), (5, 3)])
def test_overlapping_average_is_tight_in_the_limit_and_never_below_the_simple_bound(k, s):
    layer = pooling.LipschitzAvgPool1d(k, s)
    assert 0.995 < norm(layer, normal(1, 1, 60)) <= 1 + 1e-12
    assert layer.scale >= math.sqrt(k / math.ceil(k / s)) * (1 - 1e-15)


def test_average_is_torchs_average_times_a_number():
    x = normal(2, 3, 7, 7)
    layer = pooling.LipschitzAvgPool2d(3, 2, 1)
    torch.testing.assert_close(layer(x), F.avg_pool2d(x, 3, 2, 1) * 9 / 5)
    torch.testing.assert_close(pooling.LipschitzAvgPool2d(None)(x), x.sum((2, 3), keepdim=True) / 7)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_root_is_the_largest_float_not_above(numerator, denominator):
    square = Fraction(numerator, denominator)
    root = root_at_most(square)
    assert Fraction(root) ** 2 <= square < Fraction(math.nextafter(root, math.inf)) ** 2


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_concatenation_is_a_permutation(axes):
    x = normal(2, 3, *(4, 6, 2)[:axes])
    y = CONCATENATION[axes - 1](2)(x)
    assert y.shape == (2, 3 * 2**axes, *(2, 3, 1)[:axes])
    assert torch.equal(y.flatten(1).sort().values, x.flatten(1).sort().values)
    assert torch.equal(CONCATENATION[axes - 1](2)(x[0]), y[0])
    # Channel c, offset t of the window at position p holds x[c, 2 p + t].
    assert torch.equal(y[:, 2**axes], x[(slice(None), 1, *(slice(None, None, 2),) * axes)])
    assert torch.equal(y[:, -1], x[(slice(None), 2, *(slice(1, None, 2),) * axes)])


def test_concatenation_has_the_order_of_pixel_unshuffle():
    x = normal(2, 3, 6, 9)
    assert torch.equal(pooling.ConcatenationPool2d(3)(x), F.pixel_unshuffle(x, 3))
    assert pooling.ConcatenationPool2d((2, 3))(x).shape == (2, 18, 3, 3)
    with pytest.raises(ValueError, match=r"multiples of \(4, 4\), got \(6, 9\).*pad"):
        pooling.ConcatenationPool2d(4)(x)


@pytest.mark.parametrize(("k", "s"), [(2, 2), (3, 1), (3, 2), (2, 3)])
def test_l2_pool_is_the_norm_of_each_window(k, s):
    x = normal(2, 3, 7, 7)
    sums = F.avg_pool2d(x.square(), k, s) * k * k
    torch.testing.assert_close(pooling.L2Pool2d(k, s)(x), (sums / math.ceil(k / s) ** 2).sqrt())
    torch.testing.assert_close(pooling.L2Pool2d(None)(x), x.norm(dim=(2, 3), keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l2_pool_is_right_for_tiny_and_huge_values(dtype):
    info = torch.finfo(dtype)
    for scale in (info.max / 8, info.tiny, info.tiny / 16, 1.0):
        x = (torch.tensor([[[3.0, 4.0, 0.0, -1.0]]], dtype=dtype) * scale / 4).requires_grad_()
        y = pooling.L2Pool1d(2)(x)
        torch.testing.assert_close(y.double() / scale, torch.tensor([[[1.25, 0.25]]]).double(), rtol=1e-5, atol=0)
        # A gradient of 100 times a value near the largest float would overflow on its way.
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 100.0))
        torch.testing.assert_close(
            gradient, torch.tensor([[[60.0, 80.0, 0.0, -100.0]]], dtype=dtype), rtol=1e-4, atol=0
        )


def test_l2_pool_at_zero_and_at_what_is_not_a_number():
    x = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
    y = pooling.L2Pool1d(2)(x)
    assert torch.equal(y, torch.zeros_like(y))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(gradient, torch.zeros_like(x))
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, torch.zeros_like(x))
    odd = pooling.L2Pool1d(2)(torch.tensor([[[float("nan"), 1.0, float("inf"), 1.0]]]))
    assert odd[0, 0, 0].isnan()
    assert odd[0, 0, 1].isinf()


LAYERS: dict[str, LipschitzModule] = {
    "concatenation": pooling.ConcatenationPool2d(2),
    "average": pooling.LipschitzAvgPool2d(3, 2, 1),
    "average, global": pooling.LipschitzAvgPool2d(None),
    "l2": pooling.L2Pool2d(3, 2),
    "l2, global": pooling.L2Pool2d(None),
    "first": FirstChannels(2),
    "pad": PadChannels(6),
    "residual": ConvexResidual(MaxMin(), 0.3),
    "residual, fixed": ConvexResidual(MaxMin(), 0.3, learnable=False),
    "batch centering": BatchCentering(4),
    "layer centering": LayerCentering((1, 2, 3)),
}
every = pytest.mark.parametrize("name", LAYERS)


@every
def test_norm_and_gradients(name):
    layer = copy.deepcopy(LAYERS[name]).double().eval()
    x = normal(1, 4, 4, 4).requires_grad_()
    assert norm(layer, x.detach()) <= layer.lipschitz_constant + 1e-12
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    torch.testing.assert_close(torch.vmap(layer)(x.expand(3, 1, 4, 4, 4))[1], layer(x))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types(name, dtype):
    x = torch.randn(2, 4, 4, 4, dtype=dtype)
    layer = copy.deepcopy(LAYERS[name])
    for mode in (True, False):
        y = layer.train(mode)(x)
        assert y.dtype == dtype
        assert y.isfinite().all()
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), layer(x))


@every
def test_copies_state_and_export(name):
    layer = copy.deepcopy(LAYERS[name]).eval()
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(0.125)
    x = torch.randn(2, 4, 4, 4)
    other = copy.deepcopy(LAYERS[name]).eval()
    other.load_state_dict(layer.state_dict())
    y = layer(x)
    assert torch.equal(other(x), y)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), y)
    assert repr(layer).count("(") >= 1
    assert layer.extra_repr()


def test_channels():
    x = normal(2, 3, 4)
    wide = PadChannels(5)(x)
    assert torch.equal(wide[:, :3], x)
    assert not wide[:, 3:].any()
    assert torch.equal(FirstChannels(3)(wide), x)
    assert PadChannels(9, dim=-1)(x).shape == (2, 3, 9)
    assert PadChannels(9, dim=0)(x).shape == (9, 3, 4)
    assert torch.equal(FirstChannels(2, dim=-1)(x), x[..., :2])
    with pytest.raises(ValueError, match=r"at least 4 channels on axis 1, got 3.*PadChannels\(4, 1\)"):
        FirstChannels(4)(x)
    with pytest.raises(ValueError, match=r"at most 2 channels on axis 1, got 3.*FirstChannels\(2, 1\)"):
        PadChannels(2)(x)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        FirstChannels(0)


class Twice(LipschitzModule):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def bound(self) -> Bound:
        return Bound(abs(self.factor), "the factor")

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_residual_constant_is_exact_for_a_multiple_of_the_identity(factor, alpha):
    for learnable in (True, False):
        layer = ConvexResidual(Twice(factor), alpha, learnable).double()
        assert norm(layer, normal(1, 4)) <= layer.lipschitz_constant + 1e-12
        assert layer.lipschitz_constant == pytest.approx(1 - alpha + alpha * factor, abs=1e-7)
        assert layer.lipschitz_constant <= max(1.0, factor)


@given(st.floats(0, 1), st.floats(0, 4))
def test_residual_constant_is_not_below_the_exact_number(alpha, factor):
    layer = ConvexResidual(Twice(factor), alpha, learnable=False).double()
    a = Fraction(layer.alpha.item())
    assert 1 - a + a * Fraction(factor) <= Fraction(layer.lipschitz_constant)


def test_residual_stays_convex_whatever_training_does():
    layer = ConvexResidual(Twice(-1.0))
    for value in (-200.0, 200.0):
        with torch.no_grad():
            layer.logit.fill_(value)
        x = torch.ones(1, 2, requires_grad=True)
        y = layer(x)
        assert y.abs().max() <= 1
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, layer.logit)))
    assert ConvexResidual(MaxMin(), 0.25).alpha.item() == pytest.approx(0.25)


def test_residual_errors():
    x = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"keeps the shape \(1, 4\), got \(1, 2\)"):
        ConvexResidual(FirstChannels(2))(x)
    with pytest.raises(ValueError, match=r"\(0, 1\), got 1"):
        ConvexResidual(MaxMin(), 1.0)
    assert torch.equal(ConvexResidual(Twice(), 1.0, learnable=False)(x + 1), x + 2)
    unknown = ConvexResidual(nn.Linear(4, 4))
    unknown(x)
    assert unknown.lipschitz_constant is None
    assert unknown.bound().why == "no bound of its branch is known (Linear: free weights: not bounded by construction)"
    assert LipschitzModule().lipschitz_constant is None


def test_constants_of_chains():
    assert bound_chain(links(nn.Sequential(Twice(3.0), nn.ReLU(), Twice(0.5)))).constant == pytest.approx(1.5)
    assert bound_chain(links(nn.Sequential())).constant == 1.0
    found = bound_chain(links(nn.Sequential(MaxMin(), nn.Conv2d(1, 1, 1))))
    assert found.constant is None
    assert found.why.startswith("Conv2d: ")

    class Loud(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    found = bound_chain(links(Loud(MaxMin())))
    assert found.constant is None
    assert found.why.startswith("Loud: ")


@given(st.lists(st.floats(0, 1e3), max_size=6))
def test_products_are_rounded_up(factors):
    exact = math.prod((Fraction(f) for f in factors), start=Fraction(1))
    assert exact <= Fraction(multiply_up(*factors))
    assert multiply_up(*[1.0] * 5) == 1.0


def test_batch_centering_in_training_and_eval():
    layer = BatchCentering(3, momentum=0.25).double()
    x = normal(5, 3, 2) + 4
    mean = x.mean((0, 2))
    torch.testing.assert_close(layer(x).mean((0, 2)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(layer.running_mean, 0.25 * mean)
    before = layer.running_mean.clone()
    layer(x[:0])
    assert torch.equal(layer.running_mean, before)
    assert torch.autograd.gradcheck(layer, x.clone().requires_grad_())  # through the batch mean
    J = torch.autograd.functional.jacobian(layer, x)
    assert isinstance(J, Tensor)
    assert torch.linalg.matrix_norm(J.reshape(30, 30), ord=2) <= 1 + 1e-12  # the batch as a whole
    layer.eval()
    before = layer.running_mean.clone()
    assert torch.equal(layer(x), x - before[:, None])
    assert torch.equal(layer.running_mean, before)
    with pytest.raises(ValueError, match="expected 3 channels on axis 1, got 2"):
        layer(x[:, :2])
    with pytest.raises(ValueError, match="momentum"):
        BatchCentering(3, momentum=2.0)


def test_batch_centering_in_bfloat16():
    x = (torch.randn(16, 4, 8, 8) + 2).to(torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    layer = BatchCentering(4, momentum=1.0)
    y = layer(x)
    torch.testing.assert_close(layer.running_mean, x.detach().float().mean((0, 2, 3)), rtol=2**-8, atol=0)
    (gradient,) = torch.autograd.grad(y[:, :, 0].sum(), x)
    assert gradient.float().sum((0, 2, 3)).abs().max() < 0.01 * gradient.float().abs().sum((0, 2, 3)).max()


def test_batch_centering_takes_the_samples_of_the_other_processes(monkeypatch):
    here, there = normal(4, 3, 2), normal(1, 3, 2, seed=1) + 5
    others = torch.cat([there.sum((0, 2)), torch.tensor([2.0])])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda message: message.add_(others))
    layer = BatchCentering(3, momentum=1.0).double()
    mean = torch.cat([here, there]).mean((0, 2))
    torch.testing.assert_close(layer(here), here - mean[:, None])
    torch.testing.assert_close(layer.running_mean, mean)


def test_batch_centering_in_one_real_process_group(tmp_path):
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch without gloo")
    x = normal(4, 3, 2)
    alone, together = BatchCentering(3).double(), BatchCentering(3).double()
    expected = alone(x)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.testing.assert_close(together(x), expected)
        torch.testing.assert_close(together.running_mean, alone.running_mean)
        assert torch.autograd.gradcheck(together, x.clone().requires_grad_())
    finally:
        dist.destroy_process_group()


def test_layer_centering_is_a_projection():
    x = normal(2, 3, 4)
    layer = LayerCentering((1, -1))
    y = layer(x)
    torch.testing.assert_close(y.mean((1, 2)), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(layer(y), y)
    assert norm(layer, x) == pytest.approx(1, abs=1e-12)
    assert torch.equal(LayerCentering(1)(x), x - x.mean(1, keepdim=True))
    for axes in (0, (1, -3)):
        with pytest.raises(ValueError, match="batch axis 0"):
            LayerCentering(axes)(x)
    with pytest.raises(ValueError, match="at least one axis"):
        LayerCentering(())


def test_pooling_errors():
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"at least \(5, 5\), got shape \(1, 1, 4, 4\)"):
        pooling.L2Pool2d(5)(x)
    with pytest.raises(ValueError, match=r"2 spatial axes.*got shape"):
        pooling.LipschitzAvgPool2d(2)(x[None])
    with pytest.raises(ValueError, match=r"kernel_size to be 1 or 2 integers.*got 0"):
        pooling.ConcatenationPool2d(0)
    with pytest.raises(ValueError, match=r"got \(2, 2, 2\)"):
        pooling.L2Pool2d((2, 2, 2))
    with pytest.raises(ValueError, match="half the kernel size"):
        pooling.LipschitzAvgPool2d(2, padding=2)
    with pytest.raises(ValueError, match="no stride for a global"):
        pooling.L2Pool2d(None, 2)


KINDS = ("ConcatenationPool", "LipschitzAvgPool", "L2Pool")
FACTORIES = {
    "AOLLinear": lambda **kw: onelip.nn.AOLLinear(4, 6, learn_weights=True, **kw),
    "AOLConv1d": lambda **kw: onelip.nn.AOLConv1d(4, 6, 3, learn_weights=True, **kw),
    "AOLConv2d": lambda **kw: onelip.nn.AOLConv2d(4, 6, 3, learn_weights=True, **kw),
    "AOLConv3d": lambda **kw: onelip.nn.AOLConv3d(4, 6, 3, learn_weights=True, **kw),
    "AOLConvTranspose1d": lambda **kw: onelip.nn.AOLConvTranspose1d(4, 6, 3, learn_weights=True, **kw),
    "AOLConvTranspose2d": lambda **kw: onelip.nn.AOLConvTranspose2d(4, 6, 3, learn_weights=True, **kw),
    "AOLConvTranspose3d": lambda **kw: onelip.nn.AOLConvTranspose3d(4, 6, 3, learn_weights=True, **kw),
    "BatchCentering": lambda **kw: BatchCentering(4, **kw),
    "ChannelAffine": lambda **kw: onelip.nn.ChannelAffine(4, **kw),
    "ConvexResidual": lambda **kw: ConvexResidual(nn.Identity(), **kw),
    "Householder": lambda **kw: onelip.nn.Householder(4, 2, **kw),
    "Monotone": lambda **kw: onelip.nn.Monotone(nn.Identity(), signs=(1, 0), **kw),
    "NActivation": lambda **kw: onelip.nn.NActivation(4, init="alternating", **kw),
    "Normalize": lambda **kw: onelip.nn.Normalize([0.5], [0.25], **kw),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_layers_with_tensors_take_device_and_dtype(name):
    layer = FACTORIES[name](dtype=torch.float64)
    assert {t.dtype for t in (*layer.parameters(), *layer.buffers())} == {torch.float64}
    if name != "Normalize":  # which reads its numbers
        layer = FACTORIES[name](device="meta")
        assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {"meta"}


def test_every_public_layer_with_tensors_is_tested_for_device_and_dtype():
    layers = {name for name, value in vars(onelip.nn).items() if isinstance(value, type)}
    takes = {name for name in layers if "device" in inspect.signature(getattr(onelip.nn, name).__init__).parameters}
    assert takes == set(FACTORIES)
    # All others have no tensors of their own.
    small = {"FirstChannels": (2,), "PadChannels": (2,), **{f"{k}{d}d": (2,) for k in KINDS for d in (1, 2, 3)}}
    for name in layers - takes - {"LipschitzModule", "Bound", "MirrorAverage"}:
        assert not getattr(onelip.nn, name)(*small.get(name, ())).state_dict()


def test_convex_residual_with_a_fixed_weight_takes_dtype():
    assert ConvexResidual(nn.Identity(), learnable=False, dtype=torch.float64).fixed_alpha.dtype == torch.float64


@pytest.mark.parametrize(
    "name", [*sorted({*FACTORIES} - {"ConvexResidual", "Monotone", "Normalize"}), "FirstChannels", "PadChannels"]
)
def test_every_layer_has_a_constant_in_summaries(name):
    layer = FACTORIES[name]() if name in FACTORIES else getattr(onelip.nn, name)(2)
    assert onelip.summary(nn.Sequential(layer)).constant == 1.0


@pytest.mark.parametrize("layer", [onelip.nn.FirstChannels(2), onelip.nn.PadChannels(6)])
def test_layers_of_channels_are_one_step_of_a_certified_program(layer):
    """Their classes state the constant beside `forward`; a constant of a base class would not count."""
    entries = layer.out_channels * 4
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(entries, 2)).double().eval()
    kinds = [node.kind for node in onelip.prove(model, (4, 2, 2)).program.nodes]
    assert kinds == ["input", "join", "join", "affine"]
