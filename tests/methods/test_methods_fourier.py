"""Cayley, LOT, BRO, ECO: orthogonal at every frequency, against brute force; known mistakes of other libraries."""

import copy
import math

import pytest
import torch
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.core.parametrization import find_parametrization, original_of
from onelip.methods import bro, cayley, eco, lot
from onelip.methods.fourier import maps
from onelip.methods.fourier.layer import OrthogonalMap, replaced, shrunk, stored_norm
from onelip.methods.registry import METHODS as METHODS_BY_NAME
from onelip.models import create_model
from onelip.testing import contract
from onelip.testing.layers import WEIGHTS, LayerCase
from onelip.testing.norms import exact_jacobian

METHODS = [METHODS_BY_NAME[name] for name in ("cayley", "bro", "lot", "eco")]
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, **DOUBLE)


def circular(inputs, outputs, kernel, **settings):
    return nn.Conv2d(inputs, outputs, kernel, padding="same", padding_mode="circular", **DOUBLE, **settings)


def values(layer, *shape):
    return torch.linalg.svdvals(exact_jacobian(layer, shape))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_all_dimensions_start_as_published(dims):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    x = torch.randn(2, 5, *(4,) * dims, dtype=torch.float64)
    for apply, wanted in ((lot, x), (bro, torch.cat([-x[:, :2], x[:, 2:]], 1))):
        layer = kind(5, 5, 3, padding=1, padding_mode="circular", bias=False, **DOUBLE)
        layer = apply(layer, input_size=4).eval()
        find_parametrization(layer).reset(layer.parametrizations.weight.original)
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-4)
    layer = eco(kind(5, 5, 3, padding=1, bias=False, **DOUBLE), input_size=4)
    original = layer.parametrizations.weight.original
    find_parametrization(layer).reset(original)
    assert 0.8 < original.std() * (5 * 3**dims) ** 0.5 < 1.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["cayley", "bro", "lot", "eco", "sandwich"])
def test_convolutions_run_in_half_precision(name, dtype):
    layer = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", dtype=dtype)
    layer = METHODS_BY_NAME[name].apply(layer, input_size=(4, 4))
    for mode in (True, False):
        y = layer.train(mode)(torch.randn(2, 3, 4, 4, dtype=dtype))
        assert y.dtype == dtype
        y.float().sum().backward()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_hard_weights_of_convolutions_that_are_served(method, weights):
    for dtype in (torch.float32, torch.float64):
        case = LayerCase(
            "Conv2d", 3, 2, (3, 2), (1, 1), (1, 1), "same", (0, 0), 1, "circular", (3, 5), weights, dtype, seed=1
        )
        layer = method.apply(case.build(), input_size=case.size)
        contract.norm_within_claim(method, case, layer, {})


# ---- matrices at each frequency


