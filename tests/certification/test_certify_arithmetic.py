"""Differences, numbers of the code and LeakyReLU in a certified program: read as nodes that have a rule, or refused."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from _certified_programs import check
from torch import nn

import onelip
from onelip.certification.certificate import WeightFile, write_certificate
from onelip.core.errors import ProofError
from onelip.export import save_plain
from onelip.graph.lowering import lower


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.between, self.layer, self.last = between, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.between(self, x.flatten(1)))


def net(between):
    return Net(between).double().eval()


STEPS = {
    "a - b": (lambda m, x: x - m.layer(x), ["affine", "scale", "add"]),
    "b - a": (lambda m, x: torch.rsub(x, m.layer(x)), ["affine", "scale", "add"]),
    "a + t b": (lambda m, x: torch.add(x, m.layer(x), alpha=1 / 3), ["affine", "scale", "add"]),
    "a - t b": (lambda m, x: torch.sub(x, m.layer(x), alpha=2), ["affine", "scale", "add"]),
    "2 x - 1": (lambda m, x: 2 * x - 1, ["scale", "normalize"]),
    "1 - x": (lambda m, x: 1 - x, ["scale", "normalize"]),
    "x + tensor": (lambda m, x: x + torch.tensor(0.1, dtype=torch.float64), ["normalize"]),
    "x / 3": (lambda m, x: x / 3, ["normalize"]),
    "x / -3": (lambda m, x: x / -3, ["scale", "normalize"]),
    "x / -4": (lambda m, x: x / -4, ["scale"]),
    "leaky": (lambda m, x: F.leaky_relu(x - 0.3, 0.1), ["normalize", "scale", "relu", "scale", "add"]),
    "leaky layer": (lambda m, x: nn.LeakyReLU(0.3)(m.layer(x)), ["affine", "scale", "relu", "scale", "add"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_read_and_their_errors_bounded(name):
    between, expected = STEPS[name]
    model = net(between)
    program = lower(model, (2, 2, 2))
    assert [node.kind for node in program.nodes] == ["input", "join", *expected, "affine"]
    pixels = torch.randint(0, 256, (3, 2, 2, 2), generator=torch.Generator().manual_seed(1)).numpy()
    states = check(program, pixels)
    # The model itself computes in its own way, and stays within the same error of the real values.
    images = torch.from_numpy(pixels / 255)
    computed = program.run(images)[-1]
    apart = (computed - model(images).detach()).norm(dim=1)
    assert all(Fraction(float(d)) <= 2 * Fraction(states[-1].error) for d in apart)


def test_leaky_relu_has_the_constant_one():
    model = nn.Sequential(nn.Flatten(), nn.LeakyReLU(0.1), nn.Linear(8, 3)).double().eval()
    bare = nn.Sequential(model[0], model[2])
    ratio = onelip.prove(model, (2, 2, 2)).constant / onelip.prove(bare, (2, 2, 2)).constant
    assert 1 <= ratio <= 1 + 1e-15


@pytest.mark.parametrize("slope", [-0.1, 1.5])
def test_other_slopes_are_refused(slope):
    with pytest.raises(ProofError, match="leaky_relu"):
        lower(net(lambda m, x: F.leaky_relu(x, slope)), (2, 2, 2))


@pytest.mark.parametrize(
    "between",
    [
        lambda m, x: x - x[:, :1],  # repeats a number
        lambda m, x: x - torch.ones(8, dtype=torch.float64),  # one number for all would be read as eight
        lambda m, x: x * m.layer(x),
        lambda m, x: x / 1e-200,
        lambda m, x: x + 1e200,
        lambda m, x: x / m.layer(x),
        lambda m, x: torch.add(x, 1, alpha=3),
    ],
)
def test_what_has_no_rule_is_refused(between):
    with pytest.raises(ProofError, match="no rule bounds its rounding"):
        lower(net(between), (2, 2, 2))


def test_numbers_of_the_code_are_in_no_file(tmp_path):
    model = net(lambda m, x: 2 * x - 1)
    images = torch.randint(0, 256, (2, 2, 2, 2), dtype=torch.uint8)
    found = onelip.certify(model, images, exact=True)
    save_plain(model, tmp_path / "plain.safetensors")
    files = WeightFile(tmp_path / "plain.safetensors", None)
    with pytest.raises(ProofError, match="a constant of the code"):
        write_certificate(tmp_path / "c.json", found, images, files, source="random")


def test_a_part_of_the_images_is_not_all_of_them():
    """`x[0:3]` of three images has the shape of x: it is the identity for no other number of images."""
    images = torch.rand(3, 8, dtype=torch.float64)
    assert onelip.certify(net(lambda m, x: x[:]), images).mode == "sound"
    with pytest.raises(ValueError, match=r"slice|same program"):
        onelip.certify(net(lambda m, x: x[0:3]), images)
