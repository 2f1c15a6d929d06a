"""The architectures at work: norms, memory layouts, baked and plain networks, other sizes, a step of training."""

import copy

import pytest
import torch
from _models import SMALL, disturb, images, rows_of, small
from torch import Tensor, nn
from torch.nn.utils import parametrize

import onelip
from onelip.nn import AOLConv2d, AOLLinear


@pytest.mark.parametrize("name", SMALL)
def test_constant_is_one(name):
    assert onelip.summary(small(name)).constant == 1.0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_initial_network_never_stretches(name, in_channels):
    model = small(name, in_channels=in_channels).double()
    x = images(4, in_channels, 32, 32)
    y = model(x)
    assert y.shape == (4, 10)
    assert (y.norm(dim=1) <= x.flatten(1).norm(dim=1) + 1e-9).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "until"),
    [
        ("aol-small", {"width": 2, "channels": 48}, "narrow"),  # 48 inputs to a patch
        ("patchwise-tiny", {"in_channels": 1}, "narrow"),
        ("aol-fc", {"width": 1024, "in_channels": 1, "depth": 2}, "logits"),
        ("aol-alt", {"width": 12}, "narrow"),  # 12 inputs to the first window
    ],
)
def test_initial_network_is_an_isometry_until_channels_are_dropped(name, kwargs, until):
    model = small(name, **kwargs).double()
    names = [child for child, _ in model.named_children()]
    x = images(2, kwargs.get("in_channels", 3), 32, 32)
    y = model[: names.index(until)](x)
    torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "kwargs", "size"),
    [
        ("patchwise-tiny", {"num_classes": 64, "width": 4, "channels": 8}, (8, 8)),  # all features, nothing dropped
        ("aol-fc", {"num_classes": 64}, (7, 5)),
        ("aol-std", {"num_classes": 64, "width": 2}, (32, 32)),
        ("aol-dil", {"num_classes": 64, "width": 2}, (32, 32)),
        ("aol-alt", {"num_classes": 128}, (32, 32)),
        ("aol-std", {"num_classes": 64, "width": 2}, (64, 32)),  # ends with an average
    ],
)
def test_norm_of_the_jacobian(name, kwargs, size):
    model = disturb(small(name, in_channels=1, image_size=size, **kwargs).double())
    x = images(1, 1, *size)
    J = torch.autograd.functional.jacobian(model, x)
    assert isinstance(J, Tensor)
    norm = float(torch.linalg.matrix_norm(J.reshape(-1, x.numel()), ord=2))
    assert 0 < norm <= 1 + 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_bake_keeps_outputs(name):
    model = disturb(small(name), 0.05)
    x = images(2, 3, 32, 32, dtype=torch.float32)
    baked = onelip.bake(model)
    assert all(not parametrize.is_parametrized(module) for module in baked.modules())
    torch.testing.assert_close(baked(x), model(x))
    plain = small(name, method=None)
    plain.load_state_dict(baked.state_dict())  # the plain network has the same keys
    torch.testing.assert_close(plain(x), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_memory_formats_agree(name):
    model = disturb(small(name).double(), 0.05)
    x = images(2, 3, 32, 32)
    y = model(x)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), y)


@pytest.mark.parametrize("name", SMALL)
def test_without_a_method(name):
    model, constrained = small(name, method=None), small(name)
    assert not any(isinstance(module, (AOLConv2d, AOLLinear)) for module in model.modules())
    assert [n for n, _ in model.named_children()] == [n for n, _ in constrained.named_children()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in onelip.bake(constrained).parameters()]
    x = images(1, 3, 32, 32, dtype=torch.float32)
    assert rows_of(model, x) == rows_of(constrained, x)


@pytest.mark.parametrize("name", SMALL)
def test_training_step(name):
    torch.manual_seed(0)
    model = small(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = images(4, 3, 32, 32, dtype=torch.float32), torch.arange(4)
    before = nn.functional.cross_entropy(model(x), labels)
    before.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert nn.functional.cross_entropy(model(x), labels) < before


@pytest.mark.parametrize(
    ("name", "kwargs", "shape"),
    [
        ("aol-small", {"image_size": (8, 12)}, (8, 12)),
        ("aol-small", {"image_size": 14, "patch": 7}, (14, 14)),
        ("aol-small", {"image_size": 9, "patch": 3}, (9, 9)),
        ("aol-fc", {"image_size": (5, 3)}, (5, 3)),
        ("aol-std", {"image_size": (32, 64)}, (32, 64)),
        ("aol-alt", {"image_size": 64}, (64, 64)),
        ("aol-dil", {"image_size": 64}, (64, 64)),
        *(("patchwise-tiny", {"image_size": n}, (n, n)) for n in (1, 7, 8, 9, 16, 28)),
    ],
)
@pytest.mark.parametrize("in_channels", [1, 2, 3])
def test_other_sizes(name, kwargs, shape, in_channels):
    model = small(name, in_channels=in_channels, num_classes=7, **kwargs)
    assert model(torch.randn(2, in_channels, *shape)).shape == (2, 7)
    assert onelip.summary(model).constant == 1.0
