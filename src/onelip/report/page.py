"""The page: one HTML file about one or several runs, or about a comparison of methods, that loads nothing else."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from onelip import plots
from onelip._version import __version__
from onelip.certification.radius import PAPER_RADII, certified_accuracy, radius_name
from onelip.core.errors import PathTaken, RecipeError
from onelip.core.files import read_json, write_whole
from onelip.core.paper import paper
from onelip.core.rounding import rounded_up
from onelip.plots.canvas import PALETTE
from onelip.report.gather import Progress, View, examine, read_run
from onelip.report.table import Row, columns

_LARGEST = 1_900_000  # bytes of figures on a page
_OVERLAID = 8  # runs in one figure
_RECORD = {"rows", "plan", "data", "split", "commands", "onelip", "torch", "machine", "threads"}  # of a comparison
_START = b"<!DOCTYPE html>"
_PAPER = {"cifar10": "table-3", "cifar100": "table-4"}  # tables of the paper by the name of the data
_NEAR, _FAR = PAPER_RADII[0], PAPER_RADII[-1]
_LIMITS = (
    "Not proved: that the class of a new image is right; and nothing is stated about changes beyond the radius of an "
    "image, such as a rotation or another camera."
)


class Written(NamedTuple):
    """The result of `write_report`."""

    missing: list[str]
    """A line for each part that is missing on the page."""
    broken: list[str]
    """Runs in which the attack changed a certified decision, so that the certificate is wrong."""


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    data_root: str | Path | None = None,
    seconds: float = 120.0,
    attack_images: int = 64,
    force: bool = False,
    progress: Progress = lambda line: None,
) -> Written:
    """Write a report of one or several runs as an HTML page that loads nothing else.

    Test images are certified and the first of them attacked. A part that fails is left out, and the page lists it as
    missing.

    Args:
        paths: run directories, or one directory of `onelip compare`, which stands for all its runs.
        out: the file to write.
        data_root: directory of named data sets; by default that of each run.
        seconds: time for each part of a run: proofs, singular values, certifying images, the attack. Layers and images
            that do not fit are left out; a proof or an attack without any result after it (at least a minute) is given
            up. The page lists the missing parts.
        attack_images: number of images of each run to attack; 0 for no attack.
        force: replace an existing report.
        progress: called with a line of text from time to time.

    Returns:
        The parts that are missing on the page, and the runs whose certificates the attack refuted.

    Raises:
        NoRun: if a directory contains no run.
        PathTaken: if the file exists, and with `force`, if it is not a report.

    Without matplotlib the page has no figures, and states it.

    Examples:
        Not executed here:

            onelip.report.write_report(["runs/first", "runs/second"], "page.html")
    """
    out, root = Path(out), None if data_root is None else Path(data_root)
    check_out(out, force)
    given = [Path(path) for path in paths]
    record: dict[str, Any] | None = None
    if len(given) == 1 and (given[0] / "comparison.json").is_file():
        record = _read_comparison(given[0])
        runs = [given[0] / row["run"] for row in record["rows"]]
        views = _comparison_views(record, given[0])
    else:
        runs, views = given, [read_run(path, name) for path, name in zip(given, _names(given), strict=True)]
    for number, (path, view) in enumerate(zip(runs, views, strict=True), start=1):
        title = f"[{number}/{len(runs)}] {view.name}"

        def show(line: str, title: str = title) -> None:
            progress(f"{title}: {line}")

        if view.row["status"] == "done" or record is None:
            examine(view, path, data_root=root, seconds=seconds, attack_images=attack_images, progress=show)
            view.statements = _statements(view)
    progress("writing the page")
    write_whole(out, _render(views, record).encode())
    return Written(
        missing=[f"{view.name}: {line}" for view in views for line in view.missing],
        broken=[view.name for view in views if view.is_broken],
    )


def check_out(out: Path, force: bool) -> None:
    """Raise an error if a report cannot be written because of its path."""
    if out.is_dir():
        raise RecipeError(f"{out} is a directory; give the name of a file")
    if not out.parent.is_dir():
        raise RecipeError(f"{out}: there is no directory {out.parent}; create it, or choose another path")
    if out.exists() and not force:
        raise PathTaken(f"{out} exists; choose another --out, or replace it with --force")
    if out.exists() and not out.read_bytes().startswith(_START):
        raise PathTaken(f"{out} is not a report, so it is not replaced; choose another --out")


def comparison_page(record: dict[str, Any], directory: Path | None = None) -> str:
    """The page of a comparison from the content of comparison.json and the logs of its runs; nothing is computed.

    Args:
        record: the comparison.
        directory: where its runs are; None for a page without their logs.
    """
    return _render(_comparison_views(record, directory), record)


def _read_comparison(path: Path) -> dict[str, Any]:
    record = read_json(path / "comparison.json")
    if not isinstance(record, dict) or not record.keys() >= _RECORD:
        raise RecipeError(f"{path / 'comparison.json'}: is not a comparison of onelip; give directories of runs")
    return record


def _comparison_views(record: dict[str, Any], directory: Path | None) -> list[View]:
    views = []
    for row in record["rows"]:
        name = row["method"]
        if directory is None or row["status"] != "done":
            view = View(name, {"name": name, **row}, recipe=row.get("recipe", {}))
        else:
            view = read_run(directory / row["run"], name, row)
        view.data = record["data"]["name"]
        views.append(view)
    return views


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as make them distinct."""
    whole = [path.resolve().parts for path in paths]
    if len(set(whole)) < len(whole):
        raise RecipeError("a run is given twice")
    length = next(n for n in range(1, 1000) if len({parts[-n:] for parts in whole}) == len(whole))
    return ["/".join(parts[-length:]) for parts in whole]


