"""The command `python -m onelip.checker cert.json`, or `python -m checker cert.json` next to a copy of this folder."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .certificate import check
from .reading import Rejected


def verdict(path: Path, *files: Path | None, **options: Any) -> tuple[dict[str, Any], int]:
    """Return the verdict on a certificate and the exit code. The arguments are those of `check`."""
    try:
        found = check(path, *files, **options)
        return found, 0 if found["logits_checked"] else 3
    except Rejected as error:
        return {"accepted": False, "reason": str(error)}, 1
    except (OSError, ImportError, MemoryError) as error:
        advice = "; pip install python-flint" if isinstance(error, ImportError) else ""
        return {"accepted": False, "reason": f"{error or 'out of memory'}{advice}"}, 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a certificate of onelip from its weight file.")
    parser.add_argument("path", type=Path, metavar="certificate")
    for name in ("--weights", "--config", "--images"):
        parser.add_argument(name, type=Path, help="this file, if it is not at the path in the certificate")
    parser.add_argument("--max-minutes", type=float, help="limit of the estimated work, in minutes of one core")
    parser.add_argument("--max-memory", type=float, default=4.0, help="limit of the estimated memory, in gigabytes")
    found, code = verdict(**vars(parser.parse_args()), log=lambda topic, message: print(message, file=sys.stderr))
    print(json.dumps(found, indent=1))  # in ASCII, so that text in a file cannot imitate a verdict
    return code


if __name__ == "__main__":
    sys.exit(main())
