"""The command `python -m fuzz`."""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fuzz import engine, library
from fuzz.case import Outcome

TOTALS = (*engine.COUNTS, "tight", "seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Search for false bounds in onelip.")
    parser.add_argument("--seconds", type=float, default=60, help="how long to draw (default 60)")
    parser.add_argument("--part", default=",".join(engine.PARTS), help="parts, separated by commas (default: all)")
    parser.add_argument("--seed", default="0", help="of all draws; equal seeds draw equal cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file of counts; runs add up in it")
    parser.add_argument("--corpus", type=Path, default=engine.CORPUS, help="where failures are kept")
    parser.add_argument("--replay", type=Path, nargs="+", help="check these files of the corpus, and nothing else")
    given = parser.parse_args(arguments)
    if given.replay:
        return _replay(given.replay)
    parts = given.part.split(",")
    if unknown := {*parts} - {*engine.PARTS}:
        parser.error(f"unknown parts {sorted(unknown)}; choose from {', '.join(engine.PARTS)}")
    started = time.time()
    tallies, failures = _run(given, parts)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": library.commit(),
        "command": f"python -m fuzz {' '.join(sys.argv[1:] if arguments is None else arguments)}",
        "seed": given.seed,
        "jobs": given.jobs,
        "seconds": round(time.time() - started, 1),
        "failures": [failure.splitlines()[0] for failure in failures],
        "parts": tallies,
    }
    total = _publish(given.out, record)
    print(table(tallies))
    if given.out is not None:
        print(f"\nall runs in {given.out}\n{table(total)}")
    for failure in failures:
        print(f"\nFAILED {failure}")
    return 1 if failures or any(t["false"] or t["other"] for t in tallies.values()) else 0


def _replay(paths: list[Path]) -> int:
    failed = 0
    for path in paths:
        outcome = engine.replay(path)
        failed += outcome.failure is not None
        print(f"{path}: {_said(outcome)}")
    return 1 if failed else 0


def _said(outcome: Outcome) -> str:
    return outcome.verdict if outcome.failure is None else f"FAILED, {outcome.failure}: {outcome.message}"


def _run(given: argparse.Namespace, parts: list[str]) -> tuple[dict[str, Any], list[str]]:
    """All processes; one that dies is a failure, with the case it died of."""
    tallies: dict[str, Any] = {}
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, jobs = Path(name), {}
        for job in range(given.jobs):
            place = folder / f"{job}.json", folder / f"{job}.current"
            settings = (f"{given.seed}.{job}", parts, given.seconds, given.corpus, *place)
            jobs[job] = context.Process(target=engine.work_in_process, args=settings), *place
            jobs[job][0].start()
        for process, result, current in jobs.values():
            process.join()
            if result.is_file():
                found = json.loads(result.read_text())
                _add(tallies, found["parts"])
                failures += found["failures"]
            elif current.is_file():
                case = json.loads(current.read_text())
                outcome = Outcome("refused").fail("process died", f"exit code {process.exitcode}")
                path = engine.save(given.corpus, case, outcome, given.seed)
                failures.append(f"process died: {outcome.message}\n    python -m fuzz --replay {path}")
            else:
                failures.append(f"process died before its first case: exit code {process.exitcode}")
    return tallies, list(dict.fromkeys(failures))


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for part, tally in more.items():
        own = total.setdefault(part, dict.fromkeys(TOTALS, 0) | {"labels": {}})
        for key in TOTALS:
            own[key] = round(own[key] + tally[key], 3)
        for label, counts in tally["labels"].items():
            mine = own["labels"].setdefault(label, dict.fromkeys(counts, 0))
            for key, count in counts.items():
                mine[key] = round(mine[key] + count, 3)


def _publish(path: Path | None, record: dict[str, Any]) -> dict[str, Any]:
    """The counts of all runs, with this one added to the file."""
    content = json.loads(path.read_text()) if path is not None and path.is_file() else {"runs": [], "total": {}}
    _add(content["total"], record["parts"])
    without_labels = {part: {key: tally[key] for key in TOTALS} for part, tally in record["parts"].items()}
    content["runs"].append(record | {"parts": without_labels})
    content |= {"command": "python -m fuzz; each run has its own", "torch": metadata.version("torch")}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    return content["total"]


def table(tallies: dict[str, Any]) -> str:
    """Counts of each part, one line each."""
    head = ("part", *engine.COUNTS, "tightness", "per second")
    rows: list[tuple[str, ...]] = [head]
    for part, tally in tallies.items():
        measured = sum(label["measured"] for label in tally["labels"].values())
        tight = f"{tally['tight'] / measured:.3f}" if measured else ""
        speed = f"{tally['tried'] / max(tally['seconds'], 1e-9):.1f}"
        rows.append((part, *(str(tally[key]) for key in engine.COUNTS), tight, speed))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
