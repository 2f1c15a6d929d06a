"""Every activation: the Jacobian is orthogonal, distances never grow, and torch's machinery works with it."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn.activations import Abs, GroupSort, Householder, MaxMin, NActivation, groupsort, maxmin

CHANNELS = 12


def scattered(layer: LipschitzModule) -> LipschitzModule:
    """The layer in float64 with random parameters, also far from all initial values."""
    layer = layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 5)
    return layer


MAKERS = {
    "maxmin": MaxMin,
    "groupsort2": lambda: GroupSort(2),
    "groupsort3": lambda: GroupSort(3),
    "fullsort": GroupSort,
    "abs": Abs,
    "beta-abs": lambda: Abs(0.75),
    "householder1": lambda: Householder(CHANNELS),
    "householder2": lambda: Householder(CHANNELS, order=2),
    "n": lambda: NActivation(CHANNELS),
}
every = pytest.mark.parametrize("name", MAKERS)


def jacobian(layer: LipschitzModule, x: Tensor) -> Tensor:
    J = torch.autograd.functional.jacobian(layer, x)
    assert isinstance(J, Tensor)
    return J.reshape(-1, x.numel())


@every
def test_jacobian_is_orthogonal(name):
    layer = scattered(MAKERS[name]())
    torch.manual_seed(0)
    for scale in (1e-3, 1.0, 30.0):
        singular = torch.linalg.svdvals(jacobian(layer, scale * torch.randn(1, CHANNELS, 2, dtype=torch.float64)))
        assert singular.max() <= layer.lipschitz_constant + 1e-12
        assert singular.min() >= 1 - 1e-12


@every
def test_distances_never_grow(name):
    layer = scattered(MAKERS[name]())
    torch.manual_seed(1)
    x, step = torch.randn(2, 4000, CHANNELS, dtype=torch.float64) * 5
    with torch.no_grad():
        for size in (1.0, 0.1, 1e-6):
            ratio = (layer(x + size * step) - layer(x)).norm(dim=1) / (size * step).norm(dim=1)
            assert ratio.max() <= 1 + 1e-8


@every
def test_gradients(name):
    layer = scattered(MAKERS[name]())
    torch.manual_seed(2)
    x = torch.randn(2, CHANNELS, dtype=torch.float64, requires_grad=True)
    inputs = (x, *layer.parameters())

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [n for n, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
    zero = torch.zeros(2, CHANNELS, dtype=torch.float64, requires_grad=True)
    for gradient in torch.autograd.grad(layer(zero).sum(), (zero, *layer.parameters())):
        assert gradient.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_memory_format_and_other_axes(name, dtype):
    layer = MAKERS[name]()
    x = torch.randn(2, CHANNELS, 3, 2, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == x.shape
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), y)
    layer.dim = -1
    torch.testing.assert_close(layer(x.movedim(1, -1)).movedim(-1, 1), y)


@every
def test_nan_never_disappears(name):
    layer = MAKERS[name]()
    for channel in range(CHANNELS):
        x = torch.randn(1, CHANNELS)
        x[0, channel] = float("nan")
        assert layer(x).isnan().any()


@every
def test_copies_state_and_export(name):
    layer = scattered(MAKERS[name]())
    x = torch.randn(2, CHANNELS, 3, dtype=torch.float64)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    other = MAKERS[name]().double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), y)
    assert f"dim={layer.dim}" in repr(layer)


@settings(max_examples=40, deadline=None)
@given(groups=st.integers(1, 4), size=st.integers(1, 5), dim=st.integers(-2, 1), seed=st.integers(0, 2**31))
def test_groupsort_sorts_each_group(groups, size, dim, seed):
    x = torch.randn(groups * size, groups * size, generator=torch.Generator().manual_seed(seed))
    y = groupsort(x, size, dim).movedim(dim, -1)
    before = x.movedim(dim, -1)
    for j in range(groups):
        assert torch.equal(y[:, j::groups], before[:, j::groups].sort(dim=1, descending=True).values)


def test_groupsort_of_two_is_maxmin_and_of_all_is_sort():
    x = torch.randn(3, 8, 2)
    assert torch.equal(GroupSort(2)(x), maxmin(x))
    for whole in (GroupSort(), GroupSort(-1), GroupSort(8)):
        assert torch.equal(whole(x), x.sort(dim=1, descending=True).values)


def test_beta_abs_leaves_the_rest():
    x = -torch.rand(2, 10)
    assert torch.equal(Abs(0.3)(x), torch.cat([x[:, :3].abs(), x[:, 3:]], 1))
    assert torch.equal(Abs(0.0)(x), x)


def circle(points: int, radius: float = 1.0) -> tuple[Tensor, Tensor]:
    phi = torch.arange(points, dtype=torch.float64) * (2 * math.pi / points)
    return phi, radius * torch.stack([phi.cos(), phi.sin()], dim=1)


ANGLE = st.one_of(st.sampled_from([0.0, math.pi, 2 * math.pi, -math.pi, 4 * math.pi]), st.floats(-40, 40))


@settings(max_examples=60, deadline=None)
@given(order=st.sampled_from([1, 2]), angles=st.tuples(ANGLE, ANGLE, ANGLE))
def test_householder_is_continuous_and_one_lipschitz_for_every_angle(order, angles):
    layer = Householder(2, order).double()
    with torch.no_grad():
        layer.angles.copy_(torch.tensor(angles[: 1 if order == 1 else 3], dtype=torch.float64).view_as(layer.angles))
        _, points = circle(5000, radius=3.0)
        images = layer(points)
    torch.testing.assert_close(images.norm(dim=1), points.norm(dim=1), rtol=1e-12, atol=0)
    # Neighbours across every border, and across the place where the angle wraps around.
    step = (points.roll(1, 0) - points).norm(dim=1)
    assert ((images.roll(1, 0) - images).norm(dim=1) <= step * (1 + 1e-9) + 1e-13).all()
    # Points far apart, so that no border is special.
    far = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert ((images[far] - images).norm(dim=1) <= (points[far] - points).norm(dim=1) + 1e-12).all()


def test_householder_of_order_one_starts_as_min_and_max():
    x = torch.randn(50, 6, 2, dtype=torch.float64)
    torch.testing.assert_close(Householder(6).double()(x), maxmin(x).roll(3, dims=1), rtol=0, atol=1e-6)
    layer = Householder(6).double()
    with torch.no_grad():
        layer.angles.fill_(math.pi / 2)  # the initial value went through float32
    torch.testing.assert_close(layer(x), maxmin(x).roll(3, dims=1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", [1, 2])
def test_householder_computes_in_the_wider_type(order):
    layer = Householder(8, order)
    x = torch.randn(100, 8, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer(x.float()).bfloat16())
    x = torch.randn(100, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x).norm(dim=1), x.norm(dim=1), rtol=1e-14, atol=0)


def test_householder_of_order_two_has_four_sectors_and_contains_order_one():
    layer = Householder(2, 2).double()
    t0, t1, t2 = 0.7, 2.0, 1.2
    with torch.no_grad():
        layer.angles.copy_(torch.tensor([[t0], [t1], [t2]]))
        phi, points = circle(400)
        image = layer(points)
    relative = torch.remainder(phi - t0 / 2, 2 * math.pi)
    after = torch.where(
        relative < t1 / 2,
        relative,
        torch.where(
            relative < (t1 + t2) / 2,
            t1 - relative,
            torch.where(relative < math.pi + t2 / 2, relative - t2, -relative),
        ),
    )
    expected = torch.stack([(after + t0 / 2).cos(), (after + t0 / 2).sin()], dim=1)
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-7)
    once = Householder(2, 1).double()
    with torch.no_grad():
        layer.angles[2] = 0.0
        once.angles.copy_(layer.angles[0])
        torch.testing.assert_close(layer(points), once(points), rtol=0, atol=1e-14)


def test_householder_angles_outside_the_range_still_learn():
    layer = Householder(2, 2).double()
    with torch.no_grad():
        layer.angles.copy_(torch.tensor([[0.3], [-1.0], [7.0]]))
    _, points = circle(100)
    layer(points).pow(3).sum().backward()
    assert layer.angles.grad is not None
    assert (layer.angles.grad != 0).all()


def test_n_activation_follows_its_definition_whatever_the_order_of_the_kinks():
    layer = NActivation(2).double()
    with torch.no_grad():
        layer.theta.copy_(torch.tensor([[-1.0, 2.0], [0.5, -3.0]]))
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    for channel, (a, b) in enumerate([(-1.0, 0.5), (-3.0, 2.0)]):
        expected = torch.where(x < a, x - 2 * a, torch.where(x < b, -x, x - 2 * b))
        torch.testing.assert_close(layer(torch.stack([x, x], 1))[:, channel], expected, rtol=0, atol=1e-14)


def test_n_activation_starts():
    x = torch.linspace(-5, 5, 24).view(2, CHANNELS)
    assert torch.equal(NActivation(CHANNELS)(x), x)
    assert torch.equal(NActivation(CHANNELS, init="absolute")(x), x.abs())
    assert torch.equal(NActivation(CHANNELS, init="alternating")(x), Abs(0.5)(x))
    assert torch.equal(NActivation(CHANNELS, init=(-1.0, 1.0)).theta[:, 0].detach(), torch.tensor([-1.0, 1.0]))


def test_errors():
    x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="multiple of the group size 3, got length 5"):
        GroupSort(3)(x)
    with pytest.raises(ValueError, match="multiple of the group size 2, got length 5"):
        GroupSort(2)(x)
    with pytest.raises(ValueError, match="group_size"):
        GroupSort(0)
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        Abs(1.5)
    with pytest.raises(ValueError, match="even number of channels, got 3"):
        Householder(3)
    with pytest.raises(ValueError, match="order 1 or 2, got 3"):
        Householder(4, order=3)
    with pytest.raises(ValueError, match="expected 4 channels on axis 1, got 6"):
        Householder(4)(torch.zeros(1, 6))
    with pytest.raises(ValueError, match="expected 4 channels on axis 1, got 5"):
        NActivation(4)(x)
    with pytest.raises(ValueError, match="init"):
        NActivation(4, init="relu")  # pyright: ignore[reportArgumentType]
