"""State dicts of parametrized layers fit only layers with the same settings; pickles of whole modules."""

import copy
import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import onelip
from onelip.methods import list_methods


def network(method="aol", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), onelip.nn.MaxMin(), nn.Flatten(), nn.Linear(4 * 16, 4))
    return onelip.constrain(net, method, **options)


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (network(side="inputs"), network(side="outputs"), "side='inputs', and this is AOL with .*side='outputs'"),
        (network(lipschitz=2.0), network(), "lipschitz=2.0, and this is AOL with lipschitz=1.0"),
        (network(steps=2), network(), "steps=2, and this is AOL with steps=1"),
        (network("bjorck"), network(), "Bjorck .*and this is AOL"),
        (network("bjorck"), network("bjorck", steps=3), "steps=12, and this is Bjorck with steps=3"),
    ],
)
def test_another_map_raises_and_names_the_layer(saved, own, message):
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"0: the state dict is of .*{message}"):
            own.load_state_dict(saved.state_dict(), strict=strict)


def test_the_same_map_loads_also_from_files_and_through_deepcopy():
    saved, own = network(side="outputs", lipschitz=0.5), network(side="outputs", lipschitz=0.5)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.1)
    x = torch.rand(2, 2, 4, 4)
    own.load_state_dict(load(save(saved.state_dict())))
    assert torch.equal(own(x), saved(x))
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    other = copy.deepcopy(network(side="outputs", lipschitz=0.5))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), saved(x))
    assert "_extra_state" not in " ".join(onelip.bake(saved).state_dict())


def test_plain_weights_load_into_any_map():
    """They state the weight itself, so that settings cannot contradict them."""
    plain = onelip.bake(network(side="inputs"))
    own = network(side="outputs")
    own.load_state_dict(plain.state_dict())
    for loaded, given in ((own[0], plain[0]), (own[3], plain[3])):
        factor = (loaded.weight / given.weight).flatten()
        torch.testing.assert_close(factor, factor[:1].expand_as(factor))  # the same weight up to one factor
        assert torch.equal(loaded.bias, given.bias)


def test_a_damaged_tag_and_a_missing_one_raise():
    state = network().state_dict()
    tag = next(name for name in state if name.endswith("_extra_state"))
    with pytest.raises(RuntimeError, match="are damaged"):
        network().load_state_dict(state | {tag: torch.tensor([1, 2], dtype=torch.uint8)})
    del state[tag]
    with pytest.raises(RuntimeError, match="Missing key"):
        network().load_state_dict(state)


@pytest.mark.parametrize("method", list_methods())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_settings_do_not_change_in_training(method):
    """Or a trained state could not be loaded into a new network."""
    x = torch.rand(3, 8)

    def make():
        return onelip.constrain(nn.Sequential(nn.Linear(8, 8), onelip.nn.MaxMin(), nn.Linear(8, 8)), method)

    trained = make().train()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        trained(x).square().sum().backward()
        optimizer.step()
    own = make()
    own.load_state_dict(trained.state_dict())
    assert torch.equal(own.eval()(x), trained.eval()(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickles_of_whole_modules():
    net = network()
    with pytest.raises(RuntimeError, match=r"save model.state_dict\(\).*torch.save\(onelip.bake\(model\), path\)"):
        torch.save(net, io.BytesIO())
    for model in (net, onelip.create_model("patchwise-tiny", num_classes=4, image_size=8, in_channels=1)):
        plain = onelip.bake(model)
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        buffer.seek(0)
        x = torch.rand(2, 2, 4, 4) if model is net else torch.rand(2, 1, 8, 8)
        assert torch.equal(torch.load(buffer, weights_only=False)(x), plain(x))
    copy.deepcopy(net)(torch.rand(2, 2, 4, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["patchwise-tiny", "aol-fast-small", "aol-std"])
def test_torchscript(name):
    """Baked networks can be traced, and scripted once the check of the image size is removed."""
    model = onelip.create_model(name, num_classes=4, image_size=32, in_channels=1).eval()
    plain, x = onelip.bake(model), torch.rand(3, 1, 32, 32)
    with pytest.raises(RuntimeError, match=r"use torch.jit.script\(onelip.bake\(model, guard=False\)\)"):
        torch.jit.script(plain)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(onelip.bake(model, guard=False)), file)
    file.seek(0)
    for compiled in (torch.jit.trace(plain, x[:2]), torch.jit.load(file)):
        with torch.no_grad():
            assert torch.equal(compiled(x), plain(x))
    with pytest.raises(ValueError, match="expected images of shape"):  # the model itself keeps the check
        plain(x[..., :16, :16])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_layers_in_torchscript():
    layers = [
        onelip.nn.ConcatenationPool2d((2, 3)),
        onelip.nn.MaxMin(-3),
        onelip.nn.Abs(),
        onelip.nn.Abs(0.6, dim=2),
        onelip.nn.FirstChannels(3, dim=-2),
        onelip.nn.PadChannels(8, dim=-2),
        onelip.nn.Normalize((0.1, 0.2), (0.5, 2.0)),
        onelip.nn.ChannelAffine(2),
    ]
    x = torch.randn(5, 2, 4, 6)
    for layer in layers:
        assert torch.equal(torch.jit.script(layer)(x), layer(x)), layer
    with pytest.raises(RuntimeError, match=r"cannot compile Householder; use torch.jit.trace"):
        torch.jit.script(nn.Sequential(onelip.nn.Householder(2)))
