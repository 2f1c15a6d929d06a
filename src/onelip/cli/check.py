"""`onelip check CERTIFICATE`: derive everything that a certificate says again, from its weight file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from onelip.cli._parse import parse


@dataclass(frozen=True)
class Check:
    """Re-check a certificate with the independent checker, which uses neither torch nor the rest of onelip.

    Exit code 0: accepted, 1: rejected, 2: a file cannot be read, 3: the bounds are accepted, but there were no images
    to compute the logits from. The same as `python -m onelip.checker`, in words. With --run also, by torch and the
    rest of onelip: that the program is the network of the run, and images and labels are those of its data.
    """

    certificate: Annotated[Path, tyro.conf.Positional]
    """The certificate, as `onelip certify --out` wrote it."""
    weights: Path | None = None
    """The weight file, if it is neither where the certificate says nor beside it."""
    config: Path | None = None
    """The configuration, likewise."""
    images: Path | None = None
    """The .npy file of the images, if it is not where the certificate says: the program is run on them."""
    run: Path | None = None
    """A run: the certificate must be about its network, its weights and its data."""
    data_root: Path | None = None
    """Where to look for the data of the run; see onelip data."""
    json: bool = False
    """Print JSON."""
    quiet: bool = False
    """Show no progress."""


def run(arguments: Sequence[str]) -> int:
    """Parse, check, show."""
    command = parse(Check, "check", arguments)

    from onelip.cli._verdict import checked, verdict_text

    compare = None if command.run is None else _comparison(command.run, command.data_root)  # fails before the work
    files = (command.weights, command.config, command.images)
    verdict, code = checked(command.certificate, *files, quiet=command.quiet)
    if compare is not None and code in (0, 3):
        verdict, code = _compared(command, compare, verdict, code)
    print(json.dumps(verdict) if command.json else verdict_text(verdict, code))
    return code


def _compared(
    command: Check, compare: Callable[[dict[str, Any]], str], verdict: dict[str, Any], code: int
) -> tuple[dict[str, Any], int]:
    """The verdict with what the checker cannot know by itself."""
    from onelip.certify.rounding import ProofError
    from onelip.checker.certificate import ORIGIN

    try:
        words = compare(json.loads(command.certificate.read_bytes()))
    except ProofError as error:
        return {"accepted": False, "reason": f"not about {command.run}: {error}"}, 1
    left = [what for what in verdict["not_checked"] if what != ORIGIN]
    return {**verdict, "not_checked": left, "run": f"compared with {command.run}: {words}"}, code


def _comparison(run: Path, data_root: Path | None) -> Callable[[dict[str, Any]], str]:
    """From the content of a certificate to what agrees with the run, in words; ProofError if something does not."""
    from onelip.certify.origin import check_network, find_images
    from onelip.cli._run_data import load_run_data
    from onelip.training.build import load_run
    from onelip.training.run_directory import RunDirectory

    loaded, place = load_run(run), RunDirectory(run)
    data = load_run_data(loaded.config, data_root, advice="")
    parts = {"test": (data.test_images, data.test_labels), "train": (data.train_images, data.train_labels)}

    def compared(certificate: dict[str, Any]) -> str:
        check_network(certificate, loaded.plain, {"weights": place.plain, "config": place.config})
        split, count = find_images(certificate, parts), len(certificate["results"])
        network = "its network and weights" if certificate["config"] is None else "its network, weights and config"
        labelled = any(result["label"] is not None for result in certificate["results"])
        what = "images, with labels," if labelled else "images"
        return f"{network}; the {what} are the first {count} of {data.name}, {split}"

    return compared
