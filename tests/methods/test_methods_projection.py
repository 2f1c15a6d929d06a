"""Clipping, LCC, Parseval: the projection after a step, and the constant in evaluation with and without it."""

import math

import pytest
import torch
from torch import nn

import onelip
from onelip.core.geometry import geometry_of
from onelip.core.parametrization import find_parametrization, original_of
from onelip.graph.modules import bound_module
from onelip.methods.projections import (
    clipping,
    largest_not_above,
    lcc,
    limit_batch_norm,
    parseval,
    project,
    project_after,
    schur_count,
)
from onelip.testing import exact_jacobian, exact_norm

LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), (5,)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
    "strided": (lambda: nn.Conv2d(2, 4, 3, stride=2), (2, 9, 9)),
    "grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=2, dilation=2), (4, 12)),
    "circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), (3, 5, 5)),
}


@pytest.fixture(params=LAYERS, name="case")
def make_case(request):
    torch.manual_seed(0)
    make, shape = LAYERS[request.param]
    return make().double(), shape


def fill(layer, value):
    with torch.no_grad():
        layer.weight.fill_(value)


def test_clip_count_is_that_of_the_schur_test(case):
    """On an image large enough for its middle to see every tap, row sums times column sums of a constant kernel."""
    layer, shape = case
    fill(layer, 1.0)
    J = exact_jacobian(layer, shape)
    assert schur_count(geometry_of(layer), layer.weight.shape) == round(float(J.sum(0).max() * J.sum(1).max()))


def test_clip_guarantees_the_constant_and_a_constant_kernel_attains_it():
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular").double()
    fill(layer, 5.0)
    clipping(layer, lipschitz=0.5)
    assert exact_norm(layer, (2, 8, 8)) == pytest.approx(0.5, rel=1e-12)
    assert bound_module(layer).constant == 0.5


def test_a_given_clip_gives_its_bound():
    layer = nn.Conv2d(2, 3, 3, padding=1)
    assert bound_module(clipping(layer, clip=1.0)).constant == pytest.approx(9 * math.sqrt(6))
    assert bound_module(layer).constant >= 9 * math.sqrt(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_end_of_the_box_is_rounded_inwards(dtype):
    for value in (1 / 3, 0.1, 1e-6, 0.25):
        found = largest_not_above(value, dtype)
        assert found <= value
        assert torch.tensor(found, dtype=dtype).double() == found
        assert float(torch.nextafter(torch.tensor(found, dtype=dtype), torch.tensor(1.0, dtype=dtype))) > value


def test_evaluation_clips_what_training_has_not(case):
    layer, shape = case
    clipping(layer)
    with torch.no_grad():
        original_of(layer).mul_(100)
    assert exact_norm(layer.eval(), shape) <= 1 + 1e-12
    assert float(layer.train().weight.detach().abs().max()) > 0.5
    assert project(layer) == 1
    assert torch.equal(layer.train().weight, layer.eval().weight)


def test_projection_comes_after_each_step_until_it_is_taken_off():
    torch.manual_seed(0)
    model = nn.Sequential(clipping(nn.Linear(4, 4)), nn.ReLU(), clipping(nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    handle = project_after(optimizer, model)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        return max(
            float(original_of(m).detach().abs().max()) * math.sqrt(m.weight.numel()) for m in (model[0], model[2])
        )

    assert step() <= 1.0
    handle.remove()
    assert max(step() for _ in range(3)) > 1.0


def test_nothing_to_project_is_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="apply a method by projection first"):
        project_after(torch.optim.SGD(model.parameters(), lr=1.0), model)
    assert project(model) == 0


@pytest.mark.parametrize(("p", "dim"), [(1, 0), (math.inf, 1)])
def test_lcc_sums_are_the_norms_of_the_operator(case, p, dim):
    layer, shape = case
    J = exact_jacobian(layer, shape).abs().sum(dim).max()
    norm = find_parametrization(lcc(layer, p=p, lipschitz=1e9)).norm(original_of(layer).detach())
    assert float(norm) == pytest.approx(float(J), rel=1e-12)


@pytest.mark.parametrize(("p", "order"), [(1, 1), (math.inf, math.inf), (2, 2)])
def test_lcc_projects_onto_the_ball_and_leaves_what_is_inside(case, p, order):
    layer, shape = case
    inside = (
        exact_norm(layer, shape) if p == 2 else float(torch.linalg.matrix_norm(exact_jacobian(layer, shape), order))
    )
    before = layer.weight.detach().clone()
    lcc(layer, p=p, lipschitz=2 * inside, input_size=shape[1:] or None)
    assert torch.equal(layer.weight, before)
    other = lcc(baked(layer), p=p, lipschitz=inside / 2, input_size=shape[1:] or None)
    for _ in range(60):
        project(other)
    found = float(torch.linalg.matrix_norm(exact_jacobian(other.train(), shape), order))
    assert found <= inside / 2 * (1 + 1e-3)


def baked(layer):
    return onelip.bake(layer)


def test_lcc_evaluation_is_sound_before_any_projection(case):
    layer, shape = case
    lcc(layer)
    with torch.no_grad():
        original_of(layer).mul_(50)
    assert exact_norm(layer.eval(), shape) <= 1 + 1e-12
    assert 1 < bound_module(layer).constant < 1 + 1e-14  # storing the weight rounds it


def test_lcc_refuses_other_norms():
    with pytest.raises(ValueError, match="1, 2 or inf"):
        lcc(nn.Linear(2, 2), p=3)
    assert bound_module(lcc(nn.Linear(2, 2), p=1)).constant is None  # sums say nothing about the L2 norm


def test_lcc_limits_batch_norm_as_it_is_in_evaluation():
    torch.manual_seed(0)
    norm, small = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-3.0, 1.0, 0.5]))
        norm.running_var.copy_(torch.tensor([4.0, 0.01, 1.0]))
        small.weight.fill_(0.1)
    before = norm.weight.detach().clone()
    model = nn.Sequential(norm, small)
    assert limit_batch_norm(model, lipschitz=2.0) == 2
    assert exact_norm(norm.eval(), (3, 2, 2)) == pytest.approx(2.0, rel=1e-12)
    assert bound_module(norm).constant == pytest.approx(2.0, rel=1e-9)
    assert torch.allclose(norm.weight / before, (norm.weight / before)[0])  # one factor for all channels
    assert torch.equal(small.weight, torch.full((3,), 0.1, dtype=torch.float64))
    assert limit_batch_norm(nn.Linear(2, 2)) == 0
    with pytest.raises(ValueError, match="affine=True"):
        limit_batch_norm(nn.BatchNorm1d(2, affine=False))


