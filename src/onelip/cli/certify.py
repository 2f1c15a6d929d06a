"""`onelip certify RUN`: class and certified radius of images, the table of CRA, and the certificate file."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onelip.cli._parse import parse
from onelip.cli._paths import need_file, need_place
from onelip.cli._progress import StageProgress
from onelip.cli._run_data import load_run_data
from onelip.core.errors import RecipeError, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from onelip.certification.result import Certification
    from onelip.training.build import LoadedRun


@dataclass(frozen=True)
class Certify:
    """Certified radii of a run's network, for the float64 program with its rounding.

    The stored weights are taken to float64, which is exact, and their Lipschitz constants are proved. With --out the
    proof and all radii are written to a file that `onelip check` checks independently.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a run."""
    data: str | None = None
    """Other data than the run's, by name or path; of the same shape and number of classes."""
    data_root: Path | None = None
    """Where to look for named data sets; see onelip data."""
    split: Literal["test", "train"] = "test"
    """Which images."""
    limit: int | None = None
    """Only so many images, the first ones."""
    image: Path | None = None
    """One image file (png, ...) instead of data; of the size of the network's images. Needs onelip[images]."""
    mode: Literal["sound", "real-arithmetic"] = "sound"
    """sound: for the program as it runs. real-arithmetic: the ordinary claim, in float32, rounding left out."""
    exact: bool = False
    """Prove in rational arithmetic; --out implies it. Needs onelip[exact]."""
    effort: Literal["quick", "normal", "high"] = "normal"
    """How tight the bounds of the layers shall be."""
    batch_size: int = 250
    """Images at a time; changes nothing but speed and memory."""
    out: Path | None = None
    """Write the certificate here, whole or not at all."""
    images_out: Path | None = None
    """Write the images here (.npy), so that a checker can compute their logits again; beside --out if not given."""
    force: bool = False
    """Replace files of --out and --images-out that exist."""
    keep_images: bool = True
    """Write the images with --out. Without them `onelip check` cannot accept more than the bounds."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Parse, prove, certify, show."""
    command = parse(Certify, "certify", arguments)
    if command.out is not None and command.images_out is None and command.keep_images:
        command = replace(command, images_out=command.out.with_suffix(".images.npy"))
    if command.out is not None and command.mode != "sound":
        raise RecipeError(f"expected --mode sound with --out, got {command.mode}; a certificate is about the program")
    if command.limit is not None and command.limit < 1:
        raise RecipeError(f"expected --limit of at least 1, got {command.limit}")
    if command.batch_size < 1:
        raise RecipeError(f"expected --batch-size of at least 1, got {command.batch_size}")

    _check_places(command)
    if command.out is not None or command.exact:
        _need_flint()

    from onelip.certification.predict import certify
    from onelip.training.build import load_run

    loaded = load_run(command.run)
    if command.out is not None and not loaded.is_finished:
        raise RunError(
            f"{command.run}: expected a finished run for a certificate, got one without its last weights; "
            f"end it with onelip train --resume {command.run}"
        )
    images, labels, data = _images(command, loaded)
    network = loaded.plain.double() if command.mode == "sound" else loaded.plain
    with StageProgress() as progress:
        found = certify(
            network,
            images,
            labels,
            mode=command.mode,
            proof="exact" if command.exact or command.out is not None else "fast",
            batch_size=command.batch_size,
            effort=command.effort,
            progress=progress,
        )
    written = _write(command, found, images, data)
    known = loaded.lipschitz if labels is not None else None  # for the comparison of certified accuracies only
    nominal = 1.0 if known is None else known
    results = {"run": str(command.run), "finished": loaded.is_finished, "data": data, **found.to_json(nominal=nominal)}
    if command.image is not None:
        results |= _one(found, loaded.config.class_names)
    if command.json:
        print(json.dumps({**results, **written}))
        return 0
    _show(results, written, command)
    return 0


def _need_flint() -> None:
    """Exact proofs need python-flint; better said before the work than after it."""
    import importlib.util

    if importlib.util.find_spec("flint") is None:
        raise RunError("expected python-flint for --out and --exact, got none; pip install 'onelip[exact]'")


