"""Write the page of the site with the help of every command: python tools/cli_reference.py docs/cli-reference.md"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

from onelip.cli import COMMANDS, main


def help_of(command: str) -> str:
    """The text of `onelip COMMAND --help`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    plain = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return re.sub(r"^ ([a-z ]+)\n -+$", r"\1:", plain, flags=re.MULTILINE).strip()


def page() -> str:
    """All commands, in Markdown."""
    commands = [name for name in COMMANDS if name != "data"] + ["data list", "data fetch"]
    parts = [
        "# Command reference",
        "The output of `onelip COMMAND --help`. See [the command line](cli.md) for exit codes.",
    ]
    for command in sorted(commands, key=lambda name: list(COMMANDS).index(name.split()[0])):
        usage, description, *rest = help_of(command).split("\n\n")
        cut = next((i for i, part in enumerate(rest) if re.match(r"[a-z ]+:\n", part)), len(rest))
        prose, options = [description, *rest[:cut]], rest[cut:]
        parts += [f"## onelip {command}", *prose, "```text\n" + "\n\n".join([usage, *options]) + "\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    Path(sys.argv[1]).write_text(page())
