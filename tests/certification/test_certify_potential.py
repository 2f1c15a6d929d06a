"""Residual convolutions x - 2 V^T relu(V x + b) as one node: its numbers against fractions, and whole networks."""

import itertools
import json
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
from onelip.core.rounding import UNIT, up
from onelip.graph.kinds import NodeBound, propagate
from onelip.graph.lowering import lower
from onelip.methods import cpl, sll
from onelip.methods.residual import ConvexPotential

DOUBLE = {"dtype": torch.float64}
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images_of(shape, count=2):
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def network(block, shape):
    entries = int(np.prod(shape))
    return nn.Sequential(block, nn.Flatten(), nn.Linear(entries, 2)).double().eval()


def block(channels, hidden, kernel, norm=1.0, **settings):
    """A potential whose V has about this norm on images that are not small."""
    dilation = settings.get("dilation", 1)
    padding = tuple(dilation * (k - 1) // 2 for k in kernel)
    layer = KINDS[len(kernel) - 1](channels, hidden, kernel, padding=padding, **settings, **DOUBLE)
    made = ConvexPotential(layer)
    with torch.no_grad():
        made.weight.mul_(norm / made._norm_of_weight().constant)
        if made.bias is not None:
            made.bias.normal_()
    return made


SHAPES = [
    ((2, 5), (3,), 4, {}),
    ((2, 1), (3,), 2, {}),  # around a circle all taps fall on one pixel
    ((4, 4), (3,), 6, {"groups": 2, "dilation": 2}),
    ((2, 4, 3), (3, 3), 2, {}),
    ((2, 2, 5), (1, 3), 5, {"bias": False}),
    ((2, 2, 3, 2), (1, 3, 3), 2, {}),
    ((4, 2, 2), (1, 1), 4, {"groups": 4}),
]


@pytest.mark.parametrize("norm", [0.6, 1.8])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(("shape", "kernel", "hidden", "settings"), SHAPES, ids=str)
def test_three_numbers_hold(shape, kernel, hidden, settings, mode, norm):
    made = block(shape[0], hidden, kernel, norm, padding_mode=mode, **settings)
    model = network(made, shape)
    program = lower(model, shape)
    assert [node.kind for node in program.nodes] == ["input", "potential", "join", "affine"]
    state = check(program, images_of(shape).numpy())[1]
    assert state.lipschitz == up(max(Fraction(1), 2 * Fraction(state.facts["sigma"]) ** 2 - 1))
    x = torch.rand(3, *shape, **DOUBLE)
    with torch.no_grad():
        apart = (program.run(x)[1] - made(x)).flatten(1).norm(dim=1)
    assert float(apart.max()) <= 2 * state.error
    slopes = torch.autograd.functional.jacobian(made, x[:1]).reshape(-1, x[0].numel())
    assert float(torch.linalg.matrix_norm(slopes, 2)) <= state.lipschitz * (1 + 1e-14)


def test_the_constant_is_reached():
    made = block(1, 1, (3, 3), bias=False)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[0, 0, 1, 1] = 1.5
    program = lower(network(made, (1, 3, 3)), (1, 3, 3))
    one, other = (program.run(torch.full((1, 1, 3, 3), v, **DOUBLE))[1] for v in (0.25, 0.75))
    assert float((one - other).norm()) == 1.5 * 3.5  # |1 - 2 * 2.25| times a distance of 1.5
    assert 3.5 <= states_of(program)[1].lipschitz <= 3.5 * (1 + 1e-8)


# ---- what each part of the error is there for: programs that are off by nearly as much, and by more than the rest


def state_at(v, x, bias=None):
    """One pixel and one channel, as a node with its program, for an input that is known exactly."""
    layer = nn.Conv1d(1, len(v), 1, bias=bias is not None, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(v, **DOUBLE)[:, None, None])
        if bias is not None:
            layer.bias.fill_(bias)
    program = lower(network(ConvexPotential(layer), (1, 1)), (1, 1))
    square = sum(Fraction(w) ** 2 for w in v)
    return propagate(replace(program.nodes[1], square=square), NodeBound(1.0, abs(x), 0.0)), program


def off(program, x):
    node, image = program.nodes[1], torch.full((1, 1, 1), x, **DOUBLE)
    b = Fraction(0) if node.bias is None else Fraction(float(node.bias.values[0]))
    weights = [Fraction(w) for w in node.weight.values.flatten().tolist()]
    real = Fraction(x) - 2 * sum(w * max(Fraction(0), w * Fraction(x) + b) for w in weights)
    return abs(Fraction(float(program.run(image)[1])) - real)


def test_the_difference_is_rounded():
    """x - 2^-53 for x = 1 + 2^-52 is a tie: half a unit of x is lost, and nothing else."""
    x, v = 1 + 2.0**-52, 2.0**-27
    state, program = state_at([v], x)
    assert off(program, x) <= Fraction(state.error)
    assert off(program, x) > Fraction(state.error) * Fraction(9, 10)


def test_a_large_bias_is_rounded():
    """b + x loses a quarter of a unit of b, which is doubled, and the difference is rounded in the same direction."""
    x, b = 3 * 2.0**-14, 2.0**40
    state, program = state_at([1.0], x, b)
    assert 2 * UNIT * Fraction(b) < off(program, x) == 5 * Fraction(2) ** -14 <= Fraction(state.error)
    assert state_at([1.0], x)[0].error < 2.0**-60


def test_the_adjoint_is_rounded():
    """1 + 2^-53 + 2^-53 + ... in V^T loses every term but the first; V itself has one product in each sum."""
    terms = 60
    v = [1.0] + [2.0**-26.5] * terms
    state, program = state_at(v, 1.0)
    total = 0.0
    for w in v:
        total += w * w
    lost = abs(Fraction(1 - 2 * total) - (1 - 2 * sum(Fraction(w) ** 2 for w in v)))
    assert max(lost, off(program, 1.0)) <= Fraction(state.error)
    assert lost > 2 * Fraction(2) ** -53 * (terms - 1)  # V and the difference are rounded by a few units at most


def test_flushed_numbers():
    state, program = state_at([2.0**-540], 2.0**-500)
    assert state.error >= 2 * 2.0**-1022
    assert off(program, 2.0**-500) <= Fraction(state.error)


def test_errors_of_the_input_grow_by_the_constant():
    _, program = state_at([2.0], 1.0)
    states = [propagate(replace(program.nodes[1], square=Fraction(4)), NodeBound(1.0, 1.0, e)) for e in (0.0, 0.5)]
    assert states[1].error - states[0].error >= 7 * 0.5


def test_what_could_overflow_is_refused():
    state_at([1.0], 2.0**498)
    with pytest.raises(ProofError, match="sums below 2"):
        state_at([1.0], 2.0**499)  # x - 2 x
    with pytest.raises(ProofError, match="sums below 2"):
        state_at([2.0**20], 2.0**470)  # V^T


# ---- networks


def deep(method, mode, count=2, **options):
    padding = {"padding": 1, "padding_mode": mode}
    blocks = [method(nn.Conv2d(2, 2, 3, **padding), **options) for _ in range(count)]
    for one in blocks:
        nn.init.normal_(one.bias)
    return nn.Sequential(*blocks, nn.Flatten(), onelip.nn.AOLLinear(32, 3)).eval()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("method", [sll, cpl])
def test_certified_with_the_constant_one_and_checked(method, mode, exact, tmp_path):
    model, images = deep(method, mode, hidden=3), images_of((2, 4, 4), 3)
    plain = onelip.bake(model).double().eval()
    found = onelip.certify(plain, images, torch.tensor([0, 1, 2]), exact=exact)
    assert found.constant < 1 + 1e-6
    assert found.certified() == 3
    if not exact:
        return
    assert found.proof is not None
    check(found.proof.program, images[:2].numpy())
    path = write_files(tmp_path, model, found, images)
    verdict = check_file(path, images=tmp_path / "images.npy")
    assert (verdict["certified"], verdict["lipschitz"]) == (3, found.constant)
    content = json.loads(path.read_text())
    for node in content["nodes"]:
        if node["op"] == "potential":
            node["circular"] = [not around for around in node["circular"]]
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(Rejected, match="more than rounding explains"):
        check_file(path, images=tmp_path / "images.npy")


def test_another_constant_is_a_node_after_it():
    model = network(onelip.bake(sll(nn.Conv2d(2, 2, 3, padding=2, dilation=2), hidden=4, lipschitz=0.3)), (2, 4, 4))
    program = lower(model, (2, 4, 4))
    assert [node.kind for node in program.nodes] == ["input", "potential", "scale", "join", "affine"]
    states = check(program, images_of((2, 4, 4)).numpy())
    assert 0.3 <= states[2].lipschitz < 0.3 * (1 + 1e-6)


def test_a_norm_that_is_not_one_is_counted():
    """The node has the constant of the stored V."""
    plain = onelip.bake(deep(sll, "zeros")).double().eval()
    with torch.no_grad():
        plain[0].weight.mul_(2)
    state = onelip.prove(plain, (2, 4, 4)).node_bounds[1]
    assert state.facts["sigma"] > 1.2
    assert state.lipschitz == pytest.approx(2 * state.facts["sigma"] ** 2 - 1)


def test_a_dense_one_without_a_bound_is_refused():
    with pytest.raises(ProofError, match="ConvexPotential at '0'"):
        lower(network(ConvexPotential(nn.Linear(4, 4)), (4,)), (4,))


def test_a_proof_is_of_one_border():
    kinds = [block(2, 2, (3,)), block(2, 2, (3,), padding_mode="circular"), block(2, 2, (3,), dilation=2)]
    kinds.append(block(2, 4, (3,), groups=2))
    for made in kinds[1:3]:
        made.load_state_dict(kinds[0].state_dict())
    nn.init.eye_((head := nn.Linear(10, 2)).weight)
    programs = [lower(nn.Sequential(made, nn.Flatten(), head).double().eval(), (2, 5)) for made in kinds]
    for one, other in itertools.combinations(programs, 2):
        assert first_different_node(one, other) is not None
    assert first_different_node(programs[0], lower(nn.Sequential(kinds[0], nn.Flatten(), head), (2, 5))) is None


def test_both_convolutions_are_asked_for_their_backend(monkeypatch):
    program = lower(network(block(2, 3, (3, 3), padding_mode="circular"), (2, 4, 4)), (2, 4, 4))
    check_backends(program, 64)
    for refused in (False, True):
        backend = torch._C._ConvBackend

        def select(*arguments, refused=refused, backend=backend):
            return backend.NnpackSpatial if arguments[6] == refused else backend.Slow2d

        monkeypatch.setattr(torch._C, "_select_conv_backend", select)
        with pytest.raises(ProofError, match="backend NnpackSpatial"):
            check_backends(program, 64)


# ---- wide ones: as tight in a file as in float64


def wide(channels, count=2):
    blocks = [cpl(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(count)]
    last = onelip.nn.AOLLinear(16 * channels, 3)
    return nn.Sequential(nn.Conv2d(1, channels, 1), *blocks, nn.Flatten(), last).eval()


def wide_files(tmp_path, channels=16):
    model, images = wide(channels), images_of((1, 4, 4), 3)
    found = onelip.certify(onelip.bake(model).double(), images, exact=True)
    return found, write_files(tmp_path, model, found, images)


@pytest.mark.parametrize("channels", [12, 32])
def test_wide_potentials_have_the_constant_one_in_a_file(channels, tmp_path):
    found, path = wide_files(tmp_path, channels)
    assert found.proof is not None
    potentials = [i for i, node in enumerate(found.proof.program.nodes) if node.kind == "potential"]
    for i in potentials:
        bound, state = found.proof.layer_bounds[i], found.proof.node_bounds[i]
        assert bound.witness.kind == "frequencies"
        assert 0.99 < state.facts["sigma"] <= 1 + 2.0**-16
        assert state.lipschitz <= found.proof.node_bounds[i - 1].lipschitz * (1 + 1e-4)
    assert check_file(path)["lipschitz"] == found.constant


@pytest.mark.parametrize(
    "change",
    [
        lambda bound: bound.update(tree=bound["tree"][:-1]),
        lambda bound: bound.update(tree=bound["tree"] + "1"),
        lambda bound: bound.update(tree="1" * len(bound["tree"])),
        lambda bound: bound.update(tree=""),
        lambda bound: bound.update(tree="0" * 100000),
        lambda bound: bound.update(tree=7),
        lambda bound: bound.update(side="both"),
        lambda bound: bound.update(steps=1),
    ],
)
def test_changed_frequencies_are_rejected(change, tmp_path):
    _, path = wide_files(tmp_path)
    content = json.loads(path.read_text())
    node = next(node for node in content["nodes"] if node["op"] == "potential")
    change(node["bound"])
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(Rejected):
        check_file(path)


def test_a_smaller_claim_is_rejected(tmp_path):
    _, path = wide_files(tmp_path)
    content = json.loads(path.read_text())
    node = next(node for node in content["nodes"] if node["op"] == "potential")
    node["sigma"] = str(Fraction(float(Fraction(node["sigma"])) * 0.97))
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(Rejected, match="sigma: not proved by these frequencies"):
        check_file(path)
