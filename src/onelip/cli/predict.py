"""`onelip predict RUN IMAGES...`: class and certified radius of new images."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from onelip.cli._common import (
    UNFINISHED,
    Flag,
    Json,
    StageProgress,
    make_console,
    parse,
    printable,
    require_at_least,
    unset,
)
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from onelip.training.build import LoadedRun
    from onelip.training.prediction import Predictions


@dataclass(frozen=True)
class Predict:
    """Predict the class of new images, with a certified radius for each.

    Every image within the radius (L2 distance, pixels in [0, 1]) has the same class. The pixel budget N means the same
    for uint8 images: the class is the same if the sum of squared pixel differences is at most N. The images need no
    labels.

    Examples: onelip predict RUN a.png b.png; onelip predict RUN photos/ --csv; onelip predict RUN 'photos/*.jpg';
    find photos -name '*.png' | onelip predict RUN - --json; onelip predict --pretrained mnist-fast a.png
    """

    run: Annotated[Path | None, tyro.conf.Positional, unset("RUN")] = None
    """Directory of a run; omitted with --pretrained."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, unset("IMAGES...")] = ()
    """Image files, folders of image files, glob patterns, .npz files with the uint8 array `images`; - reads a list of
    paths from standard input, one in each line. Image files need pip install 'onelip[images]'."""
    pretrained: Annotated[str | None, unset("NAME")] = None
    """Use a trained network instead of a run: a name of onelip zoo, a directory of onelip export --format hub, or a
    repository OWNER/NAME on the Hugging Face hub."""
    resize: Flag = False
    """Resize images of another size. The radius is then for the resized image."""
    skip_bad: Flag = False
    """Skip files that cannot be used, and report them; by default nothing is computed if there is one."""
    mode: Literal["auto", "sound", "real-arithmetic"] = "auto"
    """sound: rounding errors are included. real-arithmetic: they are not, and there is no pixel budget. auto: sound if
    it can be proved for this network."""
    batch_size: int = 250
    """Number of images per batch; changes speed and memory only."""
    csv: Flag = False
    """Print CSV, with a header line."""
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Predict, "predict", arguments)
    if command.csv and command.json:
        raise RecipeError("--csv and --json exclude each other; choose one")
    require_at_least(1, command, "batch_size")
    if command.run is None and command.pretrained is None:
        raise RecipeError("RUN is missing: name a run directory, or a trained network with --pretrained")
    named = command.images
    if command.pretrained is not None and command.run is not None:
        named = (str(command.run), *named)
    if not named:
        raise RecipeError("IMAGES are missing: name image files, a folder, a pattern or an .npz file, or - for a list")

    loaded = _load(command)
    with StageProgress() as progress:
        found = loaded.predict(
            _sources(named),
            resize=command.resize,
            skip_bad=command.skip_bad,
            mode=None if command.mode == "auto" else command.mode,
            batch_size=command.batch_size,
            progress=progress,
        )
    for message in found.skipped:
        print(f"onelip predict: skipped: {message}", file=sys.stderr)
    if command.json:
        print(json.dumps({"run": str(loaded.directory.path), "finished": loaded.is_finished, **found.to_json()}))
    elif command.csv:
        _print_csv(found)
    else:
        _print_table(found)
        if not loaded.is_finished:
            print(UNFINISHED)
    return 0


def _load(command: Predict) -> "LoadedRun":
    if command.pretrained is not None:
        from onelip.export import load_pretrained

        return load_pretrained(command.pretrained).run
    from onelip.training.build import load_run

    assert command.run is not None
    return load_run(command.run)


def _sources(given: Sequence[str]) -> Iterator[str]:
    for source in given:
        if source == "-":
            yield from filter(None, (line.rstrip("\r\n") for line in sys.stdin))
        else:
            yield source


def _print_csv(found: "Predictions") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("image", "class", "radius", "pixels", "mode", "change"))
    for item in found:
        writer.writerow((item.image, item.class_name, item.radius, item.pixels, found.mode, item.change))


def _rounded_down(radius: float) -> str:
    """The exact value of a radius, cut off after four digits.

    Examples:
        >>> _rounded_down(0.0036999999999999997), _rounded_down(1.23456)
        ('0.0036', '1.2345')
    """
    return str(Decimal(radius).quantize(Decimal("0.0001"), ROUND_DOWN))


def _print_table(found: "Predictions") -> None:
    from onelip.training.display import text_table

    changed = any(item.change for item in found)
    rows = []
    for item in found:
        radius = _rounded_down(item.radius) if item.radius > 0 else "not certified"
        cells = (
            item.image,
            item.class_name,
            radius,
            "" if item.pixels is None else str(item.pixels),
            item.change or "",
        )
        rows.append([printable(cell) for cell in cells])
    heads = ("image", "class", "radius", "pixels", "change")
    table = text_table("", heads if changed else heads[:-1], rows if changed else [row[:-1] for row in rows], left=2)
    if changed:
        table.columns[-1].justify = "left"
    make_console().print(table)
    constant = found.certification.constant
    if found.mode == "sound":
        print(f"Sound: the radii include all rounding errors (float64, Lipschitz constant <= {constant!r}).")
    else:
        why = "" if found.reason is None else f" The sound mode cannot be proved: {found.reason}."
        print(f"Real arithmetic: the radii do not include rounding errors (Lipschitz constant <= {constant!r}).{why}")
    print("radius: L2 distance for pixels in [0, 1], rounded down.")
    if found.mode == "sound":
        print("pixels: largest sum of squared differences of uint8 pixels.")
    if changed:
        print("Images with a change were changed to fit the network; their radii are for the changed images.")
