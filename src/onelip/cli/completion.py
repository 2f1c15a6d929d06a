"""`onelip completion SHELL`: print a script that completes commands and options in a shell."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from onelip.cli._common import parse


@dataclass(frozen=True)
class Completion:
    """Print a completion script for a shell.

    bash: add `source <(onelip completion bash)` to ~/.bashrc. zsh: write the script to a file _onelip in a directory of
    $fpath. fish: write it to ~/.config/fish/completions/onelip.fish.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """Shell to complete in."""


def run(arguments: Sequence[str]) -> int:
    """Print the script."""
    command = parse(Completion, "completion", arguments)

    from onelip.cli import COMMANDS

    options = {name: getattr(importlib.import_module(f"onelip.cli.{name}"), name.capitalize()) for name in COMMANDS}
    tyro.extras.subcommand_cli_from_dict(options, prog="onelip", args=["--tyro-print-completion", command.shell])
    raise AssertionError("tyro exits after printing")
