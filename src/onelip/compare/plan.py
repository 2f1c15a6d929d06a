"""What is compared: methods x budget -> one recipe per method, which differ in the method and its own numbers only.

    same data, architecture, seed, batch size, order of images;  method, and what its authors recommend;
    epochs: the same for all, or as many whole ones as each makes in the same time

No torch here: the command line reads this file to answer `--help`.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from onelip.core.arguments import did_you_mean
from onelip.core.errors import RecipeError
from onelip.training.recipe import MACHINE_FIELDS, Recipe, parse_seconds, with_method

PLAIN = "none"  # torch layers without a method: what times are relative to, and a row if it is asked for
_EPOCHS = re.compile(r"(\d+)ep")


@dataclass(frozen=True)
class Budget:
    """What each method may spend: a number of epochs, or seconds of training steps. One of them is None."""

    text: str
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 20ep, 90s, 10m, 1h30m.

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
        """Whether both allow the same, however they are spelled."""
        return (self.epochs, self.seconds) == (other.epochs, other.seconds)


@dataclass(frozen=True)
class Plan:
    """Methods, what their recipes share, and the budget.

    Attributes:
        methods: names, in the order in which they are trained.
        recipe: what all have in common; its method is "default" and its epochs are 1, since neither is taken.
        budget: of each method.
    """

    methods: tuple[str, ...]
    recipe: Recipe
    budget: Budget

    @classmethod
    def make(cls, methods: str, *, budget: str, recipe: Recipe) -> Self:
        """Check and complete what a user asks for.

        Args:
            methods: names with commas between them, or "all"; "none" is the plain network.
            budget: see `Budget.parse`.
            recipe: the preset, with model, data and seed.

        Examples:
            >>> Plan.make("aol,bcop", budget="3ep", recipe=Recipe()).recipe_for("bcop", 3).method
            'bcop'
        """
        shared = recipe.replace(method="default", method_options=(), loss="default", loss_options=(), epochs=1)
        return cls(choose_methods(methods), shared, Budget.parse(budget))

    def recipe_for(self, method: str, epochs: int) -> Recipe:
        """The recipe of one run."""
        return with_method(self.recipe, method).replace(epochs=epochs)

    @property
    def plain_twin(self) -> Recipe:
        """The same network of torch layers, that times and memory are relative to."""
        return self.recipe.replace(method=PLAIN)

    def to_json(self) -> dict[str, Any]:
        """What a later session must agree with; the methods are in the rows."""
        return {"budget": self.budget.text, "recipe": self.recipe.to_json()}

    def check_continues(self, kept: object, where: str) -> None:
        """Refuse to add rows to a comparison of something else.

        Args:
            kept: what `to_json` gave when the comparison began.
            where: the directory, for the message.
        """
        if not isinstance(kept, dict) or not {"budget", "recipe"} <= kept.keys():
            raise RecipeError(f"{where}: expected a comparison of onelip, got another file; choose another --out")
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
    from onelip.methods.registry import METHODS

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
        f"{where}: expected the comparison's own {flag} {before!r}, got {now!r}; rows of one table must be of one "
        "plan: leave it as it is, or choose another --out"
    )
