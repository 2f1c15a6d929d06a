"""Methods and a budget, as one recipe per method.

The recipes have the same data, architecture, seed, batch size and order of images. They differ in the method and in the
hyperparameters that its authors recommend. The number of epochs is the same for all, or the number of whole epochs that
each runs in the same time. This module does not import torch.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from onelip.core.errors import RecipeError, did_you_mean
from onelip.methods.registry import METHODS
from onelip.training.objective import with_method
from onelip.training.recipe import MACHINE_FIELDS, Recipe, parse_seconds

PLAIN = "none"  # layers of torch without a method
_PLAIN_RATE = 0.01  # the rates of methods with a constant are too high for plain layers: the digits diverge at 0.1
_EPOCHS = re.compile(r"(\d+)ep")


@dataclass(frozen=True)
class Budget:
    """The budget of each method: a number of epochs, or seconds of training steps. The other one is None."""

    text: str
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse 20ep, 90s, 10m or 1h30m.

        Examples:
            >>> Budget.parse("20ep").epochs, Budget.parse("1h30m").seconds
            (20, 5400.0)
        """
        wanted = text.strip().lower()
        with suppress(RecipeError):
            if not (match := _EPOCHS.fullmatch(wanted)):
                return cls(wanted, seconds=parse_seconds(wanted))
            if 1 <= int(match[1]) <= 10**9:
                return cls(wanted, epochs=int(match[1]))
        raise RecipeError(f"expected a budget such as 20ep (epochs), 90s, 10m or 1h30m (time), got {text!r}")

    def same_as(self, other: Self) -> bool:
        """Whether both are the same amount: 600s and 10m are."""
        return (self.epochs, self.seconds) == (other.epochs, other.seconds)


@dataclass(frozen=True)
class Plan:
    """Methods, shared recipe and budget.

    Attributes:
        methods: names, in the order in which they are trained.
        recipe: the shared recipe; its method ("default") and its epochs (1) are replaced for each method.
        budget: budget of each method.
    """

    methods: tuple[str, ...]
    recipe: Recipe
    budget: Budget

    @classmethod
    def make(cls, methods: str, *, budget: str, recipe: Recipe) -> Self:
        """A plan from the options of the command line.

        Args:
            methods: names separated by commas, or "all"; "none" is the network without a method.
            budget: see `Budget.parse`.
            recipe: preset with model, data and seed.

        Examples:
            >>> Plan.make("aol,bcop", budget="3ep", recipe=Recipe()).recipe_for("bcop", 3).method
            'bcop'
        """
        shared = recipe.replace(method="default", method_options=(), loss="default", loss_options=(), epochs=1)
        return cls(choose_methods(methods), shared, Budget.parse(budget))

    def recipe_for(self, method: str, epochs: int) -> Recipe:
        """The recipe of one run.

        Examples:
            >>> from onelip.training.recipe import preset
            >>> plan = Plan.make("aol,none", budget="3ep", recipe=preset("digits"))
            >>> plan.recipe_for("aol", 3).lr, plan.recipe_for("none", 3).lr
            (0.1, 0.01)
        """
        recipe = with_method(self.recipe, method).replace(epochs=epochs)
        return recipe.replace(lr=min(recipe.lr, _PLAIN_RATE)) if method == PLAIN else recipe

    @property
    def baseline(self) -> Recipe:
        """The recipe of the same network without a method, which times and memory are relative to."""
        return self.recipe.replace(method=PLAIN)

    def to_json(self) -> dict[str, Any]:
        """The settings that a later session must have too; the methods are in the rows."""
        return {"budget": self.budget.text, "recipe": self.recipe.to_json()}

    def check_continues(self, kept: object, where: str) -> None:
        """Raise an error if the rows of a comparison are those of another plan.

        Args:
            kept: the plan of the comparison, from `to_json`.
            where: directory, for the message.
        """
        if not isinstance(kept, dict) or not {"budget", "recipe"} <= kept.keys():
            raise RecipeError(f"{where}: comparison.json has no plan; choose another --out")
        if not self.budget.same_as(Budget.parse(str(kept["budget"]))):
            raise _other(where, "budget", kept["budget"], self.budget.text)
        before, now = Recipe.from_json(kept["recipe"]).to_json(), self.recipe.to_json()
        for name in now:
            if before[name] != now[name] and name not in MACHINE_FIELDS:
                raise _other(where, name, before[name], now[name])


def choose_methods(text: str) -> tuple[str, ...]:
    """Names of methods from "aol,bcop" or "all"; in the order given, each once.

    Examples:
        >>> choose_methods("bcop, aol,aol")
        ('bcop', 'aol')
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(METHODS)
    known = [*METHODS, PLAIN]
    for name in names:
        if name not in known:
            raise RecipeError(
                f"expected methods of {', '.join(sorted(known))}, or all, got {name!r}{did_you_mean(name, known)}"
            )
    if not names:
        raise RecipeError(f"expected methods such as aol,bcop, or all, got {text!r}")
    return tuple(dict.fromkeys(names))


def _other(where: str, name: str, before: object, now: object) -> RecipeError:
    flag = name.replace("_", "-")
    return RecipeError(
        f"{where}: the comparison has {flag} {before!r}, got {now!r}; use the same {flag}, or choose another --out"
    )
