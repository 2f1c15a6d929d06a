"""Certified prediction as it is called: modes, refusals, results."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelip
from onelip.bounds import ProofFailed, exact_bound
from onelip.certification import Certification, ProofError, certify, prove
from onelip.certification.proof import check_backends
from onelip.core.errors import CannotTrace
from onelip.core.images import to_float
from onelip.graph.kinds import Affine, Input, Stored
from onelip.graph.lowering import Program, lower
from onelip.nn import MaxMin


@pytest.fixture(scope="module")
def network():
    """A small AOL network in float64 with biases, and images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        onelip.nn.AOLConv2d(1, 4, 3, padding=1), MaxMin(), nn.Flatten(), onelip.nn.AOLLinear(64, 8), MaxMin()
    )
    model.append(onelip.nn.AOLLinear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():  # not orthogonal, so that AOL's norms are below 1
            parameter.normal_(0, 0.3)
    images = torch.randint(0, 256, (30, 1, 4, 4), dtype=torch.uint8)
    return model.eval(), images


@pytest.fixture(scope="module")
def found(network):
    model, images = network
    plain = onelip.bake(model).double()
    labels = plain(images.double() / 255).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    return plain, images, certify(plain, images, labels)


def test_the_package_can_be_called(network, found):
    plain, images, certification = found
    again = onelip.certify(plain, images, proof=certification.proof)  # pyright: ignore
    assert isinstance(again, Certification)
    assert torch.equal(again.radii, certification.radii)


def test_results(found):
    _, _, certification = found
    assert certification.mode == "sound"
    assert certification.certified() == 30
    assert certification.accuracy() == 0.9
    assert certification.classes.dtype == torch.int64
    assert certification.radii.dtype == certification.logits.dtype == torch.float64
    assert all(isinstance(n, int) for n in certification.pixels)
    text = str(certification)
    assert "mode: sound" in text
    assert "CRA (sound)" in text
    cra = certification.cra((0.0, 36 / 255, 1.0))
    assert list(cra) == ["0", "36/255", "1"]
    assert cra["0"] == 0.9
    assert cra["0"] >= cra["36/255"] >= cra["1"]


def test_each_step_of_the_comparison(found):
    _, _, certification = found
    radii = [float(r) for r in certification.radii.sort().values[[5, 15, 25]]]
    one, two, three, four = certification.comparison(radii=radii)
    assert [row["mode"] for row in (one, two, three, four)] == ["real-arithmetic"] * 3 + ["sound"]
    for name in one["cra"]:
        assert one["cra"][name] <= two["cra"][name] + 1e-12 <= three["cra"][name] + 2e-12
        assert three["cra"][name] >= four["cra"][name]
    assert one["cra"] != three["cra"]  # tighter constants win some


def test_rounding_costs_next_to_nothing(found):
    plain, images, certification = found
    ordinary = certify(plain, images, mode="real-arithmetic", proof=certification.proof)
    assert bool((ordinary.radii > certification.radii).all())
    assert float((ordinary.radii - certification.radii).max()) < 1e-9


def test_fast_and_exact_proofs_agree(found):
    plain, images, certification = found
    exact = certify(plain, images, exact=True)
    assert exact.proof.exact
    assert bool((exact.radii >= certification.radii).all())
    fast = certify(plain, images, effort="high")  # which has the same bounds of convolutions
    assert bool((exact.radii >= fast.radii).all())
    assert float((exact.radii - fast.radii).max()) < 1e-9


def test_parametrized_models_are_baked(network):
    model, images = network
    double = nn.Sequential(*model).double().eval()
    found = certify(double, images[:2])
    assert torch.equal(found.radii, certify(onelip.bake(double), images[:2]).radii)
    double.float()


def test_floats_and_bytes_are_the_same_images(found):
    plain, images, certification = found
    floats = certify(plain, images.double() / 255, proof=certification.proof)
    assert torch.equal(floats.radii, certification.radii)
    assert floats.pixels == (None,) * 30
    assert certify(plain, images.float() / 255, proof=certification.proof).certified() == 30


def test_pixels_are_rounded_once():
    pixels = torch.arange(256, dtype=torch.uint8)[:, None]
    batches = to_float(pixels, torch.float64)
    assert batches[:, 0].tolist() == [k / 255 for k in range(256)]


def test_batches_do_not_matter(found):
    plain, images, certification = found
    small = certify(plain, images, proof=certification.proof, batch_size=7)
    assert torch.equal(small.classes, certification.classes)
    torch.testing.assert_close(small.radii, certification.radii, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((1, 1, 4, 4), 255.0), "got values from 255 to 255; divide by 255"),
        (torch.full((1, 1, 4, 4), -0.1), "rescale them to"),
        (torch.full((1, 1, 4, 4), math.nan), r"expected images in \[0, 1\]"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.float16), "float16"),
        (torch.zeros(4, dtype=torch.uint8), "batch axis"),
        (torch.zeros(0, 1, 4, 4), "at least one image, got none"),
        ("images", "got str"),
        (np.zeros((1, 1, 4, 4), np.uint8), r"got ndarray; use torch.as_tensor\(images\)"),
    ],
)
def test_images_that_are_refused(found, images, message):
    with pytest.raises(ValueError, match=message):
        certify(found[0], images, proof=found[2].proof)