class Plain(OrthogonalMap):
    def prepare(self, kernel):
        return kernel

    def forward(self, M):
        return M

    def excess(self):
        return 0.0


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize(
    ("size", "kernel", "dilation"),
    [((5, 7), 3, 1), ((6, 5), (2, 3), 1), ((7, 6), 3, 2), ((2, 3), 3, 1), ((1, 4), 3, 1)],
)
def test_it_is_the_convolution_where_nothing_is_made_orthogonal(size, kernel, dilation, zero_padding):
    mode = "zeros" if zero_padding else "circular"
    plain = nn.Conv2d(3, 2, kernel, padding="same", dilation=dilation, padding_mode=mode, **DOUBLE)
    layer = replaced(
        copy.deepcopy(plain),
        lambda K: Plain(K.shape[1], K.shape[2]),
        method="test",
        input_size=size,
        lipschitz=1.0,
        zero_padding=zero_padding,
    )
    x = randn(2, 3, *size)
    reach = [dilation * (k - 1) // 2 + dilation * (k - 1) % 2 for k in plain.kernel_size]
    if not zero_padding and any(p > n for p, n in zip(reach, size, strict=True)):
        pytest.skip("torch itself cannot wrap that far")
    torch.testing.assert_close(layer(x), plain(x))


def test_one_and_three_dimensions():
    for kind, size in ((nn.Conv1d, (7,)), (nn.Conv3d, (3, 4, 3))):
        layer = cayley(kind(2, 2, 3, padding=1, padding_mode="circular", **DOUBLE), input_size=size)
        torch.testing.assert_close(values(layer, 2, *size), torch.ones(2 * math.prod(size), **DOUBLE))


def test_the_bound_of_stored_matrices_holds_for_any_matrices():
    layer = cayley(circular(2, 3, 3, bias=False), input_size=(4, 5))
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    with torch.no_grad():
        layer.weight.normal_()  # no mirror symmetry any more
    norm = float(values(layer, 2, 4, 5).max())
    assert norm <= layer.lipschitz_constant
    complex_norms = torch.linalg.matrix_norm(torch.view_as_complex(layer.weight.detach()), 2)
    assert float(complex_norms.max()) <= layer.lipschitz_constant <= float(complex_norms.max()) * (1 + 1e-6)
    with torch.no_grad():
        layer.weight[0, 0, 0, 0] = math.nan
    assert layer.lipschitz_constant is None


def test_what_a_solver_adds_is_divided_out():
    Q = torch.linalg.qr(torch.complex(randn(3, 5, 4), randn(3, 5, 4))).Q
    for wrong in (Q + 1e-3 * randn(3, 5, 4), 1.01 * Q, Q.mH + 1e-6):
        norms = torch.linalg.matrix_norm(shrunk(wrong), 2)
        assert bool((norms <= 1 + 1e-15).all())
        assert bool((norms > 0.97).all())


# ---- Cayley


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 3), (2, 4), (4, 2), (1, 1)])
@pytest.mark.parametrize("size", [(4, 4), (5, 3)])
def test_cayley_convolutions_are_orthogonal(inputs, outputs, size):
    layer = cayley(circular(inputs, outputs, 3), input_size=size)
    ones = torch.ones(min(inputs, outputs) * math.prod(size), **DOUBLE)
    torch.testing.assert_close(values(layer, inputs, *size), ones)


def test_cayley_is_the_published_formula():
    layer = cayley(nn.Linear(3, 5, **DOUBLE))
    with torch.no_grad():
        find_parametrization(layer).orthogonal.alpha.fill_(2.0)
    M = original_of(layer)[0].detach()
    M = 2 * M / M.norm()
    U, V, eye = M[:3], M[3:], torch.eye(3, **DOUBLE)
    A = U - U.T + V.T @ V
    Q = torch.cat([torch.linalg.solve(eye + A, eye - A), -2 * V @ torch.linalg.inv(eye + A)])
    torch.testing.assert_close(layer.weight, Q)


def test_alpha_is_a_parameter_before_the_first_input_and_is_trained():
    layer = cayley(circular(2, 2, 3), input_size=4)
    names = [name for name, _ in layer.named_parameters()]
    assert "parametrizations.weight.0.orthogonal.alpha" in names
    torch.testing.assert_close(find_parametrization(layer).orthogonal.alpha, original_of(layer).norm()[None])
    layer(randn(1, 2, 4, 4))[..., 0].sum().backward()
    assert float(find_parametrization(layer).orthogonal.alpha.grad.abs().max()) > 0
    other = cayley(circular(2, 2, 3), input_size=4)
    other.load_state_dict(layer.state_dict())  # before it has seen an input
    x = randn(1, 2, 4, 4)
    assert torch.equal(other(x), layer(x))


# ---- BRO


def test_bro_is_the_published_formula():
    layer = bro(nn.Linear(5, 5, **DOUBLE), rank=3, relative=1e-2)
    V = original_of(layer)[0].detach()
    assert V.shape == (5, 3)
    S = V.T @ V
    inside = torch.linalg.inv(S + 1e-2 * S.diagonal().mean() * torch.eye(3, **DOUBLE))
    torch.testing.assert_close(layer.weight, torch.eye(5, **DOUBLE) - 2 * V @ inside @ V.T)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_bro_and_lot_with_either_padding(mode):
    for apply in (bro, lot):
        layer = apply(nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode, **DOUBLE), input_size=(4, 3)).eval()
        found = values(layer, 4, 4, 3)
        assert float(found.max()) <= layer.lipschitz_constant
        assert float(found.mean()) > (0.98 if mode == "circular" else 0.6)


def test_bro_keeps_its_sign_where_v_is_nothing_and_fewer_channels():
    layer = bro(nn.Linear(4, 2, **DOUBLE))
    with torch.no_grad():
        original_of(layer).zero_()
    assert torch.equal(layer.weight, torch.eye(4, **DOUBLE)[:2])


