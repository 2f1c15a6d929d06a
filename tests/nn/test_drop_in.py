"""The drop-in classes: torch.nn's signatures, the paper's initial weights."""

import inspect

import pytest
import torch
from torch import nn

import onelip
from onelip.core.parametrization import original_of
from onelip.nn.aol import find_aol
from onelip.nn.init import orthogonal_columns
from onelip.testing import exact_jacobian

NAMES = ["Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs_with_options_behind(name):
    theirs = list(inspect.signature(getattr(nn, name)).parameters.values())
    ours = list(inspect.signature(getattr(onelip.nn, f"AOL{name}")).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])
    assert {"side", "steps", "learn_weights", "lipschitz"} <= {p.name for p in ours}


@pytest.mark.parametrize("name", NAMES)
def test_is_the_torch_layer_and_bakes_to_it(name):
    args = (4, 6) if name == "Linear" else (4, 6, 3)
    layer = getattr(onelip.nn, f"AOL{name}")(*args)
    assert isinstance(layer, getattr(nn, name))
    assert type(onelip.bake(layer)) is getattr(nn, name)
    assert not layer.bias.any()


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (onelip.nn.AOLLinear(5, 5), ()),
        (onelip.nn.AOLConv1d(3, 3, 3, padding=1), (6,)),
        (onelip.nn.AOLConv2d(3, 3, 3, padding=1), (5, 4)),
        (onelip.nn.AOLConv2d(3, 3, 5, padding=2, side="outputs"), (5, 4)),
        (onelip.nn.AOLConv2d(3, 3, 4, padding="same"), (5, 4)),
        (onelip.nn.AOLConv2d(3, 3, 3, padding=2, dilation=2, padding_mode="circular"), (6, 6)),
        (onelip.nn.AOLConv2d(4, 4, 3, padding=1, groups=2), (4, 4)),
        (onelip.nn.AOLConv3d(2, 2, 3, padding=1), (3, 3, 3)),
        (onelip.nn.AOLConvTranspose2d(3, 3, 3, padding=1), (4, 4)),
    ],
    ids=str,
)
def test_layers_that_preserve_the_size_start_as_the_identity(layer, size):
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    jacobian = exact_jacobian(layer, (inputs, *size))
    assert torch.equal(jacobian, torch.eye(len(jacobian), dtype=torch.float64))


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (onelip.nn.AOLLinear(3, 8), ()),
        (onelip.nn.AOLConv2d(3, 16, 3, padding=1), (4, 4)),
        (onelip.nn.AOLConv2d(3, 12, 2, stride=2), (4, 4)),
        (onelip.nn.AOLConv2d(3, 20, 2, stride=2), (4, 4)),
        (onelip.nn.AOLConv1d(2, 9, 3, stride=3), (9,)),
        (onelip.nn.AOLConvTranspose2d(6, 3, 2, stride=2), (3, 3)),
    ],
    ids=str,
)
def test_growing_layers_start_as_isometries(layer, size):
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    jacobian = exact_jacobian(layer, (inputs, *size))
    assert torch.allclose(jacobian.T @ jacobian, torch.eye(jacobian.shape[1], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (onelip.nn.AOLLinear(8, 3), ()),
        (onelip.nn.AOLConv2d(16, 3, 3, padding=1), (4, 4)),
        (onelip.nn.AOLConv2d(32, 64, 2, stride=2), (4, 4)),
    ],
    ids=str,
)
def test_shrinking_layers_start_as_coisometries(layer, size):
    """Repeated orthogonal: the bound is tight and every output direction has singular value 1."""
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    jacobian = exact_jacobian(layer, (inputs, *size))
    assert torch.allclose(jacobian @ jacobian.T, torch.eye(jacobian.shape[0], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 3), (3, 5), (3, 11), (1, 7)])
def test_initial_weights_are_fixed_points_of_aol(rows, columns):
    W = orthogonal_columns(rows, columns)
    assert torch.allclose((W.T @ W).abs().sum(1), torch.ones(columns, dtype=torch.float64))
    assert torch.linalg.matrix_norm(W, 2) == pytest.approx(1)


def test_repeated_orthogonal_uses_every_direction():
    W = orthogonal_columns(4, 10)
    assert torch.allclose(W @ W.T, torch.eye(4, dtype=torch.float64))


def test_reset_parameters_and_generator():
    layer = onelip.nn.AOLLinear(4, 6, learn_weights=True)
    with torch.no_grad():
        original_of(layer).normal_()
        find_aol(layer).log_q.normal_()
    layer.reset_parameters()
    assert not find_aol(layer).log_q.any()
    assert torch.allclose(layer.weight.T @ layer.weight, torch.eye(4), atol=1e-6)
    a = orthogonal_columns(3, 7, generator=torch.Generator().manual_seed(1))
    b = orthogonal_columns(3, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(a, b)


def test_tight_initialiser_on_plain_and_parametrized_layers():
    for layer in (nn.Conv2d(3, 3, 3, padding=1), onelip.aol(nn.Conv2d(3, 3, 3, padding=1))):
        assert onelip.nn.init.tight_(layer) is layer
        jacobian = exact_jacobian(layer, (3, 4, 4))
        assert torch.equal(jacobian, torch.eye(48, dtype=torch.float64))


def test_refusal_happens_in_the_constructor():
    with pytest.raises(onelip.UnsupportedLayer, match="reflect"):
        onelip.nn.AOLConv2d(3, 3, 3, padding=1, padding_mode="reflect")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_entries_as_torch_allows_them():
    assert onelip.nn.AOLLinear(4, 0)(torch.zeros(2, 4)).shape == (2, 0)


def test_device_and_dtype_arguments():
    layer = onelip.nn.AOLConv1d(2, 2, 3, device="cpu", dtype=torch.float64, learn_weights=True)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
