"""`onelip certify RUN`: certified radii of images, and certificate files."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onelip.cli._common import (
    UNFINISHED,
    DataRoot,
    Flag,
    Json,
    OptionalNumber,
    OptionalPath,
    RunPath,
    StageProgress,
    load_labelled,
    make_console,
    parse,
    require_at_least,
    require_file,
    require_writable,
    unset,
)
from onelip.core.errors import RecipeError, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from onelip.certification.predict import Certification
    from onelip.training.build import LoadedRun


@dataclass(frozen=True)
class Certify:
    """Compute the class and the certified radius of each image.

    The radii hold for the network as it runs in float64: its rounding errors are included. The stored weights are
    converted to float64, which is exact, and their Lipschitz constants are proved. With --out, the proof and all radii
    are written to a file that `onelip check` checks independently.
    """

    run: RunPath
    data: Annotated[str | None, unset("NAME|PATH")] = None
    """Other images than those of the run, of the same shape: all images of a folder or .npz file without a split, else
    its --split images. Classes are matched by name."""
    resize: Flag = False
    """Resize the images of --data or --image to the size that the network takes. The results are then for the resized
    images."""
    data_root: DataRoot = None
    split: Literal["test", "train"] = "test"
    """Images to certify."""
    limit: OptionalNumber = None
    """Certify only the first INT images."""
    image: OptionalPath = None
    """Certify one image file (png, ...) of the image size of the network; for several, use onelip predict. Needs pip
    install 'onelip[images]'."""
    mode: Literal["sound", "real-arithmetic"] = "sound"
    """sound: rounding errors are included. real-arithmetic: they are not; the network runs in float32."""
    exact: Flag = False
    """Prove in rational arithmetic; --out implies it. Needs pip install 'onelip[exact]'."""
    effort: Literal["quick", "normal", "high"] = "normal"
    """Effort for each layer: more effort gives tighter bounds."""
    batch_size: int = 250
    """Number of images per batch; changes speed and memory only."""
    out: OptionalPath = None
    """Certificate file to write."""
    images_out: OptionalPath = None
    """File for the images (.npy), from which the checker recomputes the logits. Default: beside --out."""
    force: Flag = False
    """Overwrite existing files."""
    keep_images: bool = True
    """Write the images with --out. Without them, onelip check can check the bounds only."""
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Certify, "certify", arguments)
    if command.out is not None and command.images_out is None and command.keep_images:
        command = replace(command, images_out=command.out.with_suffix(".images.npy"))
    if command.out is not None and command.mode != "sound":
        raise RecipeError("--out needs --mode sound: a certificate includes rounding errors")
    require_at_least(1, command, "limit", "batch_size")

    _check_paths(command)
    if command.out is not None or command.exact:
        _require_flint()

    from onelip.certification.predict import certify
    from onelip.training.build import load_run

    loaded = load_run(command.run)
    if command.out is not None and not loaded.is_finished:
        raise RunError(
            f"{command.run}: the run is not finished, and --out needs its final weights; "
            f"finish it with onelip train --resume {shlex.quote(str(command.run))}"
        )
    images, labels, data = _images(command, loaded)
    network = loaded.plain.double() if command.mode == "sound" else loaded.plain
    with StageProgress() as progress:
        found = certify(
            network,
            images,
            labels,
            mode=command.mode,
            exact=command.exact or command.out is not None,
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


def _require_flint() -> None:
    """Fail before the work if python-flint is missing."""
    import importlib.util

    if importlib.util.find_spec("flint") is None:
        raise RunError("--out and --exact need python-flint: pip install 'onelip[exact]'")


def _check_paths(command: Certify) -> None:
    """Raise an error for invalid paths, before the work."""
    from onelip.training.run_directory import RunDirectory

    run = RunDirectory(command.run.resolve())
    taken = {run.config, run.log, run.environment, run.checkpoint, run.weights, run.plain, run.results}
    paths = [path for path in (command.out, command.images_out) if path is not None]
    require_file("--image", command.image)
    require_writable("--out", command.out)
    require_writable("--images-out", command.images_out)
    for path in paths:
        if path.resolve() in taken:
            raise RecipeError(f"{path} is a file of the run; choose another name")
        if path.exists() and not command.force:
            raise RecipeError(f"{path} exists; choose another name, or overwrite it with --force")
    if len({path.resolve() for path in paths}) < len(paths):
        raise RecipeError(f"--out and --images-out are the same file, {command.out}; choose two")


def _images(command: Certify, loaded: "LoadedRun") -> "tuple[Tensor, Tensor | None, str]":
    """Images, labels if there are any, and their source."""
    if command.image is not None:
        from onelip.data import load_images

        resize = command.resize or loaded.config.recipe.resize_to is not None
        new = load_images(command.image, loaded.config.shape, resize=resize)
        change = "" if new.changes[0] is None else f" ({new.changes[0]})"
        return new.images, None, f"{command.image}{change}"
    data = load_labelled(loaded.config, command.data_root, command.data, command.split, resize=command.resize)
    return data.images[: command.limit], data.labels[: command.limit], f"{data.name}, {data.split} images"


def _write(command: Certify, found: "Certification", images: "Tensor", source: str) -> dict[str, Any]:
    """Write the certificate and the images; returns their paths."""
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
    from onelip.training.display import text_table

    if "class" in results:
        print(f"{results['data']}: class {results['class']}")
        print(f"Certified radius: {results['radius']!r} (L2, pixels in [0, 1])")
        if results["pixels"] is not None:
            print(f"Same class for every uint8 image with a sum of squared pixel differences <= {results['pixels']}.")
    else:
        title = f"{results['data']} ({results['images']}), accuracy {100 * results['accuracy']:.2f} %; CRA in %"
        heads = ["certificate", "mode", *results["cra"]]
        rows = [
            [row["name"], row["mode"], *(f"{100 * share:.2f}" for share in row["cra"].values())]
            for row in results["comparison"]
        ]
        make_console().print(text_table(title, heads, rows, left=2))
        print(f"{results['certified']} of {results['images']} images have a radius above 0.")
    proof = "real-arithmetic rules" if results["proof"] is None else f"{results['proof']} proof"
    print(f"Proved Lipschitz constant: {results['constant']!r} ({proof}).")
    if results["mode"] == "sound":
        print(f"The radii include rounding errors: the float64 logits are off by at most {results['error']:.3g}.")
    else:
        print("The radii do not include rounding errors (real arithmetic).")
    if not results["finished"]:
        print(UNFINISHED)
    for what, name in (("images_file", "Images"), ("certificate", "Certificate")):
        if what in written:
            print(f"{name}: {written[what]}")
    if "certificate" in written:
        print(f"Check it: onelip check {shlex.quote(str(command.out))}")
