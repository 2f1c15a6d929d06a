"""The objective of a training step: the method and the loss of a recipe."""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.errors import RecipeError, check_known
from onelip.core.parametrization import find_parametrization
from onelip.losses import OffsetCrossEntropy, call_loss, create_loss, find_loss, list_losses
from onelip.methods.projections import Projection, project
from onelip.methods.registry import METHODS, Method
from onelip.models.registry import model_options
from onelip.training.recipe import Recipe, is_fast, parse_options

KEPT_BY_MUON = ("aol", "bjorck")  # methods whose weights `onelip.optim.LipschitzMuon` keeps orthogonal
OF_THE_LOSS = ("offset", "temperature", "gradient_clip")  # hyperparameters that go with the loss of a method


def resolve_method(recipe: Recipe) -> Method | None:
    """The method of a recipe; "default" is the model's own. None for plain layers.

    Examples:
        >>> resolve_method(Recipe()).name, resolve_method(Recipe(method="none"))
        ('aol', None)
    """
    name = model_options(recipe.model).get("method") if recipe.method == "default" else recipe.method
    return None if name in (None, "none") else METHODS[name]


def with_method(recipe: Recipe, method: str) -> Recipe:
    """A recipe with another method and the hyperparameters of the method.

    Only hyperparameters of the method change (loss, momentum, decay, learning rate), never data, architecture or length
    of the run. Options given beside --method take precedence, and the config records the result.

    `muon`, which a recipe of a budget has, keeps only weights of AOL and Björck orthogonal. All other methods and plain
    networks get SGD: for networks `aol-fast` with the rate `Method.fast_lr`, where it is known, else with their
    hyperparameters.

    Examples:
        >>> with_method(Recipe(), "clipping").momentum
        0.0
        >>> found = with_method(Recipe(optimizer="muon", model="aol-fast-small"), "cayley")
        >>> found.optimizer, found.lr
        ('sgd', 0.3)
    """
    if method == "none" and recipe.optimizer == "muon":  # the rates are usual ones, not tuned
        lr = 0.1 if is_fast(recipe.model) else 0.01
        return recipe.replace(method=method, optimizer="sgd", momentum=0.9, lr=lr)
    if method in ("default", "none", recipe.method):
        return recipe.replace(method=method)
    check_known("method", method, ["default", "none", *sorted(METHODS)])
    found = METHODS[method]
    if recipe.optimizer != "muon":
        return recipe.replace(method=method, **found.hyperparameters)
    changes = {key: value for key, value in found.hyperparameters.items() if key in OF_THE_LOSS}
    if found.fast_lr is not None and is_fast(recipe.model):
        changes |= {"optimizer": "sgd", "momentum": 0.9, "lr": found.fast_lr}
    elif method not in KEPT_BY_MUON:
        changes = {"optimizer": "sgd", "momentum": 0.9, **found.hyperparameters}
    return recipe.replace(method=method, **changes)


def resolve_loss(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Name and options of the loss of a recipe; "default" is the loss of the method.

    Examples:
        >>> resolve_loss(Recipe()), resolve_loss(Recipe(method="soc-cr"))
        (('offset-cross-entropy', {}), ('certificate-regularisation', {'per_pair': True}))
    """
    given = parse_options(recipe.loss_options)
    if recipe.loss != "default":
        return recipe.loss, given
    method = resolve_method(recipe)
    if method is None or method.loss is None:
        return "offset-cross-entropy", given
    return method.loss, {**method.loss_options, **given}


def make_loss(recipe: Recipe) -> Callable[..., Tensor]:
    """The loss of a recipe, called as `onelip.losses` describes; it may return one value per image.

    Raises:
        RecipeError: if there is no such loss, or an option is invalid.
    """
    name, options = resolve_loss(recipe)
    own = {"offset": recipe.offset, "temperature": recipe.temperature, "reduction": "none"}
    try:
        found = find_loss(name)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    try:
        named = inspect.signature(found).parameters if inspect.isclass(found) else {}
        own = {key: value for key, value in own.items() if key in named}
        if twice := sorted(own.keys() & options.keys()):
            raise ValueError(f"{twice[0]} is not among the loss options; the recipe's field {twice[0]} sets it")
        return create_loss(name, **own, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"loss {name}: {error}") from error


def certifies_pairs(recipe: Recipe) -> bool:
    """Whether the method or the loss of a recipe certifies each pair of classes with a constant of its own."""
    method, (name, _) = resolve_method(recipe), resolve_loss(recipe)
    if method is not None and method.certificate == "pairs":
        return True
    # A loss that is not registered is not imported for this: a run can be evaluated where its module is missing.
    return name in list_losses() and getattr(make_loss(recipe), "certificate", "constant") == "pairs"


class Objective:
    """The loss of a training step, and the projection after it.

    The mean over a batch is split among processes: each returns its sum over its images divided by the size of the
    whole batch, so that the parts add up to the loss that one process would have.

    Args:
        recipe: names the method and the loss.
        model: the network, not wrapped for several processes.
        teacher: gives the labels of a batch of images, as probabilities (N, classes), in place of those of the data.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, teacher: Callable[[Tensor], Tensor] | None = None) -> None:
        self.model = model
        self.teacher = teacher
        self.loss = make_loss(recipe)
        self.name = resolve_loss(recipe)[0]
        self.is_projected = any(isinstance(find_parametrization(m), Projection) for m in model.modules())

    def __call__(
        self,
        network: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        progress: float,
        precision: AbstractContextManager[object],
    ) -> Tensor:
        """Run the network and compute the loss.

        Args:
            network: the network to run: the model, or a wrapper of it.
            images: (N, C, H, W), the part of the batch of this process.
            labels: (N).
            batch_size: number of images of the whole batch.
            progress: part of the run that is done.
            precision: context of the forward pass.
        """
        if getattr(self.loss, "needs_input_gradient", False):
            images = images.detach().requires_grad_()
        with precision:
            if self.teacher is not None:
                labels = self.teacher(images)
            scores = network(images)
        value = call_loss(self.loss, scores, labels, model=self.model, images=images, progress=progress)
        if value.dim():
            return value.sum() / batch_size
        if not len(labels):  # the mean of nothing is NaN; the process takes part in the step all the same
            return scores.sum() * 0.0
        return value * (len(labels) / batch_size)

    def after_step(self) -> None:
        """Project the weights, if the method does, after the optimizer has changed them."""
        if self.is_projected:
            project(self.model)

    def check(self, shape: tuple[int, int, int]) -> None:
        """Try a loss that depends on the network on blank images, with a copy of the model.

        Raises:
            RecipeError: if it does not fit the network.
        """
        if type(self.loss) is OffsetCrossEntropy and self.teacher is None:
            return
        device = next(self.model.parameters()).device
        trial = copy.copy(self)
        trial.model = copy.deepcopy(self.model)
        images, labels = torch.zeros(2, *shape, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                value = trial(trial.model, images, labels, batch_size=2, progress=0.0, precision=nullcontext())
            if value.dim() or not value.requires_grad:
                raise ValueError("a loss must return a differentiable number, or one for each image")
        except Exception as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            if self.teacher is not None:
                raise RecipeError(
                    f"the loss {self.name} does not take the probabilities of a teacher as labels ({what}); use --loss "
                    "offset-cross-entropy"
                ) from error
            raise RecipeError(f"the loss {self.name} does not fit this network: {what}") from error