def _check_places(command: Certify) -> None:
    """Refuse paths that cannot be meant, before the work that they are for."""
    from onelip.training.run_directory import RunDirectory

    run = RunDirectory(command.run.resolve())
    taken = {run.config, run.log, run.environment, run.checkpoint, run.weights, run.plain, run.results}
    paths = [path for path in (command.out, command.images_out) if path is not None]
    need_file("--image", command.image)
    need_place("--out", command.out)
    need_place("--images-out", command.images_out)
    for path in paths:
        if path.resolve() in taken:
            raise RecipeError(f"{path}: expected a file of its own, got one of the run itself; choose another name")
        if path.exists() and not command.force:
            raise RecipeError(f"{path}: expected a new file, got one that exists; choose another name, or use --force")
    if len({path.resolve() for path in paths}) < len(paths):
        raise RecipeError(f"expected two files for --out and --images-out, got {command.out} for both")


def _images(command: Certify, loaded: "LoadedRun") -> "tuple[Tensor, Tensor | None, str]":
    """Images, labels if there are any, and where they are from."""
    if command.image is not None:
        return _read_image(command.image, loaded.config.shape), None, str(command.image)
    data = load_run_data(loaded.config, command.data_root, command.data)
    tests = command.split == "test"
    images = data.test_images if tests else data.train_images
    labels = data.test_labels if tests else data.train_labels
    return images[: command.limit], labels[: command.limit], f"{data.name}, {command.split} images"


def _read_image(path: Path, shape: tuple[int, int, int]) -> "Tensor":
    import numpy as np
    import torch

    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise RunError("expected Pillow for --image, got none; pip install 'onelip[images]'") from error
    channels, height, width = shape
    if channels not in (1, 3):
        raise RunError(f"expected a network for images of 1 or 3 channels with --image, got one for {channels}")
    try:
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB" if channels == 3 else "L"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise RunError(f"{path}: expected an image file, got something else ({error})") from error
    array = pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)  # (c, h, w)
    if array.shape != shape:
        raise RunError(
            f"{path}: expected an image of {width}x{height} pixels, got {array.shape[2]}x{array.shape[1]}; resize it "
            "first: the certificate is about the pixels that the network takes"
        )
    return torch.from_numpy(array.copy())[None]


def _write(command: Certify, found: "Certification", images: "Tensor", source: str) -> dict[str, Any]:
    """Write what was asked for; returns the paths."""
    import io

    import numpy as np

    from onelip.certification.certificate import WeightFile, make_certificate, save_certificate
    from onelip.core.files import write_whole
    from onelip.training.run_directory import RunDirectory

    content = None
    if command.out is not None:
        run = RunDirectory(command.run)
        files = WeightFile(run.plain, run.config)
        kept = None if command.images_out is None else command.images_out.resolve()
        content = make_certificate(found, images, files, folder=command.out.parent, source=source, images_file=kept)
    written: dict[str, Any] = {}
    if command.images_out is not None:
        buffer = io.BytesIO()
        np.save(buffer, images.contiguous().numpy(), allow_pickle=False)
        write_whole(command.images_out, buffer.getvalue())
        written["images_file"] = str(command.images_out)
    if command.out is not None and content is not None:
        save_certificate(command.out, content)
        written["certificate"] = str(command.out)
    return written


def _one(found: "Certification", names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "class": names[int(found.classes[0])],
        "radius": float(found.radii[0]),
        "pixels": found.pixels[0],
        "logits": dict(zip(names, found.logits[0].tolist(), strict=True)),
    }


def _show(results: dict[str, Any], written: dict[str, Any], command: Certify) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if "class" in results:
        print(f"class {results['class']}, radius {results['radius']!r} (L2, pixels in [0, 1])")
        if results["pixels"] is not None:
            print(f"every image with sum of squared pixel differences <= {results['pixels']} (of 0..255) is the same")
    else:
        title = f"{results['data']} ({results['images']}), accuracy {100 * results['accuracy']:.2f} %; CRA in %"
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("certificate")
        table.add_column("mode")
        for radius in results["cra"]:
            table.add_column(radius, justify="right", min_width=6)
        for row in results["comparison"]:
            table.add_row(row["name"], row["mode"], *(f"{100 * share:.2f}" for share in row["cra"].values()))
        Console().print(table)
        print(f"{results['certified']} of {results['images']} images have a radius above 0.")
    proof = "real-arithmetic rules" if results["proof"] is None else f"{results['proof']} proof"
    print(f"Proved Lipschitz constant: {results['constant']!r} ({proof}).")
    if results["mode"] == "sound":
        print(f"Sound: for the float64 program, whose logits are off by at most {results['error']:.3g}.")
    else:
        print("Real arithmetic: the rounding of floats is not in these radii.")
    if not results["finished"]:
        print("The run is not finished: these are the weights of its last checkpoint.")
    for what, path in written.items():
        print(f"{what}: {path}")
    if "certificate" in written:
        print(f"Check it: onelip check {shlex.quote(str(command.out))}")
