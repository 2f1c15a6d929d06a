"""Exceptions shared by several packages. This module does not import torch, so the command line starts quickly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
