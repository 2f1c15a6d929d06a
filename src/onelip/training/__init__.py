"""Recipes, the loop that trains by them, and what it leaves behind.

    recipe = onelip.training.preset("digits").replace(epochs=10)
    results = onelip.training.train(recipe, "runs/first")
    run = onelip.training.load_run("runs/first")

Names are loaded when they are first used: recipes need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelip.training.build import LoadedRun, build_model, load_run
    from onelip.training.display import Display
    from onelip.training.errors import CheckpointError, Diverged, RecipeError, RunError, Stopped
    from onelip.training.evaluation import Evaluation, compute_scores, evaluate
    from onelip.training.loop import train
    from onelip.training.optimizer import make_optimizer
    from onelip.training.presets import PRESETS, preset
    from onelip.training.recipe import Recipe
    from onelip.training.run_directory import RunDirectory, read_config, read_log
    from onelip.training.schedule import learning_rate

_WHERE = {
    "PRESETS": "presets",
    "CheckpointError": "errors",
    "Display": "display",
    "Diverged": "errors",
    "Evaluation": "evaluation",
    "LoadedRun": "build",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "RunDirectory": "run_directory",
    "RunError": "errors",
    "Stopped": "errors",
    "build_model": "build",
    "compute_scores": "evaluation",
    "evaluate": "evaluation",
    "learning_rate": "schedule",
    "load_run": "build",
    "make_optimizer": "optimizer",
    "preset": "presets",
    "read_config": "run_directory",
    "read_log": "run_directory",
    "train": "loop",
}

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Display",
    "Diverged",
    "Evaluation",
    "LoadedRun",
    "Recipe",
    "RecipeError",
    "RunDirectory",
    "RunError",
    "Stopped",
    "build_model",
    "compute_scores",
    "evaluate",
    "learning_rate",
    "load_run",
    "make_optimizer",
    "preset",
    "read_config",
    "read_log",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onelip.training.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
