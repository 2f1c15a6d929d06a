"""What the tests of training share: a small recipe, and runs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from onelip.training import Recipe

# A few hundred parameters: a step takes milliseconds. Augmented, so that every kind of random number is in play.
SMALL = Recipe(
    data="digits",
    model="patchwise-tiny",
    model_options=("channels=8", "width=2", "convs=1", "linears=1"),
    epochs=3,
    batch_size=250,
    lr=0.05,
    schedule="one-cycle",
    rotation=5.0,
)

SMALL_FLAGS = [
    *("--data", "digits", "--model", "patchwise-tiny"),
    *("--model-options", "channels=8", "width=2", "convs=1", "linears=1"),
    *("--batch-size", "250", "--augment"),
]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONWARNINGS": "error"}


def onelip(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`onelip ...` to its end."""
    command = [sys.executable, "-m", "onelip", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT | environment, timeout=120, check=False
    )


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """`onelip ...`, not waited for."""
    command = [sys.executable, "-m", "onelip", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    return all((one / n).read_bytes() == (other / n).read_bytes() for n in ("weights.safetensors", "plain.safetensors"))