def test_parseval_moves_singular_values_by_its_polynomial(case):
    layer, _ = case
    parseval(layer, beta=0.1)
    rule = find_parametrization(layer)
    before = torch.linalg.svdvals(rule._matrix(original_of(layer)))
    project(layer)
    after = torch.linalg.svdvals(rule._matrix(original_of(layer)))
    assert torch.allclose(after, (1.1 * before - 0.1 * before**3).abs().sort(descending=True).values, atol=1e-12)


def test_parseval_rows_become_orthonormal_and_the_layer_short(case):
    layer, shape = case
    parseval(layer, beta=0.5)
    for _ in range(200):
        project(layer)
    M = find_parametrization(layer)._matrix(original_of(layer))
    G = M @ M.mT if M.shape[1] <= M.shape[2] else M.mT @ M
    assert torch.allclose(G, torch.eye(G.shape[1], dtype=G.dtype).expand_as(G), atol=1e-8)
    assert exact_norm(layer, shape) <= 1 + 1e-8
    assert bound_module(layer).constant is None


def test_parseval_keeps_the_weight_and_starts_orthonormal():
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    parseval(layer)
    assert torch.allclose(layer.weight, before, rtol=1e-6)
    rule = find_parametrization(layer)
    rule.reset(original_of(layer))
    M = rule._matrix(original_of(layer).detach())[0]
    assert torch.allclose(M @ M.T, torch.eye(4), atol=1e-5)


def test_parseval_moves_a_random_part_of_the_rows(case):
    layer, _ = case
    torch.manual_seed(0)
    parseval(layer, beta=0.1, rows=0.5)
    rule = find_parametrization(layer)
    seen = set()
    for _ in range(12):
        before = rule._matrix(original_of(layer).detach()).clone()
        project(layer)
        after = rule._matrix(original_of(layer).detach())
        chosen = (before != after).any(2).any(0)
        assert int(chosen.sum()) == round(0.5 * before.shape[1])
        M = before[:, chosen]
        assert torch.allclose(after[:, chosen], 1.1 * M - 0.1 * M @ M.mT @ M, atol=1e-12)
        seen |= set(chosen.nonzero().flatten().tolist())
    assert seen == set(range(rule._matrix(original_of(layer)).shape[1]))


def test_parseval_rows_by_parts_become_orthonormal_too():
    torch.manual_seed(0)
    layer = parseval(nn.Linear(9, 5).double(), beta=0.5, rows=0.4)
    for _ in range(1500):
        project(layer)
    assert torch.allclose(layer.weight @ layer.weight.T, torch.eye(5, dtype=torch.float64), atol=1e-6)


def test_parseval_chooses_the_same_rows_again_from_the_same_state():
    layer, other = (parseval(nn.Linear(6, 8), beta=0.3, rows=0.3) for _ in range(2))
    project(layer)
    assert int(find_parametrization(layer).draws) != int(find_parametrization(other).draws)
    other.load_state_dict(layer.state_dict())
    torch.manual_seed(7)  # the choice does not use the global random numbers
    project(layer)
    torch.manual_seed(8)
    project(other)
    assert torch.equal(layer.weight, other.weight)
    assert not any("draws" in key for key in parseval(nn.Linear(2, 2)).state_dict())


@pytest.mark.parametrize("rows", [0.0, 1.5, math.nan, True])
def test_parseval_refuses_parts_that_are_none(rows):
    with pytest.raises(ValueError, match="expected rows"):
        parseval(nn.Linear(2, 2), rows=rows)


def test_parseval_transposed_layers_are_short_too():
    """Rows of a transposed layer with a stride do not bound its phases: all taps are divided out."""
    layer = parseval(nn.ConvTranspose1d(1, 2, 2, stride=2).double(), beta=0.5)
    with torch.no_grad():
        original_of(layer).copy_(torch.eye(2)[None])  # (in, out, taps): orthonormal rows
    assert exact_norm(layer, (1, 3)) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, -1.0, 0.6, math.nan, True])
def test_parseval_refuses_steps_that_diverge(beta):
    with pytest.raises(ValueError, match="expected beta"):
        parseval(nn.Linear(2, 2), beta=beta)


@pytest.mark.parametrize("method", [clipping, lcc, parseval])
@pytest.mark.parametrize("name", ["reflect", "replicate"])
def test_copied_pixels_are_refused(method, name):
    with pytest.raises(onelip.UnsupportedLayer, match="copies pixels"):
        method(nn.Conv2d(2, 2, 3, padding=1, padding_mode=name))


def test_bake_gives_the_projected_weight():
    model = clipping(nn.Linear(3, 3))
    with torch.no_grad():
        original_of(model).fill_(7)
    plain = onelip.bake(model)
    assert type(plain) is nn.Linear
    assert float(plain.weight.detach().max()) == pytest.approx(1 / 3)
