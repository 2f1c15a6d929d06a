"""MaxMin: the definition, the derivative as a permutation of every order, and all the ways torch can call it."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from onelip.nn import activations as module
from onelip.nn.activations import MaxMin, maxmin


def reference(x: Tensor, dim: int) -> Tensor:
    a, b = x.chunk(2, dim)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], dim)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    dim=st.integers(0, 4),
    negative=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradient_for_any_shape_axis_and_type(shape, dim, negative, dtype, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    dim %= len(shape)
    shape[dim] *= 2
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    if transposed:  # same values, other strides
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    x.requires_grad_()
    axis = dim - len(shape) if negative else dim
    y = maxmin(x, axis)
    assert y.dtype == dtype
    assert torch.equal(y, reference(x, dim))
    (gradient,) = torch.autograd.grad(y, x, weight)
    # Where nothing ties, torch's own derivative is the permutation too.
    (expected,) = torch.autograd.grad(reference(x, dim), x, weight)
    a, b = x.detach().chunk(2, dim)
    distinct = torch.cat([a != b, a != b], dim)
    assert torch.equal(gradient[distinct], expected[distinct])


@pytest.mark.parametrize("words", [None, {}], ids=["exclusive or", "where"])
def test_ties_keep_the_gradient_a_permutation(words, monkeypatch):
    if words is not None:
        monkeypatch.setattr(module, "_WORD", words)
    x = torch.randint(0, 2, (5, 8), dtype=torch.float64).requires_grad_()
    weight = torch.arange(40.0, dtype=torch.float64).view(5, 8)
    (gradient,) = torch.autograd.grad(maxmin(x), x, weight)
    assert torch.equal(gradient.sort(dim=1).values, weight)
    # The vector-Jacobian product of the map with its own output gives the input back: S S x = x.
    (back,) = torch.autograd.grad(maxmin(x), x, maxmin(x))
    assert torch.equal(back, x)


def test_both_ways_of_swapping_agree_bit_for_bit(monkeypatch):
    x = torch.tensor([[1.0, float("nan"), float("inf"), -0.0, 3e38, 1e-45, -float("inf"), 0.0]])
    mask = torch.tensor([[True, False, True, True]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        fast = module._swap(x.to(dtype), mask, 1)
        monkeypatch.setattr(module, "_WORD", {})
        slow = module._swap(x.to(dtype), mask, 1)
        monkeypatch.undo()
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.to(dtype).element_size()]
        assert torch.equal(fast.view(bits), slow.view(bits))


def test_infinite_and_huge_gradients_pass_unchanged():
    x = torch.tensor([[0.0, 1.0, 2.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(maxmin(x), x, torch.tensor([[float("inf"), 3e38, -3e38, -3e38]]))
    assert gradient.tolist() == torch.tensor([[-3e38, 3e38, float("inf"), -3e38]]).tolist()


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("grad", [True, False])
def test_nan_never_disappears(position, grad):
    x = torch.zeros(1, 2)
    x[0, position] = float("nan")
    with torch.set_grad_enabled(grad):
        assert maxmin(x).isnan().any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on the first forward mode
def test_derivatives_of_first_and_second_order_and_forward_mode():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: maxmin(t, -1), x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: maxmin(t, -1), x)
    assert torch.autograd.gradgradcheck(lambda t: maxmin(t, -1).pow(3), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on the first forward mode
def test_function_transforms():
    def cubes(v: Tensor) -> Tensor:
        return maxmin(v, 0).pow(3).sum()

    v = torch.randn(6, dtype=torch.float64)
    J = torch.func.jacrev(maxmin)(v[None])[0, :, 0]
    assert torch.equal(J, torch.func.jacfwd(maxmin)(v[None])[0, :, 0])
    assert torch.equal(J @ J.T, torch.eye(6, dtype=torch.float64))
    assert torch.equal(J @ v, maxmin(v, 0))
    for hessian in (torch.func.hessian(cubes), torch.func.jacrev(torch.func.jacrev(cubes))):
        torch.testing.assert_close(hessian(v), torch.diag(6 * v))
    batch = torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(lambda t: maxmin(t, 0), in_dims=1, out_dims=1)(batch), maxmin(batch, 0))
    torch.testing.assert_close(torch.vmap(torch.func.grad(cubes), in_dims=1, out_dims=1)(batch), 3 * batch**2)


def test_jacobian_norm_is_exactly_one():
    x = torch.randn(1, 6, 2, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(maxmin, x)
    assert isinstance(J, Tensor)
    singular = torch.linalg.svdvals(J.reshape(12, 12))
    assert torch.allclose(singular, torch.ones_like(singular), rtol=0, atol=1e-12)


def test_channels_last_is_kept():
    x = torch.randn(2, 6, 5, 3).to(memory_format=torch.channels_last).requires_grad_()
    for y in (maxmin(x), maxmin(x.detach())):
        assert y.is_contiguous(memory_format=torch.channels_last)
    weight = torch.randn(2, 6, 5, 3).to(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(maxmin(x), x, weight)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert maxmin(x).is_contiguous(memory_format=torch.channels_last)


def test_only_one_byte_per_pair_is_stored():
    stored = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal stored
        stored += t.numel() * t.element_size()
        return t

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        maxmin(x)
    assert stored == x.numel() // 2


def test_odd_gradients_are_understood():
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(maxmin(x).sum(), x)  # an expanded scalar
    assert torch.equal(gradient, torch.ones(3, 4))
    negated = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    (gradient,) = torch.autograd.grad(maxmin(x), x, negated)
    (again,) = torch.autograd.grad(maxmin(x), x, negated.clone().resolve_neg())
    assert torch.equal(gradient, again)


def test_empty_batch_integers_and_no_grad():
    x = torch.empty(0, 4, 2, requires_grad=True)
    y = maxmin(x)
    y.sum().backward()
    assert y.shape == (0, 4, 2)
    assert x.grad is not None
    assert maxmin(torch.tensor([[1, 2, 3, 0]])).tolist() == [[3, 2, 1, 0]]
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        without = maxmin(x)
    assert torch.equal(without, maxmin(x))
    with torch.inference_mode():
        assert torch.equal(maxmin(x.detach()), without)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_and_vmap_with_gradients_switched_off():
    x, tangent = torch.randn(2, 3, 4)
    value, derivative = torch.func.jvp(maxmin, (x,), (tangent,))[:2]
    with torch.no_grad():
        torch.testing.assert_close(torch.func.jvp(maxmin, (x,), (tangent,)), (value, derivative))
        assert torch.equal(torch.vmap(lambda t: maxmin(t, 0))(x), value)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"even length of axis 1, got 3 .*\(2, 3\).*PadChannels\(4, dim=1\)"):
        maxmin(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"has axis 1, got shape \(4,\)"):
        maxmin(torch.zeros(4))
    with pytest.raises(ValueError, match="has axis -3"):
        MaxMin(-3)(torch.zeros(4, 4))


def test_layer():
    layer = MaxMin(dim=-1)
    assert repr(layer) == "MaxMin(dim=-1)"
    assert layer.lipschitz_constant == 1.0
    x = torch.randn(2, 3, 4)
    assert torch.equal(copy.deepcopy(layer)(x), reference(x, -1))
    assert layer.state_dict() == {}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), MaxMin(), nn.Flatten(), nn.Linear(72, 5)).eval()


def test_export_has_plain_operations():
    x = torch.randn(2, 3, 5, 5)
    net = network()
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"aten.maximum.default", "aten.minimum.default"} <= targets
    more = torch.randn(7, 3, 5, 5)
    torch.testing.assert_close(program.module()(more), net(more), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own
def test_onnx_gives_the_same_output(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net, x, path = network(), torch.randn(2, 3, 5, 5), tmp_path / "net.onnx"
    torch.onnx.export(net, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net(x).detach(), rtol=1e-5, atol=1e-6)


def test_compiled_has_the_same_values_and_gradient_also_at_ties():
    x = torch.randint(0, 3, (4, 6)).float().requires_grad_()
    weight = torch.randn(4, 6)
    compiled = torch.compile(maxmin, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    assert torch.equal(y, maxmin(x))
    (gradient,) = torch.autograd.grad(y, x, weight)
    (eager,) = torch.autograd.grad(maxmin(x), x, weight)
    assert torch.equal(gradient, eager)
