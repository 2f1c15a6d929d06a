"""Compare methods with one budget: one recipe per method, and one ordinary run per method in OUT/NAME.

The recipes have the same data, architecture, seed, batch size and order of images. They differ in the method and in the
hyperparameters that its authors recommend. The number of epochs is the same for all, or the number of whole epochs that
each runs in the same time.

comparison.json   plan, data, machine, command of each session, rows
index.html        the same as a page
NAME/             the run of a method, as written by `onelip train`

A finished method is not trained again. One that was stopped or killed is resumed from its checkpoint. One that fails
is a row with the reason.
"""

import platform
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich.table import Table

from onelip._version import __version__
from onelip.compare.measures import epochs_within, measure, peak_mebibytes
from onelip.core.errors import RecipeError, RunError, did_you_mean, noted_errors
from onelip.core.files import locked, read_json, write_json, write_whole
from onelip.data import ImageData, load_data
from onelip.methods.registry import METHODS
from onelip.report.page import comparison_page
from onelip.report.table import columns, terminal_table
from onelip.training.build import build_model, load_run
from onelip.training.display import Display
from onelip.training.objective import with_method
from onelip.training.recipe import MACHINE_FIELDS, Recipe, parse_seconds
from onelip.training.run_directory import RunDirectory, read_config, read_log
from onelip.training.trainer import train_or_reuse

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


# ---- Training and measurements


FORMAT = "onelip comparison 1"


def compare(
    plan: Plan,
    out: str | Path,
    *,
    data: ImageData | None = None,
    data_root: str | Path | None = None,
    display: Display | None = None,
    memory: bool = True,
    retry: bool = False,
    command: str | None = None,
    handle_signals: bool = False,
) -> dict[str, Any]:
    """Train and measure the methods of a plan.

    Args:
        plan: methods, budget and shared recipe.
        out: directory; new or empty, or one with a comparison of the same plan, to which methods are added.
        data: the images; by default loaded by the name in the recipe.
        data_root: directory of named data sets.
        display: shows the progress; None shows nothing.
        memory: measure the peak memory, in separate processes.
        retry: train methods again that failed before.
        command: the command to record; by default that of the process.
        handle_signals: on SIGINT and SIGTERM, save the training in progress and stop.

    Returns:
        The content of comparison.json.

    Raises:
        Stopped: after SIGINT or SIGTERM in a training, with `handle_signals`; the same command resumes it.
        RecipeError: if the plan is invalid for every method, or the directory contains something else.
    """
    out, shown = Path(out), display or Display(None)
    kept = _read_kept(out, plan)
    data = load_data(plan.recipe.data, data_root, image_size=plan.recipe.resize_to) if data is None else data
    _check_fits(plan, data)
    with locked(out, "the comparison is in use by another process"):
        record = _begin(plan, data, kept, command or shlex.join(sys.argv))
        _write(out, record)
        for number, method in enumerate(plan.methods, start=1):

            def log(line: str, title: str = f"[{number}/{len(plan.methods)}] {method}") -> None:
                shown.print(f"{title}: {line}")

            before = next((row for row in record["rows"] if row["method"] == method), None)
            if before is not None and before["status"] == "done":
                log("finished before")
            elif before is not None and not retry:
                log(f"failed before (use --retry to train it again): {before['why']}")
            else:
                row = _describe(method)
                with noted_errors(lambda why, row=row: row.update(why=why)):  # the next method follows
                    recipe = _decide_recipe(plan, method, RunDirectory(out / method), data, log)
                    train_or_reuse(recipe, out / method, data=data, display=shown, handle_signals=handle_signals)
                    row |= _measured(plan, recipe, out / method, data, record, memory, log)
                if row["status"] != "done":
                    log(f"FAILED: {row['why']}")
                _insert(record, row)
                _write(out, record)
    return record


def _describe(method: str) -> dict[str, Any]:
    """The row of a method that has no results yet."""
    known = METHODS.get(method)
    return {
        "method": method,
        "title": "torch layers without a method" if known is None else known.title,
        "guarantee": (known.guarantee if known is not None else None) or "none",
        "run": method,
        "status": "failed",
        "why": None,
    }


