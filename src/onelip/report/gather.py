"""Collect the content of a report from the files of a run, its network and its test images.

A part that fails does not stop the others: for a run that is incomplete, of another version or of a model that is not
registered, the page lists the missing parts with the reasons.
"""

import copy
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from onelip import plots
from onelip.attacks import AttackResult, attack
from onelip.certification.audit import Audit, audit
from onelip.certification.predict import Certification, real_certification
from onelip.certification.radius import PAPER_RADII, radius_name
from onelip.core.bake import bake
from onelip.core.errors import RunError, noted_errors
from onelip.core.files import file_hash, read_json
from onelip.core.images import to_float
from onelip.gram.jacobian import spectrum_of_network
from onelip.plots.canvas import to_svg
from onelip.report.table import Row
from onelip.training.build import LoadedRun, load_run, load_run_data
from onelip.training.evaluation import compute_scores
from onelip.training.objective import resolve_method
from onelip.training.recipe import format_seconds
from onelip.training.run_directory import RunDirectory, read_config, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 60.0  # seconds of each part
_LARGE = 50_000_000  # weights; the proofs of larger networks take minutes

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Drawing:
    """A figure on the page.

    Attributes:
        title: its heading.
        svg: the element.
        caption: the text below it.
    """

    title: str
    svg: str
    caption: str


