"""The command line: `onelip VERB ...`, one short file per verb.

A verb is a module with a function `run(arguments) -> exit code`. It imports torch only when it works, so that help
comes at once. Exit codes: docs/cli.md.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from onelip._version import __version__

VERBS = {
    "demo": "the whole way in a minute, on digits that come with the package",
    "train": "train a network, or go on with a run",
    "evaluate": "accuracy and certified robust accuracy of a run",
    "certify": "class and certified radius of images, rounding included; certificate files",
    "check": "check a certificate file, independently of all else",
    "attack": "try to break certified decisions",
    "audit": "what is proved of a network's Lipschitz constant, node by node",
    "export": "plain weights, ONNX, or a directory for a hub",
    "compare": "methods side by side, under one budget, in one table and on one page",
    "data": "data sets: what is there, and fetching",
    "models": "architectures",
    "methods": "ways to make a layer 1-Lipschitz",
}

_HELP = f"""usage: onelip VERB [options]

Neural networks with a proved Lipschitz constant.

{chr(10).join(f"  {verb:<10} {text}" for verb, text in VERBS.items())}

onelip VERB --help tells more. Exit codes: 0 done, 1 it failed or the answer is no, 2 the command makes no sense.
A first run, on digits that come with the package, in about a minute:

  onelip demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors that a user can mend come as one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if given[0] in ("-V", "--version"):
        print(f"onelip {__version__}")
        return 0
    verb, *rest = given
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"onelip: expected a verb of {', '.join(VERBS)}, got {verb!r}{hint}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"onelip.cli.{verb}").run(rest)
    except KeyboardInterrupt:
        print("onelip: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `onelip models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("ONELIP_TRACEBACK"):
            raise
        print(f"onelip {verb}: {error}", file=sys.stderr)
        return code


def _exit_code(error: Exception) -> int | None:
    """2 for a command without sense, 1 for what could not be done, None for a mistake of our own."""
    from onelip.core.errors import RunError, UsageError

    if isinstance(error, UsageError):
        return 2
    if isinstance(error, ImportError):  # ours say what to install; others are a mistake of our own
        return 1 if "pip install" in str(error) else None
    # Everything that onelip refuses (data, layers, models, methods) is a ValueError; OSError is the machine's refusal.
    return 1 if isinstance(error, ValueError | RunError | OSError) else None
