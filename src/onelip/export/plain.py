"""Plain weights as a safetensors file, with the keys of the torch network.

A file is rejected before memory is allocated if it is larger than the network, if its header claims more bytes than it
has, or if it is a pickle; and before the model is changed if names, shapes or types differ, or a number is not finite.
The file of a run is copied byte for byte, so a certificate for its hash also holds for the copy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from onelip.core.bake import bake
from onelip.core.errors import CheckpointError, NonFiniteWeight
from onelip.export.files import ExportError, write_files
from onelip.training.build import PLAIN_FORMAT
from onelip.training.checkpoint import read_header, read_tensors

Model = TypeVar("Model", bound=nn.Module)

HEADER_LIMIT = 16 * 2**20  # bytes; names and shapes of 100,000 tensors fit

_PICKLES = (b"\x80", b"PK\x03\x04")  # a pickle; a zip, as torch.save writes it


def save_plain(
    model: nn.Module, path: str | Path, *, metadata: Mapping[str, str] | None = None, force: bool = False
) -> None:
    """Bake a model and write its state dict as a safetensors file.

    Args:
        model: any model; it is not changed.
        path: output file, written completely or not at all.
        metadata: strings to store in the metadata of the file.
        force: overwrite an existing file.

    Raises:
        ExportError: if the file exists or cannot be written.
        NonFiniteWeight: if a tensor contains NaN or infinity.

    Examples:
        >>> import tempfile, onelip
        >>> model = onelip.nn.AOLLinear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_plain(model, f"{folder}/net.safetensors")
        ...     plain = load_plain(f"{folder}/net.safetensors", nn.Linear(3, 2))
        >>> torch.equal(plain.weight, model.weight)
        True
    """
    write_files([(Path(path), plain_bytes(bake(model), metadata or {}))], force=force)


def plain_bytes(plain: nn.Module, metadata: Mapping[str, str]) -> bytes:
    """Return the content of the file for a plain network.

    Raises:
        NonFiniteWeight: if a tensor contains NaN or infinity.
    """
    tensors = plain.state_dict()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NonFiniteWeight(f"tensor {name!r} contains NaN or infinity; load an earlier checkpoint")
    own = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    return save(own, {**metadata, "format": PLAIN_FORMAT})


def load_plain(path: str | Path, model: Model) -> Model:
    """Load the tensors of a file into a plain network; names, shapes and types must be those of the network.

    Args:
        path: a file of `save_plain`, of `onelip export`, or the plain.safetensors of a run.
        model: a plain network, e.g. `onelip.bake(onelip.create_model(...))`. It is changed in place.

    Returns:
        The model.

    Raises:
        ExportError: if the file does not match the network or is damaged; the model is then unchanged.

    Examples:
        >>> import tempfile
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_plain(model, f"{folder}/net.safetensors")
        ...     loaded = load_plain(f"{folder}/net.safetensors", nn.Linear(3, 2))
        >>> torch.equal(loaded.weight, model.weight)
        True
    """
    model.load_state_dict(read_plain(Path(path), model.state_dict()))
    return model


def read_plain(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file, checked against those of a network."""
    _check_file(path, sum(t.numel() * t.element_size() for t in like.values()))
    try:
        return read_tensors(path, read_header(path, PLAIN_FORMAT), like)
    except CheckpointError as error:
        raise ExportError(str(error)) from error


def _check_file(path: Path, expected: int) -> None:
    """Check the size and the first bytes; nothing else is read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ExportError(f"{path}: cannot read the weights ({error.strerror})") from error
    if size > expected + HEADER_LIMIT:
        raise ExportError(
            f"{path}: expected about {expected:,} bytes for this network, got {size:,}; it belongs to another network"
        )
    if len(start) < 8:
        raise ExportError(f"{path}: expected a safetensors file, got one of {size} bytes; it is truncated")
    header = int.from_bytes(start, "little")
    # The first bytes of a zip or a pickle, read as a length, exceed any header: report the kind of the file instead.
    if start.startswith(_PICKLES) and header > HEADER_LIMIT:
        raise ExportError(
            f"{path}: expected a safetensors file, got a pickle, which can run code when loaded; use safetensors"
        )
    if header > min(size - 8, HEADER_LIMIT):
        raise ExportError(
            f"{path}: expected a header within the {size:,} bytes of the file, got one that claims {header:,}; "
            "it is truncated or not a safetensors file"
        )
