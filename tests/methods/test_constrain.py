"""`onelip.constrain`: a method on a whole model, and what it reports."""

import copy
import dataclasses
import functools
import warnings
from fractions import Fraction

import pytest
import torch
from torch import nn

import onelip
from onelip.graph.modules import bound_module
from onelip.nn.aol import find_aol


def mixed():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(128),
        nn.Linear(128, 10),
    )


def test_constrains_what_it_can_and_warns_of_the_rest(capsys):
    model = mixed()
    with pytest.warns(UserWarning, match="1 layer is left unchanged:\n  3: expected zero or circular padding"):
        assert onelip.constrain(model) is model
    assert capsys.readouterr().out == ""
    said = str(onelip.summary(model))
    assert find_aol(model[0]) is not None
    assert find_aol(model[7]) is not None
    assert find_aol(model[3]) is None
    assert onelip.summary(model).unproved == ["3", "6"]
    assert "no bound is known for 2 of 8 modules (3, 6)" in said
    assert "advice for 7: side='outputs' can be tighter" in said
    assert "own deviation" in said


def test_a_chain_gets_its_product():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LeakyReLU(2.0), nn.Linear(4, 3)), nn.Sigmoid())
    onelip.constrain(model, lipschitz=3.0)
    summary = onelip.summary(model)
    assert summary.constant == pytest.approx(3 * 2 * 3 * 0.25)
    assert "at most 4.5" in str(summary)


def test_own_forward_is_unproved_as_a_whole():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x + self.gain * self.layer(x)

    summary = onelip.summary(onelip.constrain(Residual()))
    assert summary.constant is None
    assert summary.unproved == [""]
    assert "uses parameters of its own in forward: gain" in str(summary)


def test_a_module_that_stands_twice_in_a_chain_counts_twice():
    layer = onelip.nn.AOLLinear(3, 3, lipschitz=2.0)
    model = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))
    summary = onelip.summary(model)
    assert [row.name for row in summary.layers] == ["0", "1.0", "1.1"]
    assert summary.constant == pytest.approx(4.0)
    assert "own forward" not in str(summary)
    with torch.no_grad():
        layer.weight = torch.eye(3)
    x = torch.tensor([[1.0, 0, 0]])
    assert torch.allclose((model(2 * x) - model(x)).norm(), torch.tensor(4.0))  # and it is attained


def test_a_module_inside_of_another_counts_where_the_chain_uses_it():
    layer = onelip.nn.AOLLinear(3, 3, lipschitz=2.0)
    residual = onelip.nn.ConvexResidual(layer, alpha=0.5, learnable=False)
    assert onelip.summary(nn.Sequential(residual, layer)).constant == pytest.approx(3.0)
    assert onelip.summary(nn.Sequential(layer, residual)).constant == pytest.approx(3.0)


def test_how_often_a_forward_of_its_own_uses_a_module_is_not_known():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = self.same = onelip.nn.AOLLinear(3, 3)

        def forward(self, x):
            return self.same(self.layer(x))

    summary = onelip.summary(Twice())
    assert [row.name for row in summary.layers] == ["layer"]
    assert summary.constant is None
    assert "own forward" in str(summary)


def test_root_may_be_the_layer():
    layer = onelip.constrain(nn.Linear(3, 4))
    assert find_aol(layer) is not None
    assert "(model)" in str(onelip.summary(layer))


def test_strict_raises_before_anything_changes():
    model = mixed()
    with pytest.raises(onelip.UnsupportedLayer, match="nothing was changed"):
        onelip.constrain(model, strict=True)
    assert find_aol(model[0]) is None


def test_bad_options_raise_before_anything_changes():
    model = mixed()
    with pytest.raises(ValueError, match="expected side"):
        onelip.constrain(model, side="rows")
    assert find_aol(model[0]) is None
    with pytest.raises(TypeError, match="colour"):
        onelip.constrain(model, colour="blue")
    assert find_aol(model[0]) is None


