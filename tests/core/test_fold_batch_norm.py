"""Batch normalisation folded by `bake`: its place, its outputs, and its certificates."""

import copy
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from _certificate_files import sealed, write_files
from _certified_programs import check
from _exact_network import exact, run_exactly
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import onelip
from onelip.certification.certificate import check_network
from onelip.checker import Rejected, check as check_file
from onelip.core.batch_norm import Folded
from onelip.export import export_onnx
from onelip.graph.lowering import lower
from onelip.nn import ChannelAffine, MaxMin


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def trained(model, *shape):
    """Set statistics and factors that differ from those of a new layer; float64, eval mode."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.normal_()
                module.bias.normal_()
        for _ in range(3):
            model(3 * torch.rand(16, *shape))
    return model.double().eval()


def same(model, *shape):
    """The baked network computes the same, and has no batch normalisation."""
    plain, x = onelip.bake(model), torch.rand(5, *shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in plain.modules())
    assert all(t.is_floating_point() for t in plain.state_dict().values())
    return plain


PAIRS = [
    (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), (2, 6)),
    (nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), (2, 4, 4)),
    (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False), (2, 4, 4)),
    (nn.Conv3d(2, 4, 2, groups=2), nn.BatchNorm3d(4), (2, 3, 3, 3)),
    (nn.ConvTranspose1d(2, 4, 3), nn.BatchNorm1d(4), (2, 4)),
    (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), nn.BatchNorm2d(6), (4, 3, 3)),
    (nn.Linear(6, 4), nn.BatchNorm1d(4), (6,)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), PAIRS, ids=lambda v: type(v).__name__)
def test_into_the_layer_before(layer, norm, shape):
    model = trained(nn.Sequential(layer, norm, nn.ReLU()), *shape)
    assert [type(module) for module in same(model, *shape)] == [type(layer), Folded, nn.ReLU]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("norm", "shape"), [(1, (3,)), (1, (3, 5)), (2, (3, 2, 4)), (3, (3, 2, 2, 2))])
def test_elsewhere_it_is_a_layer_of_its_own(norm, shape, affine):
    kind = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[norm - 1]
    model = trained(nn.Sequential(nn.ReLU(), kind(3, affine=affine, eps=0.1)), *shape)
    plain = same(model, *shape)
    assert type(plain[1]) is ChannelAffine
    assert onelip.audit(plain, torch.rand(2, *shape).double()).upper == plain[1].lipschitz_constant
    alone = trained(kind(3), *shape)
    assert type(same(alone, *shape)) is ChannelAffine


class Net(nn.Module):
    """Normalisations before, after and between layers, called by name, one of them twice."""

    def __init__(self):
        super().__init__()
        self.before, self.twice, self.after = nn.BatchNorm2d(2), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.one = nn.Conv2d(2, 4, 3, padding=1)
        self.two = onelip.nn.AOLConv2d(4, 4, 3, padding=1)
        self.maxmin, self.dense = MaxMin(), nn.Linear(64, 3)
        self.norm = nn.BatchNorm1d(3)
        self.aliases = [self.one, self.norm]

    def forward(self, x, features=False):
        y = self.maxmin(self.twice(self.aliases[0](self.before(x))))
        y = self.twice(y) + self.after(self.two(y))
        return y if features else self.aliases[1](self.dense(y.flatten(1)))


def test_in_a_forward_of_somebody_else():
    model = trained(Net(), 2, 4, 4)
    before = copy.deepcopy(model.state_dict())
    plain = same(model, 2, 4, 4)
    assert [type(getattr(plain, n)) for n in ("before", "twice", "after", "norm")] == [
        ChannelAffine,
        ChannelAffine,
        Folded,
        Folded,
    ]
    assert plain.aliases[0] is plain.one
    assert plain.aliases[1] is plain.norm
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Reads(nn.Module):
    """A convolution and a normalisation after it, but not that alone."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.norm, self.how = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), how

    def forward(self, x):
        y = self.layer(x)
        if self.how == "twice":
            return self.norm(y) + y
        if self.how == "again":
            return self.layer(self.norm(y))
        if self.how == "weight":
            return self.norm(y) * self.layer.weight.sum()
        if self.how == "values":
            return self.norm(y) if float(y.sum()) < 1e9 else x
        return self.norm(y.clone())


