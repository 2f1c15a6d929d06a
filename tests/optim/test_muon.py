"""LipschitzMuon and retract_after: steps by hand, state, refusals."""

import copy

import pytest
import torch
from torch import nn

import onelip
from onelip.core.errors import Diverged
from onelip.methods.orthogonal.reshaped import bjorck
from onelip.optim import LipschitzMuon, keeps_norms, retract_, retract_after, training_weights, unscaled

R = torch.float64


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        onelip.nn.AOLConv2d(2, 4, 2, stride=2, side="auto", dtype=dtype),
        onelip.nn.MaxMin(),
        onelip.nn.AOLConv2d(4, 4, 3, padding=1, groups=2, dtype=dtype),
        nn.Flatten(),
        onelip.nn.AOLLinear(36, 12, side="auto", dtype=dtype),
        onelip.nn.MaxMin(),
        nn.Linear(12, 3, dtype=dtype),
    )


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 2, 6, 6, generator=generator).to(next(model.parameters()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def dense_step(P, M, g, lr, momentum):
    """The documented step for a matrix with at least as many rows as columns, by singular values."""
    M = momentum * M + g
    D = g + momentum * M
    X = P.T @ D
    D = D - P @ (X + X.T) / 2
    U, s, V = torch.linalg.svd(D / (D.T @ D).abs().sum(1).sqrt(), full_matrices=False)
    for _ in range(2):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    P = P - lr * (U * s) @ V
    Q = P / (P.T @ P).abs().sum(1).sqrt()
    return 1.5 * Q - 0.5 * Q @ (Q.T @ Q), M


def test_steps_by_hand():
    layer = onelip.aol(nn.Linear(5, 8, dtype=R))
    P = layer.parametrizations.weight.original
    optimizer = LipschitzMuon(layer, lr=0.1, momentum=0.8)
    reference = torch.optim.SGD([bias := layer.bias.detach().clone()], lr=0.1, momentum=0.8, nesterov=True)
    expected, M = P.detach().clone(), torch.zeros_like(P)
    for step in range(3):
        P.grad, layer.bias.grad = torch.randn_like(P), torch.randn(8, dtype=R)
        bias.grad = layer.bias.grad.clone()
        expected, M = dense_step(expected, M, P.grad, 0.1, 0.8)
        optimizer.step()
        reference.step()
        assert torch.allclose(P, expected, atol=1e-10), step
        assert torch.equal(layer.bias, bias)


def test_layers_with_columns_on_the_other_side():
    """A wide layer is stored transposed."""
    wide, tall = onelip.aol(nn.Linear(8, 5, dtype=R), side="auto"), onelip.aol(nn.Linear(5, 8, dtype=R))
    P, T = (layer.parametrizations.weight.original for layer in (wide, tall))
    T.data = P.data.T.clone()
    for layer, p in ((wide, P), (tall, T)):
        p.grad = torch.arange(40, dtype=R).reshape(5, 8).cos() if p is P else P.grad.T.clone()
        LipschitzMuon(layer, lr=0.3).step()
    assert torch.allclose(P.T, T, atol=1e-12)


def test_a_convolution_of_stride_is_a_dense_layer_on_its_windows():
    conv, dense = onelip.aol(nn.Conv2d(2, 9, 2, stride=2, dtype=R)), onelip.aol(nn.Linear(8, 9, dtype=R))
    P, T = (layer.parametrizations.weight.original for layer in (conv, dense))
    T.data = P.data.flatten(1).clone()
    P.grad = torch.randn_like(P)
    T.grad = P.grad.flatten(1).clone()
    for layer in (conv, dense):
        LipschitzMuon(layer, lr=0.3).step()
    assert torch.allclose(P.flatten(1), T, atol=1e-12)


def test_agrees_with_muon_of_torch():
    """Momentum and direction, for square matrices; Muon divides by another norm first, so the angle is what agrees."""
    torch.manual_seed(0)
    layer = onelip.aol(nn.Linear(48, 48, bias=False))
    P = layer.parametrizations.weight.original
    plain = nn.Parameter(P.detach().clone())
    ours = LipschitzMuon(layer, lr=0.01, momentum=0.9, retraction=None, tangent=False, orthogonalize=5)
    theirs = torch.optim.Muon([plain], lr=0.01, momentum=0.9, weight_decay=0.0, ns_steps=5)
    for _ in range(3):
        P.grad = torch.randn(48, 48)
        plain.grad = P.grad.clone()
        before = P.detach().clone()
        assert torch.equal(before, plain.detach())
        ours.step()
        theirs.step()
        a, b = (P - before).flatten(), (plain - before).flatten()
        assert torch.dot(a, b) > 0.93 * a.norm() * b.norm()
        assert 0.8 < a.norm() / b.norm() < 1.25
        plain.data.copy_(P)


@pytest.mark.parametrize("every", [1, 3])
def test_state_dict_continues_to_the_last_bit(every, tmp_path):
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05, every=every)
    train(model, optimizer, 4)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = LipschitzMuon(other, lr=1.0, every=every)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(model, optimizer, 5, seed=1)
    train(other, resumed, 5, seed=1)
    assert equal(model, other)


def test_the_choice_of_products_is_kept(monkeypatch):
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    monkeypatch.setattr("onelip.optim.muon.bfloat16_is_faster", lambda device: True)
    train(model, optimizer, 1)
    other = copy.deepcopy(model)
    resumed = LipschitzMuon(other, lr=0.05)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    monkeypatch.setattr("onelip.optim.muon.bfloat16_is_faster", lambda device: False)  # not asked again
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert equal(model, other)
    full = network()
    train(full, LipschitzMuon(full, lr=0.05, products="float32"), 3)
    assert not equal(full, model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    train(model, optimizer, 1)
    kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    model[-1].bias.grad[0] = bad
    with pytest.raises(Diverged, match="a gradient has a NaN or an infinity"):
        optimizer.step()
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["momentum_buffer"], s["momentum_buffer"]) for i, s in state.items())