def test_skip_by_name_and_pattern():
    model = mixed()
    onelip.constrain(model, skip=["3", "7"])
    assert find_aol(model[7]) is None
    onelip.constrain(model, skip="*")
    assert find_aol(model[7]) is None
    with pytest.raises(ValueError, match="matches none"):
        onelip.constrain(model, skip=["head"])


def test_twice_changes_nothing():
    model = onelip.constrain(mixed(), skip=["3"])
    weight = model[0].weight.detach().clone()
    onelip.constrain(model, skip=["3"])
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("method", ["aol", "soc", "sll"])
def test_options_that_reach_no_constrained_layer_are_reported(method):
    model = onelip.constrain(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), method)
    title = {"aol": "AOL on the inputs", "soc": "SOC", "sll": "SLL"}[method]
    with pytest.warns(UserWarning, match=rf"0: constrained already \({title}"):
        assert onelip.constrain(model, "aol", steps=2, strict=True) is model  # no refusal
    onelip.constrain(model, steps=2, skip=["0"])
    onelip.constrain(model)


@pytest.mark.parametrize("other", ["weight_norm", "spectral_norm"])
def test_layers_that_others_parametrize_are_refused(other):
    model = nn.Sequential(nn.Linear(3, 3), getattr(nn.utils.parametrizations, other)(nn.Linear(3, 3)))
    said = rf"1: its weight is parametrized by {other.title().replace('_', '')}; use .*remove_parametrizations"
    with pytest.raises(onelip.UnsupportedLayer, match=said):
        onelip.constrain(model, strict=True)
    assert find_aol(model[0]) is None
    with pytest.warns(UserWarning, match=said):
        onelip.constrain(model)
    assert find_aol(model[0]) is not None
    assert onelip.summary(model).unproved == ["1"]
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert onelip.summary(onelip.constrain(model, strict=True)).constant == 1.0


def test_tied_weights_are_left_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match="shared with another module"):
        onelip.constrain(model)
    assert find_aol(model[0]) is None
    assert model[1].weight is model[0].weight


def test_method_may_be_a_function_or_an_object():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    assert onelip.summary(onelip.constrain(copy.deepcopy(model), onelip.aol, steps=2)).constant == 1.0
    bcop = onelip.methods.get_method("bcop")
    assert onelip.summary(onelip.constrain(copy.deepcopy(model), bcop)).constant == pytest.approx(1.0)

    def only_wide(layer):
        if layer.out_features < 3:
            raise onelip.UnsupportedLayer("too narrow")
        return onelip.aol(layer)

    with pytest.warns(UserWarning, match="2: too narrow"):
        onelip.constrain(model, only_wide)
    assert find_aol(model[0]) is not None
    with pytest.raises(ValueError, match="expected a method by name"):
        onelip.constrain(model, 3)