def _render(views: list[View], record: dict[str, Any] | None) -> str:
    # autoescape: names of data sets and messages of errors may contain HTML.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = page.from_string(files("onelip.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    # Images are certified on the test split.
    split = "test" if record is None or any(view.more for view in views) else record["split"]
    rows = [row for view in views for row in (view.row, *view.more)]
    if record is None:
        rows += _paper_rows(views)
    # A comparison has the same images in each row.
    unused = {"images"} if record is not None else set()
    shown = [
        column
        for column in columns(rows, split)
        if column.title not in unused and any(column.key(row) is not None for row in rows)
    ]
    meanings: dict[str, list[str]] = {}
    for column in shown:
        meanings.setdefault(column.meaning, []).append(column.title)
    shared = _shared(views, split)
    _fit(views, sum(len(drawing.svg) for drawing in shared.drawings))
    return template.render(
        palette=PALETTE,
        title=_title(views, record),
        record=record,
        split=split,
        views=views,
        rows=rows,
        columns=shown,
        meanings={", ".join(titles): meaning for meaning, titles in meanings.items()},
        unproved=[row for row in rows if row.get("constant") and row["constant"].get("why")],
        shared=shared.drawings,
        missing=shared.missing,
        cards=_cards(views[0], split) if len(views) == 1 else [],
        version=__version__,
    )


def _title(views: list[View], record: dict[str, Any] | None) -> str:
    if record is not None:
        return f"{record['plan']['recipe']['model']} on {record['data']['name']}: methods compared"
    data = ", ".join(dict.fromkeys(view.data for view in views if view.data)) or "unknown data"
    if len(views) > 1:
        return f"{len(views)} runs on {data}"
    return f"{views[0].recipe.get('model', 'A network')} on {data}"


def _paper_rows(views: list[View]) -> list[Row]:
    rows = {}
    for view in views:
        for name, shares in paper_results(view.data, str(view.recipe.get("model"))).items():
            cra = {radius_name(radius): share for radius, share in shares.items() if radius}
            results = {"accuracy": shares[0.0], "cra": cra, "images": 10000, "mode": "paper"}
            rows[name] = {"name": name, "status": "done", "results": {"test": results}, "epochs": 1000}
    return list(rows.values())


def paper_results(data: str, model: str) -> dict[str, dict[float, float]]:
    """The published network that is nearest to a model, and its accuracies by radius; none for other data.

    Examples:
        >>> paper_results("cifar10", "aol-large")
        {'AOL-Large, 1000 epochs (paper)': {0.0: 0.716, 0.141...: 0.64, 0.282...: 0.564, 0.423...: 0.49, 1.0: 0.237}}
        >>> paper_results("digits", "patchwise-tiny")
        {}
    """
    rows = paper()["tables"][_PAPER[data]]["rows"] if data in _PAPER else []
    known = {row["name"]: row["values"] for row in rows if row["name"].startswith("AOL")}
    name = next((name for name in known if name.lower().split("-")[1] in model.lower()), "AOL-Small")
    shares = dict(zip((0.0, *PAPER_RADII), (round(p / 100, 3) for p in known.get(name, ())), strict=False))
    return {f"{name}, 1000 epochs (paper)": shares} if shares else {}


def _cards(view: View, split: str) -> list[tuple[str, str]]:
    """The most important numbers of a run."""
    row = next((row for row in view.more if row["name"].endswith(", certified")), view.row)
    shown = {column.title: column.text(row) for column in columns([row], split)}
    names = {"accuracy": "accuracy, %", "CRA 36/255": "certified at 36/255, %", "constant": "Lipschitz constant ≤"}
    cards = [(text, shown[title]) for title, text in names.items() if shown.get(title, "-") != "-"]
    if view.certification is not None:
        cards.append(("median certified radius", f"{float(view.certification.radii.quantile(0.5)):.2f}"))
    return cards


