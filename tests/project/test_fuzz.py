"""The fuzzer: a short fixed part of it, every case that ever failed, and that it finds what is planted."""

import contextlib
import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
import torch

from fuzz import engine, forgeries, library, oracle, programs, reference
from fuzz.__main__ import main
from fuzz.case import Outcome
from onelip.core.errors import CannotTrace

DRAWS = {"layers": 220, "networks": 50, "radii": 30, "forgeries": 250, "pieces": 60}
CORPUS = sorted(engine.CORPUS.glob("*.json"))


@pytest.fixture(autouse=True)
def quick():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with library.quick_tracing():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("part", engine.PARTS)
def test_fixed_draws_find_nothing_false(part, tmp_path):
    run = engine.Run("make test", tmp_path)
    for number in range(DRAWS[part]):
        run.draw(part, number)
    tally = run.tallies[part]
    assert not run.failures, "\n".join(run.failures)
    assert tally["false"] == tally["other"] == 0
    assert tally["claims"] >= DRAWS[part] / 2
    assert tally["rejected" if part == "forgeries" else "proved"] >= DRAWS[part] / 3


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_failed_once(path):
    outcome = engine.check(engine.load(path)["case"])
    assert outcome.verdict != "invalid"
    assert outcome.failure is None, outcome.message


def test_a_planted_rule_is_found_and_shrunk(tmp_path):
    run = engine.Run("planted", tmp_path)
    templates = ["torch.sinc({x})", "F.relu({x})", "{x} + {w:N}", "{x} * {f}"]
    with library.planted(rules={"aten.sinc.default": 0.25}):
        for number in range(40):
            run.draw("networks", number, templates=templates)
            if run.failures:
                break
    (path,) = tmp_path.glob("*.json")
    found = engine.load(path)
    assert found["failure"] in ("false bound", "contradiction")
    assert len(found["case"]["lines"]) == 1
    assert "torch.sinc" in found["case"]["lines"][0]
    assert np.prod(found["case"]["input"]) == 1
    assert run.tallies["networks"]["false"] + run.tallies["networks"]["other"] == 1


def test_a_planted_method_is_found_and_shrunk(tmp_path):
    aol = library.METHODS["aol"]

    def apply(layer):
        made = aol.apply(layer)
        kind = type(made.parametrizations.weight[0])
        # A constant of the base class does not count where forward is overridden: it states its own.
        own = {"forward": lambda self, P: 1.5 * kind.forward(self, P), "constant_in": lambda self, dtype: 1.0}
        wrong = type("Wrong", (kind,), own)
        made.parametrizations.weight[0].__class__ = wrong
        return made

    method = dataclasses.replace(aol, name="planted", apply=apply, options=())
    run = engine.Run("planted", tmp_path)
    with library.planted(methods=(method,)):
        for number in range(40):
            run.draw("layers", number, methods=("planted",))
            if run.failures:
                break
    (path,) = tmp_path.glob("*.json")
    found = engine.load(path)
    assert found["failure"] == "false bound"
    assert found["case"]["channels"] == [1, 1]
    assert found["case"]["steps"] == 0


def test_an_unsound_checker_would_be_found(monkeypatch):
    """With a checker that accepts everything, forgeries are false certificates."""
    monkeypatch.setattr(library, "check", lambda *files: {"accepted": True, "logits_checked": True})
    case = engine.load(engine.CORPUS / "forgeries-unused-joins.json")["case"] | {"settle": True, "rerun": True}
    for edit in ({"at": ["nodes", 1, "sigma"], "to": "1/8"}, {"at": ["results", 0, "radius"], "to": "0x1.0p+1"}):
        assert engine.check(case | {"edits": [edit]}).failure == "false certificate"
    assert engine.check(case | {"edits": [{"at": ["created"], "to": "today"}]}).failure is None


