"""What can go wrong with a run; each message says what was expected, what came, and what to do."""

from onelip._mistake import Mistake


class RecipeError(Mistake, ValueError):
    """A recipe that means nothing: an unknown field, a wrong type, a value out of range, another version."""


class RunError(RuntimeError):
    """A run that cannot start, go on or be read. What was saved before stays."""


class NoRun(Mistake, RunError):
    """A path that holds no run."""


class PlaceTaken(Mistake, RunError):
    """A path to write to that something else has."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written or used."""


class Diverged(RunError):
    """The loss or a weight became NaN or infinite; the last good checkpoint is kept."""


class OtherFailed(RunError):
    """Another of several processes could not go on, and says why; this one has nothing to add."""


class Stopped(RunError):
    """A signal asked the run to end; it was saved and can be gone on with."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
