"""Flags from a dataclass, by tyro."""

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def parse(kind: type[T], verb: str, arguments: Sequence[str], default: T | None = None) -> T:
    """The dataclass filled from the arguments; help and errors come from its docstrings. Wrong usage exits with 2."""
    import tyro

    settings: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, args=list(arguments), prog=f"onelip {verb}", **settings)
