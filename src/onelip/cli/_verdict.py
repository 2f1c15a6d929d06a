"""The independent checker for `onelip check`: find files by their hashes, run it, print its verdict."""

import hashlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

_MAX_FILES = 100  # files beside a certificate whose hash is computed


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
    """The verdict for people, in printable characters, so that a file cannot print a verdict of its own."""
    if not verdict["accepted"]:
        return f"{'REJECTED' if code == 1 else 'NOT CHECKED'}: {_printable(verdict['reason'])}"
    count = verdict["count"]
    what = "BOUNDS ACCEPTED, LOGITS NOT CHECKED; if they are right" if code else "ACCEPTED"
    lines = [f"{what}: {verdict['certified']} of {count} images are certified for the float64 program."]
    constant, error = verdict["lipschitz"], verdict["error"]
    lines.append(f"  proved: Lipschitz constant <= {constant!r}, rounding error of the logits <= {error:.3g}")
    if verdict["cra"]:
        shares = {_printable(r): f"{n / max(count, 1):.2%}" for r, n in verdict["cra"].items()}
        accuracy = f"accuracy {shares.pop('0')}, " if "0" in shares else ""
        found = ", ".join(f"{r}: {share}" for r, share in shares.items())
        lines.append(f"  with the labels in the file: {accuracy}certified robust accuracy {found}")
    if not code:
        lines.append(f"  recomputed logits differ by at most {verdict['logits_apart']:.3g}")
    lines += [f"  {verdict['run']}"] if "run" in verdict else []
    return "\n".join(lines + [f"  not checked: {_printable(what)}" for what in verdict["not_checked"]])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