@pytest.mark.parametrize("how", ["twice", "again", "weight", "values", "clone"])
def test_a_layer_that_is_read_elsewhere_is_left_as_it_is(how):
    model = trained(Reads(how), 2, 4, 4)
    plain = same(model, 2, 4, 4)
    assert type(plain.norm) is ChannelAffine
    assert torch.equal(plain.layer.weight, model.layer.weight)


def test_hooks_stay_where_they_are():
    for hooked in (0, 1):
        model = trained(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), 2, 4, 4)
        model[hooked].register_forward_hook(lambda module, args, y: 2 * y)
        assert type(same(model, 2, 4, 4)[1]) is ChannelAffine


def test_features_that_are_not_channels():
    """BatchNorm1d after a Linear layer of tokens (batch, tokens, features) is over tokens: refused, never mixed up."""
    model = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 4, 4)
    with pytest.raises(ValueError, match=r"expected an input with 2 axes.*fold=False"):
        onelip.bake(model)(torch.rand(2, 4, 4).double())
    x = torch.rand(2, 4, 4).double()
    assert torch.equal(onelip.bake(model, fold=False)(x), model(x))
    mixed = trained(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm2d(2)), 2, 3, 4)  # another axis, by its type
    assert type(same(mixed, 2, 3, 4)[1]) is ChannelAffine


def test_statistics_of_the_batch_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten())
    assert type(onelip.bake(model)[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"that onelip\.bake can fold"):
        onelip.prove(model, (1, 2, 2))
    model = trained(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2)), 4)
    model[2].running_var.fill_(-1.0)
    with pytest.raises(ValueError, match=r"that onelip\.bake can fold"):
        onelip.prove(model, (4,))


def test_numbers_are_rounded_once():
    """From exact square roots: the quotient and the product of float64, then float32."""
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(1, eps=0.0)).eval()
    with torch.no_grad():
        model[1].running_var.fill_(9.0)
        model[1].running_mean.fill_(0.1)
    plain = onelip.bake(model)
    assert plain[1].factors.dtype == torch.float32
    assert plain[1].factors.item() == np.float32(1 / 3)
    assert plain[1].offsets.item() == np.float32(-float(np.float32(0.1)) * (1 / 3))


# ---- certified


def network():
    return trained(
        nn.Sequential(
            nn.BatchNorm2d(2),
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            MaxMin(),
            nn.Flatten(),
            nn.Linear(64, 6, bias=False),
            nn.ReLU(),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
            nn.BatchNorm1d(3),
        ),
        *(2, 4, 4),
    )


