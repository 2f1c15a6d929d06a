"""The independent checker as a verb uses it: files found by their hashes, and its verdict in words."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

_MOST_FILES = 100  # beside a certificate, that are looked at


def checked(
    certificate: Path, weights: Path | None, config: Path | None, images: Path | None, *, quiet: bool
) -> tuple[dict[str, Any], int]:
    """The verdict and the exit code of the checker."""
    from onelip.checker.__main__ import judge

    weights, config = (
        given or _beside(certificate, part) for part, given in (("weights", weights), ("config", config))
    )
    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    return judge(certificate, weights, config, images, say=say)


def _beside(certificate: Path, part: str) -> Path | None:
    """The file that a certificate names by its hash, if it is not where it says but beside it under another name.

    Exports and downloads rename files. None leaves it to the checker to look, and to say what is wrong.
    """
    folder = certificate.parent
    try:
        told = json.loads(certificate.read_bytes())[part]
        place = folder / told["file"]
        if place.is_file():
            return None
        beside = sorted(file for file in folder.iterdir() if file.suffix == place.suffix and file.is_file())
        for file in beside[:_MOST_FILES]:
            if hashlib.sha256(file.read_bytes()).hexdigest() == told["sha256"]:
                return file
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def verdict_text(verdict: dict[str, Any], code: int) -> str:
    """What people read. In plain characters and lines of ours, so that a file cannot put a verdict of its own here."""
    if not verdict["accepted"]:
        return f"{'REJECTED' if code == 1 else 'NOT CHECKED'}: {_printable(verdict['reason'])}"
    count = verdict["count"]
    what = "BOUNDS ACCEPTED, LOGITS NOT CHECKED; if they are right" if code else "ACCEPTED"
    lines = [f"{what}: {verdict['certified']} of {count} images are certified, for the float64 program."]
    constant, error = verdict["lipschitz"], verdict["error"]
    lines.append(f"  proved: Lipschitz constant <= {constant!r}, error of the logits <= {error:.3g}")
    if verdict["cra"]:
        shares = {_printable(r): f"{n / max(count, 1):.2%}" for r, n in verdict["cra"].items()}
        accuracy = f"accuracy {shares.pop('0')}, " if "0" in shares else ""
        found = ", ".join(f"{r}: {share}" for r, share in shares.items())
        lines.append(f"  by the labels of the file: {accuracy}certified robust accuracy {found}")
    if not code:
        lines.append(f"  logits computed again: at most {verdict['logits_apart']:.3g} apart")
    lines += [f"  {verdict['run']}"] if "run" in verdict else []
    return "\n".join(lines + [f"  not checked: {_printable(what)}" for what in verdict["not_checked"]])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
