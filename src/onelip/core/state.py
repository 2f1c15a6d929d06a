"""Detect whether running a model changes its state, and restore that state.

Everything that is reachable from the model is read before the run and compared after it: parameters, buffers, all
attributes and their contents, attributes of its classes, closures and default arguments of its functions, and the
global names that its own code uses. The random states of Python, NumPy and torch and torch's default dtype are compared
too. State outside of these (files, the clock, the memory of a C library) is not detected.
"""

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from onelip.core.contents import Copies, Incomparable, Parts, is_value, parts_of, same_value
from onelip.core.errors import ChangingModel

# Limit on the number of objects that are reached only through global names.
_MOST_SHARED = 100_000
_DICTIONARIES = ("._parameters", "._buffers", "._modules")


@dataclass
class _Read:
    obj: Any
    path: str
    parts: Parts
    is_cache: bool


class Snapshot:
    """Snapshot of everything that is reachable from a model.

    Args:
        model: the model.
        path: its name, if it is a submodule of another model.

    Raises:
        ChangingModel: if the model contains an object that cannot be compared.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> state = Snapshot(model)
        >>> model.history = [1]
        >>> state.difference()
        "'history' (new)"
        >>> state.restore()
        >>> hasattr(model, "history")
        False
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self._read: dict[int, _Read] = {}
        self._copies = Copies(state._copies for state in _ACTIVE.get())
        self._walk(model, f".{path}" if path else "")
        self._ambient = _Ambient()

    def holds(self, obj: Any) -> bool:
        """Whether the object is reachable from the model."""
        return id(obj) in self._read

    def _walk(self, model: nn.Module, start: str) -> None:
        # (object, path, label, whether it is reached through a global name, whether it is a cache of onelip)
        waiting: deque[tuple[Any, str, str, bool, bool]] = deque([(model, start, "", False, False)])
        shared = 0
        while waiting:
            obj, path, label, is_shared, is_cache = waiting.popleft()
            if is_value(obj) or id(obj) in self._read:
                continue
            shared += is_shared
            if shared > _MOST_SHARED:
                raise ChangingModel(
                    f"expected at most {_MOST_SHARED:,} objects in the global names that the model uses, got more, up "
                    f"to {_format_path(path)}: they cannot all be compared before and after a call"
                )
            try:
                parts = parts_of(obj, self._copies)
            except Incomparable as error:
                if is_shared and not label.startswith(" (global"):
                    continue
                raise ChangingModel(
                    f"expected attributes that can be compared before and after a call, got {type(obj).__name__} in "
                    f"{_format_path(path)} ({error}); move it out of the model, or store its numbers in buffers "
                    "(register_buffer)"
                ) from error
            self._read[id(obj)] = _Read(obj, path, parts, is_cache)
            caches = _caches(obj)
            for label, child in parts.children:
                is_global = is_shared or label.startswith(" (global")
                waiting.append((child, _join(path, obj, label), label, is_global, is_cache or label in caches))

    def check(self, among: Iterable[Any] | None = None) -> None:
        """Check that the model has not changed.

        Args:
            among: parts of the model to check; everything by default.

        Raises:
            ChangingModel: if it has; the message names the first change.
        """
        if (changed := self.difference(among)) is not None:
            way_out = "recompute the value in every call, or store it outside the model"
            if "parametrizations" in changed:  # a power iteration that goes on, say
                way_out = "store the weights with torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            raise ChangingModel(
                f"expected a model that is the same function at every call, got one that changes {changed} when it "
                f"runs in eval mode; {way_out}"
            )

    def difference(self, among: Iterable[Any] | None = None) -> str | None:
        """Return a short description of the first change, in the model or among parts of it; None without a change."""
        compared: set[tuple[int, int]] = set()
        for read in list(self._read.values()) if among is None else [self._read[id(obj)] for obj in among]:
            if read.is_cache:
                continue
            try:
                now = parts_of(read.obj)
            except Incomparable:
                return _format_path(read.path)
            found = self._compare(read, now, read.path, compared)
            if found is not None:
                return found
        return self._ambient.difference() if among is None else None

    def _compare(self, read: _Read, now: Parts, path: str, compared: set[tuple[int, int]]) -> str | None:
        if read.parts.fixed != now.fixed:
            return _format_path(path)
        caches = _caches(read.obj)
        before = {label: child for label, child in read.parts.children if label not in caches}
        after = {label: child for label, child in now.children if label not in caches}
        for label in (*before, *after):
            place = _join(path, read.obj, label)
            if label not in after:
                return f"{_format_path(place)} (removed)"
            if label not in before:
                return f"{_format_path(place)} (new)"
        if list(before) != list(after):
            return f"{_format_path(path)} (another order)"
        for label, child in before.items():
            found = self._same(child, after[label], _join(path, read.obj, label), compared)
            if found is not None:
                return found
        return None

    def _same(self, before: Any, after: Any, path: str, compared: set[tuple[int, int]]) -> str | None:
        if before is after:  # its contents are compared separately
            return None
        if type(before) is not type(after) or is_value(before):
            short = f"{_format_path(path)} (from {_brief(before)} to {_brief(after)})"
            return None if same_value(before, after) else short
        known = self._read.get(id(before))
        if known is None or known.is_cache or (id(before), id(after)) in compared:
            return None
        compared.add((id(before), id(after)))
        try:
            return self._compare(known, parts_of(after), path, compared)
        except (Incomparable, RecursionError):
            return _format_path(path)

    def draws(self) -> bool:
        """Whether torch has drawn random numbers since the snapshot."""
        return self._ambient.draws()

    def restore(self) -> None:
        """Restore everything bit for bit, including state shared with other models, such as class attributes."""
        moved = {key: copy.deepcopy(read.parts.spare) for key, read in self._read.items() if self._has_moved(read)}
        for read in self._read.values():
            if read.parts.restore is not None:
                read.parts.restore(lambda child: moved.get(id(child), child))
        self._ambient.restore()

    def _has_moved(self, read: _Read) -> bool:
        return read.parts.spare is not None and bool(self._compare(read, parts_of(read.obj), read.path, set()))


_ACTIVE: ContextVar[tuple[Snapshot, ...]] = ContextVar("snapshots of models under way", default=())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Snapshot]:
    """Restore the state of a model at the end of the block.

    Yields its `Snapshot`. A nested block for the same model, or for a part of it, yields that of the outer block.

    Raises:
        ChangingModel: if the model contains an object that cannot be compared.

    Examples:
        >>> model = nn.BatchNorm1d(2)
        >>> with unchanged(model) as state:
        ...     _ = model(torch.rand(4, 2))
        ...     state.difference()
        "'running_mean'"
        >>> model.running_mean
        tensor([0., 0.])
    """
    active = _ACTIVE.get()
    outer = next((state for state in active if state.holds(model)), None)
    if outer is not None:
        yield outer
        return
    state = Snapshot(model)
    token = _ACTIVE.set((*active, state))
    try:
        with uncached():
            yield state
    finally:
        _ACTIVE.reset(token)
        state.restore()


@contextmanager
def uncached() -> Iterator[None]:
    """Disable `torch.nn.utils.parametrize.cached` inside the block.

    Its entries are keyed by object ids, not by models, and may be older than the parameters.
    """
    module: Any = parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


class _Ambient:
    """Random states and settings of the process that a forward pass may read and change."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state()  # noqa: NPY002  models may use the global generator
        self.torch = torch.get_rng_state()
        self.dtype = torch.get_default_dtype()

    def difference(self) -> str | None:
        """Return the name of the first state that has changed, or None."""
        now = _Ambient()
        if self.python != now.python:
            return "the random state of Python"
        if any(not np.array_equal(a, b) for a, b in zip(self.numpy, now.numpy, strict=True)):
            return "the random state of NumPy"
        if self.dtype != now.dtype:
            return "torch's default dtype"
        return None

    def draws(self) -> bool:
        """Whether the random state of torch has changed."""
        return not torch.equal(self.torch, torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)
        torch.set_default_dtype(self.dtype)


def _caches(obj: Any) -> tuple[str, ...]:
    """Labels of the attributes that are caches, computed from the other attributes; only in classes of onelip."""
    kind = type(obj)
    return getattr(kind, "_caches", ()) if f"{kind.__module__}".startswith("onelip.") else ()


def _join(path: str, obj: Any, label: str) -> str:
    if isinstance(obj, nn.Module) and label in _DICTIONARIES:
        return f"{path}\0"  # their entries are named like attributes of the module
    if path.endswith("\0"):
        return f"{path[:-1]}.{label[2:-2]}"
    return path + label


def _format_path(path: str) -> str:
    path = path.replace("\0", "").strip().removeprefix(".")
    return repr(path) if path else "the model"


def _brief(value: Any) -> str:
    return f"{value!r:.40}" if is_value(value) else type(value).__name__
