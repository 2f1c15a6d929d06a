"""SOC layers as one node: its numbers against fractions, and whole networks with files."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _certificate_files import sealed, write_files
from _certified_programs import check, states_of
from torch import nn

import onelip
from onelip.certification.proof import check_backends, first_different_node
from onelip.checker import Rejected, check as check_file
from onelip.core.errors import ProofError
from onelip.graph.kinds import Exponential, NodeBound, Stored, gain, propagate
from onelip.graph.lowering import Program, lower
from onelip.methods.orthogonal.soc import SOC, soc

DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images_of(shape, count=2):
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def network(layer, shape, **options):
    """A baked SOC layer with a random bias, and logits."""
    made = soc(layer, **options)
    assert isinstance(made, SOC)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    entries = math.prod(made.double()(torch.zeros(1, *shape, **DOUBLE)).shape)
    return onelip.bake(nn.Sequential(made, nn.Flatten(), nn.Linear(entries, 2))).double().eval()


LAYERS = {
    "same": (nn.Conv2d(2, 2, 3, padding=1), (2, 4, 3)),
    "circular": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 3, 3)),
    "one pixel around": (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 1)),
    "wider": (nn.Conv1d(1, 3, 3, padding=1), (1, 5)),
    "narrower": (nn.Conv1d(3, 2, 5, padding=2, bias=False), (3, 4)),
    "groups": (nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2), (4, 5)),
    "narrower groups": (nn.Conv2d(6, 2, (3, 1), padding=(1, 0), groups=2, padding_mode="circular"), (6, 3, 2)),
    "strides": (nn.Conv2d(2, 5, 3, stride=2, padding=1), (2, 4, 4)),
    "strides and groups": (nn.Conv1d(4, 4, 4, stride=2, padding=1, groups=2, padding_mode="circular"), (4, 6)),
    "three axes": (nn.Conv3d(1, 2, (3, 1, 3), padding=(1, 0, 1)), (1, 3, 2, 2)),
}
OPTIONS = [{"terms": 1}, {"terms": 4}, {"terms": 5, "lipschitz": 0.3}, {"terms": 9, "norm": 3.5}]


@pytest.mark.parametrize("name", LAYERS)
def test_three_numbers_hold(name):
    """Real values in fractions, at two images; and the layer itself computes what the node does."""
    (layer, shape), options = LAYERS[name], OPTIONS[[*LAYERS].index(name) % len(OPTIONS)]
    model = network(layer, shape, **options)
    program = lower(model, shape)
    kinds = [node.kind for node in program.nodes]
    assert kinds == ["input", *["max"] * ("strides" in name), "exponential", "join", "affine"]
    at = kinds.index("exponential")
    state = check(program, images_of(shape).numpy())[at]
    x = torch.rand(3, *shape, **DOUBLE)
    with torch.no_grad():
        apart = (program.run(x)[at] - model[0](x)).flatten(1).norm(dim=1)
    assert float(apart.max()) <= 2 * state.error
    slopes = torch.autograd.functional.jacobian(model[0], x[:1]).reshape(-1, x[0].numel())
    assert float(torch.linalg.matrix_norm(slopes, 2)) <= state.lipschitz * (1 + 1e-14)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_proved_constant_is_the_one_asked_for(options):
    """Not loose: what is proved of the stored kernel is what the method promises, but for rounding."""
    model = network(nn.Conv2d(6, 6, 3, padding=1), (6, 4, 4), **options)
    for exact in (False, True):
        state = onelip.prove(model, (6, 4, 4), exact=exact).node_bounds[1]
        assert state.lipschitz <= options.get("lipschitz", 1.0) * (1 + 1e-6)
        assert state.facts["gain"] == gain(options["terms"], state.facts["sigma"])


# ---- the parts of the error: programs that are off by nearly as much


def rotation(a, x, terms, factor=1.0):
    """One pixel, two channels, S = a [[0, 1], [-1, 0]], as a node for an input (x, 0) that is known exactly."""
    weight = torch.zeros(2, 2, 3, **DOUBLE)
    weight[:, :, 1] = torch.tensor([[0.0, a], [-a, 0.0]], **DOUBLE)
    numbers = {"weight": Stored(weight), "square": Fraction(a) ** 2, "pixels": (1,), "terms": terms, "factor": factor}
    node = Exponential((0,), (2, 1), layer=nn.Conv1d(2, 2, 3, padding=1), **numbers)
    state = propagate(node, NodeBound(1.0, abs(x), 0.0))
    found = node.run(torch.tensor([[[x], [0.0]]], **DOUBLE))[0, :, 0].tolist()
    real = [Fraction(0), Fraction(0)]
    for j in range(terms + 1):  # (x, 0), (0, -a x), (-a^2 x, 0), (0, a^3 x), ...
        real[j % 2] += (-1) ** ((j + 1) // 2) * Fraction(a) ** j * Fraction(x) / math.factorial(j)
    off = sum((Fraction(f) - Fraction(factor) * r) ** 2 for f, r in zip(found, real, strict=True))
    return state, float(off) ** 0.5


@pytest.mark.parametrize("a", [2.0**-30, 1 / 3, 1.0, 2.7, 8.0])
@pytest.mark.parametrize("terms", [1, 2, 5, 30])
def test_error_of_a_rotation(a, terms):
    for x in np.random.default_rng(0).uniform(0.5, 2, 20):
        state, off = rotation(float(a), float(x), terms, factor=0.7)
        assert off <= state.error
        assert state.error < 2.0**-45 * math.exp(a) * max(1, a)


def test_the_sum_is_rounded():
    """x (1 + a^2 / 2) is a tie for a tiny a: half a unit of x is lost."""
    state, off = rotation(2.0**-26, 1 + 2.0**-52, 2)
    assert 0.99 * 2.0**-53 <= off <= state.error <= 16 * off


def test_flushed_numbers():
    state, off = rotation(2.0**-500, 2.0**-540, 3)
    assert state.error >= 2 * 2.0**-1022
    assert off <= state.error


def test_errors_of_the_input_grow_by_the_gain():
    model = network(nn.Conv1d(2, 2, 3, padding=1), (2, 2), terms=1, norm=4.0)
    node = replace(lower(model, (2, 2)).nodes[1], square=Fraction(16), factor=2.0)
    states = [propagate(node, NodeBound(1.0, 1.0, e)) for e in (0.0, 0.5)]
    assert states[0].lipschitz >= 2 * math.sqrt(17)
    assert states[1].error - states[0].error >= 2 * math.sqrt(17) * 0.5


def test_refused_kernels():
    model = network(nn.Conv1d(2, 2, 3, padding=1), (2, 3))
    program = lower(model, (2, 3))
    node = replace(program.nodes[1], square=Fraction(4))
    before = NodeBound(1.0, 1.0, 0.0)
    propagate(node, before)
    moved = node.weight.values.clone()
    moved[0, 1, 0] = math.nextafter(float(moved[0, 1, 0]), 1.0)
    wrong = [
        {"weight": node.weight._replace(values=moved)},
        {"square": Fraction(65)},
        *({"layer": nn.Conv1d(2, 2, 3, **other)} for other in ({"padding": 0}, {"padding": 1, "stride": 2})),
        {"layer": nn.ConvTranspose1d(2, 2, 3, padding=1)},
    ]
    for change in wrong:
        with pytest.raises(ProofError, match="expected a skew kernel of norm at most 8"):
            propagate(replace(node, **change), before)
    for size, factor in ((2.0**499, 0.25), (2.0**400, 2.0**120)):
        with pytest.raises(ProofError, match="sums below 2"):
            propagate(replace(node, factor=factor), NodeBound(1.0, size, 0.0))
    with torch.no_grad():
        model[0].weight[0, 0, 0] += 1
    with pytest.raises(ProofError, match="expected a skew kernel"):
        onelip.prove(model, (2, 3))


# ---- networks


def deep(**options):
    layers = [
        soc(nn.Conv2d(1, 4, 3, padding=1), **options),
        onelip.nn.MaxMin(),
        soc(nn.Conv2d(4, 8, 3, stride=2, padding=1), **options),
        onelip.nn.MaxMin(),
        soc(nn.Conv2d(8, 4, 3, padding=1, groups=2, padding_mode="circular"), **options),
        onelip.nn.MaxMin(),
        nn.Flatten(),
        soc(nn.Linear(16, 3)),
    ]
    return nn.Sequential(*layers).eval()


def files(folder, model, images, exact=True):
    found = onelip.certify(onelip.bake(model).double(), images, torch.tensor([0, 1, 2]), exact=exact)
    return found, write_files(folder, model, found, images)


@pytest.mark.parametrize("terms", [4, 5])
def test_certified_with_the_constant_one_and_checked(terms, tmp_path):
    images = images_of((1, 4, 4), 3)
    model = deep(terms=terms)
    assert onelip.certify(onelip.bake(model).double(), images).constant < 1 + 1e-6
    found, path = files(tmp_path, model, images)
    assert found.constant < 1 + 1e-6
    assert found.certified() == 3
    assert found.proof is not None
    check(found.proof.program, images[:2].numpy())
    verdict = check_file(path)
    assert (verdict["certified"], verdict["lipschitz"]) == (3, found.constant)
    assert verdict["logits_checked"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return files(tmp_path_factory.mktemp("right"), deep(terms=5), images_of((1, 4, 4), 3))[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("circular", [True, True]), ("terms", 6), ("factor", (1.0).hex()), ("bias", None), ("gain", "1"), ("sigma", "1")],
)
def test_changed_files_are_rejected(key, value, right):
    path = right.with_name("changed.json")
    content = json.loads(right.read_text())
    node = next(node for node in content["nodes"] if node["op"] == "exponential")
    assert node[key] != value
    node[key] = value
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(Rejected):
        check_file(path)


def test_radii_hold():
    """Straight to the boundary from each image: the class is kept inside of the radius."""
    model, images = onelip.bake(deep()).double(), images_of((1, 4, 4), 3)
    found = onelip.certify(model, images)
    for image, y, radius in zip(images, found.classes.tolist(), found.radii.tolist(), strict=True):
        x = (image.double() / 255).requires_grad_()
        for j in {0, 1, 2} - {y}:
            logits = model(x[None])[0]
            (slope,) = torch.autograd.grad(logits[j] - logits[y], x, retain_graph=True)
            for size in (1.0, 0.999, 0.5):
                moved = model((x + size * radius * slope / slope.norm())[None]).argmax()
                assert int(moved) == y or size == 1.0  # the point itself is rounded


def test_a_proof_is_of_one_series():
    def program(**options):
        torch.manual_seed(0)
        return lower(network(nn.Conv2d(2, 2, 3, padding=1), (2, 3, 3), **options), (2, 3, 3))

    one = program(terms=5)
    assert first_different_node(one, program(terms=5)) is None
    assert "terms 5, got 7" in (first_different_node(one, program(terms=7)) or "")
    assert "factor" in (first_different_node(one, program(terms=5, lipschitz=0.5)) or "")


def test_a_changed_number_of_terms_needs_a_new_proof():
    model = network(nn.Conv2d(2, 2, 3, padding=1), (2, 3, 3))
    proof, images = onelip.prove(model, (2, 3, 3)), images_of((2, 3, 3))
    onelip.certify(model, images, proof=proof)
    model[0].terms = 1
    with pytest.raises(ProofError, match="another one now"):
        onelip.certify(model, images, proof=proof)


def test_its_convolution_is_asked_for_its_backend(monkeypatch):
    model = network(nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4))
    check_backends(lower(model, (2, 4, 4)), 64)
    backend = torch._C._ConvBackend
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *arguments: backend.NnpackSpatial)
    with pytest.raises(ProofError, match=r"exponential at '0': .*backend NnpackSpatial"):
        check_backends(lower(model, (2, 4, 4)), 64)


def test_a_series_at_the_end_has_no_rows():
    """Its logits are no rows of a matrix in the file: one slope serves all pairs."""
    model = nn.Sequential(onelip.bake(soc(nn.Conv1d(2, 2, 3, padding=1))), nn.Flatten()).double().eval()
    proof = onelip.prove(model, (2, 1))
    assert isinstance(proof.program, Program)
    assert proof.head.node is None
    assert len(states_of(proof.program)) == len(proof.node_bounds)
