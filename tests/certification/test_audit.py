"""The audit catches what is known to go wrong, and its proved bound is never below what is measured."""

# A missing number fails a test here, which is as good.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import json
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import onelip
from onelip.cli import audit as cli
from onelip.core.errors import CannotTrace, UnsoundBound
from onelip.nn import LipschitzModule, MaxMin
from onelip.nn.channels import Normalize


def steepest(model, shape, points=4):
    """The largest singular value of the Jacobian in float64 at some points."""
    model = onelip.bake(model).double().eval()
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for scale in [0.0, 0.1, 1.0, 5.0][:points]:
        x = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
        jacobian = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], x).reshape(-1, x.numel())
        largest = max(largest, float(torch.linalg.matrix_norm(jacobian, 2)))
    return largest


def test_torchs_parametrizations_of_convolutions_are_not_what_they_seem():
    torch.manual_seed(0)
    layers = [
        wrap(nn.Conv2d(8, 8, 3, padding=1)) for wrap in (parametrizations.spectral_norm, parametrizations.orthogonal)
    ]
    audit = onelip.audit(nn.Sequential(*layers), torch.rand(1, 8, 8, 8))
    first, second = audit.rows
    assert 1.2 < first.lower < first.upper
    assert 8 < second.lower < second.upper
    assert first.upper < 2.5
    assert audit.upper > 8
    assert audit.lower > 1
    text = str(audit)
    assert "torch's SpectralNorm norms the weight as a matrix" in text
    assert "torch's Orthogonal norms the weight as a matrix" in text


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_spectral_norm_is_none_either():
    layer = nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
    audit = onelip.audit(nn.Sequential(layer).eval(), torch.rand(1, 8, 8, 8))
    assert "torch's SpectralNorm norms the weight as a matrix" in str(audit)


def test_what_is_no_module():
    with pytest.raises(CannotTrace, match="expected a torch module, got function"):
        onelip.audit(lambda x: x, torch.rand(1, 2))


def test_soft_shrinkage():
    assert onelip.audit(nn.Sequential(nn.Softshrink(0.3)), torch.rand(2, 5)).upper == 1.0


@pytest.mark.parametrize(
    ("mode", "kernel", "size", "norm"),
    [
        ("reflect", [0.5, 0, 0.5], 3, 1.4142),
        ("reflect", [0.5, 0, 0.5], 4, 1.1441),
        ("replicate", [0.5, 0.5, 0], 4, 1.1546),
    ],
)
def test_padding_by_copies_is_seen(mode, kernel, size, norm):
    """The hand kernels of which zero padding makes 1-Lipschitz layers."""
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode=mode, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(kernel))
    audit = onelip.audit(layer, torch.rand(1, 1, size))
    assert audit.lower == pytest.approx(norm, abs=1e-4)
    assert audit.upper >= audit.lower > 1
    layer.padding_mode = "zeros"
    assert onelip.audit(layer, torch.rand(1, 1, size), lower=False).upper < 1 + 1e-9


def test_a_last_layer_that_nobody_normalised():
    torch.manual_seed(0)
    model = nn.Sequential(onelip.nn.AOLLinear(6, 6), MaxMin(), nn.Linear(6, 6))
    with torch.no_grad():
        nn.init.eye_(model[2].weight).mul_(3)
    audit = onelip.audit(model, torch.rand(1, 6))
    assert audit.upper > 2.9
    assert any("1 of 2 linear steps have a norm above 1 (measured): 2 (3)" in finding for finding in audit.findings)
    nn.init.eye_(model[2].weight)
    assert onelip.audit(model, torch.rand(1, 6)).findings == []


def test_standardised_inputs_are_found_out():
    model = nn.Sequential(nn.Flatten(), onelip.nn.AOLLinear(12, 2))
    image = torch.rand(2, 3, 2, 2)
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.25, 0.25)
    outside = onelip.audit(model, (image - 0.5) / 0.25, lower=False)
    assert "not in raw pixel units" in outside.findings[0]
    assert "onelip.nn.Normalize" in outside.findings[0]
    inside = onelip.audit(model, image, lower=False)
    assert inside.findings == []
    with_it = onelip.audit(model, image, normalize=(mean, std))
    assert with_it.rows[0].place == "normalize"
    assert with_it.rows[0].upper == pytest.approx(5)
    assert with_it.rows[-1].place == "1"
    assert with_it.upper == pytest.approx(5 * inside.upper, rel=1e-6)
    by_layer = onelip.audit(nn.Sequential(Normalize(mean, std), model), image, lower=False)
    assert by_layer.upper == with_it.upper
    by_hand = onelip.audit(_ByHand(model, torch.tensor(mean), torch.tensor(std)), image, lower=False)
    assert by_hand.upper == pytest.approx(with_it.upper, rel=1e-6)


class _ByHand(nn.Module):
    def __init__(self, model, mean, std):
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean.view(3, 1, 1))
        self.register_buffer("std", std.view(3, 1, 1))

    def forward(self, x):
        return self.model((x - self.mean) / self.std)


