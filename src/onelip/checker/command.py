"""The command: `python -m onelip.checker cert.json`, or `python -m checker cert.json` beside a copy of this folder."""

import argparse
import json
import sys
from pathlib import Path

from .certificate import check
from .reading import Rejected, Unreadable


def report(path: Path, *files: Path | None, as_json: bool = False, quiet: bool = False) -> int:
    """Check, print the verdict, give the exit code; the files are those of `check`, in its order."""
    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    reason, code, verdict = "", 0, {}
    try:
        verdict = check(path, *files, say=say)
    except Unreadable as error:
        reason, code = str(error), 2
    except ImportError as error:
        reason, code = f"{error}; pip install python-flint", 2
    except Rejected as error:
        reason, code = str(error), 1
    except Exception as error:  # what nobody thought of is no proof either
        reason, code = f"malformed ({type(error).__name__}: {error})", 1
    if code:  # in one line of plain characters, so that a file cannot put a verdict of its own here
        verdict = {"accepted": False, "reason": "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)}
    if as_json:
        print(json.dumps(verdict))
    elif code:
        print(f"{'REJECTED' if code == 1 else 'NOT CHECKED'}: {verdict['reason']}")
    else:
        what = "ACCEPTED" if verdict["logits_checked"] else "BOUNDS ACCEPTED, LOGITS NOT CHECKED; if they are right"
        print(f"{what}: {verdict['certified']} of {verdict['count']} images are certified, for the float64 program.")
        numbers = f"Lipschitz constant <= {verdict['lipschitz']!r}, error of the logits <= {verdict['error']:.3g}"
        print(f"  proved: {numbers}")
        if verdict["cra"]:
            shares = ", ".join(f"{r}: {v:.2%}" for r, v in verdict["cra"].items())
            print(f"  certified robust accuracy, by the labels of the file: {shares}")
        if "logits_apart" in verdict:
            print(f"  logits computed again: at most {verdict['logits_apart']:.3g} apart; radii from them are at most")
            print(f"  {verdict['radii_smaller_by']:.3g} smaller")
        print(*(f"  not checked: {text}" for text in verdict["not_checked"]), sep="\n")
    return code if code or verdict["logits_checked"] else 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Re-check a certificate of onelip from its weight file.")
    parser.add_argument("certificate", type=Path)
    for name, text in (("weights", "the weight file"), ("config", "the configuration")):
        parser.add_argument(f"--{name}", type=Path, help=f"{text}, if it is not beside the certificate")
    parser.add_argument("--images", type=Path, help="the images (.npy), if they are not where the certificate says")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    a = parser.parse_args()
    return report(a.certificate, a.weights, a.config, a.images, as_json=a.json, quiet=a.quiet)
