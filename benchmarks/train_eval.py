"""Difference between a network in eval mode and in training mode, for each method.

It is not zero for methods that use an estimate or a truncation in training and divide by a proved bound in eval mode.
"""

import torch
from _harness import publish
from torch import Tensor

from onelip.core.errors import RecipeError
from onelip.data import load_data, to_float
from onelip.methods.registry import METHODS
from onelip.training import build_model, preset
from onelip.training.learner import Learner
from onelip.training.objective import with_method
from onelip.training.recipe import Recipe

STEPS = 20


def main() -> None:
    data = load_data("digits")
    images, labels = to_float(data.train_images[:100]), data.train_labels[:100]
    rows = []
    for name in METHODS:
        recipe = with_method(preset("digits"), name)
        try:
            apart = difference(recipe, images, labels, data.num_classes, data.shape)
        except (RecipeError, ValueError) as error:  # a method that does not fit this network
            print(f"{name}: {error}")
            continue
        rows.append({"method": name, "train - eval": float(f"{apart:.3g}")})
    publish("train_eval", rows, what=f"digits, patchwise-tiny after {STEPS} steps: logits of both modes, relative")


def difference(recipe: Recipe, images: Tensor, labels: Tensor, classes: int, shape: tuple[int, int, int]) -> float:
    """Largest difference of logits between both modes, in parts of the largest logit."""
    torch.manual_seed(0)
    model = build_model(recipe, classes, shape).train()
    learner = Learner(recipe, model)
    for _ in range(STEPS):
        learner.step(images, labels, batch_size=len(labels), progress=0.5, lr=0.1 * recipe.lr)
    with torch.no_grad():
        in_training = model(images)
        in_evaluation = model.eval()(images)
    return float((in_training - in_evaluation).abs().max() / in_training.abs().max())


if __name__ == "__main__":
    main()
