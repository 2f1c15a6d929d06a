"""Losses by name: registered losses, custom classes and functions, and the arguments that each receives."""

import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelip.core.docstrings import arguments_in
from onelip.losses import (
    EMMALoss,
    OffsetCrossEntropy,
    call_loss,
    create_loss,
    find_loss,
    list_losses,
    loss_options,
    register_loss,
    registry,
)

SCORES, LABELS = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])


@pytest.fixture
def registered(monkeypatch):
    """An empty copy of the registry."""
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))


@pytest.fixture
def module(monkeypatch):
    """A module of the user."""
    made = ModuleType("my_losses")
    monkeypatch.setitem(sys.modules, "my_losses", made)
    return made


@pytest.mark.parametrize("name", list_losses())
def test_all_losses_and_their_arguments_are_documented(name):
    page = Path(__file__).parents[2] / "docs" / "methods.md"
    assert f"| `{name}` |" in page.read_text(), "add a row to the table of losses in docs/methods.md"
    found = find_loss(name)
    assert list(arguments_in(found)) == list(inspect.signature(found).parameters)


def test_options_are_those_that_a_recipe_does_not_set():
    assert loss_options("emma") == {
        "epsilon": 36 / 255, "start": 0.1, "overshoot": 3.0, "ramp": 0.5, "floor": 0.01
    }  # fmt: skip
    assert loss_options("offset-cross-entropy") == {}


def test_options_reach_the_loss():
    loss = create_loss("emma", epsilon=0.5)
    assert isinstance(loss, EMMALoss)
    assert loss.epsilon == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ema", {}, r"unknown loss 'ema'; known: .*did you mean 'emma'"),
        ("emma", {"epsilom": 1}, r"no option 'epsilom'; its options: .*did you mean 'epsilon'"),
        ("emma", {"epsilon": -1}, "expected epsilon"),
        ("no_such_module:loss", {}, "cannot be imported: No module named"),
        ("math:no_such_name", {}, "cannot be imported"),
        ("math:pi", {}, "not callable"),
        (":loss", {}, "cannot be imported"),
        ("torch.nn.functional:cross_entropy", {"margin": 1}, "no option 'margin'"),
    ],
)
def test_names_and_options_that_do_not_exist(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_loss(name, **options)


def test_losses_of_torch():
    function = create_loss("torch.nn.functional:cross_entropy", label_smoothing=0.1)
    made = create_loss("torch.nn:CrossEntropyLoss", label_smoothing=0.1)
    context = {"model": nn.Identity(), "images": SCORES}
    expected = F.cross_entropy(SCORES, LABELS, label_smoothing=0.1)
    assert torch.equal(call_loss(function, SCORES, LABELS, **context), expected)
    assert torch.equal(call_loss(made, SCORES, LABELS, **context), expected)


def test_a_loss_gets_what_it_names(module):
    """Positional scores and labels, whatever they are called; model, images and progress by name."""
    model, seen = nn.Identity(), {}

    def named(output, target, *, images, progress, weight=1.0):
        seen["named"] = (output is SCORES, target is LABELS, images is SCORES, progress, weight)
        return output.sum()

    def everything(output, target, **context):
        seen["everything"] = sorted(context), context["model"] is model
        return output.sum()

    module.named, module.everything = named, everything
    for name in ("my_losses:named", "my_losses:everything"):
        call_loss(create_loss(name), SCORES, LABELS, model=model, images=SCORES, progress=0.25)
    assert seen["named"] == (True, True, True, 0.25, 1.0)
    assert seen["everything"] == (["images", "model", "progress"], True)
    assert loss_options("my_losses:named") == {"weight": 1.0}
    call_loss(create_loss("my_losses:named", weight=3.0), SCORES, LABELS, model=model, images=SCORES)
    assert seen["named"][3:] == (1.0, 3.0)


def test_registered_losses(registered):
    @register_loss("half")
    class Half(OffsetCrossEntropy):
        pass

    assert "half" in list_losses()
    assert isinstance(create_loss("half", offset=1.0), Half)
    register_loss("half")(Half)  # again: a cell of a notebook

    def other(scores, labels):
        return scores.sum()

    with pytest.raises(ValueError, match="the name 'emma' is taken by onelip"):
        register_loss("emma")(other)
