"""The state of a run between two steps, as one safetensors file: tensors, and a JSON header. Nothing is pickled.

It holds all that the next step depends on: parameters and buffers, the momentum of SGD, the states of the random
generators, and where the run is. The learning rate is a function of the step, so it needs no place. Of the data, the
generator's state at the *beginning* of the epoch is kept, and the batches that are done are skipped again on loading.
After the last batch of an epoch it is written before the evaluation, which a run that goes on from there does again.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from onelip.training.errors import CheckpointError
from onelip.training.tensors import read_header, read_tensors, write_tensors

FORMAT = "onelip checkpoint 1"
_MODEL, _MOMENTUM, _RANDOM = "model.", "momentum.", "random."


@dataclass(frozen=True)
class Position:
    """Where a run is: between two steps."""

    epoch: int = 0  # complete epochs, evaluated and logged
    batch: int = 0  # steps of the next epoch that are done; all of them: it is to be evaluated
    loss_sum: float = 0.0  # of the training losses of these steps, each weighted with its images
    images: int = 0  # in these steps
    seconds: float = 0.0  # of these steps


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.SGD,
    random_states: dict[str, Tensor],
    position: Position,
    fingerprint: str,
) -> None:
    """Write all of it, or raise and leave the file that is there (see `write_tensors`)."""
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        momentum = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
        if momentum is not None:
            tensors[f"{_MOMENTUM}{name}"] = momentum
    tensors |= {f"{_RANDOM}{name}": tensor for name, tensor in random_states.items()}
    facts = {"format": FORMAT, "position": json.dumps(asdict(position)), "data": fingerprint}
    write_tensors(path, tensors, facts)


def check_same_data(path: Path, kept: str, given: str) -> None:
    """Refuse data with another fingerprint than the one that the file keeps."""
    if kept != given:
        raise CheckpointError(
            f"{path}: expected the data that the run began with (fingerprint {kept[:12]}…), got other data "
            f"({given[:12]}…); bring the old data back (say where they are with --data), or start a new run"
        )


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.SGD | None = None, fingerprint: str | None = None
) -> tuple[Position, dict[str, Tensor]]:
    """Fill model and optimizer from the file; returns the position and the states of the random generators.

    Everything is checked before anything is changed: the format, the data, every name, shape and type, all finite.
    Without an optimizer only the model is filled.
    """
    header = read_header(path, FORMAT)
    position = _position(path, header.facts)
    if fingerprint is not None:
        check_same_data(path, header.facts.get("data", ""), fingerprint)
    state = model.state_dict()
    # Before the first step there is no momentum; after it every parameter has one.
    momenta = {name: p for name, p in model.named_parameters() if f"{_MOMENTUM}{name}" in header.tensors}
    like = {f"{_MODEL}{name}": tensor for name, tensor in state.items()}
    like |= {f"{_MOMENTUM}{name}": parameter for name, parameter in momenta.items()}
    tensors = read_tensors(path, header, like, also=_RANDOM)
    with torch.no_grad():
        # Into the tensors that are there: these have the layout in memory that they had in the steps before.
        for name, tensor in state.items():
            tensor.copy_(tensors[f"{_MODEL}{name}"])
        if optimizer is not None:
            for name, parameter in momenta.items():
                buffer = torch.empty_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = buffer.copy_(tensors[f"{_MOMENTUM}{name}"])
    return position, {name.removeprefix(_RANDOM): t for name, t in tensors.items() if name.startswith(_RANDOM)}


def read_position(path: Path) -> Position:
    """Only where the run is."""
    return _position(path, read_header(path, FORMAT).facts)


def _position(path: Path, facts: dict[str, str]) -> Position:
    try:
        content = json.loads(facts["position"])
        return Position(
            epoch=int(content["epoch"]),
            batch=int(content["batch"]),
            loss_sum=float(content["loss_sum"]),
            images=int(content["images"]),
            seconds=float(content["seconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a position in the header, got none that can be read") from error
