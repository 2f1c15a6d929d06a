"""One process or many: who this one is, what it computes on, and the few things that all must agree on.

torchrun tells each process who it is by environment variables; without them there is one process.
"""

import gc
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onelip.training.errors import OtherFailed, RecipeError, RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process among `count`."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that logs, evaluates and writes."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """What the first process has, for all."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do what may fail in one process alone (files, mostly). If it does, all fail, and one says why.

        Were one to leave by itself, the others would lose the connection in the middle of a step, and their
        tracebacks would bury the reason.

        Raises:
            OtherFailed: in all processes but the first of those that failed; that one raises its own error.
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
        speaker = next((rank for rank, text in enumerate(failed) if text is not None), None)
        if speaker is None:
            return result[0]
        if failure is not None and speaker == self.rank:
            raise failure
        raise OtherFailed(f"process {speaker} failed: {failed[speaker]}") from failure

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over all processes: what one wants (to stop, to save), all do after this step."""
        if self.count == 1:
            return list(values)
        box = torch.tensor(values, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return box.tolist()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor


@contextmanager
def processes(device: str) -> Iterator[Process]:
    """Join the other processes, if there are any, for as long as the context lasts."""
    count, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = find_device(device, local_rank if count > 1 else None)
    if count == 1:
        yield Process(chosen)
        return
    # Hours: the others wait while the first evaluates.
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=4))
    # The C++ part of DistributedDataParallel holds the group. Were it the last to let go of it, it would wait for the
    # group's threads while it keeps Python's lock, and they may wait for that lock: seen as a process that never ends.
    # So every network goes before the group: those that an exception's frames keep, and those in cycles.
    try:
        with warnings.catch_warnings():
            # It means kernels of one tap: the strides of their axes of length one say nothing.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            yield Process(chosen, rank, count)
    except BaseException as error:
        clear_frames(error)
        if _is_lost_connection(error):
            raise RunError(
                f"process {rank} of {count} lost the connection to another, which ended; its own message says why"
            ) from error
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error only says that another process is gone; gloo has no type of its own for that."""
    if not isinstance(error, RuntimeError) or os.environ.get("ONELIP_TRACEBACK"):
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, and those of all errors that it was raised from or during."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()  # chains may go round in a circle
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            waiting += [link.__cause__, link.__context__]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with so many threads within the context; 0 leaves the number as it is."""
    before = torch.get_num_threads()
    if count:  # to set what is set already would change how torch's libraries use them: `onelip.methods._inverse`
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that a recipe names; "auto" is a GPU if there is one.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"expected a device as torch names them (cpu, cuda, cuda:1, mps), got {name!r}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RecipeError(f"expected a device of this machine, got {name!r}, and torch sees no GPU; use cpu")
        if local_rank is not None:
            device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise RecipeError(f"expected a device of this machine, got {name!r}, which torch does not see; use cpu")
    elif device.type not in ("cpu", "mps"):
        raise RecipeError(f"expected a device to train on (cpu, cuda, mps), got {name!r}")
    return device
