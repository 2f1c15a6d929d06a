"""Fourier layers and blocks with relu as plain layers: the same function, and constant 1 as a product of norms."""

import copy
import itertools
import math

import pytest
import torch
from _certificate_files import write_files
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip.checker import check
from onelip.core.errors import NonFiniteWeight
from onelip.export import export_onnx
from onelip.graph.modules import bound_chain, bound_stored, links
from onelip.methods import bro, cayley, cpl, eco, lot, sandwich, sll
from onelip.methods.fourier.frequencies import Period, frequencies, real_waves
from onelip.methods.fourier.plain import plain_periodic, reflected
from onelip.methods.residual import ConvexPotential

DOUBLE = {"dtype": torch.float64}
FOURIER = [cayley, lot, bro, eco]
BLOCKS = [sll, cpl, sandwich]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def circular(inputs, outputs, kernel=3, **settings):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, padding_mode="circular", **settings)


def constant(plain):
    return bound_chain(links(plain), bound_stored).constant


# ---- the real form of a layer in the Fourier domain


@pytest.mark.parametrize("size", [(1,), (2,), (5,), (6,), (4, 4), (3, 6), (4, 5), (2, 3, 4), (3, 2, 1)])
def test_waves_are_orthonormal(size):
    waves = real_waves(size, size)
    assert float((waves.T @ waves - torch.eye(waves.shape[1], **DOUBLE)).abs().max()) < 1e-14


@pytest.mark.parametrize("size", [(1,), (2,), (5,), (6,), (4, 4), (3, 6), (4, 5), (2, 3, 4), (3, 2, 1)])
def test_of_two_mirror_images_one_is_kept(size):
    kept = frequencies(size).kept
    mirrored = {tuple(-i % n for i, n in zip(f, size, strict=True)) for f in kept}
    assert {*kept} | mirrored == {*itertools.product(*map(range, size))}
    assert len(kept) + len(mirrored - {*kept}) == math.prod(size)
    assert frequencies(size).own_mirror == tuple(
        all(2 * i % n == 0 for i, n in zip(f, size, strict=True)) for f in kept
    )


def of_all_frequencies(M, size):
    """The matrices at all frequencies of rfftn: those of mirror images are conjugates."""
    own = dict(zip(frequencies(size).kept, torch.view_as_complex(M), strict=True))
    found = []
    for f in itertools.product(*map(range, size[:-1]), range(size[-1] // 2 + 1)):
        found.append(own[f] if f in own else own[tuple(-i % n for i, n in zip(f, size, strict=True))].conj())
    return torch.stack(found)


@pytest.mark.parametrize("size", [(1,), (5,), (6,), (4, 4), (3, 6), (4, 5), (2, 3, 4)])
def test_any_matrices_give_what_the_transform_gives(size):
    """Without mirror symmetry, too: what the way back drops is dropped here."""
    axes = tuple(range(2, 2 + len(size)))
    x = torch.randn(2, 3, *size, **DOUBLE)
    spectrum = torch.fft.rfftn(x, dim=axes)
    M = torch.randn(len(frequencies(size).kept), 4, 3, 2, **DOUBLE)
    product = torch.einsum("foi,bif->bof", of_all_frequencies(M, size), spectrum.flatten(2))
    expected = torch.fft.irfftn(product.unflatten(2, spectrum.shape[2:]), s=size, dim=axes)
    bias = torch.randn(4, **DOUBLE)
    expected = expected + bias.view(-1, *(1,) * len(size))
    plain = plain_periodic(M, bias, input_size=size, size=size)
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=1e-13)
    for by in (Period(size).by_waves, Period(size).by_transforms):
        y = by(x, torch.view_as_complex(M)) + bias.view(-1, *(1,) * len(size))
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    norms = torch.linalg.matrix_norm(torch.view_as_complex(M), 2)
    assert float(norms.max()) <= constant(plain) <= float(norms.max()) * (1 + 1e-8)


@pytest.mark.parametrize("apply", FOURIER)
@pytest.mark.parametrize("size", [(4, 4), (5, 6), (7, 3), (8, 8)])  # eco: filled up by 2, 1 and 0, 2 and 0, 1
def test_baked_fourier_layers_are_plain_and_tight(apply, size):
    layer = apply(circular(2, 3, **DOUBLE), input_size=size, lipschitz=0.5).eval()
    plain = onelip.bake(layer).eval()
    assert {type(link).__module__ for link in links(plain)} <= {
        "torch.nn.modules.conv",
        "torch.nn.modules.flatten",
    }
    x = torch.randn(3, 2, *size, **DOUBLE)
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=1e-13)
    assert 0.499 < constant(plain) < 0.5 * (1 + 1e-8)
    assert torch.equal(onelip.bake(plain)(x), plain(x))