def test_large_gradients_whose_sum_overflows_are_finite():
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    train(model, optimizer, 1)
    kept = model[0].weight.detach().clone()
    model[0].parametrizations.weight.original.grad.fill_(1.5e37)  # 32 of them
    optimizer.step()
    assert model[0].weight.isfinite().all()
    assert not torch.equal(model[0].weight, kept)


def test_infinities_whose_sum_is_a_nan_are_refused():
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    train(model, optimizer, 1)
    model[0].parametrizations.weight.original.grad[0, :2] = torch.tensor([torch.inf, -torch.inf])
    with pytest.raises(Diverged):
        optimizer.step()


def test_parameters_without_a_gradient_stay():
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    frozen = copy.deepcopy(model[0].state_dict())
    optimizer = LipschitzMuon(model, lr=0.05)
    model[2].parametrizations.weight.original.grad = None
    kept = model[2].weight.detach().clone()
    model[-1](torch.randn(4, 12)).sum().backward()
    optimizer.step()
    assert torch.equal(model[2].weight, kept)
    assert all(torch.equal(v, frozen[k]) for k, v in model[0].state_dict().items())


def test_layers_stay_near_orthogonality_and_the_weights_are_those_of_aol():
    model = network()
    train(model, LipschitzMuon(model, lr=0.1), 30)
    for index in (0, 4):
        s = torch.linalg.svdvals(onelip.testing.exact_jacobian(model[index], (2, 2, 2) if index == 0 else (36,)))
        assert s.max() <= 1 + 1e-6
        assert s[s > 1e-6].min() > 0.9
    plain = network()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.3), 30)
    s = torch.linalg.svdvals(onelip.testing.exact_jacobian(plain[4], (36,)))
    assert s.min() < 0.9  # so the assertion above can fail


def test_huge_rates_stay_finite():
    layer = onelip.nn.AOLConv2d(2, 8, 2, stride=2, bias=False)
    train(layer, LipschitzMuon(layer, lr=1e30), 5)
    assert onelip.testing.exact_norm(layer, (2, 2, 2)) <= 1 + 1e-6
    P = layer.parametrizations.weight.original.detach().flatten(1)
    assert torch.linalg.matrix_norm(P, 2) <= 1 + 1e-6


def test_groups_of_modules_have_options_of_their_own():
    model = network()
    groups = [{"module": model[0], "lr": 0.0}, {"module": model}]
    optimizer = LipschitzMuon(groups, lr=0.05, products="float32")
    assert sorted(map(id, model.parameters())) == sorted(id(p) for g in optimizer.param_groups for p in g["params"])
    kept = model[0].bias.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].bias, kept)
    assert model[2].bias.any()


def test_a_copy_goes_on_alike():
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, seed=1)
    train(other, copied, 2, seed=1)
    assert equal(model, other)


def test_parameters_of_other_kinds_do_not_decay():
    model = nn.Sequential(onelip.nn.AOLLinear(4, 4, learn_weights=True), onelip.nn.Householder(4), nn.Linear(4, 4))
    others = [p for name, p in model.named_parameters() if "log_q" in name or name.startswith("1.")]
    assert len(others) == 2
    before = [p.detach().clone() for p in others]
    optimizer = LipschitzMuon(model, lr=0.1, momentum=0.0, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    weight = model[2].weight.detach().clone()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(others, before, strict=True))
    assert torch.allclose(model[2].weight, 0.95 * weight)


