"""`onelip tryit`: a folder with a page that runs a network in the browser through ONNX Runtime Web.

index.html, tryit.js, tryit.css   the page
model.onnx                        the network, with uint8 images as input
network.json                      classes, constants of the radius, test images
ort*                              ONNX Runtime Web, from npm
"""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch

from onelip._version import __version__
from onelip.core.errors import RunError
from onelip.core.files import file_hash, write_whole
from onelip.data import DataError, ImageData
from onelip.export.files import ExportError, ExportTaken, make_folder, new_directory
from onelip.export.hub import WEIGHTS, find_in_zoo, load_pretrained, read_source
from onelip.export.onnx import export_onnx
from onelip.training.build import LoadedRun, load_run_data
from onelip.training.prediction import Predictions
from onelip.training.run_directory import RunDirectory

RUNTIME = "1.30.0"  # of onnxruntime-web
_SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"  # of its package in the registry
_RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_PAGE_FILES = ("index.html", "tryit.css", "tryit.js")

_SOUND = (
    "The browser computes in float64. The radius includes all rounding errors: those of the images, of the network and "
    "of the radius itself. It holds for every image within it. The Lipschitz "
    "constant of the network is at most {constant!r}, proved for the stored weights."
)
_REAL = (
    "The browser computes in {dtype}. The radius is that of real arithmetic: rounding errors in the browser are not "
    "included. The Lipschitz constant of the network is at most {constant!r}. {why}"
)


@dataclass(frozen=True)
class TryIt:
    """The result of `write_tryit`.

    Attributes:
        folder: the folder.
        dtype: arithmetic of the network in the browser.
        predictions: class, radius and pixel budget of the test images of the page, as the library computes them; None
            if the data of the run are not on this machine.
        size: bytes of all files.
    """

    folder: Path
    dtype: str
    predictions: Predictions | None
    size: int


def write_tryit(
    run: str | Path,
    folder: str | Path,
    *,
    dtype: Literal["float32", "float64"] | None = None,
    images: int = 20,
    data_root: str | Path | None = None,
    runtime: str | Path | None = None,
    force: bool = False,
) -> TryIt:
    """Write a folder in which a network runs in the browser; any web server can serve it, also offline.

    Args:
        run: directory of a finished run, or of `save_pretrained`; or a name of `onelip zoo`.
        folder: new folder, written completely or not at all.
        dtype: float64 for radii that include all rounding errors, float32 for a file of half the size and radii of
            real arithmetic. Default: float64, or float32 for a network whose rounding cannot be bounded.
        images: number of test images on the page.
        data_root: directory of named data sets.
        runtime: package onnxruntime-web of this version as a file, for machines without npm; by default it is
            downloaded with npm once.
        force: replace an existing folder of this command.

    Returns:
        The folder and the library's own numbers for the images of the page.

    Raises:
        ExportTaken: if the folder exists.
        ExportError: if the run is not finished, or the runtime cannot be downloaded.
        ProofError: if no constant of the network is proved.
    """
    folder = Path(folder)
    if folder.exists() and not (force and (folder / "network.json").is_file()):
        raise ExportTaken(f"{folder} exists; choose another --out, or use --force for a folder of onelip tryit")
    if images < 0:
        raise ExportError(f"expected a number of images of at least 0, got {images}")
    loaded, weights_sha256 = _load(run)
    config, shape = loaded.config, loaded.config.shape
    if shape[0] not in (1, 3) or len(config.class_names) > 1000:
        raise ExportError(f"expected images with 1 or 3 channels and at most 1000 classes, got {shape[0]} channels")
    packed = _runtime_package(runtime)
    chosen, labels = _test_images(config, data_root, images)
    trial = chosen if len(chosen) else torch.zeros(1, *shape, dtype=torch.uint8)
    mode = {"float64": "sound", "float32": "real-arithmetic", None: None}[dtype]
    found = loaded.predict(trial, mode=mode)  # pyright: ignore[reportArgumentType]  the keys are literals
    arithmetic = "float64" if found.mode == "sound" else "float32"
    head = found.certification.head
    sound = found.mode == "sound"
    why = "" if found.reason is None else f"The sound mode cannot be proved: {found.reason}."
    network = {
        "onelip": __version__,
        "runtime": RUNTIME,
        "model": config.recipe.model,
        "data": config.data_name,
        "weights_sha256": weights_sha256,
        "shape": list(shape),
        "classes": list(config.class_names),
        "dtype": arithmetic,
        "mode": found.mode,
        "claim": (_SOUND if sound else _REAL)
        .format(constant=found.certification.constant, dtype=arithmetic, why=why)
        .strip(),
        "slope": head.slope,
        "rounding": head.rounding if sound else 0.0,
        "images": [
            {"label": config.class_names[label], "pixels": base64.b64encode(image.numpy().tobytes()).decode()}
            for image, label in zip(chosen, labels.tolist(), strict=True)
        ],
    }
    contents: dict[str, bytes] = {
        name: files("onelip.export.tryit").joinpath(name).read_bytes() for name in _PAGE_FILES
    }
    contents["network.json"] = json.dumps(network, ensure_ascii=False, allow_nan=False).encode()
    contents |= _unpacked(packed)
    with new_directory(folder) as new:
        export_onnx(
            loaded.plain,
            new / "model.onnx",
            shape,
            dtype=getattr(torch, arithmetic),
            uint8_input=True,
            class_names=config.class_names,
            metadata={"weights_sha256": weights_sha256, "model": config.recipe.model},
            images=chosen if len(chosen) else None,
        )
        for name, content in contents.items():
            write_whole(new / name, content)
        size = sum(path.stat().st_size for path in new.iterdir())
    return TryIt(folder, arithmetic, found if len(chosen) else None, size)


