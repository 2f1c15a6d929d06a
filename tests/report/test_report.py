"""`onelip report`: what is on the page, what is missing on it, and what is never overwritten."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from _browser import browser, needs_chromium
from _runs import SMALL, call

import onelip
from onelip.core.errors import NoRun, PathTaken, RecipeError
from onelip.core.rounding import rounded_up
from onelip.data import load_data
from onelip.report import gather, write_report
from onelip.report.page import paper_results

FIGURES = (
    "Certified accuracy by radius",
    "Training",
    "Certified radii",
    "Decisions by class",
    "Most and least robust images",
    "Nearest images with another decision",
    "Singular values and proved constants of the layers",
    "JᵀJ of a layer",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    onelip.train(SMALL.replace(threads=1), path)
    return path


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    """The page of one run, what is missing on it, and the progress."""
    out, lines = tmp_path_factory.mktemp("report") / "page.html", []
    missing, _ = write_report([run], out, attack_images=8, progress=lines.append)
    return out, missing, lines


@pytest.fixture
def quick(monkeypatch):
    """Figures that are made, but not written as SVG, for tests of all else."""
    monkeypatch.setattr(gather, "to_svg", lambda figure, label, key: "<svg></svg>")


def copy_of(run, where):
    return Path(shutil.copytree(run, where, ignore=shutil.ignore_patterns(".lock")))


def write(runs, out, **settings):
    """The page without an attack, which takes most of the time."""
    missing, _ = write_report(runs, out, attack_images=0, **settings)
    return out.read_text(), missing


def test_the_page_has_everything(run, report):
    out, missing, lines = report
    page = out.read_text()
    assert missing == []
    assert page.startswith("<!DOCTYPE html>")
    assert out.stat().st_size < 2_000_000
    for title in FIGURES:
        assert page.count(f"<h3>{title}</h3>") == 1
    assert page.count("<svg") == len(FIGURES)
    assert len(re.findall(r'<ol class="proof">(.*?)</ol>', page, re.DOTALL)[0].split("<li")) == 5  # four sentences
    certified = onelip.load_run(run).predict(load_data("digits").test_images).certification
    assert f"at most {rounded_up(certified.constant)} d" in page
    results = json.loads((run / "results.json").read_text())["test"]
    assert f">{100 * results['accuracy']:.1f}</td>" in page
    for text in ("<dt>batch size</dt><dd>250</dd>", "onelip certify", "torch 2", "small, attacked"):
        assert text in page
    assert "http" not in page
    assert any("certifying: 355 of 355 images" in line for line in lines)
    assert any("attacking: 8 of 8 images" in line for line in lines)


def test_several_runs_are_overlaid(run, tmp_path):
    other = copy_of(run, tmp_path / "other" / "small")
    page, missing = write([run, other], tmp_path / "page.html")
    assert missing == []
    assert "<title>2 runs on digits</title>" in page
    parent = f"{run.parent.name}/small"
    for name in (parent, "other/small"):  # the last parts that differ
        assert page.count(f"<summary>{name}</summary>") == 1
    assert page.count("<h3>Certified accuracy by radius</h3>") == 1
    assert page.count("<h3>Decisions by class</h3>") == 2
    assert page.count("<h3>Singular values of the layers</h3>") == 1
    assert "no attack was run" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    with pytest.raises(RecipeError, match="given twice"):
        write([run, run], tmp_path / "twice.html")


def test_files_are_never_overwritten_unasked(run, report, tmp_path, capsys, quick):
    out = tmp_path / "thesis.html"
    out.write_text("years of work")
    with pytest.raises(PathTaken, match="exists; choose another --out, or replace it with --force"):
        write_report([run], out)
    assert call(capsys, "report", run, "--out", out)[0] == 2
    code, _, error = call(capsys, "report", run, "--out", out, "--force")
    assert (code, "is not a report, so it is not replaced" in error) == (2, True)
    assert out.read_text() == "years of work"
    shutil.copy(report[0], out)
    code, text, progress = call(capsys, "report", run, "--out", out, "--force", "--attack-images", "0", "--json")
    assert code == 0
    assert json.loads(text) == {"report": str(out), "bytes": out.stat().st_size, "missing": [], "broken": []}
    assert "[1/1] small: certifying" in progress


def test_results_of_other_weights_are_not_shown(run, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    results = json.loads((copied / "results.json").read_text())
    results["test"]["weights_sha256"] = "0" * 64
    (copied / "results.json").write_text(json.dumps(results))
    missing, _ = write_report([copied], tmp_path / "page.html", attack_images=0)
    assert any("of other weights" in line for line in missing)


@pytest.mark.parametrize(
    "wrong", [{"accuracy": "all"}, {"cra": [{}]}, {"mode": 3}, {"cra": {"1": "most"}}, {"images": None}]
)
def test_results_that_are_no_numbers(run, tmp_path, wrong, quick):
    """They are left out, and the page is written."""
    other = copy_of(run, tmp_path / "other")
    results = json.loads((other / "results.json").read_text())
    results["test"] |= wrong
    (other / "results.json").write_text(json.dumps(results))
    page, _ = write([other], tmp_path / "page.html")
    assert "<h3>Decisions by class</h3>" in page


def test_what_is_no_run_is_refused(run, tmp_path, capsys):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NoRun, match="is not a run"):
            write_report([run, path], tmp_path / "page.html")
    code, _, error = call(capsys, "report", tmp_path / "nothing", "--out", tmp_path / "page.html")
    assert (code, error.count("\n")) == (2, 1)
    assert "there is no such directory" in error
    assert call(capsys, "report", run, "--out", tmp_path / "no" / "page.html")[0] == 2
    assert call(capsys, "report", run, "--out", tmp_path)[0] == 2
    assert call(capsys, "report", run, "--out", tmp_path / "a.html", "--attack-images", "-1")[0] == 2
    assert call(capsys, "report")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run(run, tmp_path, quick):
    part = copy_of(run, tmp_path / "part")
    for name in ("results.json", "weights.safetensors", "plain.safetensors"):
        (part / name).unlink()
    page, missing = write([part], tmp_path / "page.html")
    assert [line.split(":")[1].strip() for line in missing] == ["final results", "final weights"]
    assert "onelip train --resume" in page
    assert "<h3>Certified accuracy by radius</h3>" in page


def test_a_run_that_has_only_a_config(run, tmp_path, quick):
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(run / "config.json", part)
    page, missing = write([part], tmp_path / "page.html")
    text = " ".join(missing)
    for what in ("training curves: no epoch is finished", "environment:", "network:"):
        assert what in text
    assert "failed: no results yet" in page
    assert "<dt>batch size</dt><dd>250</dd>" in page


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config: config | {"version": 99}, "expected a config of version 1, got version 99"),
        (lambda config: config | {"recipe": config["recipe"] | {"model": "my-old-model"}}, "unknown model"),
        (lambda config: config | {"recipe": config["recipe"] | {"speed": 3}}, "speed"),
        (lambda config: {"version": 1}, "KeyError: 'recipe'"),
    ],
)
def test_runs_of_other_versions_and_models(run, tmp_path, change, why, quick):
    other = copy_of(run, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(change(config)))
    page, missing = write([other], tmp_path / "page.html")
    assert any("network" in line for line in missing)
    assert why in " ".join(missing)
    assert "<h3>Training</h3>" in page  # from the log
    assert "Stated by the training" in page
    assert ", ;" not in page
    results = json.loads((run / "results.json").read_text())["test"]
    assert f">{100 * results['accuracy']:.1f}</td>" in page


def test_damaged_files_cost_their_part_only(run, tmp_path, quick):
    other = copy_of(run, tmp_path / "other")
    (other / "log.jsonl").write_text("no json\n")
    (other / "environment.json").write_text("[3]")
    (other / "results.json").write_text("[]")
    page, missing = write([other], tmp_path / "page.html")
    assert [line.split(":")[1].strip() for line in missing] == ["training curves", "environment", "results"]
    assert "<h3>Decisions by class</h3>" in page


def test_missing_data_cost_what_needs_images(run, tmp_path, quick):
    other = copy_of(run, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["data"]["fingerprint"] = "0" * 64
    (other / "config.json").write_text(json.dumps(config))
    page, missing = write([other], tmp_path / "page.html")
    (line,) = missing
    assert "test images: " in line
    assert "these are not the data of the run" in line
    assert "<h3>JᵀJ of a layer</h3>" in page
    assert "<h3>Decisions by class</h3>" not in page


def test_failing_parts_cost_themselves_only(run, tmp_path, monkeypatch, quick):
    def fail(*args, **settings):
        raise ArithmeticError("a <b>test</b>")

    for name in ("confusion", "certified_accuracy"):
        monkeypatch.setattr(gather.plots, name, fail)
    monkeypatch.setattr(gather, "attack", fail)
    missing, _ = write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [line.split(":")[1].strip() for line in missing] == ["attack", "Decisions by class"]
    assert "ArithmeticError: a &lt;b&gt;test&lt;/b&gt;" in page
    assert page.count("<b>test") == 0
    assert "Certified accuracy by radius: ArithmeticError" in page
    assert "<h3>Certified radii</h3>" in page


def test_without_matplotlib_the_page_has_tables(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, missing = write([run], tmp_path / "page.html")
    assert "onelip.plots needs matplotlib: pip install" in page
    assert all("pip install" in line for line in missing)
    assert "<svg" not in page
    assert "Proved: of 355 test images" in page


def test_time_is_bounded(run, tmp_path, quick):
    missing, _ = write_report([run], tmp_path / "page.html", seconds=0.0)
    page = (tmp_path / "page.html").read_text()
    assert "Proved: of 50 test images" in page  # the first part
    assert "an attack on 4 images" in page
    assert "The first 50 test images." in page
    (line,) = missing  # all layers but the smallest
    assert "singular values of " in line
    assert "use a larger --seconds" in line


def test_parts_without_a_result_are_given_up(run, tmp_path, monkeypatch, quick):
    """A large network: its proof and one attack take longer than the limit."""
    monkeypatch.setattr(gather, "_LEAST", -1.0)
    page, missing = write([run], tmp_path / "page.html", seconds=-1.0)
    given_up = {line.split(":")[1].strip(): line for line in missing}
    assert "or onelip audit RUN" in given_up["proved constants"]
    assert "or onelip certify RUN" in given_up["certified radii"]
    assert "Stated by the training" in page

    # Without a proof in time, the radii are those of the audit.
    monkeypatch.setattr(gather, "_Limit", lambda seconds, command: gather_limit(command, "certify"))
    page, missing = write([run], tmp_path / "audit.html")
    assert ["rounding errors: not included" in line for line in missing] == [True]
    assert "Proved: of 355 test images" in page
    assert "rounding errors are not included" in page

    monkeypatch.setattr(gather, "_Limit", lambda seconds, command: gather_limit(command, "attack"))
    missing, _ = write_report([run], tmp_path / "attack.html", attack_images=4)
    assert ["onelip attack RUN" in line for line in missing] == [True]


def test_large_networks_are_certified_by_the_audit(run, tmp_path, monkeypatch, quick):
    monkeypatch.setattr(gather, "_LARGE", 1000)
    page, missing = write([run], tmp_path / "page.html")
    (line,) = missing
    assert "onelip certify RUN includes them" in line
    assert "Proved: of 355 test images" in page


def gather_limit(command, limited):
    """No limit, except for one command."""

    class Limit:
        def check(self, *_):
            if limited in command:
                raise gather._OutOfTime(f"not finished; use {command}")

    return Limit()


def test_a_run_of_one_epoch_has_no_training_curve(run, tmp_path, quick):
    shorter = copy_of(run, tmp_path / "short")
    lines = (shorter / "log.jsonl").read_text().splitlines()
    assert len(lines) > 1
    (shorter / "log.jsonl").write_text(lines[0] + "\n")
    page, _ = write([shorter], tmp_path / "page.html")
    assert "<h3>Training</h3>" not in page
    assert "AOL" in page.split("</header>")[0]  # the method, below the title


def test_a_broken_certificate_is_stated(run, tmp_path, monkeypatch, capsys, quick):
    real = gather.attack

    def found(network, images, classes, *, radii, **settings):
        return real(network, images, classes, radii=radii, steps=2, restarts=0)

    certify = gather._certify

    def too_large(*args):
        one, reason = certify(*args)
        return gather.replace(one, radii=one.radii * 100), reason

    monkeypatch.setattr(gather, "attack", found)
    monkeypatch.setattr(gather, "_certify", too_large)
    code, _, error = call(capsys, "report", run, "--out", tmp_path / "page.html", "--attack-images", "4")
    assert code == 1
    assert "small: certified decisions were changed" in error
    assert '<li class="refuted">REFUTED: an attack changed' in (tmp_path / "page.html").read_text()


def test_networks_without_a_sound_proof(tmp_path, quick):
    onelip.train(SMALL.replace(threads=1, epochs=1, method="none"), tmp_path / "run")
    page, _ = write([tmp_path / "run"], tmp_path / "page.html")
    assert "Proved: of 355 test images" in page


def test_large_pages_lose_pictures(run, tmp_path, monkeypatch):
    from onelip.report import page as module

    monkeypatch.setattr(module, "_LARGEST", 60_000)
    page, missing = write([run], tmp_path / "page.html")
    assert any("the page would be too large" in line for line in missing)
    assert len(page) < 100_000


def test_the_published_results():
    for data in ("cifar10", "cifar100"):
        (shares,) = paper_results(data, "aol-medium").values()
        values = list(shares.values())
        assert values == sorted(values, reverse=True)
        assert len(values) == 5


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_in_a_browser(report, tmp_path, width, dark):
    out, _, _ = report
    with browser(tmp_path) as tab:
        tab.open(out, width=width, dark=dark)
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [out.as_uri()]
        text = tab.run("document.body.innerText")
        for words in ("What is proved, and what is not", *FIGURES, "Proved: of 355 test images"):
            assert words in text
        assert tab.run("document.documentElement.scrollWidth") <= width  # only tables scroll
        ink, paper = tab.run(
            "['color', 'backgroundColor'].map(key => getComputedStyle(document.body)[key].match(/\\d+/g).map(Number))"
        )
        assert (sum(ink) > sum(paper)) == dark
        assert tab.violations() == []
        # Sorting by the first number, up and down.
        tab.run("document.querySelectorAll('#rows button')[1].click()")
        first = tab.run("[...document.querySelectorAll('#rows tbody tr')].map(row => +row.cells[1].dataset.key)")
        assert first == sorted(first, reverse=True)
