"""From a recipe to its network, from a run to the network that it trained."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from onelip.data import Augmentation, DataError
from onelip.export import bake
from onelip.methods._about import options_of as method_options
from onelip.methods._registry import METHODS, list_methods
from onelip.models import create_model, list_models
from onelip.models._registry import options_of
from onelip.training._fields import suggestion
from onelip.training._options import parse_options
from onelip.training.checkpoint import load_checkpoint
from onelip.training.constants import Constants, constants_of
from onelip.training.errors import RecipeError, RunError
from onelip.training.recipe import Recipe
from onelip.training.run_directory import RunConfig, RunDirectory, read_config
from onelip.training.tensors import read_header, read_tensors, write_tensors

WEIGHTS_FORMAT = "onelip weights 1"
PLAIN_FORMAT = "onelip plain weights 1"


def build_model(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """The network of a recipe, for images (channels, height, width), with weights from torch's random generator."""
    if recipe.model not in list_models():
        near = suggestion(recipe.model, list_models())
        raise RecipeError(f"expected a model of {', '.join(list_models())}, got {recipe.model!r}{near}")
    methods = ["default", "none", *list_methods()]
    if recipe.method not in methods:
        near = suggestion(recipe.method, methods)
        raise RecipeError(f"expected a method of {', '.join(methods)}, got {recipe.method!r}{near}")
    options = parse_options(recipe.model_options)
    if recipe.method_options:
        options["method_options"] = parse_options(recipe.method_options)
    channels, height, width = shape
    try:
        return create_model(
            recipe.model,
            num_classes=num_classes,
            image_size=(height, width),
            in_channels=channels,
            method=recipe.method,
            **options,
        )
    except ValueError as error:  # what the model or the method refuses: sizes, values of options, kinds of layers
        raise RecipeError(str(error)) from error
    except TypeError as error:  # an option that the model or the method does not have
        what = _unknown_option(recipe) or f"expected options that {recipe.model} and its method know, got: {error}"
        raise RecipeError(what) from error


def _unknown_option(recipe: Recipe) -> str | None:
    """The first option that the model or its method does not have, in words; None if the mistake is another."""
    of_model = options_of(recipe.model)
    method = of_model.get("method") if recipe.method == "default" else recipe.method
    known = {"model_options": [name for name in of_model if name not in ("method", "method_options")]}
    if method not in (None, "none"):
        known["method_options"] = [option.name for option in method_options(METHODS[method])]
    for field, names in known.items():
        for option in parse_options(getattr(recipe, field)):
            if option not in names:
                who = recipe.model if field == "model_options" else method
                near = suggestion(option, names)
                return f"expected {field} of {who} among {', '.join(names)}, got {option!r}{near}"
    return None


def set_layout(model: nn.Module, recipe: Recipe) -> torch.memory_format:
    """Lay the kernels out as the recipe says; returns how, for the images."""
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    # torch's annotations do not know of this use of `to`; it is the documented one.
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    return layout


def make_augmentation(recipe: Recipe) -> Augmentation | None:
    """The augmentation of a recipe; None for none."""
    if not recipe.augment:
        return None
    try:
        return Augmentation(
            hue=recipe.hue,
            saturation=recipe.saturation,
            brightness=recipe.brightness,
            contrast=recipe.contrast,
            rotation=recipe.rotation,
            translation=recipe.translation,
            flip=recipe.flip,
            interpolations=recipe.interpolations,
        )
    except DataError as error:
        raise RecipeError(str(error)) from error


@dataclass(frozen=True)
class LoadedRun:
    """A run read back."""

    config: RunConfig
    model: nn.Module  # as training has it
    plain: nn.Module  # baked: what is evaluated, proved and shipped
    constants: Constants  # in real arithmetic
    is_finished: bool

    @property
    def lipschitz(self) -> float | None:
        """From the image to the scores; None: nobody vouches."""
        return self.constants.total


def save_weights(run: RunDirectory, model: nn.Module, plain: nn.Module) -> None:
    """weights.safetensors and plain.safetensors."""
    write_tensors(run.weights, model.state_dict(), {"format": WEIGHTS_FORMAT})
    write_tensors(run.plain, plain.state_dict(), {"format": PLAIN_FORMAT})


def load_run(path: str | Path) -> LoadedRun:
    """The network of a run directory, on the CPU: of its end, or of its last checkpoint if it has not ended.

    The plain network has the stored numbers bit for bit, whichever machine bakes how.
    """
    run = RunDirectory(Path(path))
    config = read_config(run)
    try:
        model = build_model(config.recipe, len(config.class_names), config.shape)
    except RecipeError as error:
        raise RunError(f"{run.config}: {error}") from error
    # The layout decides the order of sums: the same as in training, for the same numbers to the last bit.
    set_layout(model, config.recipe)
    is_finished = run.plain.exists() and run.weights.exists()
    if not is_finished:
        load_checkpoint(run.checkpoint, model)
        plain = bake(model)
    else:
        _fill(model, run.weights, WEIGHTS_FORMAT)
        plain = bake(model)
        _fill(plain, run.plain, PLAIN_FORMAT)
    set_layout(plain, config.recipe)  # also of layers that are plain for the first time
    constants = constants_of(model.eval(), plain.eval(), config.recipe, config.shape, effort="high")
    return LoadedRun(config, model, plain, constants, is_finished)


def _fill(model: nn.Module, path: Path, format: str) -> None:
    model.load_state_dict(read_tensors(path, read_header(path, format), model.state_dict()))
