"""Errors of `onelip.data`."""

from onelip.core.errors import UsageError


class DataError(ValueError):
    """Data, or a request for data, that cannot be used."""


class DataNotFound(DataError):
    """A known data set that is in none of the searched directories."""


class UnknownData(UsageError, DataNotFound):
    """Neither the name of a data set nor an existing path."""


class ChecksumError(DataError):
    """A file that is not the official one: truncated, changed, or a different file."""


class FetchError(DataError):
    """An incomplete download; the partial file is kept and resumed if possible."""
