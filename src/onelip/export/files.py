"""Files of an export, all or none are written: plain weights as safetensors, and certificates that match them.

A file of weights is rejected before memory is allocated if it is larger than the network, if its header claims more
bytes than it has, or if it is a pickle; and before the model is changed if names, shapes or types differ, or a number
is not finite. The file of a run is copied byte for byte, so a certificate for its hash also holds for the copy.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from onelip.certification.certificate import digest
from onelip.checker.certificate import FORMAT, VERSION
from onelip.core.bake import bake
from onelip.core.errors import CheckpointError, NonFiniteWeight, RunError, UsageError
from onelip.core.files import disk_error, write_whole
from onelip.training.build import PLAIN_FORMAT
from onelip.training.checkpoint import not_finite, read_header, read_tensors, tensor_bytes

SIZE_LIMIT = 2**30  # bytes of a certificate; one for ten thousand images has a few million


class ExportError(RunError):
    """An export cannot be written or read. Existing files are unchanged."""


class UnknownNetwork(UsageError, ExportError):
    """There is no trained network of this name."""


class ExportTaken(UsageError, ExportError):
    """The output path of an export already exists."""


def check_free(paths: Sequence[Path], *, force: bool) -> None:
    """Raise `ExportTaken` for paths that exist, before any work is done."""
    for path in paths:
        if path.is_dir():
            raise ExportTaken(f"{path}: expected a file name, got a directory; name a file in it")
        if path.exists() and not force:
            raise ExportTaken(f"{path}: the file exists; choose another name, or use --force")


def write_files(files: Sequence[tuple[Path, bytes]], *, force: bool) -> None:
    """Write all files. If one cannot be written, the new ones are removed."""
    check_free([path for path, _ in files], force=force)
    new: list[Path] = []
    try:
        for path, content in files:
            make_folder(path.parent)
            if not path.exists():
                new.append(path)
            write_whole(path, content)
    except RunError as error:
        for path in new:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise ExportError(str(error)) from error


def make_folder(folder: Path) -> None:
    """Create a folder if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """Within the context, a temporary directory; it becomes `folder` at the end, and replaces an existing one."""
    make_folder(folder.parent)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
            new = Path(place, "new")
            new.mkdir()
            yield new
            if folder.exists():
                os.replace(folder, Path(place, "old"))  # removed with the temporary directory
            os.replace(new, folder)
    except OSError as error:
        raise disk_error(error, folder) from error


def read_certificate(path: str | Path, weights_sha256: str, config_sha256: str | None = None) -> tuple[bytes, Any]:
    """Read a certificate, to copy it, if it is for these weights (and for this config, if it names one).

    The JSON, the format and its version, the digest and the hashes are checked. To check that the certificate is
    *true*, use `onelip check`, which recomputes everything.

    Args:
        path: the certificate.
        weights_sha256: hash of the weight file.
        config_sha256: hash of the config file.

    Returns:
        Its bytes and its JSON content.

    Raises:
        ExportError: if it is damaged, has another version, or is for other files.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT:
            raise ExportError(f"{path}: expected a certificate of at most {SIZE_LIMIT:,} bytes, got {size:,}")
        raw = path.read_bytes()
        content = json.loads(raw, parse_constant=int)  # int raises a ValueError for NaN and Infinity
    except OSError as error:
        raise ExportError(
            f"{path}: cannot read the certificate ({error.strerror}); create one: onelip certify RUN --out {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"{path}: expected a certificate, but the file is not JSON or is damaged ({error})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExportError(f"{path}: the file is not an {FORMAT}; create one: onelip certify RUN --out {path}")
    if content.get("version") != VERSION:
        raise ExportError(
            f"{path}: expected version {VERSION} of the format, got {content.get('version')!r}; certify "
            "again, or use the onelip that wrote it"
        )
    if content.get("digest") != digest(content):
        raise ExportError(f"{path}: the digest does not match the content; the file was changed or is damaged")
    _check_hash(path, content.get("weights"), weights_sha256, "weights")
    if config_sha256 is not None and content.get("config") is not None:
        _check_hash(path, content["config"], config_sha256, "config")
    return raw, content


def _check_hash(path: Path, entry: object, wanted: str, what: str) -> None:
    found = entry.get("sha256") if isinstance(entry, dict) else None
    if found != wanted:
        other = f"{found[:12]}…" if isinstance(found, str) else "none"
        raise ExportError(
            f"{path}: the certificate is for another {what} file (sha256 {other}, not {wanted[:12]}…); certify this "
            "run: onelip certify RUN --out cert.json"
        )


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
        >>> import tempfile, torch, onelip
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
    if (name := not_finite(tensors)) is not None:
        raise NonFiniteWeight(f"tensor {name!r} contains NaN or infinity; load an earlier checkpoint")
    return tensor_bytes(tensors, {**metadata, "format": PLAIN_FORMAT})


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
        >>> import tempfile, torch
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
    most = min(size - 8, HEADER_LIMIT)
    if header > most:
        raise ExportError(
            f"{path}: expected a header of at most {most:,} bytes, got one that claims {header:,}; "
            "it is truncated or not a safetensors file"
        )