def test_one_and_three_axes():
    for layer, size in (
        (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular", **DOUBLE), (7,)),
        (nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular", **DOUBLE), (4, 3, 5)),
    ):
        for apply in (cayley, eco):
            made = apply(copy.deepcopy(layer), input_size=size).eval()
            x = torch.randn(2, 2, *size, **DOUBLE)
            torch.testing.assert_close(onelip.bake(made)(x), made(x), rtol=0, atol=1e-13)


def test_zero_padding_is_a_border_that_is_left_out():
    layer = lot(nn.Conv2d(2, 3, 3, padding=1, **DOUBLE), input_size=(4, 5)).eval()
    plain = onelip.bake(layer)
    assert plain.analysis.kernel_size == (1, 20)  # pyright: ignore
    x = torch.randn(2, 2, 4, 5, **DOUBLE)
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=1e-13)


def test_other_sizes_are_refused():
    plain = onelip.bake(cayley(circular(2, 2), input_size=4))
    for size in ((4, 5), (8, 8), (2, 8)):  # the last has as many pixels
        with pytest.raises(ValueError, match="the size that the layer was built for"):
            plain(torch.zeros(1, 2, *size))


# ---- blocks with relu


@pytest.mark.parametrize("inputs", [slice(None), slice(2, None), slice(4, None)])
@pytest.mark.parametrize("outputs", [slice(None), slice(0, 2), slice(0, 4)])
@pytest.mark.parametrize("hidden", [1, 3, 5, 9])
@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, "orthogonal"])
def test_reflections(inputs, outputs, hidden, norm):
    """Complex matrices; entries with a zero in place of inputs that are left out; relu of the real part."""
    V = torch.complex(torch.randn(2, hidden, 5, **DOUBLE), torch.randn(2, hidden, 5, **DOUBLE))
    if norm == "orthogonal":
        V = torch.linalg.qr(V.mH).Q.mH if hidden <= 5 else torch.linalg.qr(V).Q
    else:
        V = V * (norm / torch.linalg.matrix_norm(V, 2))[:, None, None]
    before, after = reflected(V, inputs, outputs)
    S2 = torch.eye(5, dtype=V.dtype) - V.mH @ V
    p_in, q_in = (before[:, : before.shape[1] // 2], before[:, before.shape[1] // 2 :])
    p, q = (p_in + q_in) / 2**0.5, (p_in - q_in) / 2**0.5
    torch.testing.assert_close(q[:, :hidden], V[..., inputs])
    half = after.shape[2] // 2
    p_out, q_out = (after[..., :half] + after[..., half:]) / 2**0.5, (after[..., :half] - after[..., half:]) / 2**0.5
    torch.testing.assert_close(p_out @ p, S2[:, outputs, inputs], rtol=0, atol=1e-14)
    torch.testing.assert_close(q_out[..., :hidden], -V.mH[:, outputs], rtol=0, atol=1e-14)
    for M in (before, after):
        assert float(torch.linalg.matrix_norm(M, 2).max()) <= 1 + 1e-7  # the root of what rounding leaves


@pytest.mark.parametrize("apply", BLOCKS)
@pytest.mark.parametrize("hidden", [2, 6, 9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_baked_blocks_are_two_layers_with_maxmin_between(apply, hidden, bias, axes):
    kind = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes]
    layer = apply(kind(6, 6, *(1,) * (axes > 0), bias=bias, **DOUBLE), hidden=hidden, lipschitz=2.0).eval()
    plain = onelip.bake(layer).eval()
    assert [type(link) for link in links(plain)] == [kind, onelip.nn.MaxMin, kind]
    x = 3 * torch.randn(4, 6, *(3,) * axes, **DOUBLE)
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=1e-12)
    assert constant(plain) <= 2 * (1 + 1e-7)


@pytest.mark.parametrize("size", [(4, 4), (3, 5)])
@pytest.mark.parametrize(("inputs", "outputs", "hidden"), [(3, 3, 3), (2, 4, 5), (4, 2, 1), (3, 2, 5)])
def test_sandwich_convolutions(size, inputs, outputs, hidden):
    layer = sandwich(circular(inputs, outputs, **DOUBLE), input_size=size, hidden=hidden).eval()
    plain = onelip.bake(layer).eval()
    x = 3 * torch.randn(4, inputs, *size, **DOUBLE)
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=1e-12)
    assert constant(plain) <= 1 + 1e-7


def test_weights_that_nobody_bounds_keep_their_form():
    """For ||V|| > 1 there is no such form, and another parametrization of V proves nothing."""
    layer = ConvexPotential(nn.Linear(3, 3))
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    x = torch.randn(2, 3)
    assert isinstance(onelip.bake(layer), ConvexPotential)
    assert torch.equal(onelip.bake(layer)(x), layer(x))
    convolution = onelip.bake(sll(nn.Conv2d(2, 2, 3, padding=1)))
    assert isinstance(convolution, ConvexPotential)


def test_forms_follow_the_settings_alone():
    """A state dict is loaded into the form of other weights, also on the meta device."""
    for layer in (
        cayley(circular(2, 2), input_size=4),
        sll(nn.Linear(3, 3)),
        sandwich(circular(2, 2), input_size=4),
    ):
        shapes = {name: tensor.shape for name, tensor in onelip.bake(layer).state_dict().items()}
        empty = onelip.bake(copy.deepcopy(layer).to("meta")).state_dict()
        assert {name: tensor.shape for name, tensor in empty.items()} == shapes
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        assert {name: tensor.shape for name, tensor in onelip.bake(layer).state_dict().items()} == shapes
        with torch.no_grad():
            next(layer.parameters()).fill_(torch.nan)
            for parameter in layer.parameters():
                parameter.fill_(torch.nan)
        with pytest.raises(NonFiniteWeight):
            onelip.bake(layer)


def test_hooks_modes_and_sharing_stay():
    layer = sll(nn.Linear(3, 3)).eval()
    layer.register_forward_hook(lambda module, args, output: output + 1)
    model = nn.Sequential(layer, layer).requires_grad_(False)
    plain = onelip.bake(model)
    assert plain[0] is plain[1]
    assert not plain[0].training
    assert not any(p.requires_grad for p in plain.parameters())
    x = torch.randn(2, 3)
    torch.testing.assert_close(plain(x), model(x))


# ---- what it is for


@pytest.mark.parametrize("apply", [cayley, eco, sandwich])
def test_certified_checked_and_exported(apply, tmp_path):
    model = nn.Sequential(
        apply(circular(2, 4), input_size=(4, 5)),
        onelip.nn.MaxMin(),
        nn.Flatten(),
        onelip.nn.AOLLinear(80, 6),
        sll(nn.Linear(6, 6)),
        onelip.nn.AOLLinear(6, 3),
    ).eval()
    images = torch.randint(0, 256, (3, 2, 4, 5), dtype=torch.uint8)
    found = onelip.certify(onelip.bake(model).double().eval(), images, exact=True)
    assert found.constant < 1 + 1e-5
    assert found.certified() == 3
    path = write_files(tmp_path, model, found, images)
    verdict = check(path, tmp_path / "plain.safetensors", None, tmp_path / "images.npy")
    assert verdict["certified"] == 3
    for dtype in (torch.float32, torch.float64):
        report = export_onnx(model, tmp_path / f"{dtype}.onnx", (2, 4, 5), dtype=dtype)
        assert report.difference <= 32 * torch.finfo(dtype).eps
