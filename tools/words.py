"""Check the sources for words that readers have to translate. `make lint` runs it; exit code 1 if it finds any.

python tools/words.py            all sources and documents
python tools/words.py src/x.py   these files or directories
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("src", "docs", "tests", "tools", "examples", "benchmarks", "fuzz")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile")

# A pattern, and the usual terms for it.
WORDS = {
    r"vouch": "prove; no bound is known; unproved",
    r"\bdear(er|est|ly)?\b": "expensive, costly",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(come|comes|came) by\b": "obtain",
    r"\b(go|goes|gone|went|going) on with\b": "resume, continue",
    r"\b(told|spoken|speaks? of)\b": "reports, states, contains",
    r"\bsome \d+(\.\d+)?e-": "about",
    r"\bbegun\b": "started, initialised",
    r"\bmakes? no sense\b": "invalid",
    r"\btwins?\b": "baseline, unconstrained network",
    r"\blook(s|ed)? at with\b|\bwhat is looked at\b": "evaluated",
    r"\bno trifle\b": "not negligible",
    r"\bfor want of\b": "missing",
    r"\b(nobody|whoever)\b": "name the subject",
    r"\banew\b": "again",
    r"\bwhat came of\b": "the result",
    r"\bleft alone\b": "unchanged, skipped",
    r"\bparted\b": "split",
    r"\bverbs?\b": "function, command",
}


def violations(path: Path) -> Iterator[str]:
    """Yield a line for each match in a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for pattern, usual in WORDS.items():
            if found := re.search(pattern, line, re.IGNORECASE):
                yield f"{path}:{number}: {found[0]!r}; write: {usual}"


def files(places: list[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files in these files and directories, except this tool and its test."""
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if (path == place or path.suffix in (".py", ".md")) and path.name not in ("words.py", "test_words.py"):
                yield path


def main() -> int:
    places = [Path(place) for place in sys.argv[1:] or (*SOURCES, *DOCUMENTS)]
    found = [line for path in files(places) for line in violations(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
