"""bake returns the same function in plain torch, and does not change the original."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import onelip


class Net(nn.Module):
    """Shared layers, references in lists and dictionaries, a residual sum and a hook."""

    def __init__(self):
        super().__init__()
        self.shared = onelip.nn.AOLConv2d(4, 4, 3, padding=1)
        self.stem = onelip.aol(nn.Conv2d(3, 4, 3, padding=1, stride=2))
        self.blocks = nn.ModuleList([self.shared, self.shared])
        self.by_name = {"again": self.shared}
        self.head = onelip.aol(nn.Linear(4, 2), side="auto")
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.calls = 0

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.scale * (x + block(x))
        return self.head(self.by_name["again"](x).mean((2, 3)))


def test_bake_of_a_model_with_everything():
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(2, 3, 8, 8)
    expected = net(x)
    state = {key: value.clone() for key, value in net.state_dict().items()}

    plain = onelip.bake(net)
    assert torch.equal(plain(x), expected)
    assert type(plain) is Net
    assert type(plain.stem) is nn.Conv2d
    assert type(plain.shared) is nn.Conv2d
    assert plain.blocks[0] is plain.blocks[1] is plain.shared is plain.by_name["again"]
    assert sorted(plain.state_dict()) == sorted(
        ["scale", *(f"{n}.{p}" for n in ("shared", "stem", "blocks.0", "blocks.1", "head") for p in ("weight", "bias"))]
    )
    assert not any(isinstance(module, onelip.AOL) for module in plain.modules())

    # The original: same keys and values, still parametrized, still trainable, and not sharing memory with the copy.
    assert torch.equal(net(x), expected)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in state.items())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(7)
    assert torch.equal(net(x), expected)
    net(x).sum().backward()


def test_baking_copies_does_not_destroy_the_original():
    """deepcopy followed by remove_parametrizations would break it."""
    net = nn.Sequential(onelip.nn.AOLLinear(3, 3))
    x = torch.randn(2, 3)
    expected = net(x)
    other = copy.deepcopy(net)
    assert torch.equal(onelip.bake(other)(x), expected)
    assert torch.equal(other(x), expected)
    assert torch.equal(net(x), expected)


def test_bake_of_a_single_layer_and_of_a_plain_model():
    layer = onelip.nn.AOLLinear(3, 4)
    assert type(onelip.bake(layer)) is nn.Linear
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    assert torch.equal(onelip.bake(plain)[0].weight, plain[0].weight)
    assert onelip.bake(plain)[0].weight is not plain[0].weight


def test_bake_of_torch_parametrizations_uses_eval_mode_and_leaves_their_state():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)).train()
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    plain = onelip.bake(layer)
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in state.items())
    assert layer.training
    assert torch.equal(plain.weight, layer.eval().weight)
    both = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 2))
    assert torch.equal(onelip.bake(both).weight, both.weight)


def test_frozen_stays_frozen_and_modes_are_kept():
    net = nn.Sequential(onelip.nn.AOLLinear(3, 3), nn.Dropout()).eval()
    net.requires_grad_(False)
    plain = onelip.bake(net)
    assert not any(p.requires_grad for p in plain.parameters())
    assert not plain.training
    assert not plain[0].training


def test_subclasses_of_torch_layers_keep_their_class():
    class Loud(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = onelip.aol(Loud(3, 3))
    x = torch.randn(2, 3)
    plain = onelip.bake(layer)
    assert type(plain) is Loud
    assert torch.equal(plain(x), layer(x))

    class Louder(onelip.nn.AOLLinear):
        def forward(self, x):
            return 3 * super().forward(x)

    louder = Louder(3, 3)
    assert torch.equal(onelip.bake(louder)(x), louder(x))
    assert not parametrize.is_parametrized(onelip.bake(louder))


def test_non_finite_is_refused_by_name():
    net = nn.Sequential(onelip.nn.AOLLinear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[1].bias[1] = float("nan")
    with pytest.raises(onelip.NonFiniteWeight, match=r"'1.bias' contains 1 NaN or infinite of 3 values"):
        onelip.bake(net)


def test_nan_in_a_buffer_is_refused_and_a_mask_is_not():
    net = nn.Sequential(onelip.nn.AOLLinear(3, 3), nn.BatchNorm1d(3))
    net.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    onelip.bake(net)
    net[1].running_var[1] = float("nan")
    with pytest.raises(onelip.NonFiniteWeight, match=r"'1.running_var'"):
        onelip.bake(net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.onnx's own
def test_baked_network_in_onnx_runtime(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        onelip.nn.ConcatenationPool2d(2),
        onelip.nn.AOLConv2d(12, 16, 3, padding=1),
        onelip.nn.MaxMin(),
        onelip.aol(nn.ConvTranspose2d(16, 8, 2, stride=2)),
        nn.Flatten(),
        onelip.nn.AOLLinear(512, 10, side="auto"),
        onelip.nn.FirstChannels(4),
    ).eval()
    plain = onelip.bake(net)
    x = torch.randn(3, 3, 8, 8)
    path = tmp_path / "net.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(plain, (x,), str(path), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for images in (x, x[:1]):
        (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        np.testing.assert_allclose(got, net(images).detach().numpy(), atol=1e-5)
