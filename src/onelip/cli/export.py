"""`onelip export RUN`: the trained network as plain weights, as ONNX, or as a directory for a hub."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onelip.cli._parse import parse
from onelip.cli._paths import need_file

if TYPE_CHECKING:
    from torch import Tensor

    from onelip.export.source import Source


@dataclass(frozen=True)
class Export:
    """Ship a trained network.

    safetensors: the plain torch state dict, and the config beside it. onnx: one file, any batch size, compared with
    torch in ONNX Runtime before it is written. hub: a directory for onelip.from_pretrained and the Hugging Face hub.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a finished run."""
    format: Literal["safetensors", "onnx", "hub"] = "safetensors"
    """Kind of export."""
    out: Path | None = None
    """What to write: a file .safetensors or .onnx, or a directory (hub); in RUN/export if not given."""
    dtype: Literal["float32", "float64"] | None = None
    """Type of the numbers. ONNX: float64 with a certificate, which speaks about the float64 program, else float32."""
    certificate: Path | None = None
    """A certificate of this run (onelip certify --out); copied along after a look at its hashes."""
    uint8_input: bool = False
    """ONNX: take uint8 images, and divide by 255 inside."""
    force: bool = False
    """Overwrite what is there."""
    json: bool = False
    """Print JSON."""

    @property
    def place(self) -> Path:
        """Where it goes."""
        name = "hub" if self.format == "hub" else f"model.{self.format}"
        return self.out or self.run / "export" / name


def run(arguments: Sequence[str]) -> int:
    """Parse, export, show."""
    command = parse(Export, "export", arguments)
    if senseless := _contradiction(command):
        print(f"onelip export: {senseless}", file=sys.stderr)
        return 2
    need_file("--certificate", command.certificate)

    from onelip.export.source import read_source

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
            f"({written['source']}); up to {written['bound']:.1e} is rounding."
        )
    if command.format == "onnx" and written["dtype"] == "float32":
        print("It computes in float32: certificates speak about the float64 program (--dtype float64).")
    return 0


def _contradiction(command: Export) -> str | None:
    """What makes no sense in the flags, whatever the run is."""
    suffix = {"safetensors": ".safetensors", "onnx": ".onnx"}.get(command.format)
    if suffix and command.place.suffix != suffix:
        return f"expected --out to end in {suffix} for this --format, got {command.place.name!r}"
    if command.uint8_input and command.format != "onnx":
        return f"expected --uint8-input with --format onnx, got {command.format}; other formats hold weights only"
    if command.dtype and command.format == "hub":
        return "expected no --dtype with --format hub, got one; the weights are kept as the run has them"
    if command.certificate and command.format == "onnx" and command.dtype == "float32":
        return "expected float64 with a certificate, which speaks about that program, got float32; leave --dtype out"
    return None


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.stem}.{ending}")


def _hub(command: Export) -> dict[str, Any]:
    from onelip.export.hub import save_pretrained

    files = save_pretrained(command.run, command.place, certificate=command.certificate, force=command.force)
    return {"files": list(map(str, files))}


def _safetensors(command: Export, source: "Source") -> dict[str, Any]:
    import torch

    from onelip.export.certificates import read_certificate
    from onelip.export.errors import ExportError
    from onelip.export.places import place
    from onelip.export.plain import plain_bytes

    stored = str(next(source.plain.parameters()).dtype).removeprefix("torch.")
    dtype = command.dtype or stored
    content = source.weights  # the bytes as they are, so that a certificate for their hash is one for the copy
    if dtype != stored:
        if command.certificate:
            raise ExportError(
                f"expected the weights as the run has them ({stored}) with a certificate, which knows them by their "
                f"hash, got --dtype {dtype}; leave it out (float64 from float32 is exact)"
            )
        facts = {"weights_sha256": source.weights_sha256}
        content = plain_bytes(source.plain.to(getattr(torch, dtype)), facts)
    files = [(_beside(command.place, "config.json"), source.config_bytes)]
    if command.certificate:
        raw, _ = read_certificate(command.certificate, source.weights_sha256, source.config_sha256)
        files.append((_beside(command.place, "cert.json"), raw))
    files.append((command.place, content))
    place(files, force=command.force)
    return {"files": [str(path) for path, _ in files], "dtype": dtype}


def _onnx(command: Export, source: "Source") -> dict[str, Any]:
    import torch

    from onelip.export.certificates import read_certificate
    from onelip.export.onnx import make_onnx
    from onelip.export.places import check_free, place

    files: list[tuple[Path, bytes]] = []
    if command.certificate:
        raw, _ = read_certificate(command.certificate, source.weights_sha256, source.config_sha256)
        # What the certificate is about goes along, so that whoever gets the files can check it.
        files = [
            (_beside(command.place, "cert.json"), raw),
            (_beside(command.place, "safetensors"), source.weights),
            (_beside(command.place, "config.json"), source.config_bytes),
        ]
    check_free([path for path, _ in files], force=command.force)
    dtype = command.dtype or ("float64" if command.certificate else "float32")
    images = _test_images(source)
    content, report = make_onnx(
        source.plain,
        command.place,
        source.config.shape,
        dtype=getattr(torch, dtype),
        uint8_input=command.uint8_input,
        class_names=source.config.class_names,
        facts={"weights_sha256": source.weights_sha256, "model": source.config.recipe.model},
        images=images,
        force=command.force,
    )
    files.append((command.place, content))
    place(files, force=command.force)
    told = "random" if images is None else f"test images of {source.config.data_name}"
    return {"files": [str(path) for path, _ in files], **report.to_json(), "source": told}


def _test_images(source: "Source", count: int = 64) -> "Tensor | None":
    """Some real images to compare on, if the data are on this machine."""
    from onelip.data import DataError, load_data

    try:
        data = load_data(source.config.recipe.data)
    except (DataError, OSError):
        return None
    return data.test_images[:count] if data.shape == source.config.shape else None