def low_rank(rows, columns, noise, dtype=torch.float32):
    return torch.ones(1, rows, columns, dtype=dtype) + noise * torch.randn(1, rows, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("relative", [1e-5, 0.3])
def test_derivatives_of_the_reflection(dtype, relative):
    for V in (torch.randn(2, 4, 3, dtype=dtype), torch.zeros(1, 4, 3, dtype=dtype), low_rank(4, 2, 0.1, dtype)):
        V.requires_grad_()
        if bool(V.any()):  # where nothing is there, W is I, and all around it something else
            assert torch.autograd.gradcheck(lambda V: maps._Reflection.apply(V, relative), V)
            assert torch.autograd.gradgradcheck(lambda V: maps._Reflection.apply(V, relative), V)
        else:
            maps._Reflection.apply(V, relative)[0, 0].abs().sum().backward()
            assert not V.grad.any()


@pytest.mark.parametrize("relative", [1e-7, 1e-5])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0])
def test_bro_in_float32_is_what_it_is_in_float64(relative, noise):
    """Nearly dependent columns: float32 would be wrong by tens of per cent, without an error."""
    V = low_rank(128, 64, noise).requires_grad_()
    exact = V.detach().double().requires_grad_()
    W, wanted = maps._Reflection.apply(V, relative), maps._reflected(exact, relative)[0]
    torch.testing.assert_close(W.double(), wanted, rtol=0, atol=2e-3)
    assert torch.linalg.matrix_norm(W, 2) <= 1 + 1e-3
    weights = torch.randn(128, 128)
    (W * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    assert float((V.grad - exact.grad).norm() / exact.grad.norm()) < 0.02
    layer = bro(nn.Linear(128, 128), rank=64, relative=relative).train()
    with torch.no_grad():
        original_of(layer).copy_(V)
    jacobian = torch.func.jacrev(lambda bias: torch.func.functional_call(layer, {"bias": bias}, torch.ones(128)))
    assert bool(jacobian(layer.bias.detach()).isfinite().all())  # traced: without a look at pivots


# ---- LOT


def test_lot_is_the_inverse_root_after_enough_steps():
    layer = lot(nn.Linear(6, 3, **DOUBLE), steps=40)
    V = original_of(layer)[0].detach()
    values_, vectors = torch.linalg.eigh(V @ V.T)
    torch.testing.assert_close(layer.weight, vectors @ torch.diag(values_.rsqrt()) @ vectors.T @ V)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_lot_is_sound_at_every_number_of_steps(steps):
    layer = lot(circular(3, 3, 3), input_size=(4, 5), steps=steps).eval()
    with torch.no_grad():
        original_of(layer).exponential_()  # one large singular value
    assert float(values(layer, 3, 4, 5).max()) <= layer.lipschitz_constant <= 1 + 1e-10
    dense = lot(nn.Linear(8, 8, **DOUBLE), steps=steps)
    with torch.no_grad():
        original_of(dense).fill_(1)  # all of it in one singular value
    assert 0.7 < float(values(dense, 8).max()) <= find_parametrization(dense).constant_in(torch.float64)


# ---- ECO


@pytest.mark.parametrize("size", [(6, 3), (9, 6)])
def test_eco_is_a_dilated_circular_convolution_and_orthogonal(size):
    layer = eco(circular(2, 2, 3), input_size=size)
    torch.testing.assert_close(values(layer, 2, *size), torch.ones(2 * math.prod(size), **DOUBLE))
    dilation = tuple(n // 3 for n in size)
    x, unit = randn(1, 2, *size), torch.zeros(2, 2, *size, **DOUBLE)
    plain = circular(2, 2, 3, dilation=dilation)
    with torch.no_grad():
        plain.bias.copy_(layer.bias)
        for channel in range(2):  # the response at pixel 0 to a unit at d (1 - t) is tap 1 - t seen from there
            for s in range(3):
                for t in range(3):
                    unit.zero_()
                    unit[0, channel, (s - 1) * dilation[0] % size[0], (t - 1) * dilation[1] % size[1]] = 1
                    plain.weight[:, channel, s, t] = (layer(unit[:1]) - layer(0 * unit[:1]))[0, :, 0, 0]
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (2, 4)])
def test_eco_of_sizes_that_the_kernel_does_not_divide(size):
    layer = eco(circular(2, 2, 3), input_size=size).eval()
    assert layer(randn(1, 2, *size)).shape == (1, 2, *size)
    assert 0.9 < float(values(layer, 2, *size).max()) <= layer.lipschitz_constant <= 1 + 1e-10


