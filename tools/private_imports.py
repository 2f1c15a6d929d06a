"""Exit with 1 if a package of onelip imports an underscored module or name of another package."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src"


def private_imports(path: Path) -> Iterator[str]:
    """Messages about one file. `onelip._version` belongs to all packages."""
    own = path.relative_to(ROOT).with_suffix("").parts[:2]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("onelip."):
            continue
        module = (node.module or "").split(".")
        if tuple(module[:2]) == own or module[1] == "_version":
            continue
        names = [
            part
            for part in (*module, *(alias.name for alias in node.names))
            if part.startswith("_") and part != "__main__"
        ]
        if names:
            yield f"{path}:{node.lineno}: {names[0]} is private to onelip.{module[1]}; rename it or use a public name"


if __name__ == "__main__":
    found = [message for path in sorted(ROOT.rglob("*.py")) for message in private_imports(path)]
    print("\n".join(found) or "No package imports private names of another.")
    sys.exit(bool(found))
