"""Errors that several packages raise; without torch, so that the command line can import them at once."""


class UsageError(Exception):
    """Marker base class for user errors: an unknown name, a value out of range, a path where nothing is.

    An error carries it besides its own kind. The command line then exits with code 2, as for unknown flags, and with
    code 1 for a job that failed.
    """


class RunError(RuntimeError):
    """A run, or a file that a command reads or writes, cannot be used. What was saved before is unchanged."""


class UnsupportedLayer(ValueError):
    """A layer, or a setting of it, for which the bound does not hold."""


class NonFiniteWeight(ValueError):
    """A weight contains a NaN or an infinity, so the network has no Lipschitz constant."""


class UnknownLipschitzConstant(ValueError):
    """No Lipschitz constant is known for a module: none has been proved, which does not mean that there is none."""


class ProofError(ValueError):
    """A network, or its numbers, for which no statement about the running program can be proved."""


class OutOfRange(ProofError, OverflowError):
    """A number of a proof that float64 cannot represent."""


class CannotTrace(ValueError):
    """A model that has no graph of fixed operations from one tensor to one tensor."""


class ChangingModel(ValueError):
    """A model whose state changes when it runs, or that holds something that cannot be compared."""


class UnsoundBound(RuntimeError):
    """A measured ratio above a proved bound: a mistake in a rule, or in a constant that a module states."""


class RecipeError(UsageError, ValueError):
    """An invalid option or recipe: an unknown name, a wrong type, a value out of range, options that contradict."""


class NoRun(UsageError, RunError):
    """A path that holds no run."""


class PathTaken(UsageError, RunError):
    """A path to write to that something else occupies."""


class CheckpointError(RunError):
    """A checkpoint, or a file of weights, that cannot be written or used."""


class Diverged(RunError):
    """The loss or a weight became NaN or infinite; the last good checkpoint is kept."""


class OtherProcessFailed(RunError):
    """Another of several processes failed and reports why."""


class Stopped(RunError):
    """A run stopped on request; it was saved and can be resumed.

    Attributes:
        signal_number: the signal that requested it.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
