"""What cannot be shipped, or not be read back."""

from onelip._mistake import Mistake
from onelip.training.errors import RunError


class ExportError(RunError):
    """An export that cannot be made or used; what was there before stays as it was."""


class ExportTaken(Mistake, ExportError):
    """A place that something else has."""
