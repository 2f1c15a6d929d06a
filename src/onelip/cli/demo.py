"""`onelip demo`: train, certify, check, attack and report on the digits of the package, each step a command."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from onelip.cli._common import OptionalPath, new_run_directory, parse


@dataclass(frozen=True)
class Demo:
    """Train on handwritten digits, certify the test images, check the certificate, attack it and write a report.

    It takes one to two minutes.
    """

    out: OptionalPath = None
    """Directory of the run. Default: runs/demo-1, or the next free number."""
    epochs: int = 35
    """Number of epochs."""


def run(arguments: Sequence[str]) -> int:
    """Run one command after the other until one fails."""
    command = parse(Demo, "demo", arguments)

    from onelip.cli import main

    out = command.out or new_run_directory("demo")
    certificate, report = out / "certificate.json", out / "report.html"
    steps = {
        "Train a 1-Lipschitz network.": ["train", "--out", out, "--epochs", command.epochs],
        "Prove its Lipschitz constant and certify every test image.": ["certify", out, "--out", certificate],
        "Check the certificate with an independent program.": ["check", certificate, "--quiet"],
        "Attack the certified decisions.": ["attack", out, "--certificate", certificate],
        "Write a report.": ["report", out, "--out", report],
    }
    for number, (what, words) in enumerate(steps.items(), 1):
        typed = [str(word) for word in words]
        print(f"\n[{number}/{len(steps)}] {what}\n$ onelip {shlex.join(typed)}", flush=True)
        if code := main(typed):
            print(f"onelip demo: step {number} ended with exit code {code}", file=sys.stderr)
            return code
    command = shlex.join(["onelip", "export", str(out), "--format", "onnx", "--out", str(out / "model.onnx")])
    print(f"\nAll files are in {out}. Open {report} in a browser. Next: {command}")
    return 0
