"""Models by name: spellings, options, custom models, methods, and errors."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from _models import SMALL, small
from torch import nn

import onelip
from onelip.core.errors import UnsupportedLayer
from onelip.methods import registry as methods
from onelip.models import create_model, list_models, register_model, registry
from onelip.nn import AOLConv2d

FAST = ["aol-fast-small", "aol-fast-medium", "aol-fast-large", "aol-fast-huge"]


def test_every_name_and_spelling():
    assert list_models() == sorted([*SMALL, *FAST, "aol-medium", "aol-large", "standard-cnn", "cnn-teacher"])
    assert list_models("aol_[ml]*") == ["aol-large", "aol-medium"]
    assert list_models("nothing*") == []
    assert isinstance(small("aol-fc"), nn.Sequential)
    assert create_model("Patchwise_Tiny", image_size=8)(torch.zeros(1, 3, 8, 8)).shape == (1, 10)


def test_standard_cnn_is_plain_by_default():
    with torch.device("meta"):
        assert not any(isinstance(m, AOLConv2d) for m in create_model("standard-cnn").modules())
        assert any(isinstance(m, AOLConv2d) for m in create_model("standard-cnn", method="aol").modules())


def test_options_reach_the_method():
    model = small("aol-std", method_options={"side": "auto", "lipschitz": 0.5})
    assert onelip.summary(model[:1]).constant == 0.5
    assert "side='outputs'" in repr(model)


def test_register_model(monkeypatch):
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    def my_model(*, num_classes=10, image_size=32, in_channels=3, method="aol", gain=1):
        return nn.Identity(), num_classes, image_size, in_channels, method, gain

    register_model(my_model)  # pyright: ignore[reportArgumentType]
    assert "my-model" in list_models()
    made = create_model("my_model", num_classes=2, image_size=(4, 5), method=None, gain=3)
    assert made[1:] == (2, (4, 5), 3, None, 3)  # pyright: ignore[reportIndexIssue]
    assert create_model("my_model", image_size=7)[2] == (7, 7)  # pyright: ignore[reportIndexIssue]
    register_model(my_model)  # pyright: ignore[reportArgumentType]

    def aol_small(**kwargs) -> nn.Module:
        return nn.Identity()

    with pytest.raises(ValueError, match=r"'aol-small' is taken by onelip.models.paper"):
        register_model(aol_small)


def test_other_methods_are_applied(monkeypatch):
    def refuses_strides(layer: nn.Module, factor: float = 1.0) -> nn.Module:
        if isinstance(layer, nn.Conv2d) and layer.stride != (1, 1):
            raise UnsupportedLayer("expected stride 1")
        layer.register_buffer("factor", torch.tensor(factor))
        return layer

    aol = methods.get_method("aol")
    other = dataclasses.replace(aol, name="other", layers=(nn.Linear, nn.Conv2d), apply=refuses_strides)
    monkeypatch.setitem(methods.METHODS, "other", other)
    model = small("aol-alt", method="other", method_options={"factor": 2.0})
    linear = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(type(module) is nn.Conv2d and module.factor == 2.0 for module in linear)
    assert all(module.stride == (1, 1) for module in linear)  # concatenation pooling instead of strides
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)

    monkeypatch.setitem(methods.METHODS, "dense", dataclasses.replace(other, name="dense", layers=(nn.Linear,)))
    assert small("aol-fc", method="dense")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(UnsupportedLayer, match=r"'dense' supports Linear, not Conv2d; choose another"):
        small("aol-alt", method="dense")


def test_changed_layers_are_listed():
    """Layers that the architecture changes for a method are in `adaptations` and in the repr, also of copies."""
    model: Any = small("aol-std", method="sandwich")
    strides = [n for n, m in model.named_children() if type(m) is nn.Sequential and "pool" in m._modules]
    assert len(strides) == 5
    assert model.adaptations == (
        "circular instead of zero padding: conv1, conv3, conv5, conv7, conv9",
        f"concatenation pooling and a 1x1 convolution instead of a stride: {', '.join(strides)}",
    )
    for line in model.adaptations:
        assert line in repr(model)
        assert line in repr(pickle.loads(pickle.dumps(onelip.bake(model))))
    narrow: Any = small("aol-fc", method="cpl")
    assert narrow.adaptations == ("the first channels of a square layer: fc1",)
    assert list(narrow.fc1._modules) == ["layer", "narrow"]
    assert "zero channels before a square layer: conv1" in small("aol-std", method="cpl").adaptations


@pytest.mark.parametrize("name", SMALL)
def test_unchanged_architectures_have_no_adaptations(name):
    for method in ("aol", None):
        model = small(name, method=method)
        assert model.adaptations == ()
        assert repr(model).startswith("Sequential(\n  (")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("aol-smal", {}, r"unknown model 'aol-smal'; known: .*aol-alt.*; did you mean 'aol-small'\?"),
        ("resnet", {}, "unknown model 'resnet'"),
        ("aol-small", {"image_size": 30}, r"multiple of 4 .*got 30x30; .* 28x28 or 32x32 .* `patch`"),
        ("aol-small", {"image_size": (32, 3)}, r"got 32x3; .* 32x4 "),
        (
            "aol-std",
            {"image_size": 28},
            r"of 32 \(it is halved 5 times\), got 28x28; .* 32x32 .*patchwise-tiny",
        ),
        ("aol-dil", {"image_size": 48}, r"got 48x48; .* 32x32 or 64x64"),
        ("aol-alt", {"image_size": 33}, r"multiple of 32"),
        ("aol-std", {"image_size": 0}, r"expected image_size to be a positive integer or \(height, width\), got 0"),
        ("aol-std", {"image_size": (32,)}, r"got \(32,\)"),
        ("aol-std", {"image_size": True}, "got True"),
        ("aol-fc", {"image_size": 2.5}, "image_size"),
        ("aol-fc", {"num_classes": 65}, "at most the width of the last layer, 64, got 65; choose a larger width"),
        ("aol-std", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-alt", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-small", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-fc", {"num_classes": 0}, "expected num_classes to be an integer of at least 1, got 0"),
        ("aol-fc", {"in_channels": 0}, "expected in_channels"),
        ("aol-fc", {"width": 63}, "expected width to be even, .* got 63; choose 62 or 64"),
        ("aol-std", {"width": 3}, "expected width to be even"),
        ("aol-alt", {"width": 1}, "expected width to be an integer of at least 2, got 1"),
        ("aol-small", {"width": 10}, "at most channels = 8, got 10"),
        ("aol-small", {"channels": 9}, "expected channels to be even"),
        ("aol-small", {"patch": 0}, "expected patch"),
        ("aol-std", {"depth": -1}, "expected depth"),
        ("aol-fc", {"method": "aool"}, r"got 'aool'; did you mean 'aol'\?"),
        ("aol-fc", {"method": None, "method_options": {"side": "auto"}}, "no method_options without a method"),
    ],
)
def test_errors(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **{**SMALL.get(name, {}), **kwargs})


def test_unknown_keyword():
    with pytest.raises(TypeError, match="widht"):
        create_model("aol-small", widht=3)
