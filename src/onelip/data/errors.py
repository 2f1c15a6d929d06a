"""Errors of `onelip.data`."""

from onelip.core.errors import UsageError


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
