"""Lazy rescaling: no part of the gradient is lost, and nothing outside of training sees it."""

import copy

import pytest
import torch
from torch import nn

import onelip
from onelip.optim import LazyRescaling, LipschitzMuon, unscaled

# Dense, 1d to 3d, strided through its phases, grouped, dilated, transposed; both sides, more Gram steps, constants.
LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), (5,), {}),
    "outputs": (lambda: nn.Linear(7, 5), (7,), {"side": "outputs"}),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 6), {}),
    "conv2d strided": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 6, 6), {}),
    "conv2d grouped, dilated": (lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2), (4, 6, 6), {}),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3), {}),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), (3, 4, 4), {}),
    "two steps": (lambda: nn.Linear(5, 6), (5,), {"steps": 2, "lipschitz": 0.5}),
    "weights": (lambda: nn.Linear(5, 6), (5,), {"learn_weights": True}),
}


def layer_and_input(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    make, shape, options = LAYERS[name]
    layer = onelip.aol(make(), **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer, torch.randn(4, *shape, dtype=torch.float64)


def gradients(layer: nn.Module, x: torch.Tensor, passes: int, lazy: LazyRescaling | None) -> list[torch.Tensor]:
    """The sum of the gradients of some passes, each with a loss of its own, at fixed parameters."""
    layer.zero_grad()
    for i in range(passes):
        if lazy is None:
            out = layer(x + i)
        else:
            with lazy:
                out = layer(x + i)
        (out.sin() * (i + 1)).sum().backward()
    return [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_of_the_gradient_is_lost(name: str) -> None:
    """After an exact pass, the sum of all gradients is that of AOL itself: the parameters did not move."""
    layer, x = layer_and_input(name)
    layer.train()
    lazy = LazyRescaling(layer, every=3)
    expected = gradients(layer, x, 7, None)
    found = gradients(layer, x, 7, lazy)  # exact passes: 0, 3, 6
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not lazy.owed.any()
    layer.zero_grad()
    with lazy:  # pass 7: the part of the gradient in the scale is missing
        layer(x).sin().sum().backward()
    assert lazy.owed.any()


def test_the_norms_are_the_last_exact_ones() -> None:
    layer, _ = layer_and_input("linear")
    layer.train()
    lazy, P = LazyRescaling(layer, every=4), layer.parametrizations.weight.original
    with lazy:
        first = layer.weight.detach().clone()
    with torch.no_grad():
        P[:, 0] *= 2.0  # AOL changes all columns; their directions are the same
    with lazy:
        torch.testing.assert_close(layer.weight, first)
    assert not torch.allclose(layer.weight, first)
    assert torch.equal(layer.weight, layer.parametrizations.weight[0].rescale(P))  # outside: exact
    for _ in range(2):
        with lazy:
            pass
    with lazy:
        assert torch.equal(layer.weight, layer.parametrizations.weight[0].rescale(P))


def test_layers_take_turns() -> None:
    model = nn.Sequential(*(onelip.nn.AOLLinear(4, 4) for _ in range(4))).train()
    lazy = LazyRescaling(model, every=4)
    seen = []
    for _ in range(8):
        with lazy:
            seen.append([layer.is_exact for layer in lazy._entered])
            assert lazy.norms.all()  # from the first pass on
    assert all(sum(row) == 1 for row in seen)
    assert all(any(row[i] for row in seen[:4]) for i in range(4))


def test_evaluation_bake_and_audit_are_exact_within_the_context() -> None:
    layer, x = layer_and_input("conv2d strided")
    layer.train()
    lazy = LazyRescaling(layer, every=100)
    with lazy:
        layer(x)
    with torch.no_grad():
        layer.parametrizations.weight.original[0].mul_(5.0)
    exact = layer.weight.detach().clone()
    with lazy:
        assert not torch.allclose(layer.weight, exact)
        torch.testing.assert_close(onelip.bake(layer).weight, exact)
        assert onelip.audit(layer, x[:1], lower=False).upper <= 1 + 1e-9
        torch.testing.assert_close(layer.eval().weight, exact)


def test_resumes_to_the_last_bit() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(onelip.nn.AOLLinear(6, 6), onelip.nn.MaxMin(), onelip.nn.AOLLinear(6, 3)).train()

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, lazy: LazyRescaling, steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            with lazy:
                loss = net(torch.full((2, 6), 0.1 * i)).square().sum()
            loss.backward()
            optimizer.step()

    net = model()
    optimizer, lazy = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), LazyRescaling(net, every=5)
    train(net, optimizer, lazy, range(7))
    kept = copy.deepcopy((net.state_dict(), optimizer.state_dict(), lazy.state_dict()))
    train(net, optimizer, lazy, range(7, 13))

    other = model()
    optimizer, lazy = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), LazyRescaling(other, every=5)
    other.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    lazy.load_state_dict(kept[2])
    train(other, optimizer, lazy, range(7, 13))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="another model"):
        LazyRescaling(onelip.nn.AOLLinear(2, 2)).load_state_dict(kept[2])


def test_layers_that_are_unscaled_stay_so() -> None:
    model = nn.Sequential(onelip.nn.AOLConv2d(4, 4, 3, padding=1), onelip.nn.AOLConv2d(4, 4, 1)).train()
    LipschitzMuon(model, lr=0.1)
    lazy = LazyRescaling(model, every=4)
    with unscaled(model), lazy:
        assert model[1].weight is model[1].parametrizations.weight.original
        assert isinstance(model[0].parametrizations.weight[0].in_training, type(lazy._layers[0]))
    assert all(layer.parametrizations.weight[0].in_training is None for layer in model)


def test_zero_columns_and_half_precision() -> None:
    layer = onelip.nn.AOLLinear(3, 3).train()
    with torch.no_grad():
        layer.parametrizations.weight.original[:, 1] = 0.0
    lazy = LazyRescaling(layer, every=2)
    for _ in range(4):
        with lazy:
            out = layer(torch.ones(2, 3))
        out.square().sum().backward()
    assert layer.parametrizations.weight.original.grad.isfinite().all()
    half = onelip.nn.AOLLinear(3, 3, dtype=torch.bfloat16).train()
    lazy = LazyRescaling(half, every=2)
    for _ in range(3):
        with lazy:
            out = half(torch.ones(2, 3, dtype=torch.bfloat16))
        out.square().sum().backward()
    assert half.parametrizations.weight.original.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_options_that_mean_nothing(every: float) -> None:
    with pytest.raises((ValueError, TypeError), match="every"):
        LazyRescaling(onelip.nn.AOLLinear(2, 2), every=every)


def test_refuses_models_without_aol_and_nesting() -> None:
    with pytest.raises(ValueError, match="expected a model with AOL layers"):
        LazyRescaling(nn.Linear(2, 2))
    lazy = LazyRescaling(onelip.nn.AOLLinear(2, 2))
    with pytest.raises(RuntimeError, match="already entered"), lazy, lazy:
        pass
