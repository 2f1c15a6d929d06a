"""`onelip demo`: the whole way on the digits that come with the package, each step a command that can be typed."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onelip.cli._parse import parse


@dataclass(frozen=True)
class Demo:
    """Train on handwritten digits, certify the test images, check the certificate, try to break it: about a minute."""

    out: Path | None = None
    """Directory of the run; runs/demo-1 or the next free number if left out."""
    epochs: int = 35
    """Fewer are faster, and certify less."""


def run(arguments: Sequence[str]) -> int:
    """Run one verb after the other; the first that fails ends it."""
    command = parse(Demo, "demo", arguments)

    from onelip.cli import main

    out = command.out or _new_directory()
    certificate = out / "certificate.json"
    steps = {
        "Train a 1-Lipschitz network.": ["train", "--out", out, "--epochs", command.epochs],
        "Prove its constant, certify every test image.": ["certify", out, "--out", certificate],
        "Check the certificate with a program that shares nothing with the first.": ["check", certificate, "--quiet"],
        "Try to break what was certified.": ["attack", out, "--certificate", certificate],
    }
    for number, (what, words) in enumerate(steps.items(), 1):
        typed = [str(word) for word in words]
        print(f"\n[{number}/{len(steps)}] {what}\n$ onelip {shlex.join(typed)}", flush=True)
        if code := main(typed):
            print(f"onelip demo: step {number} ended with exit code {code}", file=sys.stderr)
            return code
    command = shlex.join(["onelip", "export", str(out), "--format", "onnx", "--out", str(out / "model.onnx")])
    print(f"\nAll files are in {out}. Next: {command}")
    return 0


def _new_directory() -> Path:
    number = next(n for n in range(1, 10**6) if not Path("runs", f"demo-{n}", "config.json").exists())
    return Path("runs", f"demo-{number}")
