"""Checkpoints: the state of a run between two steps, as one safetensors file with a JSON header; nothing is pickled.

A checkpoint contains everything that the next step depends on: parameters and buffers, the state of the optimizer, the
states of the random generators, and the position of the run. The learning rate is a function of the step and needs no
state. For the data, it stores the state of the generator at the *start* of the epoch; completed batches are skipped on
loading. After the last batch of an epoch, the checkpoint is written before the evaluation, which a resumed run repeats.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from onelip.core.errors import CheckpointError, Diverged, RunError
from onelip.core.files import write_whole
from onelip.core.parametrization import settings_difference

FORMAT = "onelip checkpoint 2"
_MODEL, _AVERAGE, _OPTIMIZER, _RANDOM = "model.", "average.", "optimizer.", "random."

_KINDS = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Position:
    """Position of a run between two steps.

    Attributes:
        epoch: number of completed epochs, evaluated and logged.
        batch: number of completed steps in the current epoch; after the last one, the evaluation follows.
        loss_sum: sum of the training losses of these steps, weighted by their numbers of images.
        images: number of images in these steps.
        seconds: duration of these steps.
    """

    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    images: int = 0
    seconds: float = 0.0


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random_states: Mapping[str, Tensor],
    position: Position,
    fingerprint: str,
    average: nn.Module | None = None,
) -> None:
    """Write a checkpoint atomically, or raise an error and keep the existing file (see `write_tensors`).

    Args:
        path: the file.
        model: the model, without a DistributedDataParallel wrapper.
        optimizer: the optimizer; its state for each parameter may contain tensors and numbers.
        random_states: states of random generators, by name.
        position: position of the run.
        fingerprint: fingerprint of the data.
        average: average of the weights, if there is one.
    """
    tensors = _prefixed(model, average)
    tensors |= {f"{_RANDOM}{name}": tensor for name, tensor in random_states.items()}
    numbers: dict[str, Any] = {}
    names = _names_by_index(model, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            name = f"{_OPTIMIZER}{names[index]}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif value is not None:
                numbers[name] = value
    facts = {"format": FORMAT, "position": json.dumps(asdict(position)), "data": fingerprint}
    write_tensors(path, tensors, facts | {"optimizer": json.dumps(numbers)})


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    fingerprint: str | None = None,
    average: nn.Module | None = None,
) -> tuple[Position, dict[str, Tensor]]:
    """Load a checkpoint into a model and an optimizer.

    Everything is checked before anything is changed: the format, the data, all names, shapes and types, and that values
    are finite.

    Args:
        path: the file.
        model: a model of the same architecture, without a DistributedDataParallel wrapper.
        optimizer: the optimizer; None to load only the model.
        fingerprint: fingerprint of the data of the resumed run; None to accept any.
        average: average of the weights, if the run has one.

    Returns:
        The position, and the states of the random generators.

    Raises:
        CheckpointError: if the file is damaged, or belongs to another architecture or to other data.
    """
    header = read_header(path, FORMAT)
    position, numbers = _read_facts(path, header.facts)
    if fingerprint is not None:
        check_same_data(path, header.facts.get("data", ""), fingerprint)
    like = _prefixed(model, average)
    tensors = read_tensors(path, header, like, also=(_OPTIMIZER, _RANDOM))
    kept = numbers | {name: tensor for name, tensor in tensors.items() if name.startswith(_OPTIMIZER)}
    of_optimizer = _optimizer_state(path, model, optimizer, kept) if optimizer is not None else None
    with torch.no_grad():
        # Copy into the existing tensors, which have the memory layout used before the checkpoint.
        for name, tensor in like.items():
            if not name.endswith("_extra_state"):  # compared by `read_tensors`
                tensor.copy_(tensors[name])
    if optimizer is not None and of_optimizer is not None:
        optimizer.load_state_dict(of_optimizer)
    return position, {name.removeprefix(_RANDOM): t for name, t in tensors.items() if name.startswith(_RANDOM)}


def _prefixed(model: nn.Module, average: nn.Module | None) -> dict[str, Tensor]:
    """The tensors of the model and of the average of its weights, by their names in the file."""
    parts = {_MODEL: model} | ({} if average is None else {_AVERAGE: average})
    return {f"{prefix}{name}": t for prefix, part in parts.items() for name, t in part.state_dict().items()}


def read_position(path: Path) -> Position:
    """Return the position of a checkpoint."""
    return _read_facts(path, read_header(path, FORMAT).facts)[0]


def check_same_data(path: Path, kept: str, given: str) -> None:
    """Raise a CheckpointError unless the data have the fingerprint stored in the file."""
    if kept != given:
        raise CheckpointError(
            f"{path}: these are not the data that the run started with (fingerprint {given[:12]}…, expected "
            f"{kept[:12]}…); restore the original data, or pass their path with --data, or start a new run"
        )


def _names_by_index(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Names of parameters by their indices in the state dict of the optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True)
    pairs = (pair for group, packed in groups for pair in zip(group["params"], packed["params"], strict=True))
    return {index: names[id(parameter)] for parameter, index in pairs}


def _optimizer_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict for the optimizer from values by "optimizer.PARAMETER.KEY"."""
    indices = {name: index for index, name in _names_by_index(model, optimizer).items()}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Any]] = {}
    for full, value in kept.items():
        name, _, key = full.removeprefix(_OPTIMIZER).rpartition(".")
        if name not in indices:
            raise CheckpointError(f"{path}: {full!r} belongs to no parameter; {_OTHER_ARCHITECTURE}")
        if isinstance(value, Tensor) and value.shape == parameters[name].shape:
            # Use the memory layout of the parameter, as before the checkpoint.
            value = torch.empty_like(parameters[name], dtype=value.dtype).copy_(value)
        state.setdefault(indices[name], {})[key] = value
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _read_facts(path: Path, facts: Mapping[str, str]) -> tuple[Position, dict[str, Any]]:
    try:
        content = json.loads(facts["position"])
        # Each value has the type of its default: int or float.
        position = Position(**{name: type(value)(content[name]) for name, value in asdict(Position()).items()})
        return position, dict(json.loads(facts["optimizer"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header has no valid position; the file is damaged") from error


# Tensor files: safetensors, written atomically, and read only if all names, shapes and types are as expected.

_OTHER_ARCHITECTURE = "the file is for another architecture; use the config.json that was written with it"


@dataclass(frozen=True)
class Header:
    """The header of a tensor file, read before its tensors.

    Attributes:
        facts: metadata.
        tensors: shape and type of each tensor, by name.
    """

    facts: dict[str, str]
    tensors: dict[str, tuple[tuple[int, ...], str]]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: dict[str, str]) -> None:
    """Write a tensor file atomically, or raise an error and keep the existing file.

    Raises:
        Diverged: if a number is not finite, so that such a state never replaces a good one.
        CheckpointError: if the file cannot be written.
    """
    if (name := not_finite(tensors)) is not None:
        raise Diverged(f"NaN or infinity in {name!r}")
    try:
        write_whole(path, tensor_bytes(tensors, facts))
    except RunError as error:
        kept = "the last good one is kept" if path.exists() else "nothing was saved before"
        raise CheckpointError(f"{error}; {kept}") from error


def tensor_bytes(tensors: Mapping[str, Tensor], facts: dict[str, str]) -> bytes:
    """Return the content of a tensor file."""
    # The format has no shared memory and no strides, so each tensor is copied.
    own = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    return save(own, facts)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity; None if there is none."""
    return next((n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)


def read_header(path: Path, format: str) -> Header:
    """Return names, shapes and metadata of a tensor file.

    Raises:
        CheckpointError: if the file is missing, damaged, or of another format.
    """
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            tensors = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: replaced while it is opened
        raise CheckpointError(
            f"{path}: the file is damaged or truncated ({error}); restore it from a copy, or start a new run"
        ) from error
    if facts.get("format") != format:
        raise CheckpointError(
            f"{path}: expected the format {format!r}, got {facts.get('format')!r}; use the onelip that wrote it"
        )
    return Header(facts, tensors)


def read_tensors(
    path: Path, header: Header, like: Mapping[str, Tensor], also: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Args:
        path: the file.
        header: its header.
        like: tensors with the expected names, shapes and types.
        also: prefixes of the names of further tensors.

    Raises:
        CheckpointError: if a tensor is missing, unexpected, of another shape or type, or not finite.
    """
    got = {name for name in header.tensors if not name.startswith(also)}
    if missing := sorted(like.keys() - got):
        raise CheckpointError(
            f"{path}: the tensor {missing[0]!r} is missing ({len(missing)} in total); {_OTHER_ARCHITECTURE}"
        )
    if extra := sorted(got - like.keys()):
        raise CheckpointError(f"{path}: the model has no tensor {extra[0]!r}; {_OTHER_ARCHITECTURE}")
    settings = [name for name in like if name.endswith("_extra_state")]
    for name, tensor in ((name, tensor) for name, tensor in like.items() if name not in settings):
        wanted, found = (tuple(tensor.shape), _KINDS.get(tensor.dtype)), header.tensors[name]
        if wanted != found:
            raise CheckpointError(
                f"{path}: expected {name!r} of {_format_kind(wanted)}, got {_format_kind(found)}; {_OTHER_ARCHITECTURE}"
            )
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in header.tensors}
    if (damaged := not_finite(tensors)) is not None:
        raise CheckpointError(f"{path}: NaN or infinity in {damaged!r}; the file is damaged")
    for name in settings:
        if difference := settings_difference(tensors[name], like[name]):
            layer = name.removeprefix(_MODEL).partition(".parametrizations")[0]
            raise CheckpointError(f"{path}: {layer}: {difference}")
    return tensors


def _format_kind(kind: tuple[tuple[int, ...], str | None]) -> str:
    shape, name = kind
    return f"shape {'x'.join(map(str, shape)) or '()'} and type {name}"
