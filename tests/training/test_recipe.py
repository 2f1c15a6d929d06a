"""The recipe: the paper's numbers, the round trip to JSON, and clear errors; the schedule; what decays."""

import json
import math

import pytest
import torch
from torch import nn

import onelip
from onelip.optim.layers import linear_weights
from onelip.training import PRESETS, Recipe, RecipeError, build_model, learning_rate, make_optimizer, preset
from onelip.training.learner import make_augmentation
from onelip.training.recipe import default_preset, parse_options, recipe_for_budget


def test_defaults_are_the_papers():
    recipe = preset("paper")
    assert recipe == Recipe()
    assert (recipe.offset, recipe.temperature) == (math.sqrt(2), 0.25)
    assert (recipe.lr, recipe.momentum, recipe.nesterov, recipe.weight_decay) == (1e-3, 0.9, True, 1e-3)
    assert (recipe.epochs, recipe.batch_size, recipe.drop_at, recipe.drop_factor) == (
        1000,
        250,
        (0.9, 0.99, 0.999),
        0.1,
    )
    assert make_augmentation(recipe) == onelip.data.Augmentation()


def test_the_learning_rate_drops_at_epochs_900_990_999():
    rates = [learning_rate(Recipe(), epoch * 200, 200_000) for epoch in range(1000)]
    assert [e for e in range(1, 1000) if rates[e] != rates[e - 1]] == [900, 990, 999]
    assert rates[-1] == pytest.approx(1e-6)
    # and not one step earlier
    assert learning_rate(Recipe(), 900 * 200 - 1, 200_000) == 1e-3


def test_one_cycle_rises_and_falls_straight():
    recipe = Recipe(schedule="one-cycle", lr=1.0, warmup=0.25)
    rates = [learning_rate(recipe, step, 1000) for step in range(1000)]
    assert 0 < rates[0] < 0.01
    assert 0 < rates[-1] < 0.01
    assert max(rates) == pytest.approx(1.0, abs=5e-3)
    assert rates.index(max(rates)) in (249, 250)
    for warmup in (0.0, 1.0):
        assert all(0 < learning_rate(recipe.replace(warmup=warmup), s, 10) < 1 for s in range(10))


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_to_json(name):
    recipe = preset(name)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert recipe.to_json()["version"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"epochs": "3"}, "epochs to be an integer, got '3'"),
        ({"epochs": True}, "epochs to be an integer"),
        ({"epochs": 1.5}, "epochs to be an integer"),
        ({"lr": "fast"}, "lr to be a number"),
        ({"schedule": "stpes"}, "did you mean 'steps'"),
        ({"contrast": [1.0]}, "a list of 2 values"),
        ({"drop_at": 0.9}, "a list of values"),
        ({"version": 2}, "version 1, got version 2"),
        ({"version": None}, "not a onelip recipe"),
        ({"epochs": 0}, "epochs of at least 1"),
        ({"lr": math.nan}, "lr to be positive"),
        ({"temperature": 0}, "temperature to be positive"),
        ({"validation": 1.0}, "validation from 0 to below 1"),
        ({"drop_at": [90]}, "from 0 to 1"),
        ({"momentum": 0.0}, "nesterov"),
        ({"model_options": ["width"]}, "key=value"),
        ({"loss_options": ["epsilon"]}, "key=value"),
        ({"offset": math.inf}, "finite offset"),
    ],
)
def test_invalid_recipes_are_refused(change, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_json(Recipe().to_json() | change)


def test_other_json_is_refused():
    with pytest.raises(RecipeError, match="JSON object"):
        Recipe.from_json([])
    with pytest.raises(RecipeError, match="lacks the fields lr"):
        Recipe.from_json({key: value for key, value in Recipe().to_json().items() if key != "lr"})
    with pytest.raises(RecipeError, match="did you mean 'paper'"):
        preset("papr")


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        (None, None, "digits"),
        ("digits", "aol-small", "digits"),
        ("cifar10", None, None),
        ("cifar10", "aol-fast-large", None),
        ("cifar10", "aol-small", "paper"),
        ("own.npz", None, None),
        ("own.npz", "aol-small", None),
    ],
)
def test_runs_without_a_preset_have_that_of_data_and_model_or_a_budget(data, model, expected):
    assert default_preset(data, model) == expected


