"""`onelip export RUN`: write a trained network as plain weights, as ONNX, or as a directory for a hub."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onelip.cli._common import FinishedRun, Flag, Json, OptionalPath, parse, require_file, unset
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from onelip.export.hub import Source


@dataclass(frozen=True)
class Export:
    """Export a trained network.

    safetensors: the state dict of the plain torch network, and its config. onnx: one file, any batch size, compared
    with torch in ONNX Runtime before it is written. hub: a directory for onelip.from_pretrained and the Hugging Face
    hub.
    """

    run: FinishedRun
    format: Literal["safetensors", "onnx", "hub"] = "safetensors"
    """File format."""
    out: OptionalPath = None
    """File (.safetensors, .onnx) or directory (hub) to write. Default: in RUN/export."""
    dtype: Annotated[Literal["float32", "float64"] | None, unset("{float32,float64}")] = None
    """Type of the numbers. Default for ONNX: float64 with a certificate, else float32."""
    certificate: OptionalPath = None
    """Certificate of this run (onelip certify --out) to copy; its hashes are checked."""
    uint8_input: Flag = False
    """ONNX: take uint8 images and divide them by 255 in the file."""
    force: Flag = False
    """Overwrite existing files."""
    json: Json = False

    @property
    def place(self) -> Path:
        """Path of the export."""
        name = "hub" if self.format == "hub" else f"model.{self.format}"
        return self.out or self.run / "export" / name


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Export, "export", arguments)
    _check(command)
    require_file("--certificate", command.certificate)

    from onelip.export.hub import read_source

    if command.format == "hub":
        written = _hub(command)
    else:
        source = read_source(command.run)
        written = _onnx(command, source) if command.format == "onnx" else _safetensors(command, source)
    if command.json:
        print(json.dumps({"run": str(command.run), "format": command.format, **written}))
        return 0
    for path in written["files"]:
        print(f"wrote {path}")
    if "difference" in written:
        print(
            f"ONNX Runtime and torch differ by at most {written['difference']:.1e} on {written['images']} images "
            f"({written['source']}); rounding explains up to {written['bound']:.1e}."
        )
    if command.format == "onnx" and written["dtype"] == "float32":
        print("The file computes in float32. Certificates hold for float64 only; export that with --dtype float64.")
    return 0


def _check(command: Export) -> None:
    """Raise an error for options that exclude each other."""
    suffix = {"safetensors": ".safetensors", "onnx": ".onnx"}.get(command.format)
    if suffix and command.place.suffix != suffix:
        raise RecipeError(f"--format {command.format} needs an --out that ends in {suffix}, got {command.place.name!r}")
    if command.uint8_input and command.format != "onnx":
        raise RecipeError(
            f"--uint8-input needs --format onnx, got {command.format}: other formats contain weights only"
        )
    if command.dtype and command.format == "hub":
        raise RecipeError("--dtype and --format hub exclude each other: a hub directory keeps the weights of the run")
    if command.certificate and command.format == "onnx" and command.dtype == "float32":
        raise RecipeError("--certificate and --dtype float32 exclude each other: a certificate holds for float64 only")


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.stem}.{ending}")


def _hub(command: Export) -> dict[str, Any]:
    from onelip.export.hub import save_pretrained

    files = save_pretrained(command.run, command.place, certificate=command.certificate, force=command.force)
    return {"files": list(map(str, files))}


def _safetensors(command: Export, source: "Source") -> dict[str, Any]:
    import torch

    from onelip.export.files import ExportError, plain_bytes, write_files

    stored = str(next(source.plain.parameters()).dtype).removeprefix("torch.")
    dtype = command.dtype or stored
    content = source.weights  # byte for byte, so that a certificate for their hash is one for the copy
    if dtype != stored:
        if command.certificate:
            raise ExportError(
                f"--dtype {dtype} changes the stored weights ({stored}), and the certificate contains their hash; "
                "remove --dtype"
            )
        content = plain_bytes(source.plain.to(getattr(torch, dtype)), {"weights_sha256": source.weights_sha256})
    files = [(_beside(command.place, "config.json"), source.config_bytes)]
    files += _certificate(command, source)
    files.append((command.place, content))
    write_files(files, force=command.force)
    return {"files": [str(path) for path, _ in files], "dtype": dtype}


def _onnx(command: Export, source: "Source") -> dict[str, Any]:
    import torch

    from onelip.export.onnx import export_onnx

    files = _certificate(command, source)
    if files:  # with the files that the certificate is about, so that it can be checked elsewhere
        files.append((_beside(command.place, "safetensors"), source.weights))
        files.append((_beside(command.place, "config.json"), source.config_bytes))
    images = _test_images(source)
    report = export_onnx(
        source.plain,
        command.place,
        source.config.shape,
        dtype=getattr(torch, command.dtype or ("float64" if command.certificate else "float32")),
        uint8_input=command.uint8_input,
        class_names=source.config.class_names,
        metadata={"weights_sha256": source.weights_sha256, "model": source.config.recipe.model},
        images=images,
        extra_files=files,
        force=command.force,
    )
    compared = "random images" if images is None else f"test images of {source.config.data_name}"
    return {"files": [*(str(path) for path, _ in files), str(command.place)], **report.to_json(), "source": compared}


def _certificate(command: Export, source: "Source") -> list[tuple[Path, bytes]]:
    from onelip.export.files import read_certificate

    if command.certificate is None:
        return []
    raw, _ = read_certificate(command.certificate, source.weights_sha256, source.config_sha256)
    return [(_beside(command.place, "cert.json"), raw)]


def _test_images(source: "Source", count: int = 64) -> "Tensor | None":
    """Test images to compare on, if the data are on this machine."""
    from onelip.data import DataError, load_data

    try:
        data = load_data(source.config.recipe.data, source.config.data_root, image_size=source.config.recipe.resize_to)
    except (DataError, OSError):
        return None
    return data.test_images[:count] if data.shape == source.config.shape else None
