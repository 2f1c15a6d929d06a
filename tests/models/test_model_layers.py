"""Layers of models: the nearest one that a method supports is built from it and maps of constant 1."""

import pytest
import torch
from torch import nn

import onelip
from onelip.methods.registry import Method
from onelip.models.chain import LayerFactory


def test_layers_that_a_method_refuses_are_made_from_those_it_serves():
    """Only square layers without strides, and only circular padding: as methods of the Fourier domain have it."""

    def picky(layer):
        square = layer.weight.shape[0] == layer.weight.shape[1]
        circular = isinstance(layer, nn.Linear) or layer.padding_mode == "circular"
        plain = isinstance(layer, nn.Linear) or layer.stride == (1, 1)
        if not (square and circular and plain):
            raise onelip.UnsupportedLayer("expected a square circular layer, got another; take a square one")
        return onelip.aol(layer)

    factory = LayerFactory("aol")
    factory.method = Method(name="picky", title="", guarantee="proved", layers=(nn.Linear, nn.Conv2d), apply=picky)
    for inputs, outputs in ((3, 3), (2, 5), (5, 2)):
        x = torch.randn(2, inputs, 6, 6)
        assert factory.linear(inputs, outputs)(x[:, :, 0, 0]).shape == (2, outputs)
        layer = factory.conv2d(inputs, outputs, 3, padding=1)
        assert layer(x).shape == (2, outputs, 6, 6)
        assert onelip.summary(layer).constant == 1.0
        assert factory.downsample(inputs, outputs, 2)(x).shape == (2, outputs, 3, 3)


def test_refusals_reach_the_user():
    with pytest.raises(onelip.UnsupportedLayer, match="supports Linear"):
        LayerFactory("lln").conv2d(2, 2, 3)