def _measured(
    plan: Plan,
    recipe: Recipe,
    path: Path,
    data: ImageData,
    record: dict[str, Any],
    memory: bool,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Results and cost of a finished run."""
    loaded = load_run(path)
    if memory and "plain_mebibytes" not in record:
        record["plain_mebibytes"] = _baseline_memory(plan, data)
    baseline_memory = record.get("plain_mebibytes")
    cost = measure(
        recipe, plan.baseline, loaded.model, loaded.plain, data, baseline_memory=baseline_memory, memory=memory, log=log
    )
    lines = read_log(loaded.directory)
    results = read_json(loaded.directory.results)
    return {
        "status": "done",
        "epochs": recipe.epochs,
        "seconds": sum(line["seconds"] for line in lines),
        "train_loss": lines[-1]["train_loss"] if lines else None,
        # The results of each class are in results.json of the run.
        "results": {name: {k: v for k, v in part.items() if k != "per_class"} for name, part in results.items()},
        **cost,
        "recipe": recipe.to_json(),
    }


def _decide_recipe(plan: Plan, method: str, run: RunDirectory, data: ImageData, log: Callable[[str], None]) -> Recipe:
    """The recipe of an existing run, or a new one; with a time budget, its epochs are measured first."""
    epochs, is_started = plan.budget.epochs, run.config.exists()
    if is_started:
        kept = read_config(run).recipe
        wanted = plan.recipe_for(method, epochs or kept.epochs)
        wanted.check_resumes(kept)
    else:
        wanted = plan.recipe_for(method, epochs or 1)
        if plan.budget.seconds is not None:
            log(f"measuring how many epochs fit into {plan.budget.text}")
            wanted = wanted.replace(epochs=epochs_within(plan.budget.seconds, wanted, data))
    log(f"{'resuming, ' if is_started else ''}{wanted.epochs} epoch{'' if wanted.epochs == 1 else 's'}")
    return wanted


def _baseline_memory(plan: Plan, data: ImageData) -> float | None:
    try:
        return peak_mebibytes(plan.baseline, data.num_classes, data.shape)
    except RunError:
        return None


def _check_fits(plan: Plan, data: ImageData) -> None:
    """An error of the baseline is one of all methods: raise it before anything is trained."""
    with torch.random.fork_rng(devices=[]):
        build_model(plan.baseline, data.num_classes, data.shape)


def _read_kept(out: Path, plan: Plan) -> dict[str, Any] | None:
    path = out / "comparison.json"
    if path.exists():
        kept = read_json(path)
        if not isinstance(kept, dict) or kept.get("format") != FORMAT:
            raise RecipeError(f"{path}: is not a comparison of onelip ({FORMAT!r}); choose another --out")
        plan.check_continues(kept.get("plan"), str(out))
        return kept
    if out.exists() and not out.is_dir():
        raise RecipeError(f"{out} is a file; choose another --out")
    if out.is_dir() and any(entry.name != ".lock" for entry in out.iterdir()):
        raise RecipeError(
            f"{out} contains files, but no comparison; choose another --out, new, empty or with a comparison"
        )
    return None


def _begin(plan: Plan, data: ImageData, kept: dict[str, Any] | None, command: str) -> dict[str, Any]:
    if kept is not None and kept["data"]["fingerprint"] != data.fingerprint:
        raise RecipeError(
            f"{data.source}: these are not the data of the comparison (fingerprint {data.fingerprint[:12]}…, not "
            f"{kept['data']['fingerprint'][:12]}…); choose another --out"
        )
    before = kept or {}
    commands = [*before.get("commands", []), command]
    memory = {"plain_mebibytes": before["plain_mebibytes"]} if before.get("plain_mebibytes") is not None else {}
    return {
        "format": FORMAT,
        "command": commands[-1],
        "commands": list(dict.fromkeys(commands)),
        "onelip": __version__,
        "torch": torch.__version__,
        "threads": plan.recipe.threads or torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "plan": plan.to_json(),
        "split": "validation" if plan.recipe.validation else "test",
        "data": {
            "name": data.name,
            "fingerprint": data.fingerprint,
            "shape": list(data.shape),
            "classes": data.num_classes,
        },
        **memory,
        "rows": list(before.get("rows", [])),
    }


def _write(out: Path, record: dict[str, Any]) -> None:
    write_json(out / "comparison.json", record)
    write_whole(out / "index.html", comparison_page(record, out).encode())


def _insert(record: dict[str, Any], row: dict[str, Any]) -> None:
    """Insert a row, or replace that of the method; rows are in the order of the registry."""
    order = [PLAIN, *METHODS]
    rows = [r for r in record["rows"] if r["method"] != row["method"]] + [row]
    record["rows"] = sorted(rows, key=lambda r: order.index(r["method"]) if r["method"] in order else len(order))


def comparison_tables(record: dict[str, Any]) -> list[Table]:
    """Two tables for the terminal, accuracy and cost, each at most 80 characters wide.

    A failed method is a row without numbers; `failures` gives the reasons.
    """
    recipe, split = record["plan"]["recipe"], record["split"]
    rows = [{"name": row["method"], **row} for row in record["rows"]]
    shown = [column for column in columns(rows, split) if column.title != "images"]  # the same for all
    first_cost = next(i for i, column in enumerate(shown) if column.title == "step")
    title = f"{recipe['model']} on {record['data']['name']}, {record['plan']['budget']} each; % of {split} images"
    return [
        terminal_table(title, "method", rows, shown[:first_cost]),
        terminal_table("Cost relative to the network without a method", "method", rows, shown[first_cost:]),
    ]


def failures(record: dict[str, Any]) -> list[str]:
    """A line for each method that failed."""
    return [f"{row['method']} failed: {row['why']}" for row in record["rows"] if row["status"] != "done"]