def _shared(views: list[View], split: str) -> View:
    """Figures of all runs together, and the missing ones. Of many runs, those with the largest CRA are overlaid."""
    page = View("page", {})
    done = {view.name: view for view in views if view.row["status"] == "done"}
    results = {name: part for name, view in done.items() if (part := (view.row.get("results") or {}).get(split))}
    best = sorted(done, key=lambda name: -_first_cra(results.get(name)))[:_OVERLAID]
    few = {view.name: view for view in views if view.name in best}
    some = "" if len(few) == len(done) else f" The {len(few)} runs with the largest CRA."
    certified = {name: view.certification for name, view in few.items() if view.certification is not None}
    attacks = {name: view.attack for name, view in few.items() if view.attack is not None}
    published = {
        name: shares
        for view in few.values()
        for name, shares in paper_results(view.data, str(view.recipe.get("model"))).items()
    }
    if certified:
        page.draw(
            "Certified accuracy by radius",
            "A lower bound of the accuracy under every change of that norm. The true robust accuracy is between it and "
            f"the accuracy under the attack.{some}",
            lambda: plots.certified_accuracy(certified, attacks=attacks, paper=published),
        )
    logs = {name: view.log for name, view in few.items() if view.log}
    if any(len(log) > 1 for log in logs.values()):  # a single epoch is no curve; the table has its numbers
        single = next(iter(logs.values())) if len(logs) == 1 else None
        page.draw(
            "Training",
            f"Loss, accuracy and certified robust accuracy (CRA) after each epoch.{some}",
            lambda: plots.training_curves(logs if single is None else single),
        )
    if len(results) > 1:
        page.draw(
            "Accuracy and certified robust accuracy",
            f"Accuracy and CRA on the {split} images, by radius.",
            lambda: plots.accuracies(results),
        )
    spectra = {
        name: found for name, view in done.items() if "histogram" in (found := view.row.get("singular_values") or {})
    }
    if len(spectra) > 1:
        ways = ", ".join(sorted({layer["how"] for found in spectra.values() for layer in found["layers"]}))
        page.draw(
            "Singular values of the layers",
            "The distribution of the singular values s of the layers. An isometry has all of them at 1, the dashed "
            f"line. Each layer has the same weight. Computed in float64, not proved, by: {ways}.",
            lambda: plots.spectra(spectra),
        )
    return page


def _first_cra(results: dict[str, Any] | None) -> float:
    shares = list(((results or {}).get("cra") or {}).values())
    return shares[0] if shares and shares[0] is not None else 0.0


def _fit(views: list[View], used: int) -> None:
    """Leave out figures that would make the page too large."""
    for view in views:
        kept = []
        for drawing in view.drawings:
            used += len(drawing.svg)
            if used <= _LARGEST:
                kept.append(drawing)
            else:
                view.missing.append(f"{drawing.title}: the page would be too large; report this run by itself")
        view.drawings = kept


def _statements(view: View) -> list[str]:
    """Four sentences: the constant, the certified images, the limits of the proof, and the attack."""
    return [_constant_sentence(view), _certified_sentence(view), _LIMITS, _attack_sentence(view)]


def _constant_sentence(view: View) -> str:
    found = view.certification
    if found is None:
        why = (view.row.get("constant") or {}).get("why")
        return "Not proved here: this report has no Lipschitz constant of the network" + (f" ({why})." if why else ".")
    return (
        "Proved: changing an image by d (L2 norm, pixels in [0, 1]) changes the scores of the stored network by at "
        f"most {rounded_up(found.constant)} d"
        + (
            f", and the float64 program is off by at most {rounded_up(found.proof.error, 2)}."
            if found.mode == "sound" and found.proof is not None
            else ", in real arithmetic; rounding errors are not included."
        )
    )


def _certified_sentence(view: View) -> str:
    found = view.certification
    if found is None:
        results: Any = (view.row.get("results") or {}).get("test") or {}
        share = (results.get("cra") or {}).get(radius_name(_NEAR))
        if share is None:
            return "Not proved: no image is certified."
        mode = f", {results['mode']}" if results.get("mode") else ""
        return (
            f"Stated by the training: {100 * share:.1f} % of the test images are classified correctly up to a radius "
            f"of {radius_name(_NEAR)}{mode}; this report could not repeat it."
        )
    count, shares = len(found.classes), found.cra((_NEAR, _FAR))
    near, far = (100 * shares[radius_name(radius)] for radius in (_NEAR, _FAR))
    return (
        f"Proved: of {count} test images, {near:.1f} % are classified correctly and stay so under every change of a "
        f"norm up to {radius_name(_NEAR)}, and {far:.1f} % up to {radius_name(_FAR)}."
    )


def _attack_sentence(view: View) -> str:
    found, certified = view.attack, view.certification
    if found is None or certified is None or certified.labels is None:
        return "Not known: no attack was run, so the true robust accuracy may be anything above the certified one."
    if view.is_broken:
        return (
            f"REFUTED: an attack changed {int(found.broken.sum())} certified decisions, so the certificate is wrong; "
            "do not rely on it, and please report it."
        )
    labels = certified.labels[: len(found)]
    right, radii = found.classes == labels, certified.radii[: len(found)]
    low = 100 * certified_accuracy(right, radii, _NEAR, inclusive=certified.mode == "sound")
    between = f"between {low:.1f} % (certified) and {100 * found.accuracy(labels, _NEAR):.1f} % (no change found)"
    return (
        f"Tested: an attack on {len(found)} images changed no certified decision; the robust accuracy of these images "
        f"at {radius_name(_NEAR)} is {between}."
    )