def test_images_that_the_model_does_not_take():
    """The model's own error, not one about control flow."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double().eval()
    for images in (torch.rand(3, 4, 4), torch.rand(1, 3, 5, 5), torch.rand(1, 1, 4, 4)):
        with pytest.raises(ValueError, match=r"takes inputs of shape .* got RuntimeError when it ran: .*image\[None\]"):
            certify(model, images)
    with pytest.raises(ValueError, match="expected a torch module, got function"):
        certify(lambda x: x, torch.rand(1, 2))


def test_programs_that_are_refused_in_the_sound_mode(found):
    plain, images, certification = found
    with pytest.raises(ProofError, match=r"got float32 in '0.weight'.*model.double\(\).*real-arithmetic"):
        certify(onelip.bake(plain).float(), images)
    with pytest.raises(ProofError, match="eval mode"):
        certify(onelip.bake(plain).train(), images)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ProofError, match=r"autocast to torch.bfloat16"):
        certify(plain, images)
    with pytest.raises(ProofError, match="on the CPU"):
        certify(onelip.bake(plain).to("meta"), images)
    with pytest.raises(ValueError, match="'sound' or 'real-arithmetic'"):
        certify(plain, images, mode="safe")
    with pytest.raises(ValueError, match="got 'quick'; for exact proofs use exact=True"):
        certify(plain, images, proof="quick")
    with pytest.raises(ValueError, match="the given proof is not exact"):
        certify(plain, images, proof=certification.proof, exact=True)
    with pytest.raises(ValueError, match="batch_size"):
        certify(plain, images, batch_size=0)
    with pytest.raises(ValueError, match="30 integer labels"):
        certify(plain, images, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected labels"):
        certify(plain, images, proof=certification.proof).cra()


def test_real_arithmetic_takes_float32(found):
    plain, images, certification = found
    ordinary = certify(onelip.bake(plain).float(), images, certification.labels, mode="real-arithmetic")
    assert ordinary.mode == "real-arithmetic"
    assert "rounding not included" in str(ordinary)
    assert ordinary.pixels == (None,) * 30
    torch.testing.assert_close(ordinary.radii, certification.radii, rtol=1e-4, atol=1e-5)


def test_a_proof_of_other_weights_or_shapes(found):
    plain, images, certification = found
    other = onelip.bake(plain)
    with torch.no_grad():
        other[0].bias += 2.0**-30
    with pytest.raises(ProofError, match=r"program that was proved, .*other numbers in '0.bias'; prove"):
        certify(other, images, proof=certification.proof)
    with pytest.raises(ProofError, match="the proof's shape"):
        certify(plain, images[:, :, :3], proof=certification.proof)


def test_a_proof_of_other_activations_on_the_same_weights():
    linear, last = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        linear.bias.fill_(9.0)  # every image is on the same side of ReLU
    model = nn.Sequential(linear, nn.ReLU(), last).double().eval()
    other = nn.Sequential(linear, nn.Identity(), last).double().eval()
    with pytest.raises(ProofError, match=r"node 2 \(relu at '1'\): expected op 'relu', got 'affine'"):
        certify(other, torch.rand(3, 2), proof=prove(model, (2,)))


@pytest.mark.parametrize("label", [-1, 2])
@pytest.mark.parametrize("mode", ["sound", "real-arithmetic"])
def test_labels_that_are_no_classes(label, mode):
    model = nn.Linear(2, 2).double().eval()
    with pytest.raises(ValueError, match="labels 0 to 1"):
        certify(model, torch.rand(2, 2), torch.tensor([0, label]), mode=mode)


def test_a_cholesky_claim_that_exact_arithmetic_cannot_prove(monkeypatch):
    def stubborn(weight, geometry, witness=None):
        if witness is not None:
            raise ProofFailed("too near")
        return exact_bound(weight, geometry)

    monkeypatch.setattr("onelip.certification.proof.exact_bound", stubborn)
    assert prove(nn.Linear(3, 2), (3,), exact=True).exact


def test_weights_that_are_not_finite():
    model = nn.Sequential(nn.Linear(2, 2)).double().eval()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="finite"):
        certify(model, torch.zeros(1, 2))


class Gain(nn.Module):
    """A number of each kind, of which none is in its repr or a float tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.gain = 1.0
        self.settings = {"slope": [1.0]}
        self.register_buffer("shift", torch.tensor(0))
        self.register_buffer("is_on", torch.tensor([True, True]))
        self.table = torch.tensor([1.0, 1.0], dtype=torch.float64)
        self.pool = onelip.nn.LipschitzAvgPool1d(2)
        self.mode = "relu"

    def forward(self, x):
        x = self.layer(x * self.gain) * self.settings["slope"][0]
        x = F.linear(x, torch.diag(self.table * self.is_on) + self.shift * torch.eye(2, dtype=x.dtype))
        x = x.relu() if self.mode == "relu" else x.abs()
        return self.pool(torch.cat([x, x], 1)[:, None]).flatten(1)


