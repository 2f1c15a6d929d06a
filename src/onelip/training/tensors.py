"""Tensors in files: safetensors, written whole, and read only where every name, shape and type is the expected one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from onelip.training.errors import CheckpointError, Diverged, RunError
from onelip.training.files import write_whole

_KINDS = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Header:
    """What a file says of itself before its tensors are read."""

    facts: dict[str, str]
    tensors: dict[str, tuple[tuple[int, ...], str]]  # shape and type by name


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: dict[str, str]) -> None:
    """Write all of it, or leave the file that is there.

    Raises:
        Diverged: if a number is not finite: such a state must not replace a good one.
        CheckpointError: if the disk refuses.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise Diverged(f"expected finite weights, got NaN or infinity in {name!r}")
    # Shared memory and strides are no part of the format: each tensor gets its own contiguous copy.
    own = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    try:
        write_whole(path, save(own, facts))
    except RunError as error:
        kept = "the last good one is kept" if path.exists() else "nothing was saved before"
        raise CheckpointError(f"{error}; {kept}") from error


def read_header(path: Path, format: str) -> Header:
    """Names, shapes and facts of a file of the given format."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            tensors = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected a file of the run, got none") from error
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: replaced by another while it is opened
        raise CheckpointError(
            f"{path}: expected a whole file, got a damaged or truncated one ({error}); restore it from a copy, or "
            "start a new run"
        ) from error
    if facts.get("format") != format:
        raise CheckpointError(
            f"{path}: expected the format {format!r}, got {facts.get('format')!r}; use the onelip that wrote it"
        )
    return Header(facts, tensors)


def read_tensors(path: Path, header: Header, like: Mapping[str, Tensor], also: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file, which must be exactly those of `like`; names that begin with `also` may come besides."""
    got = {name for name in header.tensors if also is None or not name.startswith(also)}
    other = "it is of another architecture; use the config.json that was written with it"
    if missing := sorted(like.keys() - got):
        raise CheckpointError(
            f"{path}: expected a tensor {missing[0]!r}, got none ({len(missing)} are missing); {other}"
        )
    if extra := sorted(got - like.keys()):
        raise CheckpointError(f"{path}: expected only the tensors of the model, got {extra[0]!r} too; {other}")
    for name, tensor in like.items():
        wanted, found = (tuple(tensor.shape), _KINDS.get(tensor.dtype)), header.tensors[name]
        if wanted != found:
            raise CheckpointError(f"{path}: expected {name!r} of {_spoken(wanted)}, got {_spoken(found)}; {other}")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in header.tensors}
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise CheckpointError(f"{path}: expected finite numbers, got NaN or infinity in {name!r}; it is damaged")
    return tensors


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _spoken(kind: tuple[tuple[int, ...], str | None]) -> str:
    shape, name = kind
    return f"shape {'x'.join(map(str, shape)) or 'of a number'} and type {name}"