IMAGES = torch.randint(0, 256, (4, 2, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_three_numbers_hold_in_fractions():
    model = network()
    program = lower(onelip.bake(model), (2, 4, 4))
    assert [node.kind for node in program.nodes] == [
        *("input", "affine", "affine", "sort", "join", "affine", "relu"),
        *("join", "affine", "join", "affine"),
    ]
    check(program, IMAGES[:2].numpy())
    # The rows of the last layer, with its normalisation inside, have slopes of their own.
    assert onelip.prove(model, (2, 4, 4)).head.node == len(program.nodes) - 1


@pytest.mark.parametrize("is_exact", [False, True])
def test_no_exact_point_within_the_radius_has_another_class(is_exact):
    """Steepest directions and random ones to the end of the radius, the program in fractions."""
    model = network()
    found = onelip.certify(model, IMAGES, exact=is_exact)
    assert found.certified() == len(IMAGES)
    assert found.proof is not None
    plain = onelip.bake(model)
    for image, y, radius in zip(IMAGES, found.classes.tolist(), found.radii.tolist(), strict=True):
        x = (image.double() / 255)[None].requires_grad_(True)
        for j in {0, 1, 2} - {y}:
            (slope,) = torch.autograd.grad(plain(x)[0, j] - plain(x)[0, y], x)
            step = slope[0] / slope.norm() * radius * (1 - 1e-12)
            point = exact((x[0] + step).detach())
            assert sum(v * v for v in (point - exact(x[0].detach())).ravel().tolist()) <= Fraction(radius) ** 2
            logits = run_exactly(found.proof.program, point)[-1].tolist()
            assert logits.index(max(logits)) == y


def test_as_tight_as_folded_by_hand():
    """Rows of very different lengths: the factors of the normalisation are the inverse of the weights'."""
    layer, norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([1.0, 1e-3, 10.0, 1e2]).reshape(-1, 1, 1, 1))
    model = trained(nn.Sequential(layer, norm, nn.Flatten(), nn.Linear(64, 2)), 2, 4, 4)
    by_hand = nn.Sequential(fuse_conv_bn_eval(model[0], model[1]), model[2], model[3])
    ours, theirs = (onelip.prove(net, (2, 4, 4)).constant for net in (model, by_hand))
    assert ours == pytest.approx(theirs, rel=1e-9)
    apart = onelip.certify(model, IMAGES, mode="real-arithmetic").constant
    assert apart > 3 * ours  # one layer after the other, as the audit has it


def test_real_arithmetic_is_about_the_model_as_it_is():
    model = network().float()
    found = onelip.certify(model, IMAGES, mode="real-arithmetic")
    assert found.proof is None
    audited = onelip.audit(copy.deepcopy(model).double(), torch.rand(2, 2, 4, 4).double(), lower=False)
    assert found.constant == audited.upper
    assert any("BatchNorm" in str(line) or "batch_norm" in str(line) for line in str(audited).splitlines())


def files(tmp_path):
    model = network()
    found = onelip.certify(model, IMAGES, torch.tensor([0, 1, 2, 0]), exact=True)
    return model, found, write_files(tmp_path, model, found, IMAGES)


def test_in_a_file(tmp_path):
    model, found, path = files(tmp_path)
    verdict = check_file(path)
    assert (verdict["certified"], verdict["lipschitz"]) == (4, found.constant)
    assert verdict["logits_checked"]
    check_network(json.loads(path.read_text()), onelip.bake(model), {"weights": tmp_path / "plain.safetensors"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda node: node.update(groups=1), "."),
        (lambda node: node.update(bias=None), "."),
        (lambda node: node.update(sigma="1/1024"), "sigma"),
        (lambda node: node.update(weight="1.bias"), "."),
        (lambda node: node["bound"].update(scale=["1"]), "scale"),
    ],
)
def test_changed_files_are_rejected(change, reason, tmp_path):
    _, _, path = files(tmp_path)
    content = json.loads(path.read_text())
    node = content["nodes"][1]
    assert node["groups"] == 2
    change(node)
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(Rejected, match=reason):
        check_file(path)


def test_a_baked_network_that_computes_something_else_is_seen(monkeypatch):
    """The proof is about the baked network, so a bug in baking must be detected."""
    model = network()
    wrong = onelip.bake(model)
    with torch.no_grad():
        wrong[1].bias.add_(1)
    monkeypatch.setattr("onelip.certification.predict.plain_of", lambda *args, **settings: copy.deepcopy(wrong))
    with pytest.raises(ValueError, match="to compute what"):
        onelip.certify(model, IMAGES)


def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = network()
    export_onnx(model, tmp_path / "net.onnx", (2, 4, 4), dtype=torch.float64)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    x = IMAGES.double() / 255
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-12)


def test_a_forward_that_reads_the_normalisation_fails_instead_of_using_other_numbers():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.norm.running_var.fill_(0.01)

        def forward(self, x):
            return self.norm(x) * self.norm.weight.abs().max()

    model = Reads().eval()
    with pytest.raises(AttributeError, match="weight"):
        onelip.bake(model)(torch.rand(2, 3))
    torch.testing.assert_close(onelip.bake(model, fold=False)(torch.ones(1, 3)), model(torch.ones(1, 3)))
