"""Bounds of modules by themselves: what acts in torch is read, and nothing else."""

import math

import pytest
import torch
from torch import nn

import onelip
from onelip.bounds import bound_layer
from onelip.core.lipschitz_module import Bound
from onelip.graph import modules
from onelip.graph.modules import bound_chain, bound_module, links


def changed(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("name", ["scale", "input_scale"])
def test_attributes_that_do_not_act(name):
    # aten.elu has these arguments, nn.ELU leaves them at 1.
    layer = changed(nn.ELU(3.0), **{name: 0.1})
    x = torch.tensor([-1e-3, 0.0])
    slope = float(layer(x).diff() / x.diff())
    assert slope <= bound_module(layer).constant == 3.0


@pytest.mark.parametrize(
    "layer",
    [nn.Softmax(-4), nn.Softmax(0), nn.Flatten(-4), nn.Unflatten(-2, (2, 2)), onelip.nn.MaxMin(dim=-4)],
)
def test_axes_that_may_be_the_batch(layer):
    assert bound_module(layer).constant is None
    assert bound_module(nn.Softmax(-1)).constant == 0.5
    assert onelip.audit(onelip.nn.MaxMin(dim=-3), torch.rand(2, 4, 3, 3)).upper == 1.0
    assert onelip.audit(onelip.nn.MaxMin(dim=-4), torch.rand(2, 4, 3, 3)).upper is None


class Stating(onelip.nn.LipschitzModule):
    def __init__(self, constant):
        super().__init__()
        self.constant = constant

    def forward(self, x):
        return x

    def bound(self):
        return Bound(self.constant, "")


@pytest.mark.parametrize(
    "layer",
    [
        changed(nn.MaxPool2d(2), stride=0),
        changed(nn.MaxPool2d(2), kernel_size="2"),
        changed(nn.RReLU(), lower="a"),
        changed(nn.BatchNorm1d(2), eps=None),
        changed(nn.BatchNorm1d(2), eps=math.nan),
        changed(nn.BatchNorm1d(2), eps=math.inf),
        changed(onelip.nn.LipschitzAvgPool2d(2), stride=1),
        Stating(math.nan),
        Stating(-1.0),
        Stating(None),
    ],
    ids=repr,
)
def test_settings_that_no_rule_can_read(layer):
    assert onelip.summary(nn.Sequential(nn.ReLU(), layer)).unproved == ["1"]


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self._orig_mod = nn.ReLU()

    def forward(self, x):
        return 100 * self._orig_mod(x)


class Parallel(nn.DataParallel):
    def forward(self, x):
        return 100 * self.module(x)


class Called(nn.ReLU):
    def _call_impl(self, x):
        return 100 * x


def hooked(module):
    module.register_forward_hook(lambda module, inputs, output: 100 * output)
    return module


@pytest.mark.parametrize(
    "model",
    [
        Inside(),
        Parallel(nn.ReLU()),
        hooked(nn.DataParallel(nn.ReLU())),
        hooked(torch.compile(nn.ReLU(), backend="eager")),
        Called(),
        changed(nn.ReLU(), _call_impl=lambda x: 100 * x),
        changed(nn.Sequential(nn.ReLU()), _call_impl=lambda x: 100 * x),
    ],
    ids=lambda model: type(model).__name__,
)
def test_wrappers_that_compute_something_else(model):
    assert bound_chain(links(model)).constant is None
    assert onelip.summary(model).constant is None


def test_wrappers_of_torch():
    for model in (nn.DataParallel(nn.ReLU()), torch.compile(nn.ReLU(), backend="eager")):
        assert bound_chain(links(model)).constant == 1.0


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.rand(2, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_not_read(make):
    found = onelip.summary(make(nn.Sequential(nn.Flatten(), nn.ReLU()).eval()))
    assert found.constant is None
    assert "TorchScript" in str(found)


def test_fixed_weights_are_bounded_as_they_are_stored(monkeypatch):
    layer = nn.Linear(3, 2)
    nn.init.constant_(layer.weight, 1.0)
    assert bound_module(layer).constant is None  # training changes them
    layer.requires_grad_(False)
    layer.bias.requires_grad_()
    assert 6**0.5 <= bound_module(layer).constant < 6**0.5 * (1 + 1e-9)
    with monkeypatch.context() as patch:  # computed once
        patch.setattr(modules, "bound_layer", None)
        assert bound_module(layer).constant is not None
    version = layer.weight._version
    layer.weight.data[0, 0] = 100.0
    assert layer.weight._version == version  # torch does not show this change
    assert bound_module(layer).constant > 100.0
    layer.weight.data[0, 0] = math.nan
    assert bound_module(layer).constant is None


def test_fixed_weights_follow_their_settings():
    layer = nn.Conv1d(1, 1, 2, stride=2, bias=False).requires_grad_(False)
    nn.init.constant_(layer.weight, 1.0)
    assert bound_module(layer).constant < 1.5
    layer.stride = (1,)
    assert bound_module(layer).constant >= 1.9  # the sum of neighbours, on long signals


def test_fixed_weights_on_no_device():
    assert bound_module(nn.Linear(3, 2, device="meta").requires_grad_(False)).constant is None


@pytest.mark.parametrize("name", ["aol-fast-small", "aol-fast-medium"])
def test_constants_of_the_fast_networks_are_known(name):
    found = onelip.summary(onelip.create_model(name))
    assert not found.unproved
    assert found.constant == pytest.approx(1.0, rel=1e-5)
    assert [row.bound.why for row in found.layers if row.name == "patches"] == ["fixed weights"]


def test_settings_of_other_types_than_those_of_the_constructor():
    convolution = changed(nn.Conv2d(2, 2, 3), stride=2)  # torch runs it
    with pytest.raises(onelip.UnsupportedLayer, match="stride to be a tuple of 2 numbers"):
        bound_layer(convolution)
    transposed = onelip.aol(nn.ConvTranspose1d(2, 1, 3, padding=3, dilation=2, output_padding=1))
    for layer, why in (
        (changed(onelip.aol(nn.Conv2d(2, 2, 3)), stride=2), "tuple of 2 numbers"),
        (changed(transposed, dilation=(1,)), "does not run"),
    ):
        (row,) = onelip.summary(layer).layers
        assert row.bound.constant is None
        assert why in row.bound.why


def test_an_attribute_that_hides_the_weight():
    layer = nn.Linear(4, 4).requires_grad_(False)
    layer.__dict__["weight"] = torch.eye(4) * 9
    assert bound_module(layer).constant is None
    assert onelip.audit(layer, torch.rand(2, 4), lower=False).upper >= 9


@pytest.mark.parametrize("answer", [None, 1.0, Bound(math.nan, ""), Bound(-1.0, ""), Bound("1", "")])
def test_layers_that_state_something_else_than_a_bound(answer):
    layer = changed(Stating(1.0), bound=lambda: answer)
    with pytest.raises(TypeError, match="to return Bound"):
        _ = layer.lipschitz_constant
    assert bound_module(layer).constant is None


def hooked_map(layer):
    layer.parametrizations.weight[0].register_forward_hook(lambda module, inputs, output: output * 9)


def hooked_list(layer):
    layer.parametrizations.weight.register_forward_hook(lambda module, inputs, output: output * 9)


def replaced_map(layer):
    layer.parametrizations.weight[0].forward = lambda P: 9 * P


def other_map(layer):
    layer.parametrizations.weight[0].__class__ = type("Other", (onelip.AOL,), {"forward": lambda self, P: 9 * P})


@pytest.mark.parametrize("change", [hooked_map, hooked_list, replaced_map, other_map])
def test_parametrizations_that_were_changed_have_no_constant(change):
    layer = onelip.aol(nn.Linear(4, 4))
    assert bound_module(layer).constant == 1.0
    change(layer)
    assert torch.linalg.matrix_norm(layer.weight.detach(), 2) > 1.1
    assert onelip.summary(layer).constant is None


def test_the_padding_of_fixed_weights():
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular").requires_grad_(False)
    before = bound_module(layer).constant
    layer._reversed_padding_repeated_twice = [5, 5]  # repeats outputs
    assert bound_module(layer).constant > 1.2 * before
