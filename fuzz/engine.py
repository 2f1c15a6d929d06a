"""Draw cases for a time or a number, count the outcomes, shrink failures and keep them in the corpus."""

import contextlib
import hashlib
import json
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fuzz import forgeries, layers, library, networks, pieces, radii
from fuzz.case import Case, Outcome, crash

PARTS: dict[str, Any] = {
    "layers": layers,
    "networks": networks,
    "radii": radii,
    "forgeries": forgeries,
    "pieces": pieces,
}
SHARES = {"layers": 2, "networks": 4, "radii": 2, "forgeries": 2, "pieces": 1}  # of the time
CORPUS = Path(__file__).parent / "corpus"
SECONDS, MEMORY = 60, 3 * 2**30  # of CPU for one case, and of bytes more than before
SHRINKING = 30  # seconds of CPU for one failure
COUNTS = (
    "tried",
    "refused",
    "unproved",
    "proved",
    "rejected",
    "accepted",
    "unmeasured",
    "invalid",
    "claims",
    "false",
    "other",
)
FALSE = ("false bound", "false radius", "false certificate")


class TooSlow(BaseException):
    """A case took more CPU than any honest one; no `except Exception` on the way takes it for a refusal."""


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Of CPU and memory, for one case: whatever it is, it must end."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {SECONDS} s of CPU")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(case: Case) -> Outcome:
    """The outcome of a case, within limits."""
    try:
        with _limits(), library.quietly():
            return PARTS[case["part"]].check(case)
    except TooSlow as error:
        return Outcome("refused", "limits").fail("too slow", crash(error))
    except MemoryError as error:
        return Outcome("refused", "limits").fail("too much memory", crash(error))


def shrink(case: Case, failure: str, seconds: float = SHRINKING) -> tuple[Case, Outcome]:
    """The smallest case found that fails in the same way."""
    end, outcome = time.process_time() + seconds, check(case)
    progress = True
    while progress:
        progress = False
        for candidate in PARTS[case["part"]].smaller(case):
            if time.process_time() > end:
                return case, outcome
            found = check(candidate)
            if found.failure == failure:
                case, outcome, progress = candidate, found, True
                break
    return case, outcome


def signature(case: Case, failure: str) -> str:
    """Equal for failures that are alike: the case without its numbers."""
    text = json.dumps({k: v for k, v in case.items() if k not in ("seed", "fill", "dtype", "effort")}, sort_keys=True)
    return hashlib.sha256(f"{failure} {re.sub(r'[-0-9.]+', '#', text)}".encode()).hexdigest()[:10]


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def save(folder: Path, case: Case, outcome: Outcome, seed: str) -> Path:
    """A failure as a file of the corpus."""
    name = f"{case['part']}-{(outcome.failure or 'passes').replace(' ', '-')}-{signature(case, outcome.failure or '')}"
    content = {"failure": outcome.failure, "message": outcome.message, "seed": seed, "commit": library.commit()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({**content, "found": datetime.now(UTC).date().isoformat(), "case": case}, indent=1) + "\n"
    )
    return path


class Run:
    """Counts and failures of one process."""

    def __init__(self, seed: str, corpus: Path, current: Path | None = None) -> None:
        self.seed, self.corpus, self.current = seed, corpus, current
        self.tallies: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.alike: dict[str, int] = {}
        self.known = {signature(load(path)["case"], load(path)["failure"] or "") for path in corpus.glob("*.json")}

    def draw(self, part: str, number: int, **settings: Any) -> Outcome:
        """Case `number` of a part; the same at every call with the same seed."""
        tally = self.tallies.setdefault(part, dict.fromkeys(COUNTS, 0) | {"tight": 0.0, "seconds": 0.0, "labels": {}})
        started = time.process_time()
        if block := getattr(PARTS[part], "BLOCK", None):
            settings = settings | {"block": f"{self.seed}/{part}/block {number // block}"}
        with library.quietly():
            case = PARTS[part].draw(random.Random(f"{self.seed}/{part}/{number}"), **settings)
        if self.current is not None:
            self.current.write_text(json.dumps(case))
        outcome = check(case)
        self._count(tally, outcome)
        if outcome.failure is not None:
            self._keep(case, outcome, f"{self.seed}/{part}/{number}")
        tally["seconds"] += time.process_time() - started
        return outcome

    def _count(self, tally: dict[str, Any], outcome: Outcome) -> None:
        tally[outcome.verdict] += 1
        if outcome.verdict == "invalid":
            return
        tally["tried"] += 1
        tally["claims"] += outcome.claims
        tally["tight"] += sum(outcome.tightness)
        label = tally["labels"].setdefault(
            outcome.label, {"tried": 0, "claims": 0, "measured": 0, "tight": 0.0, "failed": 0}
        )
        label["tried"] += 1
        label["claims"] += outcome.claims
        label["measured"] += len(outcome.tightness)
        label["tight"] += sum(outcome.tightness)
        if outcome.failure is not None:
            tally["false" if outcome.failure in FALSE else "other"] += 1
            label["failed"] += 1

    def _keep(self, case: Case, outcome: Outcome, seed: str) -> None:
        """Shrunk and saved, unless failures like it were already."""
        label = "" if outcome.failure == "crash" else outcome.label
        first = f"{case['part']} {outcome.failure} {label} {re.sub(r'[-0-9.e+]+', '#', outcome.message)}"
        self.alike[first] = self.alike.get(first, 0) + 1
        if self.alike[first] > 3 or len(self.failures) >= 50:
            return
        small, found = shrink(case, outcome.failure or "")
        if found.failure is None:  # not to be seen twice: the first sight counts
            small, found = case, outcome
        name = signature(small, found.failure or "")
        if name not in self.known:
            self.known.add(name)
            path = save(self.corpus, small, found, seed)
            self.failures.append(f"{found.failure}: {found.message}\n    python -m fuzz --replay {path}")


def work(seed: str, parts: list[str], stop: Callable[[Run], bool], corpus: Path, current: Path | None = None) -> Run:
    """Draw until a stop request, the parts in turn by their share of the time."""
    torch.set_num_threads(1)
    run, numbers = Run(seed, corpus, current), dict.fromkeys(parts, 0)
    with library.quick_tracing(), library.shared_exports():
        while not stop(run):
            spent = {part: run.tallies.get(part, {"seconds": 0.0})["seconds"] / SHARES[part] for part in parts}
            part = min(parts, key=lambda name: spent[name])
            run.draw(part, numbers[part])
            numbers[part] += 1
    return run


def work_in_process(seed: str, parts: list[str], seconds: float, corpus: Path, result: Path, current: Path) -> None:
    """`work` for some seconds; its counts and failures as a file."""
    end = time.monotonic() + seconds
    run = work(seed, parts, lambda run: time.monotonic() > end, corpus, current)
    result.write_text(json.dumps({"parts": run.tallies, "failures": run.failures}))


def replay(path: Path) -> Outcome:
    """A file of the corpus once more."""
    with library.quick_tracing():
        return check(load(path)["case"])