def test_autocast_has_no_proof():
    layer = nn.Linear(3, 3)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x).float()

    inside = onelip.audit(Inside(), torch.rand(1, 3))
    assert inside.upper is None
    assert "rounds to bfloat16" in inside.unproved[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = onelip.audit(layer, torch.rand(1, 3))
    assert around.upper is None
    assert "called under torch.autocast, which rounds to bfloat16" in around.unproved[0]
    assert onelip.audit(layer, torch.rand(1, 3)).upper is not None
    assert onelip.audit(layer.bfloat16(), torch.rand(1, 3).bfloat16(), lower=False).upper is None


class Elsewhere(nn.Module):
    """A small ResNet that has never heard of us: BatchNorm, residuals, GELU, concatenation, functional calls."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.block = nn.Conv2d(6, 6, 3, padding=1)
        self.block.register_forward_hook(lambda module, args, output: 0.5 * output)
        self.kernel = nn.Parameter(torch.randn(6, 6, 1, 1) / 6)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.gelu(self.norm(self.stem(x)))
        for _ in range(2):
            x = x + F.relu_(self.block(x))
        x = torch.cat([F.conv2d(x, self.kernel), F.max_pool2d(x, 3, 1, 1)], dim=1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)) * 0.5


def test_a_network_from_elsewhere():
    torch.manual_seed(0)
    model = Elsewhere()
    model(torch.rand(8, 3, 6, 6))  # in training mode: the statistics move
    audit = onelip.audit(model, torch.rand(2, 3, 6, 6))
    assert audit.unproved == []
    assert audit.input_shape == (3, 6, 6)
    assert audit.lower <= steepest(model, (3, 6, 6)) * 1.5
    assert steepest(model, (3, 6, 6)) <= audit.upper
    assert 0 < audit.lower <= audit.upper
    assert [row.layer for row in audit.rows].count("conv2d") == 3  # the hooked layer is looked into, twice
    assert any("training mode" in finding for finding in audit.findings)
    assert model.training
    text = str(audit)
    assert f"(proved, eval mode, real arithmetic), at least {audit.lower:.6g} (measured)" in text
    shown = float(text.split("at most ")[-1].split(" ")[0])
    assert Fraction(shown) >= Fraction(audit.upper)
    assert json.loads(json.dumps(audit.to_json()))["upper"] == audit.upper


def test_what_has_no_rule_is_named_with_its_place_and_the_way_out():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.sinc(x) * x

    audit = onelip.audit(nn.Sequential(nn.Linear(3, 3), Odd()), torch.rand(1, 3))
    assert audit.upper is None
    assert len(audit.unproved) == 2
    assert audit.unproved[0].startswith("1 (sinc): no rule for aten.sinc.default; give one with onelip.graph.reg")
    assert "both depend on the input" in audit.unproved[1]
    assert "NO PROOF, at least" in str(audit)
    with pytest.raises(CannotTrace, match="control flow"):
        onelip.audit(_Branching(), torch.rand(2, 3))


class _Branching(nn.Module):
    def forward(self, x):
        return x if x.max() > 0 else -x


def test_layer_norm_is_said_to_be_of_no_use():
    audit = onelip.audit(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.rand(1, 4), lower=False)
    assert audit.upper > 100
    assert any(finding.startswith("1: ") and "of no use" in finding for finding in audit.findings)


def test_a_constant_that_is_a_lie_is_found_out():
    class Liar(LipschitzModule):
        proved_constant = 1.0

        def forward(self, x):
            return 2 * x

    with pytest.raises(UnsoundBound, match="please report"):
        onelip.audit(nn.Sequential(Liar()), torch.rand(1, 3))


def test_rounding_inside_a_network_is_no_contradiction():
    torch.manual_seed(0)
    first = parametrizations.orthogonal(nn.Linear(8, 8))
    nn.init.constant_(first.bias, 1e6)
    last = nn.Linear(8, 8)
    nn.init.eye_(last.weight)
    with torch.no_grad():
        last.bias.copy_(-first.bias)
    audit = onelip.audit(nn.Sequential(first, last), torch.rand(1, 8))
    assert audit.upper * (1 - 1e-5) < audit.lower <= audit.upper

    class Rounds(nn.Module):
        def forward(self, x):
            return 3 * x.double().float()

    assert 2.99 < onelip.audit(Rounds(), torch.rand(1, 3)).lower <= 3


def test_layers_along_the_batch_axis_are_refused():
    audit = onelip.audit(nn.Sequential(MaxMin(dim=0)), torch.rand(2, 3), lower=False)
    assert audit.upper is None
    assert "batch axis" in audit.unproved[0]


class Random(nn.Module):
    """Steps drawn by hypothesis: layers, sums with earlier values, concatenations."""

    def __init__(self, steps, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.steps = steps
        self.layers = nn.ModuleList()
        width = 4
        for step in steps:
            if step == "linear":
                self.layers.append(nn.Linear(width, 4))
                width = 4
            width = 2 * width if step == "cat" else width

    def forward(self, x):
        before, layers = x, iter(self.layers)
        for step in self.steps:
            last = x
            if step == "linear":
                x = next(layers)(x)
            elif step == "cat":
                x = torch.cat([x, 0.5 * x.flip(1)], 1)
            elif step == "add":
                x = x + before if x.shape == before.shape else x - 0.3 * x
            elif step == "maximum":
                x = torch.maximum(x, x.roll(1, 1))
            else:
                x = getattr(F, step)(x)
            before = last
        return x


STEPS = ("linear", "linear", "cat", "add", "maximum", "relu", "gelu", "softsign", "elu", "leaky_relu")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.sampled_from(tuple(s for s in STEPS if s != "softsign")), min_size=2, max_size=7), st.integers(0, 99)
)
def test_random_networks(steps, seed):
    model = Random(steps, seed)
    audit = onelip.audit(model, torch.rand(1, 4))
    assert audit.upper is not None, audit.unproved
    assert audit.lower <= audit.upper
    assert steepest(model, (4,)) <= audit.upper * (1 + 1e-12)


def test_normalize_layer():
    layer = Normalize((0.1, 0.2, 0.3), (0.3, 0.7, 0.9))
    x = torch.rand(2, 3, 4, 4)
    expected = (x - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.3, 0.7, 0.9]).view(3, 1, 1)
    assert torch.equal(layer(x), expected)
    smallest = Fraction(float(layer.std.min()))
    assert 1 <= Fraction(layer.lipschitz_constant) * smallest < 1 + Fraction(1, 10**12)
    assert list(layer.state_dict()) == ["mean", "std"]
    with pytest.raises(ValueError, match="one mean and one std per channel"):
        Normalize((0.1,), (0.1, 0.2))
    with pytest.raises(ValueError, match="above 0"):
        Normalize((0.1,), (0.0,))
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(torch.rand(2, 1, 4, 4))
    layer.std[1] = math.nan
    assert layer.lipschitz_constant is None


def test_command_line(tmp_path, capsys):
    source = tmp_path / "mine.py"
    source.write_text(
        "from torch import nn\n"
        "def net():\n    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
        "    nn.init.constant_(net[1].weight, 0.1)\n    return net\n"
        "odd = nn.Sequential(nn.Flatten(), nn.Softplus())\nnumber = int\ndef wide(width):\n    return None\n"
    )
    target = ["--input-shape", "3,2,2", "--no-lower"]
    assert cli.run([f"{source}:net", *target]) == 0
    assert "Lipschitz constant at most 0.48989" in capsys.readouterr().out
    assert cli.run([f"{source}:net", *target, "--require", "0.4"]) == 1
    assert "Not proved: the required bound 0.4." in capsys.readouterr().out
    assert cli.run([f"{source}:net", *target, "--mean", "0.5", "0.5", "0.5", "--std", "0.1", "1", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == pytest.approx(4.8989, rel=1e-3)
    assert cli.run([f"{source}:odd", *target]) == 1
    assert "NO PROOF" in capsys.readouterr().out
    for wrong, words in [
        ([f"{source}:nothing", *target], "has no 'nothing'; name a torch module"),
        ([f"{source}:number", *target], "is not a torch module and does not return one, but int"),
        ([f"{source}:wide", *target], "without arguments failed: wide"),
        ([f"{source}:net"], "needs --input-shape, such as"),
        ([f"{source}:net", "--input-shape", "a"], "numbers such as 3,32,32"),
        (["no.such.package:net", *target], "expected package.module:name"),
        ([str(tmp_path / "none.py") + ":net", *target], "none.py: no such file"),
        ([], "give a TARGET or --model, not both"),
        ([f"{source}:net", *target, "--mean", "1"], "--mean and --std must be given together"),
    ]:
        with pytest.raises(ValueError, match=words):
            cli.run(wrong)


def test_networks_with_one_number_for_each_sample_are_measured():
    class Critic(nn.Module):
        def forward(self, x):
            return x.sum(1)

    audit = onelip.audit(Critic().eval(), torch.rand(4, 9))
    assert 2.99 <= audit.lower <= audit.upper <= 3.0001


@pytest.mark.parametrize("part", [nn.Dropout(0.5), onelip.nn.BatchCentering(3), nn.BatchNorm2d(3)])
def test_a_part_in_training_mode_is_refused(part):
    """As it is called, such a model is random, or one sample depends on the others."""
    model = nn.Sequential(part, nn.Flatten()).eval()
    assert onelip.audit(model, torch.rand(1, 3, 2, 2)).upper is not None
    part.train()
    with pytest.raises(ValueError, match=r"'0' .* in training mode; call model.eval\(\)"):
        onelip.audit(model, torch.rand(1, 3, 2, 2))
    assert onelip.audit(model.train(), torch.rand(1, 3, 2, 2)).upper is not None
