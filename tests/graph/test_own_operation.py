"""Operations that are defined outside of the package: the examples of the documentation, in the audit and in proofs."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onelip
from onelip.certification import ProofError, write_certificate
from onelip.certification.certificate import WeightFile
from onelip.core.lipschitz_module import Bound
from onelip.graph import lowering, step
from onelip.graph.step import StepBound

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding-an-operation.md"


@pytest.fixture
def documented(monkeypatch):
    """The operations of the document, registered for one test."""
    monkeypatch.setattr(step, "_RULES", dict(step._RULES))
    monkeypatch.setattr(step, "_CALLS", dict(step._CALLS))
    monkeypatch.setattr(lowering, "_RULES", dict(lowering._RULES))
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(code, str(DOCUMENT), "exec"), {})


class Sinc(nn.Module):
    def forward(self, x):
        return torch.sinc(x)


class Shift(nn.Module):
    def forward(self, x):
        return x.roll(1, -1)


def shifted():
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 3, padding=1)
    return nn.Sequential(layer, Shift(), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double().eval()


def test_unknown_before():
    assert onelip.audit(Sinc(), torch.rand(1, 3)).upper is None
    with pytest.raises(ProofError, match=r"aten\.roll\.default at '1'"):
        onelip.prove(shifted(), (1, 4, 4))


@pytest.mark.usefixtures("documented")
def test_audit_and_summary():
    assert onelip.audit(Sinc(), torch.rand(1, 3)).upper == 1.4
    assert onelip.audit(nn.Hardshrink(0.0), torch.rand(1, 3)).upper == 1.0
    assert onelip.audit(nn.Hardshrink(0.5), torch.rand(1, 3)).upper is None
    assert onelip.summary(nn.Sequential(nn.Hardshrink(0.0))).constant == 1.0
    assert onelip.summary(nn.Sequential(nn.Hardshrink(0.5))).unproved == ["0"]


@pytest.mark.usefixtures("documented")
def test_sound_mode_and_checker(tmp_path):
    model = shifted()
    images = torch.randint(0, 256, (4, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = onelip.certify(model, images, exact=True)
    assert found.certified() > 0
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    path = tmp_path / "certificate.json"
    write_certificate(path, found, images, WeightFile(tmp_path / "weights.safetensors"), source="random")
    assert onelip.check(str(path))["certified"] == found.certified()


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("factor", [np.float32(1.5), np.float16(1.5), torch.tensor(1.5), Fraction(3, 2), 2**60 + 1])
def test_numbers_of_other_types_are_not_rounded_down(factor):
    step.register_rule("aten.sinc.default")(lambda step: step.times(factor, "slope"))
    exact = Fraction(factor if isinstance(factor, int) else 1.5) * Fraction(1000.3)
    upper = onelip.audit(nn.Sequential(Scale(), Sinc()), torch.rand(1, 3), lower=False).upper
    assert type(upper) is float
    assert upper >= exact


class Scale(nn.Module):
    def forward(self, x):
        return x * 1000.3 + 50.5


ANSWERS = [1.4, None, Bound(1.4, "x"), StepBound("1", "x"), StepBound(Fraction(7, 5), "x"), StepBound(1.4, None)]


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_rules_that_answer_something_else(answer):
    step.register_rule("aten.sinc.default")(lambda step: answer)
    (gap,) = onelip.audit(Sinc(), torch.rand(1, 3)).unproved
    assert "its rule failed: expected" in gap


@pytest.mark.parametrize("name", [5, None, int])
def test_names_that_are_none(name):
    with pytest.raises(TypeError, match="names of ATen operations"):
        step.register_rule(name)


@pytest.mark.usefixtures("documented")
def test_lowerings_that_are_none():
    for name in (5, "aten.rol.default"):
        with pytest.raises((TypeError, ValueError), match="expected"):
            lowering.lowers(name)
    lowering.lowers("aten.roll.default")(lambda low: None)
    with pytest.raises(ProofError, match="the number of a node"):
        onelip.prove(shifted(), (1, 4, 4))
