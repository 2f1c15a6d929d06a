"""`onelip report RUN...`: one HTML page about one or several runs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onelip.cli._common import Flag, Json, OptionalPath, parse, require_at_least
from onelip.core.errors import RecipeError


@dataclass(frozen=True)
class Report:
    """Write a page about one or several runs: proofs, accuracy, radii, singular values, images and commands.

    The page is one HTML file that loads nothing else. Test images are certified and the first of them attacked. A part
    that fails is left out, and the page lists it as missing. Several runs are overlaid and in one table. A directory
    of onelip compare stands for all its runs. The exit code is 1 if the attack changes a certified decision.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """Directories of runs, or one of a comparison."""
    out: OptionalPath = None
    """File to write. Default: report.html in the directory of the first run."""
    data_root: OptionalPath = None
    """Directory of named data sets; see onelip data. Default: that of each run."""
    seconds: float = 120.0
    """Seconds for each part of a run: proofs, singular values, certifying images, the attack. Layers and images that
    do not fit are left out, and the page lists them as missing."""
    attack_images: int = 64
    """Number of images of each run to attack; 0 for no attack."""
    force: Flag = False
    """Replace an existing report."""
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Report, "report", arguments)
    if not command.runs:
        raise RecipeError("expected one or more directories of runs, such as: onelip report runs/demo-1")
    require_at_least(0, command, "seconds", "attack_images")
    for path in command.runs:
        if not path.is_dir():
            raise RecipeError(f"{path}: there is no such directory; name directories of runs")
    out = command.out or command.runs[0] / "report.html"

    from onelip.report.page import write_report

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    written = write_report(
        command.runs,
        out,
        data_root=command.data_root,
        seconds=command.seconds,
        attack_images=command.attack_images,
        force=command.force,
        progress=show,
    )
    if command.json:
        print(json.dumps({"report": str(out), "bytes": out.stat().st_size, **written._asdict()}))
    else:
        for line in written.missing:
            print(f"missing: {line}", file=sys.stderr)
        print(f"Report: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it in a browser.")
    for name in written.broken:
        print(f"onelip report: {name}: certified decisions were changed, so the certificate is wrong", file=sys.stderr)
    return 1 if written.broken else 0
