"""Ctrl-C and SIGTERM: a wish, heard after the current step. A second Ctrl-C ends at once.

A second SIGTERM does not: torchrun sends one after the terminal's Ctrl-C has reached all processes already.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopWish:
    """Holds the number of the signal that came, 0 while there is none."""

    def __init__(self) -> None:
        self.signal_number = 0


@contextmanager
def listen() -> Iterator[StopWish]:
    """Catch SIGINT and SIGTERM as a wish within the context; what was set before comes back after it."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():  # only there may signals be caught
        yield wish
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and wish.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        wish.signal_number = wish.signal_number or number

    for number in before:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
