"""Ctrl-C and SIGTERM: a wish, heard after the current step. A second Ctrl-C ends at once.

A second SIGTERM does not, and under torchrun neither does a second SIGINT that comes within seconds. That of torch 2.13
starts its processes in sessions of their own, which the terminal's Ctrl-C does not reach, and passes SIGINT on itself;
where a process hears of the same Ctrl-C in both ways, it is still one wish, and the run should be saved.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS_OF_TORCHRUN = 5.0  # in which a second SIGINT under torchrun counts as the first


class StopWish:
    """Holds the number of the signal that came, 0 while there is none."""

    def __init__(self) -> None:
        self.signal_number = 0
        self.heard_at = 0.0  # by time.monotonic


@contextmanager
def listen() -> Iterator[StopWish]:
    """Catch SIGINT and SIGTERM as a wish within the context; what was set before comes back after it."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():  # only there may signals be caught
        yield wish
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: FrameType | None) -> None:
        if not wish.signal_number:
            wish.signal_number, wish.heard_at = number, time.monotonic()
        elif number == wish.signal_number == signal.SIGINT and not _is_echo(wish):
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_echo(wish: StopWish) -> bool:
    """Whether the signal that has just come may be the same wish, told again by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - wish.heard_at < SECONDS_OF_TORCHRUN
