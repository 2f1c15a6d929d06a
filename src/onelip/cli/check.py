"""`onelip check CERTIFICATE`: check a certificate file with the independent checker."""

import hashlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from onelip.cli._common import Flag, Json, OptionalPath, parse, printable, unset
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from onelip.data import ImageData
    from onelip.training.build import LoadedRun

_MAX_FILES = 100  # files beside a certificate whose hash is computed


@dataclass(frozen=True)
class Check:
    """Check a certificate with the independent checker, which uses neither torch nor the rest of onelip.

    The exit code is 0 if the certificate is accepted; 1 if it is rejected, or if the estimated work or memory exceeds
    the limit; 2 if a file cannot be read; 3 if the bounds are accepted, but there are no images to recompute the logits
    from. `python -m onelip.checker` does the same and prints JSON.

    With --run, torch and the rest of onelip also check that the program is the network of the run, and that the images
    and labels are those of its data.
    """

    certificate: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CERTIFICATE")]
    """Certificate file, as written by onelip certify --out."""
    weights: OptionalPath = None
    """Weight file. Default: the path in the certificate, or a file beside the certificate with its hash."""
    config: OptionalPath = None
    """Configuration file. Default: as for --weights."""
    images: OptionalPath = None
    """Images (.npy) to recompute the logits from. Default: the path in the certificate."""
    run: OptionalPath = None
    """Also check that the certificate belongs to this run: network, weights, configuration and data."""
    data_root: OptionalPath = None
    """Directory of the data of the run; see onelip data."""
    max_minutes: Annotated[float | None, unset("FLOAT")] = None
    """Limit of the estimated work, in minutes of one core. Default: 0.5 plus 2 per megabyte of files, at most 60."""
    max_memory: float = 4.0
    """Limit of the estimated memory, in gigabytes."""
    json: Json = False
    verbose: Flag = False
    """Show every node and every batch of images."""
    quiet: Flag = False
    """Do not show the estimate."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Check, "check", arguments)

    if command.certificate.is_dir():
        raise RecipeError(f"{command.certificate}: this is a directory; name the file that onelip certify --out wrote")
    origin = None if command.run is None else _load(command.run, command.data_root)  # fails before the work
    topics = ("certificate", "estimate", "node", "images") if command.verbose else ("estimate",)
    verdict, code = checked(
        command.certificate,
        command.weights,
        command.config,
        command.images,
        max_minutes=command.max_minutes,
        max_memory=command.max_memory,
        topics=() if command.quiet else topics,
    )
    if origin is not None and code in (0, 3):
        verdict, code = _compared(command.certificate, *origin, verdict, code)
    print(json.dumps(verdict) if command.json else verdict_text(verdict, code))
    return code


def _load(run: Path, data_root: Path | None) -> "tuple[LoadedRun, ImageData]":
    from onelip.training.build import load_run, load_run_data

    loaded = load_run(run)
    return loaded, load_run_data(loaded.config, data_root)


def _compared(
    path: Path, loaded: "LoadedRun", data: "ImageData", verdict: dict[str, Any], code: int
) -> tuple[dict[str, Any], int]:
    """The verdict, extended by the comparison of a certificate with a run and its data."""
    from onelip.certification.certificate import check_network, find_images
    from onelip.checker.certificate import ORIGIN
    from onelip.core.errors import ProofError, RunError

    run, content = loaded.directory, json.loads(path.read_bytes())
    parts = {"test": (data.test_images, data.test_labels), "train": (data.train_images, data.train_labels)}
    try:
        check_network(content, loaded.plain, {"weights": run.plain, "config": run.config})
        split = find_images(content, parts)
    except (ProofError, RunError) as error:
        return {"accepted": False, "reason": f"does not belong to {run.path}: {error}"}, 1
    images = f"images and labels are the first {len(content['results'])} of {data.name}, {split}"
    compared = f"compared with {run.path}: same network, weights and config; {images}"
    left = [what for what in verdict["not_checked"] if what != ORIGIN]
    return {**verdict, "not_checked": left, "run": compared}, code


def checked(
    certificate: Path,
    weights: Path | None = None,
    config: Path | None = None,
    images: Path | None = None,
    *,
    max_minutes: float | None = None,
    max_memory: float = 4.0,
    topics: Collection[str] = (),
) -> tuple[dict[str, Any], int]:
    """The verdict and the exit code of the checker. Its messages on the given topics go to stderr."""
    from onelip.checker.__main__ import verdict
    from onelip.checker.reading import Rejected, parse, read

    try:
        content = parse(read(certificate, max_memory), max_memory)
        weights, config = (
            weights or _beside(certificate, content["weights"]),
            config or _beside(certificate, content["config"]),
        )
    except (OSError, LookupError, TypeError, Rejected):
        pass  # the checker reports it

    def log(topic: str, message: str) -> None:
        if topic in topics:
            print(message, file=sys.stderr, flush=True)

    return verdict(certificate, weights, config, images, max_minutes=max_minutes, max_memory=max_memory, log=log)


def _beside(certificate: Path, part: Mapping[str, str] | None) -> Path | None:
    """The file that a certificate names, found by its hash beside the certificate if it was renamed or moved there."""
    if part is None or (named := certificate.parent / part["file"]).is_file():
        return None
    beside = sorted(file for file in certificate.parent.iterdir() if file.suffix == named.suffix and file.is_file())
    for path in beside[:_MAX_FILES]:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == part["sha256"]:
                return path
    return None


def verdict_text(verdict: dict[str, Any], code: int) -> str:
    """The verdict as text. Only printable characters, so that a certificate cannot print a verdict of its own."""
    if not verdict["accepted"]:
        return f"{'REJECTED' if code == 1 else 'NOT CHECKED'}: {printable(verdict['reason'])}"
    count = verdict["count"]
    what = "BOUNDS ACCEPTED, LOGITS NOT CHECKED; if they are right" if code else "ACCEPTED"
    lines = [f"{what}: {verdict['certified']} of {count} images are certified for the float64 program."]
    constant, error = verdict["lipschitz"], verdict["error"]
    lines.append(f"  proved: Lipschitz constant <= {constant!r}, rounding error of the logits <= {error:.3g}")
    if verdict["cra"]:
        shares = {printable(r): f"{n / max(count, 1):.2%}" for r, n in verdict["cra"].items()}
        accuracy = f"accuracy {shares.pop('0')}, " if "0" in shares else ""
        found = ", ".join(f"{r}: {share}" for r, share in shares.items())
        lines.append(f"  with the labels in the file: {accuracy}certified robust accuracy {found}")
    if not code:
        lines.append(f"  recomputed logits differ by at most {verdict['logits_apart']:.3g}")
    lines += [f"  {verdict['run']}"] if "run" in verdict else []
    return "\n".join(lines + [f"  not checked: {printable(what)}" for what in verdict["not_checked"]])
