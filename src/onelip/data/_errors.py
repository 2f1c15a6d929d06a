"""The errors of data: each says what was expected, what came, and what to do."""


class DataError(ValueError):
    """Data, or a request for data, that cannot be used as it is."""


class DataNotFound(DataError):
    """A data set that is known but is not in any of the places where it was looked for."""


class ChecksumError(DataError):
    """A file that is not the official one: truncated, changed, or another."""


class FetchError(DataError):
    """A download that did not come to its end. What has come is kept, where it can be gone on with."""
