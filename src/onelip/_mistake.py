"""The mark of errors that another command would mend; without torch, as the command line looks for it."""


class Mistake(Exception):
    """What was asked for cannot be meant: an unknown name, a value out of range, a path where nothing is.

    Errors carry it besides their own kind, wherever they are raised; the command line then ends with 2, as for flags
    that it does not know, and with 1 for a job that failed.
    """
