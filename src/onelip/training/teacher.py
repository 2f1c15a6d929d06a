"""Labels of another network: distillation.

A network of any kind labels the training images, augmented as they are, by probabilities. They tell a network of
constant 1, which cannot separate the classes as sharply, which images are hard. What is certified does not depend on
the teacher.
"""

import torch
from torch import Tensor, nn

from onelip.core.errors import RecipeError
from onelip.data import ImageData
from onelip.training.build import load_run
from onelip.training.recipe import Recipe


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


def load_teacher(recipe: Recipe, data: ImageData, device: torch.device) -> Teacher | None:
    """The teacher of a recipe, on a device; None if it has none.

    Raises:
        RecipeError: if it is of other classes or image sizes, or has not been trained to its end.
        RunError: if the directory contains no run.
    """
    if not recipe.teacher:
        return None
    run = load_run(recipe.teacher)
    if not run.is_finished:
        raise RecipeError(
            f"--teacher {recipe.teacher}: this run is not finished; finish it with `{run.directory.resume_command}`"
        )
    for what, theirs, ours in (
        ("the classes", run.config.class_names, data.class_names),
        ("an image shape of", run.config.shape, data.shape),
    ):
        if theirs != ours:
            raise RecipeError(
                f"--teacher {recipe.teacher}: that network has {what} {_listed(theirs)}, and {data.name} has "
                f"{_listed(ours)}; train one on the same data"
            )
    return Teacher(run.plain.to(device), run.config.recipe.temperature * recipe.teacher_temperature)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")