@dataclass
class View:
    """A run on the page.

    Attributes:
        name: name on the page.
        row: its row of the table; see `onelip.report.table.columns`.
        more: further rows with other bases.
        recipe: the options of the run.
        data: name of its data.
        facts: short facts below the title.
        log: lines of log.jsonl.
        sessions: environment of each session.
        commands: commands that repeat it.
        statements: four sentences on the proofs and their limits; none if the run was not examined.
        drawings: figures of this run.
        missing: the missing parts, with the reasons.
        certification: radii of test images.
        attack: the attack on the first of these images.
        audit: the proved constant of each layer.
    """

    name: str
    row: Row
    more: list[Row] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    facts: list[str] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    certification: Certification | None = None
    attack: AttackResult | None = None
    audit: Audit | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the attack changed a certified decision; radii in real arithmetic may be too large by rounding."""
        is_sound = self.certification is not None and self.certification.mode == "sound"
        return is_sound and self.attack is not None and bool(self.attack.broken.any())

    def part(self, what: str) -> AbstractContextManager[None]:
        """A context for a part of the report; if it fails, the reason is added to `missing`."""
        return noted_errors(lambda why: self.missing.append(f"{what}: {why}"))

    def draw(self, title: str, caption: str, make: "Callable[[], Figure]") -> None:
        """Add a figure."""
        with self.part(title):
            svg = to_svg(make(), f"{title}. {caption}", f"{self.name} {title}")
            self.drawings.append(Drawing(title, svg, caption))


def read_run(path: Path, name: str, row: Row | None = None) -> View:
    """Read the files of a run; its network is not loaded.

    Args:
        path: the run directory.
        name: name on the page.
        row: its row in comparison.json, with measurements, if it is part of a comparison.

    Raises:
        NoRun: if the directory contains no run.
    """
    run = RunDirectory(path)
    if not run.config.is_file() and row is None:
        read_config(run)  # raises NoRun
    view = View(name, {"name": name, "status": "done", "why": None, **(row or {})})
    if row is not None:
        view.recipe = row.get("recipe", {})
    if not run.config.is_file():
        view.missing.append(f"run: the directory {path} is not there; the rest is from comparison.json")
        return view
    content: Any = {}
    with view.part("config"):
        content = read_json(run.config)
        view.recipe = dict(content["recipe"])
        view.data = str(content["data"]["name"])
        read_config(run)
    with view.part("training curves"):
        view.log = read_log(run)
        if not view.log:
            raise RunError("no epoch is finished yet")
    with view.part("environment"):
        sessions = [dict(session) for session in read_json(run.environment)]
        view.commands = [shlex.join(["onelip", *session["command"][1:]]) for session in sessions]
        view.sessions = sessions
    if row is None:
        with view.part("results"):
            _results(view, run)
    where = shlex.quote(str(path))
    view.commands += [f"onelip certify {where} --out certificate.json", "onelip check certificate.json"]
    view.commands += [f"onelip attack {where}", f"onelip report {where} --out report.html"]
    return view


def _results(view: View, run: RunDirectory) -> None:
    """Final results; of a run that is not finished, those of its last evaluation."""
    if view.log:
        view.row |= {"epochs": view.log[-1]["epoch"], "seconds": sum(line.get("seconds", 0) for line in view.log)}
    if run.results.exists():
        found = read_json(run.results)
        if not isinstance(found, dict) or not all(map(_is_evaluation, found.values())):
            raise RunError(f"{run.results}: expected results by split; the file is damaged")
        stated = {part["weights_sha256"] for part in found.values() if "weights_sha256" in part}
        if run.plain.exists() and stated - {file_hash(run.plain)}:
            view.missing.append(
                "final results: results.json is of other weights than plain.safetensors; evaluate the stored weights "
                f"with onelip evaluate {shlex.quote(str(run.path))}"
            )
            return
        view.row["results"] = found
    elif view.log:
        last = view.log[-1]
        view.missing.append(
            f"final results: the run is not finished; these are the results after epoch {last['epoch']}. "
            f"To finish it: {run.resume_command}"
        )
        view.row["results"] = {last.get("split", "test"): last}
    else:
        view.row |= {"status": "failed", "why": f"no results yet; to finish the run: {run.resume_command}"}


def _is_evaluation(part: Any) -> bool:
    """Whether a part of results.json has the form of an evaluation."""
    if not isinstance(part, dict) or not isinstance(part.get("cra"), dict | None):
        return False
    numbers = [part.get("accuracy"), part.get("images"), *(part.get("cra") or {}).values()]
    return isinstance(part.get("mode", ""), str) and all(isinstance(n, int | float | None) for n in numbers)


def examine(
    view: View, path: Path, *, data_root: Path | None, seconds: float, attack_images: int, progress: Progress
) -> None:
    """Load the network of a run, certify and attack its test images, and draw the results.

    Args:
        view: the run, from `read_run`; it is completed in place.
        path: the run directory.
        data_root: directory of named data sets; by default that of the run.
        seconds: time for each part: proofs, singular values, certifying images, the attack. Layers and images that do
            not fit are left out; a proof or an attack without any result after it (at least a minute) is given up.
        attack_images: number of images to attack.
        progress: called with a line of text from time to time.
    """
    with view.part("network"):
        progress("loading the network")
        _examine(view, load_run(path), data_root, seconds, attack_images, progress)


def _examine(
    view: View, run: LoadedRun, data_root: Path | None, seconds: float, attack_images: int, progress: Progress
) -> None:
    if not run.is_finished:
        view.missing.append("final weights: the network is that of the last checkpoint")
    method, count = resolve_method(run.config.recipe), sum(p.numel() for p in run.plain.parameters())
    view.facts = [
        "no method" if method is None else method.title.split(" (")[0],
        f"{count:,} parameters",
        *_training_facts(view),
    ]
    images, labels = torch.full((1, *run.config.shape), 0.5), None
    with view.part("test images"):
        data = load_run_data(run.config, data_root)
        images, labels = data.test_images, data.test_labels
    with view.part("proved constants"):
        progress("proving the constant of each layer")
        limit, seldom = _Limit(seconds, "onelip audit RUN"), _seldom(progress)

        def watch(line: str) -> None:
            limit.check()
            seldom(line)

        effort = "quick" if count > _LARGE else "normal"
        view.audit = audit(run.plain, to_float(images[:2]), lower=False, effort=effort, progress=watch)
        unproved = "; ".join(view.audit.unproved) or None
        view.row["constant"] = {"proved": view.audit.upper, "why": unproved}
    if "singular_values" not in view.row:
        with view.part("singular values"):
            progress("computing singular values")
            fast = _fast_form(run)
            found = spectrum_of_network(fast, to_float(images[:1]), seconds)
            view.row["singular_values"] = found
            if left_out := found["left_out"]:
                view.missing.append(
                    f"singular values of {', '.join(left_out)}: no time was left; use a larger --seconds"
                )
    if labels is not None:
        with view.part("certified radii"):
            view.certification, unsound = _certify(view, run, images, labels, seconds, progress)
            if unsound is not None:
                view.missing.append(f"rounding errors: not included in the radii ({unsound})")
            view.more.append(_certified_row(view))
        if view.certification is not None and attack_images:
            with view.part("attack"):
                view.attack = _attack(run, images[:attack_images], view.certification, seconds, progress)
                view.more.append(_attacked_row(view))
    progress("drawing")
    _draw(view, run, images)


def _fast_form(run: LoadedRun) -> nn.Module:
    """The network with the FFTs of its layers, or in its plain form if its parameters cannot be loaded."""
    if run.is_finished:
        with suppress(RunError):
            return bake(run.model, expand=False)
    return run.plain


def _training_facts(view: View) -> list[str]:
    """Duration and date of the training, if they are known."""
    found = []
    if epochs := view.row.get("epochs"):
        found.append(f"{epochs} epoch{'s' if epochs > 1 else ''}")
    if seconds := view.row.get("seconds"):
        found.append(f"{format_seconds(seconds)} of training")
    if started := str((view.sessions or [{}])[-1].get("started", ""))[:10]:
        found.append(started)
    return found


def _seldom(progress: Progress) -> Progress:
    """Pass on at most one line in five seconds."""
    last = time.monotonic()

    def pass_on(line: str) -> None:
        nonlocal last
        if time.monotonic() > last + 5:
            last = time.monotonic()
            progress(line)

    return pass_on


def _certify(
    view: View, run: LoadedRun, images: torch.Tensor, labels: torch.Tensor, seconds: float, progress: Progress
) -> tuple[Certification, str | None]:
    """Certify as many images as the time allows; also returns why rounding is not included, or None if it is.

    If the proof takes too long, the constant is that of the audit, in real arithmetic.
    """
    limit = _Limit(seconds, "onelip certify RUN")
    reasons: list[str | None] = []
    weights, proved = sum(p.numel() for p in run.plain.parameters()), None if view.audit is None else view.audit.upper

    def by_proof(found: list[Certification], part: torch.Tensor) -> Certification:
        # A proof that failed is not tried again.
        made = run.predict(part, mode=found[0].mode if found else None, progress=None if found else limit.check)
        reasons.append(made.reason)
        return made.certification

    if weights <= _LARGE or proved is None:
        try:
            return _joined(by_proof, images, labels, seconds, progress), reasons[0]
        except _OutOfTime as error:
            if proved is None:
                raise
            reasons[:] = [str(error)]
    else:
        reasons.append(f"with {weights:,} weights their proof takes minutes; onelip certify RUN includes them")
    constant = proved

    def by_audit(_: list[Certification], part: torch.Tensor) -> Certification:
        return real_certification(compute_scores(run.plain, part), None, constant)

    return _joined(by_audit, images, labels, seconds, progress), reasons[0]


def _joined(
    certify: Callable[[list[Certification], torch.Tensor], Certification],
    images: torch.Tensor,
    labels: torch.Tensor,
    seconds: float,
    progress: Progress,
) -> Certification:
    """Certify as many images as fit into the time, in parts."""
    found: list[Certification] = []

    def part(where: slice) -> None:
        found.append(certify(found, images[where]))

    count = _within(seconds, len(images), part, 50, lambda n: progress(f"certifying: {n} of {len(images)} images"))
    return replace(
        found[0],
        classes=torch.cat([one.classes for one in found]),
        radii=torch.cat([one.radii for one in found]),
        logits=torch.cat([one.logits for one in found]),
        pixels=tuple(pixels for one in found for pixels in one.pixels),
        labels=labels[:count],
        images_sha256=None,
    )


def _attack(
    run: LoadedRun, images: torch.Tensor, certified: Certification, seconds: float, progress: Progress
) -> AttackResult:
    images = images[: len(certified.classes)]
    # Sound radii are those of the float64 program.
    network = copy.deepcopy(run.plain)
    network = network.double() if certified.mode == "sound" else network
    limited = network.register_forward_pre_hook(_Limit(seconds, "onelip attack RUN --limit 4").check)
    found: list[AttackResult] = []

    def part(where: slice) -> None:
        radii = certified.radii[where]
        found.append(attack(network, images[where], certified.classes[where], radii=radii, clip=True))
        limited.remove()  # further parts are as long as the time that is left

    count = _within(seconds, len(images), part, 4, lambda n: progress(f"attacking: {n} of {len(images)} images"))
    return AttackResult(
        images=images[:count],
        classes=certified.classes[:count],
        adversarials=torch.cat([one.adversarials for one in found]),
        logits=torch.cat([one.logits for one in found]),
        squares=tuple(square for one in found for square in one.squares),
        radii=certified.radii[:count],
    )


class _OutOfTime(RunError):
    """A part of the report took too long."""


class _Limit:
    """A limit of time for a part of the report: `check` raises an error when the time is over.

    Args:
        seconds: the time; at least `_LEAST`, so that small networks are always complete.
        command: a command that has no limit.
    """

    def __init__(self, seconds: float, command: str) -> None:
        self.seconds = max(seconds, _LEAST)
        self.end = time.monotonic() + self.seconds
        self.command = command

    def check(self, *_: object) -> None:
        """Raise an error if the time is over; takes the arguments of progress functions and hooks."""
        if time.monotonic() > self.end:
            raise _OutOfTime(
                f"not finished within {format_seconds(self.seconds)}; use a larger --seconds, or {self.command}"
            )


def _within(
    seconds: float, total: int, work: Callable[[slice], None], first: int, report: Callable[[int], None]
) -> int:
    """Work on growing parts until all is done, or the next part may not fit into the time; returns how much is done.

    Examples:
        >>> done = []
        >>> _within(60.0, 10, done.append, 4, lambda n: None), done
        (10, [slice(0, 4, None), slice(4, 10, None)])
        >>> _within(0.0, 10, done.append, 4, lambda n: None)
        4
    """
    done, size, end = 0, first, time.monotonic() + seconds
    while done < total and size:
        stop, start = min(total, done + size), time.monotonic()
        work(slice(done, stop))
        now = time.monotonic()
        size = min(2 * size, int(size * max(0.0, end - now) / max(now - start, 1e-9)))
        done = stop
        report(done)
    return done


def _certified_row(view: View) -> Row:
    assert view.certification is not None
    found = view.certification
    mode = "sound" if found.mode == "sound" else "by bounds of the stored weights"
    results = {"images": len(found.classes), "accuracy": found.accuracy(), "cra": found.cra(), "mode": mode}
    constant = {"proved": found.constant}
    return {"name": f"{view.name}, certified", "status": "done", "results": {"test": results}, "constant": constant}


def _attacked_row(view: View) -> Row:
    assert view.attack is not None
    assert view.certification is not None
    assert view.certification.labels is not None
    found, labels = view.attack, view.certification.labels[: len(view.attack)]
    shares = {radius_name(radius): found.accuracy(labels, radius) for radius in PAPER_RADII}
    right = int((found.classes == labels).sum()) / len(labels)
    results = {"images": len(labels), "accuracy": right, "cra": shares, "mode": "attack"}
    return {"name": f"{view.name}, attacked", "status": "done", "results": {"test": results}}


def _draw(view: View, run: LoadedRun, images: torch.Tensor) -> None:
    """The figures of one run; those that several runs share are drawn by the page."""
    names, found = run.config.class_names, view.certification
    if found is not None:
        part = "" if len(found.classes) == len(images) else f" The first {len(found.classes)} test images."
        view.draw(
            "Certified radii",
            f"Distribution of the certified radii, and their quantiles by class. Dashed lines: {_radii()}.{part}",
            lambda: plots.radii(found, names),
        )
        view.draw(
            "Decisions by class",
            f"Share of the images of each class (rows) that get each decision (columns), in %.{part}",
            lambda: plots.confusion(found, names),
        )
        view.draw(
            "Most and least robust images",
            "Decision and certified L2 radius of each image, for pixels in [0, 1].",
            lambda: plots.robust_images(found, images, names),
        )
    against = view.attack
    if against is not None:
        view.draw(
            "Nearest images with another decision",
            "Found by the attack among images with pixels in [0, 1], from the smallest to the largest distance.",
            lambda: plots.adversarial_images(against, names),
        )
    if "layers" in (spectrum := view.row.get("singular_values", {})):
        ways = ", ".join(sorted({layer["how"] for layer in spectrum["layers"]}))
        view.draw(
            "Singular values and proved constants of the layers",
            f"Singular values in float64, not proved ({ways}). The numbers on the right are proved, rounded up.",
            lambda: plots.singular_values(spectrum, view.audit),
        )
    view.draw(
        "JᵀJ of a layer",
        "Three crops of JᵀJ, each with its own colour scale: blue is positive, red negative. The identity preserves "
        "distances; a layer with fewer outputs than inputs can only come near to it.",
        lambda: plots.jtj(run),
    )


def _radii() -> str:
    return ", ".join(radius_name(radius) for radius in PAPER_RADII)
