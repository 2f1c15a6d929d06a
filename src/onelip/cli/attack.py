"""`onelip attack RUN`: attack the certified decisions of a run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    make_console,
    parse,
    require_at_least,
    require_file,
    require_writable,
    unset,
)
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from onelip.attacks.result import AttackResult, ClaimedRadii


@dataclass(frozen=True)
class Attack:
    """Attack the certified decisions of a run on its test images.

    The attack searches inside and outside the certified balls of the float64 network. The exit code is 1 if it changes
    a certified decision; the counterexamples are then written to a file.
    """

    run: RunPath
    data_root: DataRoot = None
    limit: OptionalNumber = None
    """Attack only the first LIMIT images."""
    start: int = 0
    """Index of the first image; use --start and --limit to run a long attack in parts."""
    certificate: OptionalPath = None
    """Certificate with the classes and radii to attack. By default the images are certified first."""
    radius: Annotated[tuple[float, ...], unset("FLOAT ...")] = ()
    """Radii of the table. Default: 36/255, 72/255, 108/255 and 1."""
    steps: int = 20
    """Gradient steps for each target class and each restart."""
    restarts: int = 1
    """Number of random starts."""
    clip: Flag = False
    """Require points in [0, 1]. Certificates also hold outside, so the attack is stronger without it."""
    integers: Flag = False
    """Require uint8 images: attack the certified sums of squared pixel differences."""
    foolbox: Annotated[
        Literal["FMN", "DeepFool", "DDN", "CarliniWagner"] | None, unset("{FMN,DeepFool,DDN,CarliniWagner}")
    ] = None
    """Use this attack of foolbox. Needs pip install 'onelip[attacks]'."""
    seed: int = 0
    """Seed of the random starts."""
    batch_size: int = 250
    """Number of images per batch."""
    out: OptionalPath = None
    """File for all points found (.npz). Counterexamples are always written to RUN/counterexamples.npz."""
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Attack, "attack", arguments)
    _check(command)

    from onelip.attacks.result import ClaimedRadii, read_claims
    from onelip.certification.predict import certify
    from onelip.certification.radius import PAPER_RADII
    from onelip.training.build import load_run, load_run_data

    loaded = load_run(command.run)
    data = load_run_data(loaded.config, command.data_root)
    network = loaded.plain.double()
    stop = len(data.test_images) if command.limit is None else command.start + command.limit
    part = slice(command.start, min(stop, len(data.test_images)))
    images, labels = data.test_images[part], data.test_labels[part]
    if not len(images):
        raise RecipeError(f"--start {command.start} is not below the number of images, {len(data.test_images)}")
    with StageProgress() as progress:
        if command.certificate is None:
            certified = certify(network, images, batch_size=command.batch_size, progress=progress)
            claims = ClaimedRadii(certified.classes, certified.radii, certified.pixels)
        else:
            claims = read_claims(command.certificate, command.run, data.test_images, part)
        found = _attack(command, network, images, claims, progress)
    results = {
        "run": str(command.run),
        "finished": loaded.is_finished,
        "data": data.name,
        "split": "test",
        "start": command.start,
        "attack": f"foolbox {command.foolbox}" if command.foolbox else "onelip",
        "certificate": None if command.certificate is None else str(command.certificate),
        **found.to_json(),
        "accuracy": int((found.classes == labels).sum()) / len(labels),
        "radii": _by_radius(found, labels, command.radius or PAPER_RADII),
    }
    if command.out is not None:
        found.save(command.out)
        results["flips_file"] = str(command.out)
    if results["broken"]:
        path = command.run / "counterexamples.npz"
        found.save(path, only_broken=True)
        results["counterexamples_file"] = str(path)
    if command.json:
        print(json.dumps(results))
    else:
        _show(results)
    if results["broken"]:
        print(
            f"onelip attack: {results['broken']} certified decisions were changed, so the certificate is wrong; see "
            f"{results['counterexamples_file']}",
            file=sys.stderr,
        )
    return 1 if results["broken"] else 0


def _check(command: Attack) -> None:
    require_at_least(1, command, "limit", "steps", "batch_size")
    require_at_least(0, command, "start", "restarts")
    if not all(0 <= radius < float("inf") for radius in command.radius):
        raise RecipeError(f"expected finite radii of at least 0, got {command.radius}")
    require_file("--certificate", command.certificate)
    require_writable("--out", command.out)
    if command.foolbox and command.integers:
        raise RecipeError("--foolbox and --integers exclude each other: foolbox supports floats only")


def _attack(
    command: Attack, network: "nn.Module", images: "Tensor", claims: "ClaimedRadii", progress: StageProgress
) -> "AttackResult":
    from onelip.attacks import attack, with_foolbox

    settings: dict[str, Any] = {
        "radii": claims.radii,
        "batch_size": command.batch_size,
        "progress": lambda done, total: progress(done, total, "attacking images"),
    }
    if command.foolbox:
        return with_foolbox(network, images, claims.classes, command.foolbox, **settings)
    return attack(
        network,
        images,
        claims.classes,
        pixels=claims.pixels if command.integers else None,
        steps=command.steps,
        restarts=command.restarts,
        clip=command.clip,
        integers=command.integers,
        seed=command.seed,
        **settings,
    )


def _by_radius(found: "AttackResult", labels: "Tensor", radii: Sequence[float]) -> dict[str, dict[str, float]]:
    """For each radius, a lower and an upper bound of the robust accuracy: certified and attacked; and their gap."""
    from onelip.certification.radius import radius_name

    rows = {}
    for radius in radii:
        certified, attacked = found.certified_accuracy(labels, radius), found.accuracy(labels, radius)
        rows[radius_name(radius)] = {"cra": certified, "attacked": attacked, "gap": attacked - certified}
    return rows


def _show(results: dict[str, Any]) -> None:
    from onelip.training.display import text_table

    start = f" from index {results['start']}" if results["start"] else ""
    title = f"{results['data']}, {results['images']} test images{start}, attack: {results['attack']}; in %"
    rows = [
        [radius, *(f"{100 * share:.2f}" for share in (results["accuracy"], row["cra"], row["attacked"], row["gap"]))]
        for radius, row in results["radii"].items()
    ]
    heads = ("radius", "accuracy", "CRA", "attacked accuracy", "gap")
    console = make_console()
    console.print(text_table(title, heads, rows, left=0, style="red" if results["broken"] else ""))
    counts = f"{results['attacked']} certified images were attacked; {results['broken']} decisions were changed."
    console.print(counts, style="bold red" if results["broken"] else None, highlight=False)
    if results["smallest_ratio"] is not None:
        print(
            f"Distance found divided by certified radius: at least {results['smallest_ratio']:.6f}, "
            f"median {results['median_ratio']:.4f}."
        )
    if not results["finished"]:
        print(UNFINISHED)
    for what, name in (("flips_file", "Points found"), ("counterexamples_file", "Counterexamples")):
        if what in results:
            print(f"{name}: {results[what]}")
