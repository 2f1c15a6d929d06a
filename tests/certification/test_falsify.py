"""Every public bound is tested against measurement: what is wrong raises, and rounding refutes nothing that is true."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelip
from onelip.bounds import linear as layer_bounds
from onelip.bounds.falsify import Claim, Claims, example_points, falsify
from onelip.certification import proof as proofs
from onelip.certification.radius import make_head
from onelip.core.errors import CannotTrace, ProofError, UnsoundBound
from onelip.graph import step as _step
from onelip.graph.reference import Reference, claims_of_graph
from onelip.graph.trace import trace
from onelip.graph.walk import walk
from onelip.nn import LipschitzModule


class Net(nn.Module):
    """Deep enough that a wrong step is not seen from input to output."""

    def __init__(self, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.work = forward or (lambda x: x)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.work(x)


@pytest.fixture
def rules():
    """The rules for operations, put back afterwards."""
    before = dict(_step._RULES)
    yield _step._RULES
    _step._RULES.clear()
    _step._RULES.update(before)


WRONG = [
    ("aten.relu.default", torch.relu, 0.9),
    ("aten.neg.default", torch.neg, 0.999),
    ("aten.mul.Tensor", lambda x: x * 3, 2.9),
    ("aten.abs.default", torch.abs, 0.9),
    ("aten.flip.default", lambda x: x.flip(1), 0.99),
    ("aten.sum.dim_IntList", lambda x: x.sum(1, keepdim=True), 2.3),
    ("aten.sinc.default", torch.sinc, 0.5),
]


@pytest.mark.parametrize(("op", "function", "constant"), WRONG)
def test_a_wrong_rule_raises_in_every_mode(rules, op, function, constant):
    model = Net(function).eval()
    rules[op] = lambda step: step.times(constant, "wrong")
    for lower in (False, True):
        with pytest.raises(UnsoundBound, match=op):
            onelip.audit(model, torch.rand(1, 6), lower=lower)
    if op != "aten.sum.dim_IntList":  # one class is no classification
        tail = nn.Sequential(model, nn.Sigmoid())  # which only the audit knows
        with pytest.raises(UnsoundBound, match=op):
            onelip.certify(tail, torch.rand(2, 6), mode="real-arithmetic")


def test_a_wrong_sum_is_seen_from_the_input(rules):
    rules["aten.add.Tensor"] = lambda step: step.gives(0.5, "wrong")
    with pytest.raises(UnsoundBound, match=r"aten\.add\.Tensor"):
        onelip.audit(nn.Sequential(Twice()), torch.rand(1, 6), lower=False)


class Twice(nn.Module):
    def forward(self, x):
        return x + x.flip(1)


@pytest.mark.parametrize("exact", [False, True])
def test_a_wrong_bound_of_a_weight_raises_in_every_mode(monkeypatch, exact):
    name = "exact_bound" if exact else "bound_weight"
    true = getattr(proofs, name)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)).double().eval()
    honest = onelip.prove(model, (6,), exact=exact)

    def halved(*args, **kwargs):
        found = true(*args, **kwargs)
        if exact:
            return type(found)(found.square / 4, found.value / 2, found.witness)
        return type(found)(found.value / 2, found.witness, found.candidates)

    monkeypatch.setattr(proofs, name, halved)
    with pytest.raises(UnsoundBound, match="affine at"):
        onelip.prove(model, (6,), exact=exact)
    for mode in ("sound", "real-arithmetic"):
        with pytest.raises(UnsoundBound, match="affine at"):
            onelip.certify(model, torch.rand(2, 6), mode=mode, exact=exact)
    monkeypatch.undo()
    assert onelip.certify(model, torch.rand(2, 6), proof=honest).constant == honest.constant


def test_wrong_slopes_of_pairs_raise(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double().eval()
    true = make_head

    def halved(program, states):
        head = true(program, states)
        return type(head)(head.node, head.squares, [[slope / 3 for slope in row] for row in head.slope], head.rounding)

    monkeypatch.setattr(proofs, "make_head", halved)
    with pytest.raises(UnsoundBound, match=r"logit \d - logit \d"):
        onelip.prove(model, (6,))


def test_a_layer_that_states_too_little():
    class Liar(LipschitzModule):
        proved_constant = 1.0

        def forward(self, x):
            return 1.001 * x

    class Steep(LipschitzModule):
        """1-Lipschitz but next to zero."""

        proved_constant = 1.0

        def forward(self, x):
            return 5 * torch.tanh(x)

    for layer in (Liar(), Steep()):
        with pytest.raises(UnsoundBound, match=type(layer).__name__):
            onelip.audit(nn.Sequential(layer), torch.rand(1, 6), lower=False)
    with pytest.raises(UnsoundBound):
        onelip.certify(nn.Sequential(Liar(), nn.Sigmoid()), torch.rand(2, 6), mode="real-arithmetic")


# What works with something that a trace does not see.
CONTEXTS = {
    "gradient mode": lambda x: 100 * x if torch.is_grad_enabled() else x,
    "no gradient mode": lambda x: x if torch.is_grad_enabled() else 100 * x,
    "gradients of the input": lambda x: 100 * x if x.requires_grad else x,
    "export": lambda x: x if torch.compiler.is_exporting() else 100 * x,
    "offset": lambda x: x if x.storage_offset() == 0 else 100 * x,
    "contiguous": lambda x: x if x.is_contiguous() else 100 * x,
    "compiler": lambda x: x if torch.compiler.is_compiling() else 1.01 * x,
    "inference mode": lambda x: 2 * x if torch.is_inference_mode_enabled() else x,
    "one sample": lambda x: 2 * x if len(x) == 1 else x,
    "odd lengths": lambda x: 2 * x if len(x) % 2 else x,
    "place in the batch": lambda x: torch.cat([x[:4], 2 * x[4:]]) if len(x) > 4 else x,
    "real tensors": lambda x: x if type(x) is not torch.Tensor else 2 * x,
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_models_that_work_with_what_a_trace_does_not_see(kind):
    model = Wrapped(CONTEXTS[kind]).double().eval()
    with pytest.raises(CannotTrace):
        onelip.audit(model, torch.rand(1, 6).double(), lower=False)
    with pytest.raises(CannotTrace):
        onelip.prove(model, (6,))
    for mode in ("sound", "real-arithmetic"):
        with pytest.raises(CannotTrace):
            onelip.certify(model, torch.rand(2, 6), mode=mode)


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.work = function

    def forward(self, x):
        return self.layer(self.work(x))


class ByType(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if x.dtype == torch.float64 else 100 * y


def test_models_that_work_with_the_type():
    """The audit is about the type of its example; a proof is about float64 and must not serve for float32."""
    model = ByType().eval()
    wide = onelip.audit(ByType().double().eval(), torch.rand(1, 6).double(), lower=False)
    narrow = onelip.audit(model, torch.rand(1, 6), lower=False)
    assert narrow.upper > 20 * wide.upper
    with pytest.raises(CannotTrace, match="type of its input"):
        onelip.prove(model, (6,))
    with pytest.raises(CannotTrace, match="type of its input"):
        onelip.certify(model, torch.rand(2, 6), mode="real-arithmetic")
    assert onelip.certify(ByType().double().eval(), torch.rand(2, 6)).mode == "sound"


class NarrowLiar(LipschitzModule):
    proved_constant = 1.0

    def forward(self, x):
        return x if x.dtype == torch.float64 else 100 * x


def test_a_stated_constant_that_holds_in_float64_alone():
    with pytest.raises((CannotTrace, UnsoundBound)):
        onelip.audit(nn.Sequential(NarrowLiar()), torch.rand(1, 6), lower=False)


class DefaultType(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * (1.0 if torch.get_default_dtype() == torch.float32 else 1000.0)


def test_a_proof_made_under_another_default_type():
    model = DefaultType().double().eval()
    proof = onelip.prove(model, (2,))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ProofError, match="program that was proved"):
            onelip.certify(model, torch.rand(2, 2), proof=proof)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_copy_that_is_another_model():
    """What copying makes of a model is not what runs."""

    class Tricky(nn.Module):
        def __init__(self, gain=100.0):
            super().__init__()
            self.layer, self.gain = nn.Linear(6, 3), gain

        def __deepcopy__(self, memo):
            copied = Tricky(1.0)
            copied.layer.load_state_dict(self.layer.state_dict())
            return copied.to(self.layer.weight.dtype).train(self.training)

        def forward(self, x):
            return self.layer(x) * self.gain

    model = Tricky().double().eval()
    with pytest.raises(CannotTrace, match="traced program"):
        onelip.audit(model, torch.rand(1, 6).double(), lower=False)
    with pytest.raises(CannotTrace, match="traced program"):
        onelip.prove(model, (6,))
    with pytest.raises(CannotTrace, match="traced program"):
        onelip.certify(model, torch.rand(2, 6))


def scaled(factor, bias=0.0, layers=3, width=6):
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in net:
        nn.init.orthogonal_(layer.weight, factor)
        nn.init.constant_(layer.bias, bias)
    return net


TRUE = {
    "orthogonal": scaled(1.0),
    "large biases": scaled(1.0, 1e6),
    "larger biases": scaled(1.0, 1e12),
    "biases that cancel": nn.Sequential(scaled(1.0, 1e8), scaled(1.0, -1e8)),
    "small weights": scaled(1e-12),
    "tiny weights": scaled(1e-36),
    "large weights": scaled(1e12),
    "deep": scaled(1.0, 0.3, layers=60),
    "wide": scaled(1.0, 0.1, layers=2, width=300),
    "zero": scaled(0.0, 1.0),
    "rounded inside": nn.Sequential(
        scaled(1.0, 10.0), type("Cast", (nn.Module,), {"forward": lambda s, x: x.float()})()
    ),
    "normalised": nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    "constant": type("Constant", (nn.Module,), {"forward": lambda s, x: torch.ones(x.shape[0], 3)})(),
    "identity": nn.Identity(),
    "sorted": nn.Sequential(scaled(1.0), onelip.nn.MaxMin(), onelip.nn.GroupSort(3), onelip.nn.Abs()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", TRUE)
def test_rounding_refutes_nothing_that_is_true(kind, dtype):
    model = TRUE[kind].to(dtype)
    for example in (torch.rand(1, 6), 1e4 * torch.rand(2, 6), torch.zeros(1, 6)):
        if kind == "wide":
            example = example.repeat(1, 50)
        audit = onelip.audit(model, example.to(dtype), lower=kind != "deep")
        assert audit.upper is not None, audit.unproved
        assert audit.lower is None or audit.lower <= audit.upper


@pytest.mark.parametrize("kind", [kind for kind in TRUE if kind not in ("rounded inside", "normalised", "constant")])
def test_rounding_refutes_no_proof(kind):
    size = 300 if kind == "wide" else 6
    model = TRUE[kind].double().eval()
    proof = onelip.prove(model, (size,))
    images = torch.rand(5, size, generator=torch.Generator().manual_seed(0))
    assert onelip.certify(model, images, proof=proof).constant == proof.constant
    assert onelip.certify(model, torch.zeros(2, size), proof=proof).constant == proof.constant


@pytest.mark.parametrize("size", [1e-300, 5e-324, 1e-200, 1e150, 1e300])
def test_numbers_at_the_ends_of_the_range(size):
    layer = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(layer.weight).data.mul_(size)
    audit = onelip.audit(layer, torch.rand(1, 3).double(), lower=False)
    assert audit.upper is None or audit.upper >= size


def test_points_and_pairs_at_several_distances():
    """A jump between far points, and a steep piece next to zero."""
    points = example_points(torch.full((2, 4), 0.5), 4)
    start = Claim("x", (), nn.Identity(), 1.0)
    for function, constant in (
        (lambda x: torch.where(x > 0.6, x + 1, x), 1.0),
        (lambda x: 3 * x.clamp(max=2.0), 2.9),
        (lambda x: (x**2).clamp(max=100.0), 0.5),
    ):
        with pytest.raises(UnsoundBound):
            falsify(Claims([start, Claim("f", (0,), function, constant)]), points)
    found = falsify(Claims([start, Claim("f", (0,), lambda x: 2 * x, 2.0, 2.0)]), points)
    assert 2 - 1e-5 < found.network <= 2
    assert 2 - 1e-5 < found.steps[1] <= 2


@pytest.mark.parametrize("at_once", [1, 64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 100, 3 * x - 200, x),  # steeper far above the example
        lambda x: torch.where(x < -20, 3 * x + 40, x),  # and far below it
        lambda x: x + 0.1 * torch.relu(x - 5) ** 2,  # steeper and steeper
        lambda x: x * (1 + (x.sum(1, keepdim=True) > 300)),  # a jump
    ],
)
def test_points_far_from_the_example(function, at_once):
    points = example_points(torch.full((2, 4), 0.5), 2)
    start = Claim("x", (), nn.Identity(), 1.0)
    with pytest.raises(UnsoundBound):
        falsify(Claims([start, Claim("f", (0,), function, 1.5)], at_once), points)


def test_steps_without_derivative_are_measured_in_random_directions():
    def doubled(x):
        return torch.from_numpy(2 * x.detach().numpy())

    start = Claim("x", (), nn.Identity(), 1.0)
    with pytest.raises(UnsoundBound):
        falsify(Claims([start, Claim("f", (0,), doubled, 1.9)]), torch.rand(2, 4).double())


def test_the_reference_is_what_the_graph_computes():
    model = Net().double().eval()
    graph = trace(model, torch.rand(2, 6).double())
    reference = Reference(claims_of_graph(graph, walk(graph)), [torch.float64])
    x = torch.rand(5, 6).double()
    y, allowed = reference.outputs(x)
    assert torch.allclose(y, model(x), rtol=1e-14)
    assert float(allowed.max()) < 1e-9
    reference.check(x, model(x), "")
    with pytest.raises(CannotTrace, match="traced program"):
        reference.check(x, model(x) + 1e-8, "")
    with pytest.raises(CannotTrace, match="shape"):
        reference.check(x, model(x)[:, :2], "")
    with pytest.raises(CannotTrace, match="traced program"):
        reference.check(x, model(x) * math.nan, "")


def test_wrong_bounds_of_layers_raise(monkeypatch):
    linear, conv = nn.Linear(4, 4), nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1)
    for name in ("bound_weight", "exact_bound"):
        true = getattr(layer_bounds, name)

        def halved(*args, true=true, **kwargs):
            found = true(*args, **kwargs)
            smaller = {"square": found.square / 4} if hasattr(found, "square") else {}
            return dataclasses.replace(found, value=found.value / 2, **smaller)

        monkeypatch.setattr(layer_bounds, name, halved)
    for layer in (linear, conv):
        with pytest.raises(UnsoundBound, match=type(layer).__name__):
            onelip.bounds.bound_layer(layer)
        with pytest.raises(UnsoundBound, match=type(layer).__name__):
            onelip.bounds.exact_bound_layer(layer)


def test_wrong_constants_by_construction_raise(monkeypatch):
    layer = onelip.aol(nn.Conv2d(2, 4, 3, padding=1))
    assert onelip.summary(nn.Sequential(layer)).constant == 1
    found = layer.parametrizations.weight[0]
    monkeypatch.setattr(type(found), "constant_in", lambda self, dtype: 0.2)
    with pytest.raises(UnsoundBound, match="Conv2d"):
        onelip.summary(nn.Sequential(layer))


class Claiming(LipschitzModule):
    """States constant 1, whatever its function is."""

    proved_constant = 1.0

    def __init__(self, function, width=None):
        super().__init__()
        self.function = function
        if width:
            self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda _, x: torch.where(x > 0, x, 1.01 * x), None),
        (lambda self, x: 1.01 * (x + self.shift[:, None, None]), 7),  # images with seven channels only
        (lambda _, x: 2 * F.avg_pool3d(x, 2) * 2**1.5, None),
    ],
)
def test_summary_refutes_what_a_module_states(function, width):
    with pytest.raises(UnsoundBound):
        onelip.summary(nn.Sequential(nn.ReLU(), Claiming(function, width)))


def test_rounding_of_equal_weights_refutes_nothing():
    layer = onelip.aol(nn.Linear(64, 3000, bias=False))
    with torch.no_grad():
        layer.parametrizations.weight.original.fill_(3.3)
    assert onelip.summary(layer).constant == 1


def test_summary_leaves_out_a_module_that_accepts_no_usual_shape():
    def only_13(self, x):
        return x.reshape(len(x), 13, 17)

    assert onelip.summary(nn.Sequential(Claiming(only_13))).constant == 1


@pytest.mark.parametrize("method", ["aol", "bjorck", "cayley", "soc", "sll", "spectral-norm", "lln"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_summary_states_nothing_of_a_network_that_has_diverged(method, number):
    network = onelip.constrain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), method).eval()
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] = number
    assert not bool(torch.isfinite(network(torch.ones(1, 4))).all())
    found = onelip.summary(network)
    assert found.constant is None
    assert found.unproved


@pytest.mark.parametrize("method", ["sll", "cpl", "sandwich"])
def test_layers_state_nothing_of_weights_that_are_not_finite(method):
    layer = onelip.constrain(nn.Sequential(nn.Linear(4, 4)), method)[0].eval()
    assert layer.lipschitz_constant is not None
    with torch.no_grad():
        next(layer.parameters()).view(-1)[0] = math.nan
    assert layer.lipschitz_constant is None
    assert "NaN" in layer.bound().why


@pytest.mark.parametrize("scale", [1e-161, 1e-250, 1e150])
def test_weights_of_which_the_squares_leave_the_range(scale):
    layer = nn.Linear(1, 4, bias=False, dtype=torch.float64)
    numbers = [-1.8343887027630497, 6.141828611006091, -0.9545639675369047, 2.6636549707754602]
    layer.weight.data[:, 0] = scale * torch.tensor(numbers, dtype=torch.float64)
    norm = math.hypot(*layer.weight.flatten().tolist())
    assert norm * (1 - 1e-12) <= onelip.bounds.bound_layer(layer).value <= norm * (1 + 1e-6)
    assert onelip.audit(layer, torch.rand(2, 1).double()).upper <= norm * (1 + 1e-6)
