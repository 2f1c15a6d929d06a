"""The plain network as a file: safetensors, with the keys of the torch network that it is.

    save_plain writes what was loaded or trained; load_plain gives back the same tensors bit for bit, or refuses.

Refused before anything is allocated: a file that is larger than the network, a header that claims more than is there, a
pickle. Refused before anything is used: unknown and missing names, other shapes and types, NaN and infinity. The file
of a run is copied byte for byte, so that a certificate for its hash is one for the copy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from onelip.export._bake import NonFiniteWeight, bake
from onelip.export.errors import ExportError
from onelip.export.places import place
from onelip.training.build import PLAIN_FORMAT
from onelip.training.errors import CheckpointError
from onelip.training.tensors import read_header, read_tensors

Model = TypeVar("Model", bound=nn.Module)

HEADER_LIMIT = 16 * 2**20  # bytes; names and shapes of 100,000 tensors fit

_PICKLES = (b"\x80", b"PK\x03\x04")  # a pickle; a zip, as torch.save writes it


def save_plain(
    model: nn.Module, path: str | Path, *, facts: Mapping[str, str] | None = None, force: bool = False
) -> None:
    """Write the baked model's state dict.

    Args:
        model: baked first, so AOL and other parametrizations become plain weights; it is left as it is.
        path: the file, written whole or not at all.
        facts: words for the file's metadata.
        force: overwrite a file that is there.

    Example:
        >>> import tempfile, onelip
        >>> model = onelip.nn.AOLLinear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_plain(model, f"{folder}/net.safetensors")
        ...     plain = load_plain(f"{folder}/net.safetensors", nn.Linear(3, 2))
        >>> torch.equal(plain.weight, model.weight)
        True
    """
    place([(Path(path), plain_bytes(bake(model), facts or {}))], force=force)


def plain_bytes(plain: nn.Module, facts: Mapping[str, str]) -> bytes:
    """The content of the file for a network that is plain already."""
    tensors = plain.state_dict()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NonFiniteWeight(f"expected finite tensors, got NaN or infinity in {name!r}; it cannot be shipped")
    own = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    return save(own, {**facts, "format": PLAIN_FORMAT})


def load_plain(path: str | Path, model: Model) -> Model:
    """Fill a plain network with the tensors of a file; they must be exactly its own in name, shape and type.

    Args:
        path: a file of `save_plain`, of `onelip export`, or the plain.safetensors of a run.
        model: the network, plain: `onelip.bake(onelip.create_model(...))`, say. Changed in place, and returned.

    Raises:
        ExportError: if the file is anything else; the model is then as it was.
    """
    path = Path(path)
    model.load_state_dict(read_plain(path, model.state_dict()))
    return model


def read_plain(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, checked against those of a network."""
    _check_file(path, sum(t.numel() * t.element_size() for t in like.values()))
    try:
        return read_tensors(path, read_header(path, PLAIN_FORMAT), like)
    except CheckpointError as error:
        raise ExportError(str(error)) from error


def _check_file(path: Path, expected: int) -> None:
    """Look at the size and the first bytes; nothing else is read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ExportError(f"{path}: expected a file of weights, got {error.strerror}") from error
    if size > expected + HEADER_LIMIT:
        raise ExportError(
            f"{path}: expected some {expected:,} bytes for this network, got {size:,}; it is of another network"
        )
    if len(start) < 8:
        raise ExportError(f"{path}: expected a safetensors file, got one of {size} bytes; it is truncated")
    header = int.from_bytes(start, "little")
    # A zip or a pickle read as a length is beyond any header: say what it is, not how long it would be.
    if start.startswith(_PICKLES) and header > HEADER_LIMIT:
        raise ExportError(
            f"{path}: expected a safetensors file, got a pickle, which can run code when read; ask for safetensors"
        )
    if header > min(size - 8, HEADER_LIMIT):
        raise ExportError(
            f"{path}: expected a header within the {size:,} bytes of the file, got one that claims {header:,}; "
            "it is truncated or no safetensors file"
        )