def test_weight_decay_of_plain_weights_alone():
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = LipschitzMuon(model, lr=0.1, momentum=0.0, weight_decay=0.5)
    weight, bias = (p.detach().clone() for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(model[0].weight, weight * 0.95)
    assert torch.equal(model[0].bias, bias)


def test_gradient_clipping_does_not_change_an_orthogonal_step():
    one, other = network(R), network(R)
    for model in (one, other):
        optimizer = LipschitzMuon(model, lr=0.05, momentum=0.0)
        model(torch.ones(2, 2, 6, 6, dtype=R)).square().sum().backward()
        if model is other:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert torch.allclose(one[4].weight, other[4].weight, atol=1e-9)
    assert not torch.allclose(one[4].bias, other[4].bias)


def test_bjorck_layers_are_retracted_too():
    layer = bjorck(nn.Linear(6, 6))
    torch.nn.init.normal_(layer.parametrizations.weight.original)
    for _ in range(30):
        assert retract_(layer) == 1
    P = layer.parametrizations.weight.original
    assert torch.allclose(P.T @ P, torch.eye(6), atol=1e-4)


def test_closure_and_schedulers():
    model = network()
    optimizer = LipschitzMuon(model, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 2, 6, 6)).square().sum()
        loss.backward()
        return loss

    expected = model(torch.ones(2, 2, 6, 6)).square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(expected)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "expected lr of at least 0, got -1.0"),
        ({"lr": float("nan")}, "expected lr"),
        ({"momentum": 1.0}, "expected momentum from 0 to below 1"),
        ({"weight_decay": -1}, "expected weight_decay"),
        ({"retraction": "r3"}, "'r1', 'r2' or None, got 'r3'"),
        ({"tangent": "False"}, "tangent to be true or false, got 'False'"),
        ({"lr": float("inf")}, "lr of at least 0, got inf"),
        ({"weight_decay": float("nan")}, "weight_decay of at least 0, got nan"),
        ({"products": "half"}, "'auto', 'float32' or 'bfloat16', got 'half'"),
        ({"orthogonalize": -1}, "orthogonalize"),
        ({"every": 0}, "every"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        LipschitzMuon(network(), **options)


# Beside any other optimizer.


def test_retract_after_sgd_by_hand():
    layer = onelip.aol(nn.Linear(4, 6, bias=False, dtype=R))
    P = layer.parametrizations.weight.original
    optimizer = torch.optim.SGD([P], lr=0.5)
    handle = retract_after(optimizer, layer, retraction="r1", tangent=True)
    before, g = P.detach().clone(), torch.randn_like(P) * 0.1
    P.grad = g.clone()
    optimizer.step()
    X = before.T @ g
    moved = before - 0.5 * (g - before @ (X + X.T) / 2)
    assert torch.allclose(P, 1.5 * moved - 0.5 * moved @ (moved.T @ moved), atol=1e-12)
    handle.remove()
    before = P.detach().clone()
    P.grad = g.clone()
    optimizer.step()
    assert torch.allclose(P, before - 0.5 * g)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_retract_every_other_step_resumes(make):
    model = network()
    optimizer = make(model.parameters(), lr=0.01)
    retract_after(optimizer, model, every=2)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = make(other.parameters(), lr=0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    retract_after(resumed, other, every=2)
    train(model, optimizer, 2, seed=1)
    train(other, resumed, 2, seed=1)
    assert equal(model, other)


def test_the_products_of_a_retraction_are_measured_once(monkeypatch):
    def trained(products, steps, state=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        retract_after(optimizer, model, products=products)
        train(model, optimizer, steps)
        return model, optimizer.state_dict()

    low, full = (trained(products, 3)[0] for products in ("bfloat16", "float32"))
    assert not equal(low, full)
    for a, b in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.allclose(a, b, atol=0.01)
    monkeypatch.setattr("onelip.optim.muon.bfloat16_is_faster", lambda device: True)
    model, state = trained("auto", 3)
    assert equal(model, low)
    monkeypatch.setattr("onelip.optim.muon.bfloat16_is_faster", lambda device: False)
    assert equal(trained("auto", 3)[0], full)
    assert equal(trained("auto", 3, copy.deepcopy(state))[0], low)  # a resumed run does not measure again


def test_a_retraction_refuses_other_products():
    model = network()
    with pytest.raises(ValueError, match="expected products to be 'auto', 'float32' or 'bfloat16', got 'half'"):
        retract_after(torch.optim.SGD(model.parameters(), lr=0.1), model, products="half")  # pyright: ignore


def test_layers_of_another_optimizer_are_unchanged():
    model = network()
    first, second = torch.optim.SGD(model[:3].parameters(), lr=0.1), torch.optim.AdamW(model[3:].parameters(), lr=0.0)
    retract_after(first, model)
    P = model[4].parametrizations.weight.original
    with torch.no_grad():
        P *= 2
    before = P.detach().clone()
    train(model, first, 2)
    assert torch.equal(P, before)
    first.load_state_dict(copy.deepcopy(first.state_dict()))
    second.step()
    with pytest.raises(ValueError, match="none of its AOL layers"):
        retract_after(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), model)


def test_a_removed_retraction_applies_aol_again():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = retract_after(optimizer, model)
    assert keeps_norms(optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.load_state_dict(optimizer.state_dict())  # has no hook
    assert not keeps_norms(other)
    optimizer.load_state_dict(other.state_dict())
    assert keeps_norms(optimizer)
    handle.remove()
    assert not keeps_norms(optimizer)


def test_aol_is_left_out_only_for_the_intervals_that_were_measured():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for every, expected in [(16, True), (17, False)]:
        handle = retract_after(optimizer, model, every=every)
        assert keeps_norms(optimizer) == expected
        handle.remove()
    for options, expected in [
        ({"every": 4}, True),
        ({"every": 5}, False),
        ({"every": 2, "tangent": False}, False),
        ({"every": 16, "orthogonalize": 0}, True),
        ({"retraction": "r1"}, False),
    ]:
        assert keeps_norms(LipschitzMuon(model, **options)) == expected
    muon = LipschitzMuon(model, every=5)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(3)
        with training_weights(model, muon):
            assert torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6
        with training_weights(model, LipschitzMuon(model)):
            assert torch.linalg.matrix_norm(layer.weight, 2) > 1.5


def test_retract_after_needs_a_layer():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="expected a model with AOL layers"):
        retract_after(torch.optim.SGD(model.parameters(), lr=0.1), model)


# P itself in training.


def test_unscaled_layers_are_seen_in_training_mode_alone():
    model = network()
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.parametrizations.weight.original.mul_(3.0)
    exact = {i: model[i].weight.detach().clone() for i in (0, 2, 4)}
    x = torch.randn(3, 2, 6, 6)
    expected = model.eval()(x)
    with unscaled(model):
        assert torch.equal(model(x), expected)  # eval mode
        model.train()
        for i in (0, 4):
            assert torch.equal(model[i].weight, model[i].parametrizations.weight.original)
        assert torch.equal(model[2].weight, exact[2])  # overlapping taps: R2 is not exact
        with unscaled(model, convolutions=True):
            assert torch.equal(model[2].weight, model[2].parametrizations.weight.original)
        plain = onelip.bake(model)
        assert all(torch.equal(plain[i].weight, exact[i]) for i in exact)
        audits = [onelip.audit(m, torch.zeros(1, 2, 6, 6), lower=False).upper for m in (model, plain)]
        assert audits[0] == audits[1] is not None
    assert all(torch.equal(model[i].weight, exact[i]) for i in exact)


def test_unscaled_ends_with_an_error_inside():
    model = network()
    with pytest.raises(KeyError), unscaled(model):
        raise KeyError
    assert not any(getattr(m, "is_unscaled", False) for m in model.modules())


def test_unscaled_skips_layers_that_r2_does_not_make_orthogonal():
    wide = onelip.aol(nn.Linear(6, 3))
    weight = wide.weight.detach().clone()
    with unscaled(wide):
        assert torch.equal(wide.weight, weight)


def test_cached_weights_are_exact_within_unscaled():
    """A weight that torch caches in training mode may be used in evaluation mode."""
    model = onelip.aol(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.parametrizations.weight.original.copy_(5 * torch.eye(4))
    with unscaled(model), nn.utils.parametrize.cached():
        model.train()(torch.ones(1, 4))
        assert torch.equal(model.eval()(torch.eye(4)), torch.eye(4))


def test_parts_of_another_form_are_refused():
    model = network()
    with pytest.raises(TypeError, match=r"expected a module, because .* got Parameter"):
        LipschitzMuon(model.parameters())
    with pytest.raises(TypeError, match='with the key "module"'):
        LipschitzMuon([{"params": list(model.parameters())}])
    with pytest.raises(ValueError, match="unknown option 'orthogonalise'; did you mean 'orthogonalize'"):
        LipschitzMuon([{"module": model, "orthogonalise": 0}])