@pytest.mark.parametrize(
    ("module", "weights"),
    [
        (nn.LSTM(3, 4), "weight_ih_l0, weight_hh_l0 of LSTM"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight of MultiheadAttention"),
        (nn.Embedding(5, 4), "weight of Embedding"),
        (nn.Bilinear(2, 2, 2), "weight of Bilinear"),
    ],
)
def test_other_modules_with_weights_are_reported(module, weights):
    model = nn.Sequential(nn.Linear(3, 3), module)
    with pytest.warns(UserWarning, match=f"1 layer is left unchanged:\n  1: no method constrains {weights}"):
        onelip.constrain(model)
    assert find_aol(model[0]) is not None
    with pytest.raises(onelip.UnsupportedLayer, match=weights):
        onelip.constrain(nn.Sequential(module), strict=True)
    onelip.constrain(nn.Sequential(module), skip="0")  # warnings are errors


def test_layers_with_known_constants_are_not_reported():
    layers = (onelip.nn.Householder(4, 2), onelip.nn.NActivation(4), nn.BatchNorm1d(4), nn.PReLU())
    model = onelip.constrain(nn.Sequential(nn.Linear(4, 4), *layers), learn_weights=True)
    with pytest.warns(UserWarning, match="constrained already"):
        onelip.constrain(model, side="outputs")


def test_a_registered_method_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(onelip.methods.registry, "METHODS", dict(onelip.methods.registry.METHODS))
    mine = onelip.methods.Method(
        name="mine", title="my method", guarantee="proved", layers=(nn.Linear,), apply=lambda layer: onelip.aol(layer)
    )
    onelip.register_method(mine)
    assert "mine" in onelip.list_methods()
    assert onelip.summary(onelip.constrain(nn.Sequential(nn.Linear(3, 3)), "mine")).constant == 1.0
    onelip.register_method(mine)  # again, as in a notebook
    with pytest.raises(ValueError, match=r"the name 'mine' is taken by .*test_constrain"):
        onelip.register_method(dataclasses.replace(mine, apply=onelip.aol))
    with pytest.raises(ValueError, match=r"the name 'aol' is taken by onelip\.nn\.aol\.aol"):
        onelip.register_method(dataclasses.replace(mine, name="aol", apply=functools.partial(mine.apply)))


def test_unknown_method_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'aol'"):
        onelip.constrain(mixed(), "aoll")


def test_residual_shows_its_branch_without_counting_it_twice():
    branch = nn.Sequential(onelip.nn.AOLLinear(4, 4, lipschitz=0.5), onelip.nn.MaxMin())
    model = nn.Sequential(onelip.nn.ConvexResidual(branch, alpha=0.5, learnable=False), onelip.nn.AOLLinear(4, 4))
    summary = onelip.summary(model)
    assert "  AOLLinear" in str(summary)
    assert summary.constant == pytest.approx(0.75)


# Each rule beside the steepest slope found by sampling, which must not exceed it and comes near.
@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Tanh(), nn.Sigmoid(), nn.Softsign(), nn.Tanhshrink(),
        nn.LogSigmoid(), nn.CELU(0.3), nn.Softshrink(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(),
        nn.Hardswish(), nn.SELU(), nn.LeakyReLU(3.0), nn.PReLU(init=-2.0), nn.ELU(2.0),
    ],
    ids=str,
)  # fmt: skip
def test_constants_of_activations(module):
    x = torch.linspace(-12, 12, 400001, dtype=torch.float64, requires_grad=True)
    module = module.double()
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    constant = bound_module(module).constant
    assert constant is not None
    assert slope.abs().max() <= constant
    assert slope.abs().max() >= constant * 0.99


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.AvgPool2d(2), (1, 4, 4)),
        (nn.AvgPool2d(3, stride=1, padding=1), (1, 5, 5)),
        (nn.AvgPool1d(3, stride=2), (1, 9)),
        (nn.AvgPool3d(2, stride=1), (1, 3, 3, 3)),
        (nn.AdaptiveAvgPool2d(1), (2, 3, 4)),
        (nn.ZeroPad2d(1), (1, 3, 3)),
        (nn.PixelUnshuffle(2), (1, 4, 4)),
    ],
    ids=str,
)
def test_constants_of_linear_modules(module, shape):
    constant = bound_module(module).constant
    assert constant is not None
    assert onelip.testing.exact_norm(module, shape) <= constant * (1 + 1e-12)


@pytest.mark.parametrize(
    "module", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1), nn.MaxPool1d(3, 2, dilation=2)], ids=str
)
def test_constants_of_max_pooling(module):
    """A single bright pixel appears in every window it lies in."""
    torch.manual_seed(0)
    dims = 1 if isinstance(module, nn.MaxPool1d) else 2
    x = torch.zeros(1, *(9,) * dims, dtype=torch.float64)
    worst = 0.0
    for index in range(x.numel()):
        bright = x.clone()
        bright.view(-1)[index] = 1
        worst = max(worst, float((module(bright) - module(x)).norm()))
    constant = bound_module(module).constant
    assert constant is not None
    assert worst == pytest.approx(constant)


