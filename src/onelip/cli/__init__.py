"""The command line: `onelip COMMAND ...`, one module for each command.

A command is a module with a dataclass of its options, which has the name of the command, and a function
`run(arguments)` that returns the exit code. It imports torch inside that function, so that `--help` is fast. The exit
codes are in docs/cli.md.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from onelip._version import __version__

COMMANDS = {
    "demo": "train, certify, check, attack and report on handwritten digits",
    "train": "train a network, or resume a run",
    "predict": "predict the class and a certified radius of new images",
    "evaluate": "compute accuracy and certified robust accuracy of a run",
    "certify": "compute certified radii of images, and write certificate files",
    "check": "check a certificate file with the independent checker",
    "attack": "attack the certified decisions of a run",
    "report": "write a page about one or several runs",
    "audit": "prove the Lipschitz constant of any network, layer by layer",
    "export": "export a network as plain weights, as ONNX or for a hub",
    "tryit": "write a page that runs a network in the browser",
    "compare": "train the same network with several methods and compare them",
    "zoo": "list the trained networks of the package, or describe one",
    "reproduce": "reproduce the tables and figures of the paper",
    "data": "list data sets, or download one",
    "models": "list the architectures, or describe one",
    "methods": "list the methods that make a layer 1-Lipschitz, or describe one",
    "completion": "print a completion script for a shell",
}

_HELP = f"""usage: onelip COMMAND [options]

Neural networks with a proved Lipschitz constant.

{chr(10).join(f"  {name:<11} {text}" for name, text in COMMANDS.items())}

Options of a command: onelip COMMAND --help. Start with: onelip demo
Every command takes --import MODULE: a Python module that registers models, methods or losses of your own.
Exit codes: 0 success; 1 the command failed, or its answer is no; 2 usage error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. User errors are printed as one line, without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if given[0] in ("-V", "--version"):
        print(f"onelip {__version__}")
        return 0
    command, *rest = given
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"onelip: unknown command {command!r}; {hint}", file=sys.stderr)
        return 2
    try:
        modules, rest = _split_imports(rest)
        if modules:
            from onelip.core.imports import import_modules

            import_modules(modules)
        return importlib.import_module(f"onelip.cli.{command}").run(rest)
    except KeyboardInterrupt:
        print("onelip: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output is gone: `onelip models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("ONELIP_TRACEBACK"):
            raise
        print(f"onelip {command}: {error}", file=sys.stderr)
        return code


def _split_imports(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The values of all options --import, and the other arguments."""
    modules, others, left = [], [], iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if name != "--import":
            others.append(argument)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("-"):
            from onelip.core.errors import RecipeError

            raise RecipeError("--import needs the name of a module, such as --import my_models")
        modules.append(value)
    return modules, others


def _exit_code(error: Exception) -> int | None:
    """2 for a usage error, 1 for a failure that the message explains, None for a bug of onelip."""
    from onelip.core.errors import RunError, UsageError

    if isinstance(error, UsageError):
        return 2
    if isinstance(error, ImportError):  # those of onelip name the package to install
        return 1 if "pip install" in str(error) else None
    if isinstance(error, RunError | OSError):  # an OSError is a failure of the machine
        return 1
    # Data, layers, models and methods are refused with a ValueError. One that another package raised is a bug.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return 1 if isinstance(error, ValueError) and frame.f_globals["__name__"].startswith("onelip.") else None
