"""The plain network of a config, built without weights."""

import pytest
import torch

from onelip.core.bake import bake
from onelip.core.errors import RecipeError
from onelip.methods.registry import list_methods
from onelip.training.build import build_model, build_plain
from onelip.training.recipe import Recipe
from onelip.training.run_directory import RunConfig

OPTIONS = ("width=2", "channels=8", "convs=2", "linears=2")


@pytest.mark.parametrize("method", ["default", "none", *(name for name in list_methods() if name != "lln")])
def test_filled_with_baked_weights_it_computes_the_same(method):
    """In training mode too, in which a power iteration must not move, and after the weights have changed."""
    torch.manual_seed(0)
    recipe = Recipe(model="patchwise-tiny", method=method, model_options=OPTIONS)
    model = build_model(recipe, 10, (1, 8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    plain = bake(model).eval()
    empty = build_plain(RunConfig(recipe, "digits", "", tuple("0123456789"), (1, 8, 8)))
    empty.load_state_dict(plain.state_dict(), assign=True)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(empty.eval()(images), plain(images))


def test_unknown_methods_are_named():
    config = RunConfig(Recipe(model="patchwise-tiny", method="aoll"), "digits", "", ("a", "b"), (1, 8, 8))
    with pytest.raises(RecipeError, match="did you mean 'aol'"):
        build_plain(config)
