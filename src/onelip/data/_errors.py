"""The errors of data: each says what was expected, what came, and what to do."""

from onelip._mistake import Mistake


class DataError(ValueError):
    """Data, or a request for data, that cannot be used as it is."""


class DataNotFound(DataError):
    """A data set that is known but is not in any of the places where it was looked for."""


class UnknownData(Mistake, DataNotFound):
    """A name that no data set has, and no file either."""


class ChecksumError(DataError):
    """A file that is not the official one: truncated, changed, or another."""


class FetchError(DataError):
    """A download that did not come to its end. What has come is kept, where it can be gone on with."""
