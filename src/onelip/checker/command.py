"""The command: `python -m onelip.checker cert.json`, or `python -m checker cert.json` beside a copy of this folder."""

import argparse
import json
import sys
from pathlib import Path

from .certificate import check
from .reading import Rejected, Unreadable


def report(path: Path, *files: Path | None, as_json: bool = False, quiet: bool = False) -> int:
    """Check, print the verdict, give the exit code; the files are those of `check`, in its order."""
    try:
        verdict = check(path, *files, say=lambda text: None if quiet else print(text, file=sys.stderr, flush=True))
        code = 0 if verdict["logits_checked"] else 3
    except Exception as error:  # what nobody thought of is no proof either
        missing = isinstance(error, ImportError)
        reason = f"{error}{'; pip install python-flint' if missing else ''}"
        known = missing or isinstance(error, Rejected | Unreadable)
        reason = reason if known else f"malformed ({type(error).__name__}: {reason})"
        # In one line of plain characters, so that a file cannot put a verdict of its own here.
        reason = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
        undecided = isinstance(error, ImportError | Unreadable | MemoryError | OSError)
        verdict, code = {"accepted": False, "reason": reason}, 2 if undecided else 1
    print(json.dumps(verdict) if as_json else "\n".join(told(verdict, code)))
    return code


def told(verdict: dict, code: int) -> list[str]:
    if not verdict["accepted"]:
        return [f"{'REJECTED' if code == 1 else 'NOT CHECKED'}: {verdict['reason']}"]
    what = "BOUNDS ACCEPTED, LOGITS NOT CHECKED; if they are right" if code else "ACCEPTED"
    lines = [f"{what}: {verdict['certified']} of {verdict['count']} images are certified, for the float64 program."]
    constant, error = verdict["lipschitz"], verdict["error"]
    lines.append(f"  proved: Lipschitz constant <= {constant!r}, error of the logits <= {error:.3g}")
    if verdict["cra"]:
        shares = ", ".join(f"{r}: {v:.2%}" for r, v in verdict["cra"].items())
        lines.append(f"  certified robust accuracy, by the labels of the file: {shares}")
    if not code:
        apart, smaller = verdict["logits_apart"], verdict["radii_smaller_by"]
        lines.append(f"  logits computed again: at most {apart:.3g} apart; radii at most {smaller:.3g} smaller")
    return lines + [f"  not checked: {what}" for what in verdict["not_checked"]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Re-check a certificate of onelip from its weight file.")
    parser.add_argument("certificate", type=Path)
    for name in ("weights", "config", "images"):
        parser.add_argument(f"--{name}", type=Path, help="this file, if it is not where the certificate says")
    for name, text in (("json", "print JSON"), ("quiet", "show no progress")):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    given = parser.parse_args()
    files = given.weights, given.config, given.images
    return report(given.certificate, *files, as_json=given.json, quiet=given.quiet)
