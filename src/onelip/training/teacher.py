"""Labels of another network: distillation.

A network of any kind labels the training images, augmented as they are, by probabilities. They tell a network of
constant 1, which cannot separate the classes as sharply, which images are hard. What is certified does not depend on
the teacher.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from onelip.core.errors import PathTaken, RecipeError
from onelip.data import ImageData
from onelip.losses.registry import OffsetLoss
from onelip.training.build import check_same_images, import_needed, load_run
from onelip.training.objective import make_loss
from onelip.training.recipe import Recipe
from onelip.training.run_directory import RunDirectory, read_config


class Teacher:
    """Probabilities of the classes by a network.

    Args:
        network: the network; it is frozen and set to evaluation mode.
        temperature: divides the logits.
    """

    def __init__(self, network: nn.Module, temperature: float) -> None:
        self.network = network.requires_grad_(False).eval()
        self.temperature = temperature

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the probabilities (N, classes) of images (N, C, H, W), in float32."""
        return (self.network(images).float() / self.temperature).softmax(1)


def load_teacher(recipe: Recipe, data: ImageData, device: torch.device, copy: Path | None = None) -> Teacher | None:
    """The teacher of a recipe, on a device; None if it has none.

    Args:
        recipe: the recipe.
        data: the images of the run.
        device: where the teacher computes.
        copy: directory that `copy_teacher` made; None to load the run that the recipe names.

    Raises:
        RecipeError: if it is not finished, or has other classes, images or validation images.
        RunError: if the directory contains no run.
    """
    if not recipe.teacher:
        return None
    option, directory = f"--teacher {recipe.teacher}", RunDirectory(recipe.teacher if copy is None else copy)
    import_needed(read_config(directory), directory, is_trained=True)
    run = load_run(directory.path)
    config = run.config
    if not run.is_finished:
        raise RecipeError(f"{option}: this run is not finished; finish it with `{run.directory.resume_command}`")
    check_same_images(option, config, recipe, data)
    for theirs, ours in zip(config.class_names, data.class_names, strict=True):
        if theirs != ours:
            raise RecipeError(
                f"{option}: that run has a class {theirs} where {data.name} has {ours}; train it on the same data"
            )
    loss = make_loss(config.recipe)
    own = loss.temperature if isinstance(loss, OffsetLoss) else 1.0
    return Teacher(run.plain.to(device), own * recipe.teacher_temperature)


def copy_teacher(recipe: Recipe, run: RunDirectory) -> None:
    """Copy the network of the teacher into the directory of a run, which then resumes without the original."""
    if run.teacher.exists():
        raise PathTaken(
            f"{run.teacher} exists already, and the run stores a copy of its teacher there; choose another --out"
        )
    teacher, part = RunDirectory(recipe.teacher), run.teacher_part
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir()
    for path in (teacher.config, teacher.weights, teacher.plain):
        shutil.copyfile(path, part / path.name)
    part.rename(run.teacher)
