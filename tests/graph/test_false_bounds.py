"""Programs that once were given a false bound: each has none now, or one that holds for a pair of inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelip
from onelip.core.errors import CannotTrace, ProofError

MASK, PLACE = torch.tensor([True, False, True]), torch.tensor([1])
ROOT = torch.eye(3).double() * 2**0.5
OFF = torch.full((3,), -100.0).double()  # relu is off near the example, so that no measurement there shows a mistake


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def gradient_step(alpha):
    return lambda x: x - F.linear(torch.relu(torch.add(OFF, F.linear(x, ROOT), alpha=alpha)), ROOT.T)


def jump(offset, size):
    def forward(x):
        a, b = x.chunk(3, 1)[:2]
        return torch.cat([torch.where(a > 0.3, a + offset, a + (offset + size)), b + offset], 1) - offset

    return forward


THRESHOLD = torch.full((3,), 0.3, dtype=torch.float64)
FAR, NEAR_ONE = torch.full((3,), 500.0), torch.tensor([1.0, 1.0 + 1e-8, 1.0], dtype=torch.float64)
CASES = [
    # alpha multiplies A x in b + alpha A x, so the step is alpha times as long
    (gradient_step(3), FAR, FAR + 1),
    (gradient_step(-1), -FAR, -FAR - 1),
    # negative numbers among squares: sqrt(x^2 - 1) has no bounded slope at 1
    (lambda x: torch.sqrt(torch.where(MASK, x**2, -1.0) + x**2), NEAR_ONE, NEAR_ONE + 1e-6),
    (lambda x: torch.sqrt((x**2).index_fill(1, PLACE, -1.0) + x**2), NEAR_ONE, NEAR_ONE + 1e-6),
    (lambda x: torch.sqrt((x**2).scatter(1, PLACE.expand(x.shape[0], 1), -1.0) + x**2), NEAR_ONE, NEAR_ONE + 1e-6),
    # a jump beside a large constant, or a small one between exact numbers, is not rounding
    (jump(1e12, 0.5), THRESHOLD, THRESHOLD + 0.01),
    (jump(0.0, 1e-13), THRESHOLD, THRESHOLD + 1e-14),
]


def _tiny(x):
    """|x| and x; a constant that is 1e13 times as large hides the change from a measurement."""
    return (torch.cat([x[:, :2].abs() * 1e-170 + 1e-157, x[:, 2:] * 1e-170 + 1e-157], 1) - 1e-157) * 1e170


@pytest.mark.parametrize(
    ("function", "constant"),
    [
        (_tiny, 1.0),
        (lambda x: (F.relu(x * 1e-170) - F.relu(-x * 1e-170)) * 1e170, 1.0),
        (lambda x: (x * 0.1 * 0.1 - x * (0.1 * 0.1)) * 1e18, 0.83),  # 0.1 * 0.1 is rounded
        (lambda x: x / 3 * 3 - x, 1e-17),
    ],
)
def test_coefficients_that_underflow_or_cancel_are_not_zero(function, constant):
    """Their squares, or their differences, are 0 in float64; in real arithmetic they are not."""
    proved = onelip.audit(Function(function), torch.rand(2, 3).double(), lower=False).upper
    assert proved is None or proved >= constant


@pytest.mark.parametrize(("function", "x", "y"), CASES)
def test_no_pair_is_steeper_than_the_bound(function, x, y):
    x, y = x.double()[None], y.double()[None]
    proved = onelip.audit(Function(function), torch.rand(2, 3).double(), lower=False).upper
    ratio = float((function(x) - function(y)).norm() / (x - y).norm())
    assert proved is None or ratio <= proved


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (lambda x: F.max_pool1d(x, 2), (6,)),
        (lambda x: F.max_pool2d(x, 2), (4, 4)),
        (lambda x: F.avg_pool2d(x, 2), (4, 4)),
        (lambda x: F.adaptive_avg_pool2d(x, 1), (4, 4)),
    ],
)
def test_pooling_of_samples_without_channels_has_no_lowering(pool, shape):
    model = Function(lambda x: pool(x).flatten(1)).double()
    assert onelip.audit(model, torch.rand(2, *shape).double(), lower=False).upper is not None
    with pytest.raises(ProofError, match="no rule bounds its rounding"):
        onelip.prove(model, shape)


# Operations of somebody else, with names that those of torch have for constants.
@torch.library.custom_op("onelip_tests::new_gelu", mutates_args=())
def new_gelu(x: Tensor) -> Tensor:
    return torch.where(x > 50, (x - 50) * 10, torch.zeros_like(x))


@torch.library.custom_op("onelip_tests::shift_like", mutates_args=())
def shift_like(x: Tensor) -> Tensor:
    return (torch.arange(len(x)) > 8)[:, None].expand_as(x).to(x) * 9


@torch.library.custom_op("onelip_tests::gain", mutates_args=())
def gain(w: Tensor) -> Tensor:
    return w * 2  # whatever else it may do at the next call


for operation in (new_gelu, shift_like, gain):
    operation.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda x: x + new_gelu(x), "new_gelu"),
        (lambda x: x * (1 + shift_like(x)), "shift_like"),
        (lambda x: x * gain(ROOT[0]), "gain"),
    ],
)
def test_operations_of_somebody_else_are_no_constants(forward, name):
    audit = onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False)
    assert audit.upper is None
    assert any(f"({name})" in gap for gap in audit.unproved)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.where(x**2 > -1, x**2, x**2),
        lambda x: torch.where(x * x > 4, x * x, x.square()),
        lambda x: (x**2) * (x**2 > -1),
    ],
)
def test_choices_among_squares_are_not_those_of_their_roots(forward):
    """A call made of squares is followed by its root; what reads the squares themselves is not bounded by it."""
    assert onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False).upper is None


# Found by a review: rows over one tensor.


def _twice_relu(x):
    """2 relu(u) for u = x - 1000: |u| and -|u| have equal tables, but are decided by different entries."""
    u = x - 1000
    both = torch.cat([u, -u], 1)
    positive, negative = both.abs()[:, :3], -both.abs()[:, 3:]
    half = torch.relu(both)[:, :3]
    return half * (positive > 0) + 0 * u + half * (negative < 0)


def _no_number(x):
    """[v == 0] is not 1 - v."""
    u = x + 1e6
    return -2 * torch.relu(-u) - u * torch.logical_not(torch.sign(u))


def _jump_beside_a_slope(x):
    return (1e13 * x[:, :1] + (x[:, 1:] * 0.3 * 0.7) * (x[:, :1] > 0)) * 1e-13


@pytest.mark.parametrize(
    ("forward", "x", "y"),
    [
        (_twice_relu, [2000.0, 2000.0, 2000.0], [2001.0, 2000.0, 2000.0]),
        (_no_number, [-2e6, 0.0, 0.0], [-2e6 + 1, 0.0, 0.0]),
        (_jump_beside_a_slope, [-1e-30, 1e6, 0.0], [1e-30, 1e6, 0.0]),
    ],
)
def test_rows_that_look_alike(forward, x, y):
    """Near the example the wrong constants cannot be seen."""
    model, x, y = Function(forward), torch.tensor([x]).double(), torch.tensor([y]).double()
    upper = onelip.audit(model, torch.rand(2, 3).double(), lower=False).upper
    ratio = (model(x) - model(y)).norm() / (x - y).norm()
    assert upper is None or ratio <= upper * (1 + 1e-9)


def test_sums_that_underflow_are_rounded():
    forward = lambda x: torch.relu(x + 1e-150 + 1e-200) - torch.relu(x + 1e-150) + 0 * x  # noqa: E731
    upper = onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False).upper
    assert upper is None or upper >= 1  # the slope between -1e-150 - 1e-200 and -1e-150


def test_tensordot_over_axes_of_different_lengths():
    weight = torch.ones(1, 2).double()
    audit = onelip.audit(Function(lambda x: torch.tensordot(x, weight, ([1], [0]))), torch.rand(2, 3).double())
    assert audit.upper is None
    assert "different lengths" in audit.unproved[0]


def test_a_mean_of_no_squares_is_unproved():
    forward = lambda x: torch.sqrt((x[:, :0] ** 2).mean(1, keepdim=True)) + x  # noqa: E731
    audit = onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False)
    assert audit.upper is None
    assert any("mean of no entries" in line for line in audit.unproved)


def test_a_sum_of_no_roots_of_squares_is_zero():
    forward = lambda x: x + (torch.sqrt((x**2)[:, :0]) * torch.ones(0).double()).sum(1, keepdim=True)  # noqa: E731
    assert 1 <= onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False).upper < 1 + 1e-9


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * torch.nan_to_num(x.new_empty(3)),
        lambda x: x * (torch.empty(3).double() > 0),
        lambda x: x * torch.empty(3, dtype=torch.int64),
        lambda x: x * torch.clamp(torch.empty_like(x), 0, 1),
    ],
)
def test_uninitialised_memory_is_not_read(forward):
    with pytest.raises(CannotTrace, match=r"filled memory|same program|one graph"):
        onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False)


def test_filled_memory_is_a_constant():
    def forward(x):
        mask = torch.empty(3).double()
        mask[:2] = 1
        mask[2:] = 2
        return x * mask

    assert onelip.audit(Function(forward), torch.rand(2, 3).double(), lower=False).upper == pytest.approx(2)
