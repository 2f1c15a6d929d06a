"""Recipes, training, run directories and evaluation.

    recipe = onelip.training.preset("digits").replace(epochs=10)
    results = onelip.training.train(recipe, "runs/first")
    run = onelip.training.load_run("runs/first")

Names are imported on first use: recipes do not need torch.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.core.errors import (
        CheckpointError as CheckpointError,
        Diverged as Diverged,
        RecipeError as RecipeError,
        RunError as RunError,
        Stopped as Stopped,
    )
    from onelip.training.budget import Cost as Cost, fit_to_budget as fit_to_budget, measure_cost as measure_cost
    from onelip.training.build import LoadedRun as LoadedRun, build_model as build_model, load_run as load_run
    from onelip.training.display import Display as Display
    from onelip.training.distributed import StopRequest as StopRequest, stop_on_signals as stop_on_signals
    from onelip.training.evaluation import (
        Constants as Constants,
        Evaluation as Evaluation,
        compute_scores as compute_scores,
        evaluate as evaluate,
        find_constants as find_constants,
    )
    from onelip.training.learner import (
        Learner as Learner,
        learning_rate as learning_rate,
        make_optimizer as make_optimizer,
    )
    from onelip.training.prediction import Prediction as Prediction, Predictions as Predictions
    from onelip.training.recipe import (
        PRESETS as PRESETS,
        Recipe as Recipe,
        preset as preset,
        recipe_for_budget as recipe_for_budget,
    )
    from onelip.training.run_directory import (
        RunDirectory as RunDirectory,
        read_config as read_config,
        read_log as read_log,
    )
    from onelip.training.trainer import Trainer as Trainer, train as train, train_or_reuse as train_or_reuse

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
