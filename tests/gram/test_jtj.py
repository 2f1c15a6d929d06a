"""Crops of J^T J against the dense matrix: every kind of layer, borders included."""

import pytest
import torch
from torch import nn

import onelip
from onelip.core.errors import UnsupportedLayer
from onelip.gram.jacobian import center_crop, jtj
from onelip.testing import exact_jacobian

LAYERS = {
    "dense": (nn.Linear(5, 3), ()),
    "plain": (nn.Conv2d(3, 4, 3, padding=1), (5, 4)),
    "valid, even": (nn.Conv2d(2, 3, (2, 4)), (5, 6)),
    "strided": (nn.Conv2d(3, 4, 3, stride=2, padding=1), (6, 7)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, padding=2), (6, 5)),
    "strided, dilated, grouped": (nn.Conv2d(4, 6, 3, stride=(2, 1), dilation=(1, 2), padding=2, groups=2), (6, 5)),
    "depthwise": (nn.Conv2d(4, 4, 3, padding="same", groups=4), (4, 4)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 4)),
    "circular, wrapped twice": (nn.Conv1d(2, 3, 5, padding=2, padding_mode="circular"), (3,)),
    "reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 4)),
    "1d": (nn.Conv1d(3, 2, 3, padding=1, stride=2), (7,)),
    "3d": (nn.Conv3d(2, 2, 2, padding=1), (3, 2, 3)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 4)),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 4, stride=3, groups=2, dilation=2, padding=2), (5,)),
    "float32": (nn.Conv2d(3, 4, 3, padding=1).float(), (4, 4)),
}


def dense(layer, size):
    """J^T J by forward passes of unit vectors, in channels-last order."""
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    matrix = exact_jacobian(layer, (channels, *size))
    matrix = matrix.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1)
    return matrix.T @ matrix


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_dense_product(name):
    layer, size = LAYERS[name]
    layer = layer if name == "float32" else layer.double()
    torch.testing.assert_close(jtj(layer, size), dense(layer, size), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["strided", "circular", "transposed", "depthwise"])
def test_crops_are_parts_of_it(name):
    layer, size = LAYERS[name]
    whole = dense(layer.double(), size)
    channels = layer.in_channels
    places = torch.arange(whole.shape[0]).reshape(*size, channels)
    rows, columns = [slice(0, 2), slice(1, 3), slice(1, None)], [slice(-1, None)]
    chosen = places[0:2, 1:3, 1:].flatten()
    torch.testing.assert_close(jtj(layer, size, rows), whole[chosen][:, chosen], rtol=0, atol=1e-12)
    other = places[-1:].flatten()
    torch.testing.assert_close(jtj(layer, size, rows, columns), whole[chosen][:, other], rtol=0, atol=1e-12)


def test_the_crop_of_the_paper_is_cheap():
    """The centre of a matrix of 32768 x 32768 entries, for an orthogonal layer: the identity."""
    layer = nn.Conv2d(32, 32, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight)
    found = onelip.jtj(layer, 32, center_crop((32, 32)))
    torch.testing.assert_close(found, torch.eye(288, dtype=torch.float64))


def test_parametrized_layers():
    layer = onelip.aol(nn.Conv2d(3, 4, 3, padding=1))
    torch.testing.assert_close(jtj(layer, (4, 4)), dense(onelip.bake(layer), (4, 4)), rtol=0, atol=1e-7)


def test_what_is_not_a_crop():
    layer = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match="2 positive integers, got"):
        jtj(layer)
    with pytest.raises(ValueError, match="got none of it"):
        jtj(layer, 5, [slice(7, 9)])
    with pytest.raises(ValueError, match="at most 3 slices"):
        jtj(layer, 5, [slice(None)] * 4)
    with pytest.raises(UnsupportedLayer, match="got ReLU"):
        jtj(nn.ReLU(), 5)
