"""Exceptions shared by several packages, and argument checks. Without torch, so the command line starts quickly."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class UsageError(Exception):
    """Marker base class for user errors: an unknown name, a value out of range, a path that does not exist.

    Exceptions inherit from it in addition to their own base class. The command line exits with code 2 for these errors,
    as it does for unknown flags, and with code 1 for all other failures.
    """


class RunError(RuntimeError):
    """A run, or a file that a command reads or writes, cannot be used. Previously saved files are unchanged."""


class UnsupportedLayer(ValueError):
    """The bound does not hold for this layer or for one of its settings."""


class NonFiniteWeight(ValueError):
    """A weight contains a NaN or an infinity, so the network has no Lipschitz constant."""


class ProofError(ValueError):
    """The proof of the network's program failed or is not supported."""


class OutOfRange(ProofError, OverflowError):
    """A proof needs a number outside the range of float64."""


class CannotTrace(ValueError):
    """A model that has no graph of fixed operations from one tensor to one tensor."""


class CannotCopy(CannotTrace):
    """A model that contains an object that cannot be copied, such as a generator or a lock."""


class ChangingModel(ValueError):
    """The state of a model changes when it runs, or contains an object that cannot be compared."""


class UnsoundBound(RuntimeError):
    """A measured ratio exceeds a proved bound: a rule, or the constant that a module states, is wrong."""


class RecipeError(UsageError, ValueError):
    """An invalid option or recipe: an unknown name, a wrong type, a value out of range, or conflicting options."""


class NoRun(UsageError, RunError):
    """The path contains no run."""


class PathTaken(UsageError, RunError):
    """The output path already exists."""


class CheckpointError(RunError):
    """A checkpoint or a weight file cannot be written or used."""


class Diverged(RunError):
    """The loss or a weight became NaN or infinite; the last good checkpoint is kept."""


class OtherProcessFailed(RunError):
    """Another process of a distributed run failed; the message contains its error."""


class Stopped(RunError):
    """The run stopped on request; it was saved and can be resumed.

    Attributes:
        signal_number: the signal that requested the stop.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class DataError(ValueError):
    """The data, or a request for data, cannot be used."""


class DataNotFound(DataError):
    """A known data set is in none of the searched directories."""


class UnknownData(UsageError, DataNotFound):
    """The argument is neither the name of a data set nor an existing path."""


class ChecksumError(DataError):
    """The checksum of a file is wrong: it is truncated, changed, or a different file."""


class FetchError(DataError):
    """A download failed; the partial file is kept and resumed if possible."""


def reason(error: Exception) -> str:
    """An error as one line; errors other than those of onelip and the operating system start with their type.

    Examples:
        >>> reason(KeyError("weight"))
        "KeyError: 'weight'"
    """
    text = " ".join(str(error).split())
    ours = type(error).__module__.startswith("onelip.") or type(error) is ValueError
    return text if text and (ours or isinstance(error, OSError)) else f"{type(error).__name__}: {text}"


@contextmanager
def noted_errors(note: Callable[[str], object]) -> Iterator[None]:
    """Within the context, pass the reason of an error to `note` instead of raising it; a stop request is raised.

    Examples:
        >>> with noted_errors(print):
        ...     raise ValueError("no images")
        no images
    """
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        note(reason(error))


# ---- Argument checks whose messages state the expected and the actual value


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`; booleans do not count as integers.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> check_integer("width", 3)
        3
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        wanted = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"expected {name} to be an integer {wanted}, got {value!r}")
    return value


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float if it is a number from `low` (excluded if `open_low`) to `high`; NaN is not.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> check_number("rate", 1, 0, 2)
        1.0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and low <= value <= high and (value > low or not open_low)):
        wanted = f"above {low:g} and at most {high:.3g}" if open_low else f"from {low:g} to {high:.3g}"
        raise ValueError(f"expected {name} to be a number {wanted}, got {value!r}")
    return float(value)


def per_axis(name: str, value: int | Sequence[int], axes: int, minimum: int = 1) -> tuple[int, ...]:
    """Return one integer per axis; a single integer is repeated.

    Raises:
        ValueError: for anything else, and for integers below `minimum`.

    Examples:
        >>> per_axis("stride", 2, 3)
        (2, 2, 2)
    """
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes or any(isinstance(n, bool) or not isinstance(n, int) or n < minimum for n in sizes):
        raise ValueError(f"expected {name} to be 1 or {axes} integers, each at least {minimum}, got {value!r}")
    return sizes


def check_name_free(name: str, new: Callable[..., object], registered: Mapping[str, Callable[..., object]]) -> None:
    """Check that no other function or class is registered under a name.

    The same one may be registered again: a notebook cell is run twice, or a module is reloaded.

    Raises:
        ValueError: if the name is taken.
    """
    known = registered.get(name)
    if known is not None and (taken := _qualified(known)) != _qualified(new):
        raise ValueError(f"the name {name!r} is taken by {taken}; choose another name")


def _qualified(function: Callable[..., object]) -> str:
    """Return the full name of a function or class; other callables have none."""
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that lists the known names, and the closest one, for any other name.

    Raises:
        RecipeError: if the name is unknown.
    """
    names = list(known)
    if name not in names:
        raise RecipeError(f"unknown {kind} {name!r}; known: {', '.join(names)}{did_you_mean(name, names)}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known name, to append to an error message; empty if none is close.

    Examples:
        >>> did_you_mean("epoch", ["epochs", "lr"])
        "; did you mean 'epochs'?"
    """
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
