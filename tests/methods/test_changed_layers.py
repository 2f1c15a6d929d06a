"""Layers that were changed, or compute a weight other than that of eval mode, have no constant."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip import methods
from onelip.bounds.falsify import falsify_module
from onelip.core.errors import UnsoundBound
from onelip.core.parametrization import bound_by_construction
from onelip.graph.modules import bound_module
from onelip.methods.registry import get_method
from onelip.nn.aol import AOL


def circular():
    return nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")


LAYERS = {
    "aol": lambda: methods.aol(nn.Linear(4, 4)),
    "cayley-dense": lambda: methods.cayley(nn.Linear(4, 4)),
    "soc-dense": lambda: methods.soc(nn.Linear(4, 4)),
    "soc": lambda: methods.soc(nn.Conv2d(4, 4, 3, padding=1)),
    "cayley": lambda: methods.cayley(circular(), input_size=5),
    "lot": lambda: methods.lot(circular(), input_size=5),
    "bro": lambda: methods.bro(circular(), input_size=5),
    "eco": lambda: methods.eco(circular(), input_size=6),
    "sandwich": lambda: methods.sandwich(nn.Linear(4, 4)),
    "sandwich-conv": lambda: methods.sandwich(circular(), input_size=5),
    "sll": lambda: methods.sll(nn.Linear(4, 4)),
    "sll-conv": lambda: methods.sll(nn.Conv2d(4, 4, 3, padding=1)),
    "cpl": lambda: methods.cpl(nn.Linear(4, 4)),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def triple(module, args, output):
    return 3 * output


def hook_on_the_map(maps):
    maps[0].register_forward_hook(triple)


def hook_on_the_list(maps):
    maps.register_forward_hook(triple)


def hook_before_the_map(maps):
    maps[0].register_forward_pre_hook(lambda module, args: tuple(3 * x for x in args))


def replaced_forward(maps):
    before = maps[0].forward
    maps[0].forward = lambda P: 3 * before(P)


def subclass(maps):
    kind = type(maps[0])
    maps[0].__class__ = type("Tripled", (kind,), {"forward": lambda self, P: 3 * kind.forward(self, P)})


CHANGES = [hook_on_the_map, hook_on_the_list, hook_before_the_map, replaced_forward, subclass]


def bound_of(layer):
    return bound_by_construction(layer) if isinstance(layer, (nn.Linear, nn.Conv2d)) else layer.bound()


def assert_refused(layer):
    found = bound_of(layer)
    assert found.constant is None
    assert found.why
    assert bound_module(layer).constant is None
    assert onelip.summary(nn.Sequential(layer)).constant is None


@each_layer
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_map_has_no_constant(make, change):
    layer = make().eval()
    assert bound_of(layer).constant == pytest.approx(1, abs=1e-3)
    change(layer.parametrizations.weight)
    assert_refused(layer)


@pytest.mark.parametrize("name", ["cayley-dense", "cayley", "lot", "bro", "eco", "sandwich", "sandwich-conv"])
@pytest.mark.parametrize("change", ["hook", "forward", "prepare", "class"])
def test_a_changed_part_of_a_map_has_no_constant(name, change):
    layer = LAYERS[name]().eval()
    part = layer.parametrizations.weight[0].orthogonal
    kind = type(part)
    if change == "hook":
        part.register_forward_hook(triple)
    elif change == "class":
        part.__class__ = type("Tripled", (kind,), {"forward": lambda self, M: 3 * kind.forward(self, M)})
    else:
        setattr(part, change, lambda M: 3 * getattr(kind, change)(part, M))
    assert_refused(layer)


@pytest.mark.parametrize("name", ["sandwich", "sandwich-conv", "sll", "cpl"])
def test_baking_a_hooked_layer_keeps_its_function(name):
    layer = LAYERS[name]().double().eval()
    hook_on_the_map(layer.parametrizations.weight)
    x = torch.randn(2, *(layer.input_shape or (4,)), dtype=torch.float64)
    torch.testing.assert_close(onelip.bake(layer)(x), layer(x))


def test_an_own_map_with_its_own_constant_is_used():
    class Tripled(AOL):
        def forward(self, P):
            return 3 * super().forward(P)

        def constant_in(self, dtype):
            return 3 * super().constant_in(dtype)

    layer = methods.aol(nn.Linear(4, 4)).eval()
    layer.parametrizations.weight[0].__class__ = Tripled
    assert onelip.summary(layer).constant == 3


def test_an_own_module_need_not_check_its_parametrization():
    class Own(onelip.nn.LipschitzModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return x @ self.weight

        def bound(self):
            return onelip.nn.Bound(1.0, "the identity")

    layer = Own()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert layer.lipschitz_constant == 1
    layer.parametrizations.weight[0].register_forward_hook(triple)
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize("name", ["cayley", "eco", "sandwich-conv", "sandwich"])
def test_layers_for_one_size_are_measured_at_that_size(name):
    layer = LAYERS[name]().eval()
    falsify_module(layer, layer.lipschitz_constant)
    with pytest.raises(UnsoundBound):
        falsify_module(layer, 0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", onelip.list_methods())
def test_new_parts_have_the_mode_of_the_layer(name, training):
    for layer in (nn.Linear(4, 4), circular()):
        if not isinstance(layer, get_method(name).layers):
            continue
        net = nn.Sequential(layer).train(training)
        net = onelip.constrain(net, name, example=torch.zeros(1, 4, 5, 5) if layer.weight.dim() == 4 else None)
        assert {module.training for module in net.modules()} == {training}


@pytest.mark.parametrize("hidden", [None, 8])
@pytest.mark.parametrize("method", [methods.cpl, methods.sll, methods.sandwich])
def test_functions_of_methods_keep_the_mode(method, hidden):
    for layer in (nn.Linear(4, 4), nn.Conv2d(4, 4, 1)):
        made = method(layer.eval(), hidden=hidden)
        assert not any(module.training for module in made.modules())


def test_methods_of_others_keep_the_mode():
    def replaced(layer):
        return nn.Sequential(methods.aol(nn.Linear(4, 4)))

    net = onelip.constrain(nn.Sequential(nn.Linear(4, 4)).eval(), replaced)
    assert not any(module.training for module in net.modules())


@pytest.mark.parametrize("name", ["clipping", "cpl", "lcc", "spectral-norm"])
def test_a_part_in_training_mode_in_a_layer_in_eval_mode(name):
    layer = onelip.constrain(nn.Linear(30, 30), name).eval()
    layer.parametrizations.weight.original.data.normal_()
    layer.parametrizations.train()
    assert_refused(layer)
    if isinstance(layer, nn.Linear):
        with pytest.raises(onelip.UnsupportedLayer, match="training mode"):
            onelip.bounds.bound_layer(layer)
        with pytest.raises(onelip.UnsupportedLayer, match="training mode"):
            onelip.bounds.exact_bound_layer(layer)
    layer.eval()
    assert onelip.summary(layer).constant == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["cpl", "spectral-norm"])
def test_a_weight_cached_in_training_mode(name):
    layer = onelip.constrain(nn.Linear(30, 30), name).train()
    layer.parametrizations.weight.original.data.normal_()
    with parametrize.cached():
        assert layer.weight is layer.weight
        assert bound_of(layer).constant == pytest.approx(1, abs=1e-3)  # of eval mode; losses may ask in training
        layer.eval()
        assert_refused(layer)
        if isinstance(layer, nn.Linear):
            with pytest.raises(onelip.UnsupportedLayer, match="cached"):
                onelip.bounds.bound_layer(layer)
    assert onelip.summary(layer).constant == pytest.approx(1, abs=1e-3)


@each_layer
def test_a_weight_cached_in_eval_mode_has_its_constant(make):
    layer = make().eval()
    with parametrize.cached():
        assert layer.weight is layer.weight
        assert onelip.summary(layer).constant == pytest.approx(1, abs=1e-3)


def test_the_bound_of_eval_mode_does_not_read_the_cache():
    layer = methods.clipping(nn.Linear(8, 8)).train()
    layer.parametrizations.weight.original.data.normal_()
    with parametrize.cached():
        assert torch.linalg.matrix_norm(layer.weight, 2) > 2
        assert onelip.bounds.bound_layer(layer).value < 1.001


def test_changed_groups_of_soc():
    for change in ("layer", "map"):
        layer = methods.soc(nn.Conv2d(4, 4, 3, padding=1, groups=4), terms=1).eval()
        changed = layer if change == "layer" else layer.parametrizations.weight[0]
        changed.groups = 1
        assert_refused(layer)
    baked = onelip.bake(methods.soc(nn.Conv2d(4, 4, 3, padding=1, groups=4)).eval())
    assert baked.lipschitz_constant is not None
    baked.groups = 2
    assert baked.lipschitz_constant is None


@pytest.mark.parametrize("name", onelip.list_methods())
def test_a_parameter_of_another_shape(name):
    layer = nn.Conv2d(2, 2, 1) if nn.Conv2d in get_method(name).layers else nn.Linear(2, 2)
    layer = onelip.constrain(layer, name).eval()
    if parametrize.is_parametrized(layer):
        layer.parametrizations.weight.original = nn.Parameter(torch.ones(2, 2, 3, 3))
        assert_refused(layer)


@each_layer
def test_a_parameter_from_which_no_weight_can_be_computed(make):
    layer = make().eval()
    layer.parametrizations.weight.original = nn.Parameter(torch.ones(3, 5))
    assert_refused(layer)


@pytest.mark.parametrize("name", ["soc", "cayley", "sandwich", "sll"])
def test_a_stored_weight_of_another_shape(name):
    layer = onelip.bake(LAYERS[name]().eval(), expand=False)
    layer.weight = nn.Parameter(torch.ones(3))
    found = layer.bound()
    assert found.constant is None
    assert found.why


def other_class(layer):
    class Tripled(type(layer.period)):
        def __call__(self, x, matrices):
            return 3 * super().__call__(x, matrices)

    layer.period = Tripled(layer.period.size)


def other_function(layer):
    layer.period = lambda x, matrices: 3 * x


def other_size(layer):
    layer.period.size = (5, 8)


def other_tables(layer):
    layer.period._source.value.zero_()


@pytest.mark.parametrize("name", ["cayley", "sandwich-conv"])
@pytest.mark.parametrize("change", [other_class, other_function, other_size, other_tables])
def test_a_changed_period(name, change):
    layer = LAYERS[name]().eval()
    assert layer.lipschitz_constant is not None
    change(layer)
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize("name", ["soc", "sll-conv"])
def test_a_changed_convolution(name):
    layer = LAYERS[name]().eval()
    place = "skew" if name == "soc" else "convolution"
    setattr(layer, place, replace(getattr(layer, place), kernel_size=(5, 5)))
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize(
    ("name", "method"),
    [("cayley", "_filtered"), ("cayley", "_together"), ("sandwich", "_dense"), ("soc", "forward"), ("sll", "forward")],
)
def test_a_replaced_method_of_a_layer(name, method):
    layer = LAYERS[name]().eval()
    before = getattr(layer, method)
    setattr(layer, method, lambda x: 3 * before(x))
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: methods.bjorck(nn.Linear(4, 4)), "orthogonal"),
        (lambda: methods.cholesky(nn.Linear(4, 4)), "orthogonal"),
        (lambda: methods.spectral_norm(nn.Linear(4, 4)), "scaled_by_proof"),
        (lambda: methods.clipping(nn.Linear(4, 4)), "_clipped"),
        (lambda: methods.cpl(nn.Linear(4, 4)), "scaled_by_proof"),
    ],
)
def test_a_helper_overridden_in_a_subclass_of_a_map(make, name):
    layer = make().eval()
    part = layer.parametrizations.weight[0]
    kind = type(part)
    part.__class__ = type("Own", (kind,), {name: lambda self, *given: 3 * getattr(kind, name)(self, *given)})
    assert bound_module(layer).constant is None
    part.__class__ = type("Described", (kind,), {"describe": lambda self: "of my own"})
    assert bound_module(layer).constant is not None


def test_a_helper_overridden_in_a_subclass_of_a_layer():
    class Own(onelip.nn.ConvexResidual):
        @property
        def alpha(self):
            return torch.tensor(5.0)

    layer = Own(onelip.nn.Abs())
    assert layer.lipschitz_constant is None
    assert "overrides alpha" in onelip.summary(layer).layers[0].bound.why


@pytest.mark.parametrize(
    ("layer", "name", "shape"),
    [
        (onelip.nn.Normalize([0.0], [1.0]), "std", (5,)),
        (onelip.nn.Normalize([0.0], [1.0]), "mean", (1, 5)),
        (onelip.nn.BatchCentering(2).eval(), "running_mean", (5, 1, 2)),
        (onelip.nn.NActivation(2), "theta", (2, 7, 2)),
        (onelip.nn.Householder(2), "angles", (7, 1)),
        (onelip.nn.Householder(2, order=2), "angles", (3, 7, 1)),
        (methods.cayley(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), input_size=6), "bias", (5,)),
        (methods.soc(nn.Conv2d(1, 1, 3, padding=1)), "bias", (5,)),
    ],
)
def test_a_tensor_of_another_shape(layer, name, shape):
    """Broadcasting copies the input as often as the tensor is longer."""
    assert layer.lipschitz_constant is not None
    is_parameter = isinstance(getattr(layer, name), nn.Parameter)
    setattr(layer, name, nn.Parameter(torch.ones(shape)) if is_parameter else torch.ones(shape))
    assert layer.lipschitz_constant is None


@pytest.mark.parametrize("part", [nn.Dropout(0.9), nn.RReLU(-5, 5), nn.BatchNorm1d(4), onelip.nn.BatchCentering(4)])
def test_a_part_in_training_mode_in_a_model_in_eval_mode(part):
    model = nn.Sequential(onelip.nn.Abs(), part)
    for whole in (model, onelip.nn.ConvexResidual(model), onelip.nn.MirrorAverage(model)):
        whole.eval()
        assert onelip.summary(whole).constant is not None
        part.train()
        found = onelip.summary(whole)
        assert found.constant is None
        assert found.chain.constant is None
        assert "in training mode" in str(found)
        assert whole is model or whole.lipschitz_constant is None
