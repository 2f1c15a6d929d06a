"""Time candidates in turn within one run and report medians of the ratios within a round.

The machines are shared and noisy: a ratio within one run can be compared, a time cannot.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


class Timing(NamedTuple):
    """Seconds of one candidate, round by round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: "Timing") -> float:
        """Median of the ratios within each round: the load of the machine changes more slowly than a round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[str, Timing]:
    """Time the candidates in turn, in alternating order; progress goes to stderr."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(-warm_up, rounds):
        for name in names if turn % 2 else reversed(names):
            start = time.perf_counter()
            candidates[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
        print(f"\r  round {max(turn + 1, 0)}/{rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return {name: Timing(values) for name, values in times.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as text."""
    keys = list(rows[0])
    cells = [keys, *([_text(row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def publish(name: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Print the table and write results/NAME.json with the command and the machine."""
    print(table(rows))
    RESULTS.mkdir(exist_ok=True)
    record = {
        "command": " ".join(["python", str(Path(sys.argv[0]).as_posix()), *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        **facts,
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"-> {path.relative_to(RESULTS.parent)}")
