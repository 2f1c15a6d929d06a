"""The command: `python -m onelip.checker cert.json`, or `python -m checker cert.json` beside a copy of this folder."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .certificate import Say, check
from .reading import Rejected


def judge(path: Path, *files: Path | None, say: Say) -> tuple[dict[str, Any], int]:
    """The verdict on a certificate, and the exit code; the files are those of `check`."""
    try:
        found = check(path, *files, say=say)
        return found, 0 if found["logits_checked"] else 3
    except Rejected as error:
        return {"accepted": False, "reason": str(error)}, 1
    except (OSError, ImportError, MemoryError) as error:
        advice = "; pip install python-flint" if isinstance(error, ImportError) else ""
        return {"accepted": False, "reason": f"{error}{advice}"}, 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Re-check a certificate of onelip from its weight file.")
    for name in ("certificate", "--weights", "--config", "--images"):
        parser.add_argument(name, type=Path, help="this file, if it is not where the certificate says" * (name > "c"))
    verdict, code = judge(*vars(parser.parse_args()).values(), say=lambda text: print(text, file=sys.stderr))
    print(json.dumps(verdict, indent=1))  # in ASCII, so that a file cannot put a verdict of its own here
    return code


if __name__ == "__main__":
    sys.exit(main())
