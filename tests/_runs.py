"""Helpers for tests of training: a small recipe, and runs in processes of their own."""

import multiprocessing
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from onelip.training import Display, Recipe, StopRequest
from onelip.training.learner import Learner

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

# Processes are forked from one that has torch loaded: each is real, and can be killed, but starts at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["_runs", "onelip.cli.train", "onelip.training.trainer", "torch._dynamo"])


def onelip(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m onelip ...` to its end."""
    command = [sys.executable, "-m", "onelip", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT | environment, timeout=120, check=False
    )


def call(capsys: Any, *arguments: str | Path) -> tuple[Any, str, str]:
    """`onelip ...` in this process: exit code, standard output, standard error."""
    from onelip.cli import main

    try:
        code = main([str(a) for a in arguments])
    except SystemExit as exit:  # how tyro ends
        code = exit.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def start(
    log: Path,
    *arguments: str | Path,
    interrupt: tuple[str, int, int] | None = None,
    limit: int = 0,
    environment: dict[str, str] | None = None,
) -> ForkServerProcess:
    """`onelip ...` in a process of its own, not waited for; its output goes to a file.

    Args:
        log: that file.
        *arguments: those of the command line.
        interrupt: a function by its module and name, a number n, and a signal that the process sends itself at the n-th
            call of the function; so interruptions come at a known place, however fast the machine is.
        limit: bytes beyond which the system refuses to write a file; 0 for none.
        environment: variables to set.
    """
    process = FORKS.Process(target=_command, args=(log, list(map(str, arguments)), interrupt, limit, environment or {}))
    process.start()
    return process


def finish(log: Path, *arguments: str | Path) -> str:
    """The same, to its end, which must be a good one; returns its output."""
    process = start(log, *arguments)
    process.join(600)
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


def _command(
    log: Path, arguments: list[str], interrupt: tuple[str, int, int] | None, limit: int, environment: dict[str, str]
) -> None:
    import importlib
    import resource

    import torch

    from onelip.cli import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if interrupt:
        path, at, number = interrupt
        where, _, name = path.rpartition(".")
        module = importlib.import_module(where)
        real, calls = getattr(module, name), []

        def interrupted(*arguments: object, **settings: object) -> object:
            calls.append(arguments)
            if len(calls) == at:
                os.kill(os.getpid(), number)
            return real(*arguments, **settings)

        setattr(module, name, interrupted)
    with log.open("a", buffering=1) as out, redirect_stdout(out), redirect_stderr(out):
        code = main(arguments)
    sys.exit(code)


class Interrupted(Exception):
    """Raised between two steps by `Interrupter`."""


class Interrupter(Display):
    """A display that ends the run after a number of steps, as a kill would."""

    def __init__(self, steps: int) -> None:
        super().__init__(None)
        self.left = steps

    def step(self, *args: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def stop_after(monkeypatch: Any, steps: int) -> StopRequest:
    """Train until the run stops itself after this many steps."""
    stop, real, calls = StopRequest(), Learner.step, []

    def step(self: Learner, *arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == steps:
            stop()
        return real(self, *arguments, **settings)

    monkeypatch.setattr(Learner, "step", step)
    return stop


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    return all((one / n).read_bytes() == (other / n).read_bytes() for n in ("weights.safetensors", "plain.safetensors"))
