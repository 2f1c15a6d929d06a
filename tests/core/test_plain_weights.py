"""Plain weights into constrained layers: by assigning a Parameter, and by the state dict of a plain network."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import onelip
from onelip.core.parametrization import original_of
from onelip.methods.registry import get_method
from onelip.nn.aol import find_aol

OPTIONS = [{}, {"side": "outputs"}, {"steps": 2}, {"learn_weights": True}, {"lipschitz": 2.0}]


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_assigning_a_parameter_is_assigning_its_tensor(options):
    torch.manual_seed(0)
    other = nn.Linear(5, 4)
    layer, same = onelip.aol(nn.Linear(5, 4), **options), onelip.aol(nn.Linear(5, 4), **options)
    parameter = original_of(layer)
    layer.weight, same.weight = other.weight, other.weight.detach()
    assert torch.equal(layer.weight, same.weight)
    assert original_of(layer) is parameter  # optimisers keep it
    assert "weight" not in dict(layer.named_parameters(recurse=False))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(layer.weight, before)


def test_a_parameter_of_another_shape_is_refused():
    layer = onelip.aol(nn.Linear(5, 4))
    with pytest.raises(ValueError, match=r"expected a weight of shape \(4, 5\), got \(5, 4\)"):
        layer.weight = nn.Linear(4, 5).weight


def test_other_parameters_are_registered_as_ever():
    layer = onelip.aol(nn.Linear(5, 4))
    layer.bias = nn.Parameter(torch.ones(4))
    layer.gain = nn.Parameter(torch.ones(()))
    assert {"bias", "gain"} == set(dict(layer.named_parameters(recurse=False)))


def test_copies_take_parameters_too():
    layer = onelip.aol(nn.Linear(4, 4))
    before = layer.weight.detach().clone()
    copied = copy.deepcopy(layer)
    copied.weight = nn.Parameter(torch.eye(4))
    assert torch.allclose(copied.weight, torch.eye(4))
    assert torch.equal(layer.weight, before)


def test_nothing_is_left_after_removal():
    layer = onelip.aol(nn.Linear(4, 4))
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear
    weight = nn.Parameter(torch.ones(4, 4))
    layer.weight = weight
    assert layer.weight is weight
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, weight)


def test_after_removal_beside_another_parametrization():
    layer = onelip.aol(nn.Linear(4, 4))
    parametrize.register_parametrization(layer, "bias", nn.ReLU())
    parametrize.remove_parametrizations(layer, "weight")
    weight = nn.Parameter(torch.ones(4, 4))
    layer.weight = weight
    assert layer.weight is weight
    layer.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_state_dict_is_as_constraining_after_loading(options):
    torch.manual_seed(0)
    plain = network()
    expected = onelip.constrain(copy.deepcopy(plain), **options)
    model = onelip.constrain(network(), **options)
    given = plain.state_dict()
    parameters = [id(p) for p in model.parameters()]
    assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
    assert set(given) == set(plain.state_dict())  # the caller's dict is not touched
    assert [id(p) for p in model.parameters()] == parameters
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, rtol=1e-5), name


def test_baked_weights_come_back():
    torch.manual_seed(0)
    model, x = onelip.constrain(network()), torch.randn(2, 3, 4, 4)
    other = onelip.constrain(network())
    other.load_state_dict(onelip.bake(model).state_dict())
    assert torch.allclose(other(x), model(x), atol=1e-6)


@pytest.mark.parametrize("method", ["bjorck", "spectral-norm", "cholesky", "cayley", "bcop", "sll", "gloro"])
def test_methods_load_plain_weights(method):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    x = torch.randn(1, 4, 6, 6)
    model = onelip.constrain(copy.deepcopy(plain), method, example=x)
    other = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    before = original_of(model[0]).detach().clone()
    torch.manual_seed(1)  # BCOP draws what the weight leaves open
    model.load_state_dict(other.state_dict())
    loaded = original_of(model[0]).detach().clone()
    assert not torch.equal(loaded, before)
    torch.manual_seed(1)
    model[0].weight = other[0].weight
    assert torch.allclose(original_of(model[0]), loaded)


def test_own_state_dicts_load_as_ever():
    model = onelip.constrain(network(), learn_weights=True)
    other = onelip.constrain(network(), learn_weights=True)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_types_are_those_of_the_layer():
    layer = onelip.aol(nn.Linear(4, 4))
    layer.load_state_dict(nn.Linear(4, 4, dtype=torch.float64).state_dict())
    assert layer.weight.dtype == torch.float32


def test_assign_gives_life_to_a_meta_layer():
    plain = nn.Linear(4, 4)
    layer = onelip.aol(nn.Linear(4, 4, device="meta"))
    layer.load_state_dict(plain.state_dict(), assign=True)
    assert torch.allclose(layer.weight, onelip.aol(plain).weight)


def test_what_does_not_fit_is_said():
    model = onelip.constrain(network())
    with pytest.raises(RuntimeError, match=r"size mismatch for 3.weight: expected a weight of shape \(5, 64\)"):
        model.load_state_dict(nn.Sequential(*list(network())[:3], nn.Linear(64, 6)).state_dict())
    both = nn.Linear(3, 3).state_dict()
    layer = onelip.aol(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="Unexpected key"):  # which of the two is meant?
        layer.load_state_dict(both | layer.state_dict())
    missing = onelip.aol(nn.Linear(3, 3, device="meta"), learn_weights=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        missing.load_state_dict(both, assign=True)


def test_a_map_that_was_registered_by_others_is_left_to_torch():
    layer = onelip.aol(nn.Linear(3, 3))
    parametrize.register_parametrization(layer, "weight", nn.ReLU())
    assert find_aol(layer) is None
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(nn.Linear(3, 3).state_dict())


@pytest.mark.parametrize("method", ["aol", "bjorck"])
def test_several_tensors_behind_the_weight_are_refused_before_anything_changes(method):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    keys = list(layer.state_dict())
    with pytest.raises(
        onelip.UnsupportedLayer, match=r"got 2 parameters of WeightNorm; call .*remove_parametrizations"
    ):
        get_method(method).apply(layer)
    assert list(layer.state_dict()) == keys
    assert len(layer.parametrizations.weight) == 1


def test_reset_parameters_as_the_docs_say():
    """For a torch layer, reset_parameters changes only the bias; for a drop-in class it changes both."""
    layer = onelip.aol(nn.Linear(4, 4))
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    layer.reset_parameters()
    assert torch.equal(layer.weight, weight)
    assert not torch.equal(layer.bias, bias)
    drop_in = onelip.nn.AOLLinear(4, 4)
    drop_in.weight = torch.randn(4, 4)
    drop_in.reset_parameters()
    assert torch.equal(drop_in.weight, torch.eye(4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward mode uses it
def test_forward_mode_as_the_docs_say():
    layer, x = onelip.aol(nn.Linear(4, 4)), torch.randn(4)
    assert torch.func.jacfwd(layer)(x).shape == (4, 4)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jacfwd(lambda P: torch.func.functional_call(layer, {"parametrizations.weight.original": P}, (x,)))(
            original_of(layer).detach()
        )


def test_tiny_weights_as_the_docs_say():
    torch.manual_seed(0)
    layer, tiny = onelip.aol(nn.Linear(4, 4)), 1e-44 * torch.randn(4, 4)
    with torch.no_grad():
        original_of(layer).copy_(tiny)
    assert 0.5 < torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6
    (layer.weight * torch.randn(4, 4)).sum().backward()
    assert not original_of(layer).grad.isfinite().all()
    layer.zero_grad()
    layer.weight = 1e20 * tiny
    (layer.weight * torch.randn(4, 4)).sum().backward()
    assert original_of(layer).grad.isfinite().all()
