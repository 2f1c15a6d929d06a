"""The learning rate as a function of the step: no state, so nothing to save or to restore."""

from onelip.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, of so many.

    With the paper's recipe the drops come at the first step of epochs 900, 990 and 999.

    Example:
        >>> [learning_rate(Recipe(epochs=1000), epoch * 200, 1000 * 200) for epoch in (0, 899, 900)]
        [0.001, 0.001, 0.0001]
    """
    if recipe.schedule == "steps":
        drops = sum(step / steps >= part for part in recipe.drop_at)
        return recipe.lr * recipe.drop_factor**drops
    progress = (step + 0.5) / steps  # the middle of the step: never exactly 0, where a step would be wasted
    if progress < recipe.warmup:
        return recipe.lr * progress / recipe.warmup
    return recipe.lr * (1 - progress) / (1 - recipe.warmup)
