"""The float64 decompositions compute the operations of torch, up to the order of sums."""

import math
import struct

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from onelip.export import decompositions

aten = torch.ops.aten


@st.composite
def convolutions(draw):
    """Arguments of aten.convolution: every number of axes, stride, dilation, padding, groups, both directions."""
    axes = draw(st.integers(1, 3))

    def per_axis(low, high):
        return draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    groups, transposed = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    kernel, stride, dilation, padding = per_axis(1, 3), per_axis(1, 3), per_axis(1, 2), per_axis(0, 2)
    extra = per_axis(0, 2) if transposed else [0] * axes
    assume(all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(2, 4, *per_axis(1, 7), generator=random, dtype=torch.float64)
    shape = (4, 8 // groups) if transposed else (8, 4 // groups)
    weight = torch.randn(*shape, *kernel, generator=random, dtype=torch.float64)
    bias = torch.randn(8, generator=random, dtype=torch.float64) if draw(st.booleans()) else None
    return x, weight, bias, stride, padding, dilation, transposed, extra, groups


@settings(max_examples=150, deadline=None)
@given(convolutions())
def test_convolution_is_torchs(arguments):
    try:
        expected = aten.convolution(*arguments)
    except RuntimeError:  # the kernel is larger than the image
        assume(False)
    got = decompositions.convolution(*arguments)
    assert got.shape == expected.shape
    # 4 * 27 products of normal numbers, in another order.
    assert bool(((got - expected).abs() <= 1e-13).all())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("extra", [[0, 0], [1, 0]])
def test_windows_side_by_side(groups, extra):
    """Kernels as large as the stride, as the Fourier methods have them: one product, whatever the size."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    there, back = torch.randn(6, 4 // groups, 3, 2).double(), torch.randn(4, 6 // groups, 3, 2).double()
    for arguments in (
        (x, there, None, [3, 2], [0, 0], [1, 1], False, [0, 0], groups),
        (x, back, None, [3, 2], [1, 0], [1, 1], True, extra, groups),
    ):
        expected = aten.convolution(*arguments)
        torch.testing.assert_close(decompositions.convolution(*arguments), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize(
    "settings", [([2],), ([3], [2]), ([3], [2], [1]), ([2], [], [0], False, True, 3), ([3], [1], [1], False, False, 7)]
)
def test_average_pool_is_torchs(axes, settings):
    operation = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[axes]
    settings = [s * axes if isinstance(s, list) else s for s in settings]
    for shape in ((2, 3, *range(5, 5 + axes)), (3, *range(5, 5 + axes))):  # also without a batch
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(
            decompositions.average_pool(x, *settings), operation(x, *settings), rtol=0, atol=1e-15
        )


def test_average_pools_without_a_rule_are_left_to_torch():
    x = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    assert decompositions.average_pool(x, [2, 2], [2, 2], [0, 0], True) is NotImplemented
    assert decompositions.average_pool(x, [2, 2], [2, 2], [1, 1], False, False) is NotImplemented


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs(affine):
    layer = torch.nn.BatchNorm2d(3, affine=affine).double().eval()
    layer.running_mean.uniform_()
    layer.running_var.uniform_(0.0, 1e-4)  # so that epsilon counts
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    got, *_ = decompositions.batch_norm(
        x, layer.weight, layer.bias, layer.running_mean, layer.running_var, 0.1, layer.eps
    )
    torch.testing.assert_close(got, layer(x), rtol=1e-14, atol=1e-13)


def test_atan2_in_all_directions():
    angles = torch.linspace(-math.pi, math.pi, 4001, dtype=torch.float64)[1:-1]
    for scale in (1e-300, 1.0, 1e300):
        y, x = scale * angles.sin(), scale * angles.cos()
        assert float((decompositions.atan2(y, x) - torch.atan2(y, x)).abs().max()) <= 2e-15
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(decompositions.atan2(zero, zero)) == 0
    assert float(decompositions.atan2(zero, zero - 1)) == math.pi
    assert bool(decompositions.atan2(zero * math.nan, zero + 1).isnan())


@given(st.floats(2**-95, 2**126) | st.floats(-(2**126), -(2**-95)))
def test_numbers_are_exact(value):
    like = torch.zeros(1, dtype=torch.float64)
    assert float(decompositions.exact_number(value, like)) == value
    power = 2.0 ** (math.frexp(value)[1] - 53)
    assert struct.unpack("f", struct.pack("f", power))[0] == power  # all that torch.onnx rounds is a float32 already


def test_rules_act_on_lossy_numbers_only():
    table = decompositions.float64_decompositions()
    x = torch.randn(5, dtype=torch.float64)
    multiply = table[aten.mul.Tensor]
    assert torch.equal(multiply(x, 0.1), x * 0.1)
    assert multiply(x, 0.5) is NotImplemented
    assert multiply(x, x) is NotImplemented
    assert multiply(x.float(), 0.1) is NotImplemented
    assert multiply(x, math.inf) is NotImplemented
    add = table[aten.add.Tensor]
    assert torch.equal(add(x, x, alpha=0.1), x + 0.1 * x)
    assert add(x, x, alpha=0.5) is NotImplemented
    clamp = table[aten.clamp.default]
    assert torch.equal(clamp(x, -0.1, 0.3), x.clamp(-0.1, 0.3))
    assert torch.equal(clamp(x, 0, 0.3), x.clamp(0, 0.3))
    assert torch.equal(clamp(x, None, 0.3), x.clamp(None, 0.3))
    assert clamp(x, -1, 0.5) is NotImplemented
