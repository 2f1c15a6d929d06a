"""Console output of a run: a progress bar in a terminal, lines elsewhere, and the table of results."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

# Interval of progress lines when the output is not a terminal.
_SECONDS_BETWEEN_LINES = 30.0


class Display:
    """Shows steps, epochs and results on a console.

    Args:
        console: a console of rich; None to show nothing.

    Examples:
        >>> Display(Console()).print("training on 1442 images")
        training on 1442 images
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.epochs = 0
        self._last_line = 0.0

    def start(self, epochs: int, steps: int, done: int) -> None:
        """Show that the run starts, or resumes after `done` steps."""
        self.epochs, self.steps, self.first = epochs, steps, done
        self._start = self._last_line = time.monotonic()
        self._pauses, self._images = 0.0, 0
        if self.console is not None and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rates]}"))
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.task = self.progress.add_task("", total=steps, completed=done, rates="")
            self.progress.start()

    def step(self, epoch: int, step: int, images: int, loss: float) -> None:
        """Show that step number `step` of the run, in epoch number `epoch`, is done.

        Args:
            epoch: number of the epoch.
            step: number of the step, counted over the whole run.
            images: number of images in the step.
            loss: training loss.
        """
        if self.console is None:
            return
        seconds = max(time.monotonic() - self._start - self._pauses, 1e-9)
        self._images += images
        left = (self.steps - step) * seconds / (step - self.first)
        rates = f"{self._images / seconds:.0f} images/s, {_clock(left)} left, loss {loss:.4f}"
        if self.progress is not None and self.task is not None:
            name = f"epoch {epoch}/{self.epochs}"
            self.progress.update(self.task, completed=step, description=name, rates=rates)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.console.print(f"step {step}/{self.steps}: {rates}", highlight=False, soft_wrap=True)

    def pause(self, seconds: float) -> None:
        """Exclude seconds that were not spent on steps from the number of images per second."""
        self._pauses += seconds

    def print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def block(self, facts: Sequence[tuple[str, str]]) -> None:
        """Print labels with texts beside them."""
        for label, text in facts:
            self.print(f"{label:<9} {text}")

    def print_table(self, table: Table, *notes: str) -> None:
        """Print a table and lines below it."""
        if self.console is not None:
            self.console.print(table)
        for note in notes:
            self.print(note)

    def epoch(self, line: dict[str, Any]) -> None:
        """Print the results of an epoch; `line` is its entry in the log."""
        width = len(str(self.epochs))
        shares = [f"{radius}: {_percent(value)}" for radius, value in line["cra"].items()]
        self.print(
            f"epoch {line['epoch']:>{width}}/{self.epochs}  loss {line['train_loss']:.4f}  {line['split']}: accuracy "
            f"{_percent(line['accuracy'])} %, CRA {', '.join(shares)} %, mean margin {_number(line['mean_margin'])}"
        )
        self._last_line = time.monotonic()

    def stop(self) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def text_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, style: str = ""
) -> Table:
    """A table of text with the layout that all commands share.

    Args:
        title: line above it.
        heads: headings; their words are not broken.
        rows: cells.
        left: number of columns that are text, aligned to the left; the others are numbers.
        style: style of rich.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), style=style)
    for number, head in enumerate(heads):
        widest = max(map(len, head.split()), default=0)
        if number < left:
            table.add_column(head, overflow="fold", min_width=widest, style=style)
        else:
            table.add_column(head, justify="right", no_wrap=" " not in head, min_width=widest, style=style)
    for row in rows:
        table.add_row(*map(Text, row))  # not parsed as markup
    return table


def results_table(results: dict[str, Any], *, per_class: bool = False) -> Table:
    """Return the table of an evaluation.

    Args:
        results: the evaluation, as returned by `Evaluation.to_json`.
        per_class: whether to add a row for each class.
    """
    title = f"{results['data']}, {results['split']} images; accuracy and CRA in %"
    shares = ["accuracy", *(f"CRA {radius}" for radius in results["cra"])]
    heads = ["class" if per_class else "", "images", *shares, "mean margin", "median margin"]
    rows = [
        [
            row["name"],
            str(row["images"]),
            *map(_percent, (row["accuracy"], *row["cra"].values())),
            *map(_number, (row["mean_margin"], row["median_margin"])),
        ]
        for row in [*(results["per_class"] if per_class else []), {**results, "name": "all"}]
    ]
    return text_table(title, heads, rows)


def constant_line(results: dict[str, Any]) -> str:
    """The sentence on the constant of an evaluation, as returned by `Evaluation.to_json`."""
    if results["lipschitz"] is None:
        return "No CRA: no Lipschitz constant is proved for this network."
    return f"CRA with the Lipschitz constant {results['lipschitz']:g}, {results['mode']}."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
