"""`onelip check CERTIFICATE`: derive everything that a certificate says again, from its weight file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onelip.cli._parse import parse


@dataclass(frozen=True)
class Check:
    """Re-check a certificate with the independent checker, which uses neither torch nor the rest of onelip.

    Exit code 0: accepted, 1: rejected, 2: a file cannot be read, 3: the bounds are accepted, but there were no images
    to compute the logits from. The same as `python -m onelip.checker`.
    """

    certificate: Annotated[Path, tyro.conf.Positional]
    """The certificate, as `onelip certify --out` wrote it."""
    weights: Path | None = None
    """The weight file, if it is neither where the certificate says nor beside it."""
    config: Path | None = None
    """The configuration, likewise."""
    images: Path | None = None
    """The .npy file of the images, if it is not where the certificate says: the program is run on them."""
    json: bool = False
    """Print JSON."""
    quiet: bool = False
    """Show no progress."""


def run(arguments: Sequence[str]) -> int:
    """Parse, check, show."""
    command = parse(Check, "check", arguments)

    from onelip.checker import report

    files = (command.weights, command.config, command.images)
    return report(command.certificate, *files, as_json=command.json, quiet=command.quiet)