def _set(name, value):
    def change(model):
        owner, _, last = name.rpartition(".")
        target = model.get_submodule(owner)
        if isinstance(getattr(target, last), torch.Tensor):
            getattr(target, last).copy_(torch.as_tensor(value))
        else:
            setattr(target, last, value)

    return change


CHANGES = [
    _set("gain", 1000.0),
    _set("gain", 1.0 + 2.0**-52),
    _set("settings", {"slope": [2.0]}),
    _set("shift", 3),
    _set("is_on", [True, False]),
    _set("table", [1.0, 7.0]),
    _set("mode", "abs"),
    _set("layer.weight", 2 * torch.eye(2)),
    _set("pool.scale", 1.0),
    lambda model: model.layer.register_forward_hook(lambda module, inputs, output: 3 * output),
    lambda model: setattr(model, "forward", lambda x: x * 5),
    lambda model: setattr(type(model), "forward", lambda self, x: x * 5),
    lambda model: model.settings["slope"].__setitem__(0, -1.0),
]


@pytest.mark.parametrize("mode", ["sound", "real-arithmetic"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_is_of_the_traced_program(change, mode):
    kind = type("Own", (Gain,), {})  # a class that may be changed
    model = kind().double().eval().requires_grad_(False)
    nn.init.eye_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    images = torch.tensor([[0.1, 0.9], [0.9, 0.1]])
    proof = prove(model, (2,))
    certify(model, images, mode=mode, proof=proof)
    change(model)
    with pytest.raises(ProofError, match="program that was proved"):
        certify(model, images, mode=mode, proof=proof)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_proof_has_numbers_of_its_own(name):
    # Tensors outside of the model are not copied with it. A larger bias rounds more, and no measurement shows it.
    tensors = {"weight": torch.eye(2, dtype=torch.float64), "bias": torch.zeros(2, dtype=torch.float64)}

    class Outside(nn.Module):
        def forward(self, x):
            return F.linear(x, tensors["weight"], tensors["bias"])

    model, images = Outside().eval(), torch.tensor([[0.1, 0.9], [0.9, 0.1]])
    proof = prove(model, (2,))
    certify(model, images, proof=proof)
    tensors[name][0] += 1e-9 if name == "weight" else 1e12
    with pytest.raises(ProofError, match="program that was proved"):
        certify(model, images, proof=proof)


class Changes(nn.Module):
    """Once proved, it begins to mix the images of a batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.proved = False

    def forward(self, x):
        return self.layer(x.flip(0) if self.proved else x)


def test_a_model_that_is_not_what_was_traced_is_seen():
    model = Changes().double().eval()
    images = torch.tensor([[0.1, 0.9], [0.9, 0.1]])
    proof = prove(model, (2,))
    assert certify(model, images, proof=proof).mode == "sound"
    model.proved = True
    with pytest.raises(ProofError, match="flip"):
        certify(model, images, proof=proof)


class LooksAtTheBatch(nn.Module):
    """Changes one place of batches of one length. The trace does not see that: it compares the text of the length."""

    def __init__(self, length, place):
        super().__init__()
        self.layer, self.length, self.place = nn.Linear(2, 2), length, place

    def forward(self, x):
        y = self.layer(x)
        if str(x.shape[0]) != str(self.length):
            return y
        return torch.cat([y[: self.place], 100 * y[self.place : self.place + 1], y[self.place + 1 :]])


@pytest.mark.parametrize(("length", "place"), [(9, 0), (9, 3), (9, 8), (6, 5), (6, 1)])
def test_a_model_that_looks_at_the_batch_is_seen(length, place):
    """All images of the first batch of each length are compared: here batches of 9, 9 and 6."""
    model = LooksAtTheBatch(length, place).double().eval()
    proof = prove(model, (2,))
    with pytest.raises(ProofError, match="mix images"):
        certify(model, torch.rand(24, 2), proof=proof, batch_size=9)
    assert certify(model, torch.rand(16, 2), proof=proof, batch_size=8).mode == "sound"


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_a_model_that_looks_at_short_batches_has_no_proof(length):
    model = LooksAtTheBatch(length, 0).double().eval()
    with pytest.raises(CannotTrace):
        prove(model, (2,))
    with pytest.raises(CannotTrace):
        onelip.audit(model, torch.rand(1, 2).double())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Tanh(), r"aten.tanh.default at '1'.*real-arithmetic"),
        (nn.BatchNorm2d(2).eval(), "at '1': expected batch normalisation that onelip.bake can fold"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "at '1'"),
        (nn.MaxPool2d(2, ceil_mode=True), "max_pool2d"),
        (nn.AvgPool2d(3, padding=1), "avg_pool2d"),
        (nn.Linear(5, 5), "flatten them before"),
        (nn.Flatten(0), "batch to stay axis 0"),
    ],
)
def test_operations_without_a_rule_are_named_with_their_place(layer, message):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer).double().eval()
    with pytest.raises(ValueError, match=message):
        lower(model, (1, 5, 5))


def test_outputs_that_are_no_logits():
    with pytest.raises(ProofError, match="two or more classes"):
        lower(nn.Linear(3, 1).double().eval(), (3,))
    with pytest.raises(ProofError, match="flattened"):
        lower(nn.Conv1d(1, 2, 1).double().eval(), (1, 3))
    with pytest.raises(ValueError, match="shape of one image"):
        prove(nn.Linear(3, 2), ())


def test_real_arithmetic_knows_more_operations():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    found = certify(model, torch.rand(4, 3), mode="real-arithmetic")
    assert found.proof is None
    margin = found.logits.sort(1).values
    torch.testing.assert_close(found.radii, (margin[:, -1] - margin[:, -2]) / (2**0.5 * found.constant))


def test_convolutions_by_another_backend_are_refused(monkeypatch):
    weight = Stored(torch.zeros(1, 1, 3, 3, dtype=torch.float64))
    layer = nn.Conv2d(1, 1, 3, padding=1)
    conv = Affine((0,), (1, 4, 4), "layer", layer=layer, weight=weight, pixels=(4, 4))
    program = Program((Input((), (1, 4, 4)), conv))
    check_backends(program, 64)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *a: torch._C._ConvBackend.NnpackSpatial)
    with pytest.raises(ProofError, match="backend NnpackSpatial"):
        check_backends(program, 64)


def test_a_constant_network_is_changed_by_nothing():
    """In real arithmetic its radii are infinite: they count at every radius, and JSON has no number for them."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([1.0, 0.0]))
    images, labels = torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
    found = onelip.certify(model.eval(), images, labels, mode="real-arithmetic")
    assert found.radii.isinf().all()
    assert set(found.cra().values()) == {1.0}
    json.dumps(found.to_json(), allow_nan=False)
