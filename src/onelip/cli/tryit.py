"""`onelip tryit RUN --out DIR`: a page that runs the network in the browser."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onelip.cli._common import Flag, Json, OptionalPath, parse, unset


@dataclass(frozen=True)
class Tryit:
    """Write a folder with a page that runs a network in the browser: draw, and see class, radius and pixel budget.

    Everything is in the folder: ONNX Runtime Web is downloaded with npm once, and the opened page needs no network.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of a finished run or of onelip export --format hub, or a name of onelip zoo."""
    out: OptionalPath = None
    """Folder to write. Default: RUN/tryit, or NAME-tryit for a network of onelip zoo."""
    dtype: Annotated[Literal["float32", "float64"] | None, unset("{float32,float64}")] = None
    """float64: radii include all rounding errors. float32: half the size, and radii of real arithmetic without a pixel
    budget. Default: float64 if it can be proved for this network."""
    images: int = 20
    """Number of test images on the page."""
    data_root: OptionalPath = None
    """Directory of named data sets; by default that of the run."""
    runtime: OptionalPath = None
    """File of the npm package onnxruntime-web, for machines without npm or offline."""
    force: Flag = False
    """Replace a folder of this command."""
    json: Json = False

    @property
    def place(self) -> Path:
        """Path of the folder."""
        return self.out or (self.run / "tryit" if self.run.is_dir() else Path(f"{self.run.name}-tryit"))


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Tryit, "tryit", arguments)

    from onelip.export.tryit import write_tryit

    written = write_tryit(
        command.run,
        command.place,
        dtype=command.dtype,
        images=command.images,
        data_root=command.data_root,
        runtime=command.runtime,
        force=command.force,
    )
    serve = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(written.folder))} 8000"
    if command.json:
        found = None if written.predictions is None else written.predictions.to_json()
        print(json.dumps({"out": str(written.folder), "dtype": written.dtype, "serve": serve, "images": found}))
        return 0
    print(f"wrote {written.folder} ({written.size / 2**20:.1f} MB, {written.dtype})")
    if written.predictions is None:
        print("The data of the run are not on this machine, so the page has no test images; --data-root names them.")
    print(f"Serve it, and open http://127.0.0.1:8000:\n  {serve}")
    return 0