@pytest.mark.parametrize(
    ("data", "flip"),
    [("mnist", 0), ("MNIST", 0), ("digits", 0), ("fashion-mnist", 0.5), ("cifar10", 0.5), ("own/", 0.5)],
)
def test_a_budget_does_not_mirror_digits(data, flip):
    assert recipe_for_budget(60, data).flip == flip


def test_the_short_preset_is_a_budget_of_ten_minutes_with_fixed_epochs():
    short = preset("short")
    assert short.replace(epochs=1, evaluate_every=1) == recipe_for_budget(600).replace(epochs=1)
    assert short.epochs < preset("paper").epochs


def test_only_weights_decay():
    model = nn.Sequential(
        onelip.nn.AOLLinear(8, 6, learn_weights=True), onelip.nn.NActivation(6), nn.Linear(6, 4), onelip.nn.MaxMin()
    )
    optimizer = make_optimizer(model, Recipe(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    rates = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert {name for name, rate in rates.items() if rate} == {"0.parametrizations.weight.original", "2.weight"}
    assert set(rates.values()) == {0.0, 0.5}
    assert len(linear_weights(model)) == 2


def test_a_step_is_sgd_with_nesterov_by_hand():
    """Weight decay as TensorFlow's l2(wd / 2): its gradient is wd · P."""
    recipe = Recipe(lr=0.1, momentum=0.9, weight_decay=0.01)
    layer = nn.Linear(3, 2, bias=False)
    P, v = layer.weight.detach().clone().double(), torch.zeros(2, 3, dtype=torch.float64)
    optimizer = make_optimizer(nn.Sequential(layer), recipe)
    for k in range(3):
        optimizer.zero_grad()
        (layer.weight * (k + 1)).sum().backward()
        optimizer.step()
        gradient = (k + 1) + 0.01 * P
        v = 0.9 * v + gradient
        P = P - 0.1 * (gradient + 0.9 * v)
    torch.testing.assert_close(layer.weight.detach().double(), P, rtol=1e-6, atol=1e-6)


def test_models_by_recipe():
    recipe = Recipe(model="patchwise-tiny", model_options=("channels=4", "width=2"), method_options=("side=auto",))
    model = build_model(recipe, 10, (1, 8, 8))
    assert onelip.summary(model).constant == 1.0
    plain = build_model(Recipe(model="patchwise-tiny", method="none"), 10, (1, 8, 8))
    assert onelip.summary(plain).constant is None
    assert parse_options(("a=1", "b=x", "c=")) == {"a": 1, "b": "x", "c": ""}


@pytest.mark.parametrize(
    ("changes", "shape", "error", "message"),
    [
        ({"model": "aol-smal"}, (3, 32, 32), RecipeError, "did you mean 'aol-small'"),
        ({"method": "caley"}, (3, 32, 32), RecipeError, "did you mean 'cayley'"),
        ({"model_options": ("wide=3",)}, (3, 32, 32), RecipeError, "wide"),
        ({"model_options": ("width=3",)}, (3, 32, 32), RecipeError, "width to be even"),
        ({"method": "lln"}, (3, 32, 32), RecipeError, "supports Linear"),
        ({}, (3, 30, 30), RecipeError, "multiple of 4"),
    ],
)
def test_models_that_cannot_be_built(changes, shape, error, message):
    with pytest.raises(error, match=message):
        build_model(Recipe().replace(**changes), 10, shape)


def test_augmentation_out_of_range_is_refused():
    with pytest.raises(RecipeError, match="flip between 0 and 1"):
        make_augmentation(Recipe(flip=2.0))