def test_batch_norm_in_eval():
    norm = nn.BatchNorm1d(3).double()
    norm(torch.randn(50, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0]))
    norm.eval()
    jacobian = torch.autograd.functional.jacobian(norm, torch.zeros(1, 3, dtype=torch.float64)).reshape(3, 3)
    constant = bound_module(norm).constant
    assert constant is not None
    assert torch.linalg.matrix_norm(jacobian, 2) <= constant <= torch.linalg.matrix_norm(jacobian, 2) * (1 + 1e-9)


def with_hook(module):
    module.register_forward_hook(lambda module, args, output: 10 * output)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(3),
        nn.InstanceNorm2d(3),
        nn.ReflectionPad2d(1),
        nn.Linear(2, 2),
        nn.Softmax2d(),
        nn.Softmax(0),  # along the batch
        nn.Flatten(0),
        onelip.nn.ConvexResidual(with_hook(nn.Sequential(nn.ReLU()))),
        nn.AvgPool2d(2, padding=1, count_include_pad=False),
        nn.AdaptiveAvgPool2d(3),
        nn.BatchNorm2d(2, track_running_stats=False),
    ],
    ids=str,
)
def test_modules_without_a_bound(module):
    assert bound_module(module).constant is None


class Ten(onelip.nn.MaxMin):
    def forward(self, x):
        return 10 * super().forward(x)


class Silent(onelip.nn.LipschitzModule):
    def forward(self, x):
        return 5 * x


class BigLinear(nn.Linear):
    def forward(self, x):
        return 10 * super().forward(x)


def with_own_forward(module):
    module.forward = lambda x: 10 * x
    return module


@pytest.mark.parametrize(
    "make",
    [
        Ten,
        Silent,
        lambda: onelip.aol(BigLinear(3, 3)),
        lambda: with_hook(onelip.nn.AOLLinear(3, 3)),
        lambda: with_hook(nn.Sequential(nn.ReLU())),
        lambda: with_own_forward(nn.ReLU()),
        lambda: nn.CELU(-1.0),
        lambda: nn.Softplus(),
        lambda: nn.ELU(float("nan")),
        lambda: nn.LeakyReLU(float("nan")),
        lambda: nn.PReLU(init=float("nan")),
        lambda: nn.MaxPool2d(2, return_indices=True),
    ],
)
def test_what_only_looks_harmless_is_unproved(make):
    summary = onelip.summary(nn.Sequential(make()))
    assert summary.constant is None
    assert summary.unproved


def test_settings_changed_afterwards_are_noticed():
    layer = onelip.aol(nn.Conv2d(2, 2, 3, stride=2, padding=1))
    assert onelip.summary(layer).constant == 1.0
    layer.stride = (1, 1)
    assert onelip.summary(layer).constant is None
    layer.stride, layer.padding_mode = (2, 2), "reflect"
    assert onelip.summary(layer).constant is None
    circular = nn.Conv2d(2, 2, 3, stride=2, padding=1, padding_mode="circular")
    guarded = onelip.aol(circular, input_size=(4, 5))
    assert onelip.summary(guarded).constant == 1.0
    guarded._forward_pre_hooks.clear()
    assert onelip.summary(guarded).constant is None


def test_loaded_alpha_outside_of_zero_one():
    layer = onelip.nn.ConvexResidual(nn.ReLU(), alpha=0.5, learnable=False)
    layer.load_state_dict({"fixed_alpha": torch.tensor(5.0)})
    assert onelip.summary(layer).constant is None


def test_average_pooling_is_rounded_up():
    constant = bound_module(nn.AvgPool2d(10, 4)).constant
    assert constant is not None
    assert Fraction(constant) ** 2 >= Fraction(9, 100)


def test_old_style_reparametrizations_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants it to be replaced, too
        model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 3)))
    with pytest.warns(UserWarning, match="computed by a hook"):
        onelip.constrain(model)


def test_subclasses_are_not_trusted():
    class Steep(nn.ReLU):
        def forward(self, x):
            return 100 * super().forward(x)

    assert bound_module(Steep()).constant is None