def test_eco_of_even_kernels_and_other_channels():
    layer = eco(circular(2, 3, 2), input_size=4)
    torch.testing.assert_close(values(layer, 2, 4, 4), torch.ones(32, **DOUBLE))


# ---- what they share


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("size", [3, 6])  # by waves (eco: both), and by transforms
def test_compiled_without_a_break(method, size):
    layer = method.apply(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), input_size=size)
    x = torch.randn(2, 2, size, size)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_mapped_over_inputs_it_stays_what_it_was(method):
    layer = first_layer(method).eval()
    x = randn(3, 2, 2, 6, 6)
    with torch.no_grad():
        weights = {"bias": randn(3, 2)}
        torch.func.vmap(lambda w, x: torch.func.functional_call(layer, w, x))(weights, x)
        torch.testing.assert_close(copy.deepcopy(layer)(x[0]), layer(x[0]))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_models_of_the_paper_can_have_them(method, monkeypatch):
    monkeypatch.setitem(METHODS_BY_NAME, method.name, method)
    model = create_model("patchwise-tiny", method=method.name, image_size=8, num_classes=4)
    x = torch.rand(2, 3, 8, 8)
    assert not torch.allclose(model(x[:1]), model(x[1:]))
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def first_layer(method, dtype=torch.float64):
    return method.apply(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", dtype=dtype), input_size=6)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_another_size_is_refused(method):
    layer = first_layer(method)
    for x in (randn(1, 2, 6, 9), randn(1, 3, 6, 6)):
        with pytest.raises(ValueError, match=r"expected an input \(batch, 2, 6, 6\).*input_size"):
            layer(x)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_evaluation_computes_the_matrices_once_and_notices_other_weights(method):
    layer = first_layer(method).eval()
    found = find_parametrization(layer)
    calls = []
    own = found._matrices
    found._matrices = lambda P: calls.append(1) or own(P)
    x = randn(1, 2, 6, 6)
    with torch.no_grad():
        first = layer(x)
        layer.weight.zero_()  # what is handed out is a copy
        assert torch.equal(layer(x), first)
        assert len(calls) == 1
        original_of(layer).data.normal_()
        assert not torch.allclose(layer(x), first)
        assert len(calls) == 2


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_constants_of_made_layers(method):
    layer = first_layer(method, torch.float32).eval()
    assert 1 <= layer.lipschitz_constant <= 1 + 1e-6
    assert stored_norm(layer.weight.detach()).constant <= layer.lipschitz_constant
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_constant_holds_for_the_plain_form(method, dtype):
    """Which stores the Fourier basis, too, rounded to the type of the weight."""
    for channels, size in ((1, (6, 4)), (2, (5, 5)), (3, (3, 7))):
        conv = nn.Conv2d(channels, 1, 3, padding=1, padding_mode="circular")
        layer = method.apply(conv, lipschitz=0.5, input_size=size)
        with torch.no_grad():
            original_of(layer).fill_(1)
        layer.to(dtype).eval()
        jacobian = exact_jacobian(bake(layer).double(), (channels, *size))
        assert (
            float(torch.linalg.matrix_norm(jacobian, 2)) <= layer.lipschitz_constant <= 0.5 + 8 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_autocast_leaves_the_transforms_alone(method):
    layer = first_layer(method, torch.float32)
    x = torch.randn(1, 2, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, layer(x))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (lambda: circular(2, 2, 3), {}, "needs the input size"),
        (lambda: circular(2, 2, 3, groups=2), {"input_size": 4}, "groups=1"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", stride=2), {"input_size": 4}, "Concatenation"),
        (lambda: nn.Conv2d(2, 2, 3, padding_mode="circular"), {"input_size": 4}, "keeps the size"),
        (lambda: nn.ConvTranspose2d(2, 2, 3), {"input_size": 4}, "ConvTranspose2d"),
    ],
)
def test_refusals(method, layer, options, words):
    with pytest.raises(UnsupportedLayer, match=words):
        method.apply(layer(), **options)


def test_cayley_refuses_zero_padding_and_wrong_sizes():
    with pytest.raises(UnsupportedLayer, match="padding_mode='circular'"):
        cayley(nn.Conv2d(2, 2, 3, padding=1), input_size=4)
    with pytest.raises(ValueError, match="input_size to be 1 or 2 integers"):
        cayley(circular(2, 2, 3), input_size=(4, 0))
