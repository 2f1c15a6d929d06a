"""Device, threads and communication of one or several training processes, and stop requests.

torchrun sets environment variables that identify each process; without them there is one process.
"""

import ctypes
import gc
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onelip.core.errors import OtherProcessFailed, RecipeError, RunError, Stopped

T = TypeVar("T")

_BLOCKED_SECONDS = 3.0  # that a signal may wait for the end of a library call
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of mallopt in glibc
_TORCHRUN_SECONDS = 5.0  # a second SIGINT within this time under torchrun is the first one, forwarded


@dataclass(frozen=True)
class Process:
    """This process of a distributed run.

    Attributes:
        device: device of this process.
        rank: rank of this process.
        count: number of processes.
    """

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that logs, evaluates and writes files."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process in all processes."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def run_on_all(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work` in all processes; if it fails in one, it fails in all.

        If only one process raised an error (when writing a file, for example), the others would lose the connection in
        the middle of a step, and their tracebacks would hide the reason.

        Raises:
            OtherProcessFailed: in all processes but the first one that failed, which raises its own error.
        """
        if self.count == 1:
            return work(*arguments)
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work(*arguments))
        except Exception as error:
            failure = error
        failed: list[Any] = [None] * self.count
        dist.all_gather_object(failed, None if failure is None else str(failure))
        first = next((rank for rank, text in enumerate(failed) if text is not None), None)
        if first is None:
            return result[0]
        if failure is not None and first == self.rank:
            raise failure
        raise OtherProcessFailed(f"process {first} failed: {failed[first]}") from failure

    def max_over_ranks(self, *values: int) -> list[int]:
        """Return the maximum of each value over all processes."""
        if self.count == 1:
            return list(values)
        box = torch.tensor(values, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return box.tolist()

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes in place, and return it."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor


def keep_freed_memory() -> None:
    """Tell the C library to keep freed blocks for the next step, whatever their size; for a process that only trains.

    glibc returns large blocks to the system, and each step then touches thousands of new pages: a tenth of the time
    of a step of `aol-fast-huge` on a virtual machine. Without glibc nothing is changed.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other libraries number the parameters differently
        library.mallopt(_M_MMAP_THRESHOLD, 2**30)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def processes(device: str) -> Iterator[Process]:
    """Connect to the other processes, if any, within the context; yields the `Process`.

    Contexts can be nested: the outermost one connects, because a store of torchrun can be used for one group only.

    Args:
        device: name of the device, or "auto".
    """
    count, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = find_device(device, local_rank if count > 1 else None)
    if count == 1:
        yield Process(chosen)
        return
    if dist.is_initialized():
        yield Process(chosen, rank, count)
        return
    # The timeout is long because the other processes wait while the first one evaluates.
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=4))
    # The C++ part of DistributedDataParallel holds a reference to the group. If that reference were the last one, its
    # destructor would wait for the group's threads while it holds the GIL, which they may need: a deadlock. So all
    # networks are released before the group, including those in frames of an exception and in reference cycles.
    try:
        with warnings.catch_warnings():
            # The warning is caused by kernels of one tap, whose axes of length one can have any stride.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            yield Process(chosen, rank, count)
    except BaseException as error:
        _clear_frames(error)
        if _is_lost_connection(error):
            raise RunError(
                f"process {rank} of {count} lost the connection to another process, which has ended; see its message"
            ) from error
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error means only that another process has ended; gloo has no exception type for it."""
    if not isinstance(error, RuntimeError) or os.environ.get("ONELIP_TRACEBACK"):
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))


def _clear_frames(error: BaseException) -> None:
    """Release the local variables in the frames of an error, its causes and its contexts."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()  # chains can be circular
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            waiting += [link.__cause__, link.__context__]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use this number of threads within the context; 0 keeps the current setting."""
    before = torch.get_num_threads()
    if count:  # even setting the current number changes how torch's libraries use them: see fourier/matrix_functions.py
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device with this name; "auto" is a GPU if there is one.

    Args:
        name: name of the device.
        local_rank: index of the GPU for this process; None for a single process.

    Raises:
        RecipeError: if the device is unknown or not available.

    Examples:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}; use cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RecipeError(f"device {name!r} is not available: torch finds no GPU; use cpu")
        if local_rank is not None:
            device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise RecipeError(f"device {name!r} is not available on this machine; use cpu")
    elif device.type not in ("cpu", "mps"):
        raise RecipeError(f"cannot train on device {name!r}; use cpu, cuda or mps")
    return device


class StopRequest:
    """A request to stop a run after the current step; pass it to `onelip.train` and call it, e.g. from another thread.

    Attributes:
        signal_number: the signal that requested the stop; 0 while there is no request.

    Examples:
        >>> stop = StopRequest()
        >>> stop()
        >>> stop.signal_number == signal.SIGTERM
        True
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.requested_at = 0.0  # time.monotonic
        self.at_once = False  # whether a signal raises `Stopped` where it is not deferred
        self.is_deferred = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the context, a signal only sets the request, which the trainer reads after each step."""
        before, self.is_deferred = self.is_deferred, True
        try:
            yield
        finally:
            self.is_deferred = before

    def raise_if_at_once(self) -> None:
        """Raise `Stopped` for a request that was deferred, if signals raise; call it when the state is saved."""
        if self.at_once and self.signal_number:
            raise Stopped("stopped and saved", self.signal_number)

    def __call__(self, signal_number: int = signal.SIGTERM) -> None:
        if not self.signal_number:
            self.signal_number, self.requested_at = signal_number, time.monotonic()


@contextmanager
def stop_on_signals(*, at_once: bool = False) -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a stop request within the context; previous handlers are restored at the end.

    With `at_once`, a signal outside of the steps of training (while data are loaded, a network is built or evaluated)
    raises `Stopped` in one process. If a single call of a library blocks that for more than a few seconds, the process
    is ended. Several processes finish their step together, so that none waits for another.

    A second Ctrl-C raises KeyboardInterrupt; a second SIGTERM does not. Under torchrun, a second SIGINT within a few
    seconds does not either: torchrun forwards the SIGINT that a process may also receive from the terminal, so both are
    one request, and the run is saved.

    Examples:
        >>> with stop_on_signals() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.signal_number == signal.SIGTERM
        True
    """
    request = StopRequest()
    request.at_once = at_once and os.environ.get("WORLD_SIZE", "1") == "1"
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: FrameType | None) -> None:
        if number == request.signal_number == signal.SIGINT and not _is_forwarded(request):
            raise KeyboardInterrupt
        is_first = not request.signal_number
        request(number)
        if request.at_once and is_first and not request.is_deferred:
            raise Stopped("stopped", number)

    for number in before:
        signal.signal(number, handle)
    try:
        with _watchdog(request) if request.at_once else nullcontext():
            yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watchdog(request: StopRequest) -> Iterator[None]:
    """End the process if it is still running a few seconds after a signal outside of a step.

    Python handlers wait for the end of a library call, and a library can catch the exception that they raise. The C
    handler of Python writes the number of each signal to a socket at once; a thread reads it.
    """
    over = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM) or request.is_deferred:
                continue
            if not over.wait(_BLOCKED_SECONDS) and not request.is_deferred:
                os.write(2, b"onelip: stopped\n")
                os._exit(128 + number[0])

    with reader:
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            over.set()
            writer.close()  # ends the thread
            thread.join()


def _is_forwarded(request: StopRequest) -> bool:
    """Whether a second signal may be the first one, forwarded by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - request.requested_at < _TORCHRUN_SECONDS
