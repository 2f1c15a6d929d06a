"""What is no model, no example and no claim is refused by the same few messages, not by an error of torch."""

import pytest
import torch
from torch import nn

import onelip
from onelip.core.errors import CannotTrace

X = torch.rand(2, 4)
IS_NO_MODEL = [None, 3, "model.pt", lambda x: x]
FUNCTIONS = {
    "audit": lambda model: onelip.audit(model, X),
    "summary": onelip.summary,
    "prove": lambda model: onelip.prove(model, (4,)),
    "certify": lambda model: onelip.certify(model, X, mode="real-arithmetic"),
    "bake": onelip.bake,
    "constrain": lambda model: onelip.constrain(model, "aol"),
    "attack": lambda model: onelip.attack(model, X),
}


def linear():
    return nn.Linear(4, 3).double().eval()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_module(name):
    for model in IS_NO_MODEL:
        with pytest.raises(CannotTrace, match="expected a torch module, got"):
            FUNCTIONS[name](model)


def test_lazy_layers_without_weights():
    model = nn.Sequential(nn.LazyLinear(3)).double().eval()
    for name in ("audit", "prove", "certify", "bake"):
        with pytest.raises(CannotTrace, match="run it once to initialise lazy layers"):
            FUNCTIONS[name](model)


EXAMPLES = {
    "none": (None, "NoneType"),
    "a list": ([[1.0]], "list"),
    "numpy": (X.numpy(), "ndarray"),
    "sparse": (X.to_sparse(), "dense"),
    "meta": (X.to("meta"), "dense"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    example, reason = EXAMPLES[name]
    with pytest.raises(CannotTrace, match=reason):
        onelip.audit(nn.Linear(4, 3).eval(), example)
    if name != "meta":
        with pytest.raises(ValueError, match="tensor"):
            onelip.certify(linear(), example)
        with pytest.raises(ValueError, match="dense tensor"):
            onelip.attack(linear(), example)


@pytest.mark.parametrize("shape", [3, None, "44", torch.rand(2, 4), (), (0,), (4.0,)])
def test_shapes_of_a_proof(shape):
    with pytest.raises(ValueError, match="expected the shape of one image"):
        onelip.prove(linear(), shape)


@pytest.mark.parametrize("result", [None, 3.0])
def test_models_without_a_tensor(result):
    class Odd(nn.Module):
        def forward(self, x):
            return result

    with pytest.raises(CannotTrace, match=r"returns a tensor, got (NoneType|float)"):
        onelip.audit(Odd().eval(), X)


def test_labels_of_certify():
    with pytest.raises(ValueError, match="expected labels as a tensor, got list"):
        onelip.certify(linear(), X.double(), [0, 1])


def test_claims_of_an_attack():
    images = X.double()
    for classes in ([0, 7], [-1, 0]):
        with pytest.raises(ValueError, match="expected labels 0 to 2"):
            onelip.attack(linear(), images, torch.tensor(classes))
    with pytest.raises(ValueError, match="expected a tensor with a radius for each image, got Proof"):
        onelip.attack(linear(), images, radii=onelip.prove(linear(), (4,)))
