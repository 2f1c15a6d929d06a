"""Helpers for tests of distributed training: two processes that know of each other as torchrun would arrange it."""

import socket
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from _runs import start
from safetensors.torch import load_file


def free_port() -> str:
    """A port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_pair(
    log: Path, *arguments: str | Path, interrupts: dict[int, tuple[str, int, int]] | None = None, limit: int = 0
) -> list[ForkServerProcess]:
    """`onelip ...` in two processes, not waited for; their output goes to log0 and log1 beside `log`.

    Args:
        log: see above.
        *arguments: those of the command line.
        interrupts: by rank, see `_runs.start`.
        limit: see `_runs.start`.
    """
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        start(
            log.with_name(f"log{rank}"),
            *arguments,
            interrupt=(interrupts or {}).get(rank),
            limit=limit,
            environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]


def join_pair(log: Path, processes: list[ForkServerProcess]) -> tuple[list[int | None], list[str]]:
    """Exit codes and outputs of both."""
    for process in processes:
        process.join(600)
    return [process.exitcode for process in processes], [log.with_name(f"log{rank}").read_text() for rank in (0, 1)]


def finish_pair(log: Path, *arguments: str | Path) -> None:
    """Two processes, to their end, which must be a good one."""
    codes, texts = join_pair(log, start_pair(log, *arguments))
    assert codes == [0, 0], texts


def assert_close(one: Path, other: Path) -> None:
    """Two runs have the same final weights, up to the order of sums."""
    ours, theirs = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
