"""What the figures share: size, style and colours, their form as SVG inside an HTML page, and their inputs.

The object interface of matplotlib is used: no backend, no window. Colours have names, so that a page can replace them
by CSS variables, and one drawing serves light and dark pages.
"""

import functools
import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from onelip.certification.predict import Certification
from onelip.training.build import LoadedRun, load_run, load_run_data
from onelip.training.run_directory import RunDirectory, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Name of each colour, on light and on dark pages. Each has a contrast of 3 or more to the paper, texts of 4.5.
PALETTE = {
    "ink": ("#1c1c1d", "#e8e8e8"),
    "soft": ("#5f6166", "#a8abb2"),
    "faint": ("#dcdde0", "#3a3c40"),
    "paper": ("#fffffe", "#17181a"),
    "series-0": ("#1b6ca8", "#6db1e8"),
    "series-1": ("#b8650a", "#f0a548"),
    "series-2": ("#1f8a5f", "#5cc79b"),
    "series-3": ("#b3402a", "#f08a74"),
    "series-4": ("#7a5195", "#b592d3"),
    "series-5": ("#00838f", "#4fc3cf"),
    "series-6": ("#c2477f", "#f08db8"),
    "series-7": ("#7d5a3c", "#c49a78"),
}
INK, SOFT, FAINT, PAPER, *SERIES = (light for light, _ in PALETTE.values())
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (5, 2, 1, 2)))  # so that colour is not the only difference
MARKERS = ("o", "s", "D", "^", "v")

WIDTH = 5.2  # inches; narrow enough for a phone

_STYLE = {
    "font.size": 9,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
    "image.interpolation": "none",
}

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _style(**more: Any) -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("onelip.plots needs matplotlib: pip install 'onelip[plots]'") from error
    settings: Any = {**_STYLE, **more}
    with matplotlib.rc_context(settings):
        yield


def drawing(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that draws: it uses the style of the package, and reports a missing matplotlib."""

    @functools.wraps(function)
    def draw(*args: P.args, **settings: P.kwargs) -> T:
        with _style():
            return function(*args, **settings)

    return draw


def new_figure(height: float, rows: int = 1, columns: int = 1, **settings: Any) -> "tuple[Figure, Any]":
    """An empty figure of the common width, and its axes, as an array if there are several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **settings)


def shade(colour: str, strength: Any) -> Any:
    """An image (h, w, 4) of one colour whose opacity is given (h, w), in [0, 1], so that it fits on any paper."""
    import numpy as np
    from matplotlib.colors import to_rgb

    # 64 steps are invisible, and make files smaller.
    alpha = np.round(np.clip(strength, 0, 1) * 63) / 63
    return np.dstack([*(np.full(alpha.shape, part) for part in to_rgb(colour)), alpha])


def to_svg(figure: "Figure", label: str, key: str) -> str:
    """A figure as an <svg> element for an HTML page that defines the colours of `PALETTE` as CSS variables.

    Args:
        figure: the figure.
        label: its description for screen readers.
        key: anything that differs between the figures of a page; ids inside the figure are made from it.
    """
    buffer = io.StringIO()
    nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _style(**{"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    view = re.search(r'viewBox="[^"]*"', text)
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<(g|image)( [^<>]*?)?\s+id="[^"]*"', r"<\1\2", text).replace("xlink:href", "href")
    text = re.sub(r"font(-family)?: [^;\"]*'[^;\"]*", _only_size, text)
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r">\s+<", "><", text)
    assert view is not None
    return f'<svg {view[0]} role="img" aria-label="{html.escape(label)}">{text.strip()}'


def _only_size(found: re.Match[str]) -> str:
    """The family is that of the page."""
    size = re.search(r"[\d.]+px", found[0])
    return "" if size is None else f"font-size: {size[0]}"


# ---- Inputs of the functions of `onelip.plots`: runs by path or loaded, certifications, and several of them by name


Run = str | PathLike[str] | LoadedRun
Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Certified:
    """A certification, with the images and the names of the classes if they are known."""

    certification: Certification
    images: Tensor | None
    class_names: Sequence[str]

    def name(self, label: int) -> str:
        """The name of a class, or its number."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


def certified(
    source: Certification | Run, images: Tensor | None = None, class_names: Sequence[str] | None = None
) -> Certified:
    """A certification as it is, or the one of the test images of a run."""
    if isinstance(source, Certification):
        return Certified(source, images, class_names or ())
    run = loaded(source)
    data = load_run_data(run.config)
    found = run.predict(data.test_images).certification
    return Certified(replace(found, labels=data.test_labels), data.test_images, run.config.class_names)


def loaded(run: Run) -> LoadedRun:
    """A run that is loaded already, or by its path."""
    return run if isinstance(run, LoadedRun) else load_run(Path(run))


def log_of(source: Run | Log) -> Log:
    """The lines of the log of a run; a log as it is.

    Raises:
        ValueError: if no epoch is finished.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        log = source
    else:
        log = read_log(source.directory if isinstance(source, LoadedRun) else RunDirectory(Path(source)))
    if not log:
        raise ValueError("the log is empty: no epoch is finished yet")
    return log


def by_name(sources: T | Mapping[str, T]) -> dict[str, T]:
    """Several sources by name; a single one has the name ""."""
    return dict(sources) if isinstance(sources, Mapping) else {"": sources}


def middle_image(run: LoadedRun) -> Tensor:
    """A grey image, for measurements that need an input of the right shape."""
    return torch.full((1, *run.config.shape), 0.5)