def _load(run: str | Path) -> tuple[LoadedRun, str]:
    """A run, or a trained network as one; and the hash of its weights."""
    path = Path(run)
    if not (path / WEIGHTS).is_file() and (path.is_dir() or find_in_zoo(str(run)) is None):
        source = read_source(path)
        return LoadedRun(RunDirectory(path), source.config, source.plain, True), source.weights_sha256
    found = load_pretrained(run)
    return found.run, file_hash(found.path / WEIGHTS)


def _test_images(config: Any, root: str | Path | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Test images for the page, the classes in turn; none if the data are not on this machine."""
    try:
        data: ImageData = load_run_data(config, root)
    except (DataError, RunError, OSError):
        return torch.zeros(0, *config.shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    labels = data.test_labels
    rank = torch.zeros_like(labels)  # number of earlier images of the same class
    for label in labels.unique().tolist():
        rank[labels == label] = torch.arange(int((labels == label).sum()))
    order = torch.argsort(rank * (int(labels.max()) + 1) + labels, stable=True)[:count]
    return data.test_images[order], labels[order]


# ONNX Runtime Web.


def cache_folder() -> Path:
    """Folder of downloads: onelip in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onelip"


def _runtime_package(given: str | Path | None) -> bytes:
    """The npm package, from a file, the cache or the configured npm registry; its hash is checked."""
    name = f"onnxruntime-web-{RUNTIME}.tgz"
    path = Path(given) if given is not None else cache_folder() / name
    if given is None and not path.is_file():
        _download(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExportError(f"{path}: cannot read the package of onnxruntime-web ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise ExportError(
            f"{path} is not the package onnxruntime-web {RUNTIME}; delete it, or give the right --runtime"
        )
    return content


def _download(path: Path) -> None:
    npm = shutil.which("npm")
    advice = f"give the file with --runtime (npm pack onnxruntime-web@{RUNTIME} on a machine with npm writes it)"
    if npm is None:
        raise ExportError(f"npm is missing; it downloads ONNX Runtime Web: install Node.js, or {advice}")
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [npm, "pack", f"onnxruntime-web@{RUNTIME}", "--ignore-scripts", "--pack-destination", folder]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        found = list(Path(folder).glob("*.tgz"))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExportError(
                f"npm cannot download onnxruntime-web {RUNTIME} ({last}); connect to a registry, or {advice}"
            )
        os.replace(found[0], path)


def _unpacked(package: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        found = {}
        for name in _RUNTIME_FILES:
            member = archive.extractfile(f"package/dist/{name}")
            assert member is not None  # the hash of the package is that of this version
            found[name] = member.read()
    return found
