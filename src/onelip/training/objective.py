"""What a step of training makes smaller, and what comes after it: the recipe's loss, or what its method asks for.

    parametrization   loss = the recipe's
    projection        loss = the recipe's; after the step the weights are projected
    penalty           loss = the recipe's + penalty
    loss              loss = the method's own

The mean over a batch is shared among processes: each gives the sum over its images divided by the size of the whole
batch, and a term of the weights alone in proportion to its images, so that the parts add up to the loss of one process.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from onelip.losses import OffsetCrossEntropy
from onelip.methods._method import Method, Step, Term
from onelip.methods._registry import METHODS
from onelip.training._options import parse_options
from onelip.training.errors import RecipeError
from onelip.training.recipe import Recipe


class Objective:
    """Made from a recipe and its model; `objective(...)` is this process's part of the loss.

    Args:
        recipe: names the method, and holds the options of its term among `method_options`.
        model: the network, not wrapped for several processes.
    """

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self.model = model
        self.method = METHODS.get(recipe.method)
        self.summed = OffsetCrossEntropy(recipe.offset, recipe.temperature, reduction="sum")
        self.each = OffsetCrossEntropy(recipe.offset, recipe.temperature, reduction="none")
        self.loss = _make(recipe, self.method, "loss")
        self.penalty = _make(recipe, self.method, "penalty")
        self.needs_input_gradient = any(
            getattr(term, "needs_input_gradient", False) for term in (self.loss, self.penalty)
        )

    def __call__(
        self,
        trained: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        progress: float,
        precision: AbstractContextManager[object],
    ) -> Tensor:
        """Run the network and compute the loss.

        Args:
            trained: the network to call: the model, or what wraps it.
            images: (N, C, H, W), this process's part of the batch.
            labels: (N).
            batch_size: images of the whole batch.
            progress: part of the run that is done.
            precision: context of the forward pass.
        """
        if self.needs_input_gradient:
            images = images.detach().requires_grad_()
        with precision:
            scores = trained(images)
        if self.loss is None and self.penalty is None:
            return self.summed(scores, labels) / batch_size
        scores = scores if scores.dtype.itemsize >= 4 else scores.float()
        step = Step(self.model, images, labels, scores, progress, self.each)
        total = _share(self.each(scores, labels) if self.loss is None else self.loss(step), len(labels), batch_size)
        if self.penalty is not None:
            total = total + _share(self.penalty(step), len(labels), batch_size)
        return total

    def after_step(self) -> None:
        """What the method does once the optimizer has moved the weights."""
        if self.method is not None and self.method.after_step is not None:
            with torch.no_grad():
                self.method.after_step(self.model)


def _share(value: Tensor, images: int, batch_size: int) -> Tensor:
    return value.sum() / batch_size if value.dim() else value * (images / batch_size)


def _make(recipe: Recipe, method: Method | None, kind: str) -> Term | None:
    factory = None if method is None else getattr(method, kind)
    if method is None or factory is None:
        return None
    given = parse_options(recipe.method_options)
    try:
        return factory(**{name: value for name, value in given.items() if name in method.term_options})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"expected method_options that {method.name} knows, got: {error}") from error