def test_settling_a_valid_certificate_changes_nothing():
    """The formulas of the reference, which are those of the document, agree with the writer to the last bit."""
    for block in ("a", "b", "c"):
        base = forgeries._base(json.dumps(forgeries._network(block)))
        assert base is not None
        content, tensors, images = base
        settled = json.loads(json.dumps(content))
        reference.settle(settled, tensors, images, rerun=False)
        assert settled == content
        assert reference.problems(content, tensors, images) is None


def test_a_forged_shape_without_entries_is_settled():
    """The largest radius below 0 is none; the search for it ends."""
    assert reference.radius([Fraction(1), Fraction(0)], [[Fraction(0)] * 2] * 2, Fraction(0), 0) == 0.0


def test_exact_comparison_has_no_tolerance():
    third = np.array([[1.0, 1.0], [0.0, 0.0]])  # its norm is the root of 2
    below, above = 2**0.5, np.nextafter(2**0.5, 0.0)
    assert float(below) ** 2 > 2 > float(above) ** 2
    assert not oracle.exceeds(third, float(below))
    assert oracle.exceeds(third, float(above))


def test_jumps_and_kinks_are_measured():
    generator = torch.Generator().manual_seed(0)
    assert oracle.steepest(torch.floor, (2,), generator) > 100
    assert 2.9 < oracle.steepest(torch.nn.LeakyReLU(3.0), (2,), generator) <= 3 + 1e-9
    assert oracle.mixes_samples(lambda x: x - x.mean(0), (2,), generator)
    assert not oracle.mixes_samples(torch.relu, (2,), generator)


def test_cases_cannot_call_what_is_not_in_the_table():
    case = {"input": [1], "dtype": "float64", "fill": "ones", "seed": 0, "modules": {}, "constants": {}}
    case |= {"attributes": {}, "setup": [], "result": "v1"}
    programs.build(case | {"lines": ["v1 = F.relu(v0)"]})
    for line in ("v1 = torch.load('x')", "v1 = v0.__class__", "import os; v1 = v0", "v1 = eval('v0')"):
        with pytest.raises(ValueError, match=r"not in fuzz/operations.txt"):
            programs.build(case | {"lines": [line]})


def test_quick_tracing_changes_no_bound():
    """One in many draws by torch's own way: the same number."""
    for number in range(3):
        case = engine.networks.draw(engine.random.Random(f"same {number}"))
        model, x = programs.build(case | {"dtype": "float64"}), torch.zeros(1, *case["input"], dtype=torch.float64)
        found = []
        for way in (contextlib.nullcontext(), library.slow_tracing()):
            with way:
                try:
                    found.append(library.audit(model, x, lower=False))
                except CannotTrace as error:
                    found.append(str(error))
        assert found[0] == found[1]


def test_the_command_adds_runs_up(tmp_path, capsys):
    out = tmp_path / "fuzz.json"
    counts = dict.fromkeys((*engine.COUNTS, "tight", "seconds"), 1)
    labels = {"none": {"tried": 1, "claims": 1, "measured": 1, "tight": 1, "failed": 1}}
    before = {"layers": counts | {"labels": labels}}
    out.write_text(json.dumps({"runs": [{"seed": "0", "parts": before}], "total": before}))
    main(
        ["--part", "layers", "--seconds", "0.5", "--seed", "1", "--out", str(out), "--corpus", str(tmp_path / "corpus")]
    )
    content = json.loads(out.read_text())
    assert [run["seed"] for run in content["runs"]] == ["0", "1"]
    assert content["total"]["layers"]["tried"] == 1 + content["runs"][1]["parts"]["layers"]["tried"] > 1
    assert "per second" in capsys.readouterr().out


def test_a_slow_case_is_a_failure(monkeypatch):
    def forever(case):
        with contextlib.suppress(Exception):  # as the checker has it around every node
            while True:
                pass

    monkeypatch.setattr(engine, "SECONDS", 0.2)
    monkeypatch.setattr(engine.layers, "check", forever)
    assert engine.check({"part": "layers"}).failure == "too slow"
    monkeypatch.setattr(engine.layers, "check", lambda case: Outcome("proved"))
    assert engine.check({"part": "layers"}).failure is None
