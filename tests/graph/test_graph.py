"""The graph is what the program does: leaves, functional calls, hooks, shared layers, and what is refused."""

# A missing number fails a test here, which is as good.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import onelip
from onelip.core.errors import CannotTrace
from onelip.graph.step import Ref
from onelip.graph.trace import trace
from onelip.graph.walk import walk
from onelip.nn import ConvexResidual, LipschitzModule, MaxMin


def module_of(function, **layers):
    """A model with this forward(self, x)."""
    kind = type("Model", (nn.Module,), {"forward": function})
    model = kind()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def steps(graph):
    return [(call.place, call.op) for call in graph.calls]


def test_layers_functional_calls_and_residuals():
    def forward(self, x):
        y = self.conv(x)
        y = y + self.act(y)
        a, b = y.chunk(2, 1)
        y = torch.cat([b, F.conv2d(a, self.conv.weight[:2, :2], padding=1)], 1)
        return self.conv(y).flatten(1)

    model = module_of(forward, conv=nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), act=MaxMin())
    graph = trace(model, torch.rand(5, 4, 6, 6))
    assert graph.input_shape == (2, 4, 6, 6)
    names = [op for _, op in steps(graph)]
    assert names[:4] == ["input", "module", "module", "aten.add.Tensor"]
    assert names.count("module") == 3
    assert "aten.conv2d.default" in names
    assert [call.place for call in graph.calls if call.op == "module"] == ["conv", "act", "conv"]
    first, _, last = (call for call in graph.calls if call.op == "module")
    assert first.module is last.module
    assert "forward" not in first.module.__dict__
    assert torch.equal(first.module.weight, model.conv.weight)
    assert graph.calls[3].arguments == (Ref(1), Ref(2))
    assert graph.calls[3].inputs == (1, 2)
    assert graph.calls[graph.output].shape == (2, 4 * 36)
    functional = graph.calls[names.index("aten.conv2d.default")]
    assert torch.equal(functional.arguments[1], model.conv.weight[:2, :2])  # computed, since it is constant
    assert "forward" not in model.conv.__dict__
    assert model.training


def test_parametrized_layers_are_baked():
    layer = onelip.aol(nn.Linear(4, 4))
    graph = trace(nn.Sequential(layer, nn.ReLU(inplace=True)), torch.rand(1, 4))
    assert steps(graph) == [("", "input"), ("0", "module"), ("1", "aten.relu.default")]
    assert type(graph.calls[1].module) is nn.Linear
    assert torch.equal(graph.calls[1].module.weight, layer.weight)


def test_changed_layers_are_traced_through():
    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    replaced = MaxMin()
    replaced.forward = lambda x: 3 * x
    inside = nn.Conv1d(3, 3, 1)
    inside._conv_forward = lambda x, weight, bias: 5 * F.conv1d(x, weight, bias)

    class Loud(nn.Linear):
        def __call__(self, x):
            return 4 * super().__call__(x)

    found = trace(nn.Sequential(hooked, replaced, Loud(3, 3)), torch.rand(2, 3))
    assert all(call.op != "module" for call in found.calls)
    constants = [call.arguments[1] for call in found.calls if call.op == "aten.mul.Tensor"]
    assert constants == [2, 3, 4]
    assert trace(inside, torch.rand(2, 3, 4)).calls[-1].arguments == (Ref(1), 5)


def test_a_convolution_pads_as_torch_does():
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
    layer.padding = (0,)
    graph = trace(layer, torch.rand(2, 1, 6))
    assert [(op, call.shape) for (_, op), call in zip(steps(graph), graph.calls, strict=True)][1] == (
        "module",
        (2, 1, 6),
    )


def test_layers_made_of_layers_are_looked_into_unless_they_state_a_constant():
    class Stated(LipschitzModule):
        proved_constant = 1.0

        def __init__(self):
            super().__init__()
            self.inner = nn.ReLU()

        def forward(self, x):
            return self.inner(x) if x.sum() >= 0 else x  # values may decide inside

    graph = trace(nn.Sequential(Stated(), ConvexResidual(nn.Linear(3, 3))), torch.rand(2, 3))
    assert steps(graph)[1:] == [("0", "module"), ("1.branch", "module"), ("1", "aten.lerp.Tensor")]


def test_writes_into_views_are_followed():
    def forward(self, x):
        y = x * 1
        y[:, :2].mul_(5)
        return y

    names = [op for _, op in steps(trace(module_of(forward), torch.rand(2, 3)))]
    assert "aten.slice_scatter.default" in names
    assert all(not name.split(".")[1].endswith("_") for name in names if name.startswith("aten"))


def test_random_numbers_are_not_constants():
    graph = trace(module_of(lambda self, x: x * torch.rand(3) + torch.ones(3)), torch.rand(2, 3))
    assert [op for _, op in steps(graph)] == ["input", "aten.rand.default", "aten.mul.Tensor", "aten.add.Tensor"]


def test_unfilled_memory_is_no_constant():
    graph = trace(module_of(lambda self, x: x * torch.empty(3)), torch.rand(2, 3))
    assert graph.calls[1].arguments[1].isnan().all()


COMPUTES_WITH_LENGTH = [
    (lambda x: x * x.shape[0], "mul.Tensor"),
    (lambda x: x * (1 + x.shape[0] // 8), "mul.Tensor"),
    (lambda x: x * (1 + torch.sym_max(x.shape[0] - 8, 0)), "mul.Tensor"),
    (lambda x: x * (1 + x.numel() // (8 * x.shape[1])), "mul.Tensor"),
    (lambda x: x * x.shape[0] ** 0.5, "mul.Tensor"),
    (lambda x: x + torch.full((x.shape[0], 1), x.shape[0]), "full.default"),
    (lambda x: x + torch.tensor(x.shape[0]), "scalar_tensor"),
    (lambda x: x.repeat(1, x.shape[0]), "repeat"),
    (lambda x: F.pad(x, (0, x.shape[0])), "pad"),
    (lambda x: F.interpolate(x[:, None], size=x.shape[0]), "upsample"),
    (lambda x: x * (torch.arange(x.shape[0]) >= 8)[:, None], "arange"),
    (lambda x: x * (torch.ones_like(x).cumsum(0) > 8), "cumsum"),
    (lambda x: x * (torch.ones_like(x).sum(0, keepdim=True) > 8), "sum"),
    (lambda x: x * (torch.zeros_like(x).logsumexp(0, keepdim=True) > 2.5), "logsumexp"),
    (lambda x: x * torch.zeros_like(x).softmax(0), "softmax"),
    (lambda x: x * torch.ones_like(x).tril(5), "tril"),
    (lambda x: x * torch.ones_like(x).roll(1, 0), "roll"),
    (lambda x: x * torch.ones_like(x).select_scatter(torch.zeros(3), 0, 1), "select_scatter"),
    (lambda x: torch.einsum("bc,kc->b", x, torch.ones_like(x)), "einsum"),
]


@pytest.mark.parametrize(
    ("forward", "op"), COMPUTES_WITH_LENGTH, ids=[str(i) for i in range(len(COMPUTES_WITH_LENGTH))]
)
def test_computing_with_the_number_of_samples_or_the_place_in_the_batch(forward, op):
    with pytest.raises(CannotTrace, match=rf"every number of samples, got .*{op}"):
        trace(module_of(lambda self, x: forward(x)), torch.rand(1, 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * (2 if len(x) > 8 else 1),
        lambda x: x * (2 if len(x) == 100 else 1),
        lambda x: x * torch.arange(len(x))[:, None],
        lambda x: x * (2 if tree_map(len, x) == 100 else 1),  # called from torch
        lambda x: torch.stack([row * (i + 1) for i, row in enumerate(x)]),
        lambda x: torch.cat([x] * x.shape[0], 1),
        lambda x: x * torch.ones(2, 1),
    ],
)
def test_the_number_of_samples_as_a_plain_number(forward):
    with pytest.raises(CannotTrace, match="needs the number itself"):
        trace(module_of(lambda self, x: forward(x)), torch.rand(1, 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * (2 if x.shape[0] == 100 else 1),
        lambda x: x * (2 if x.shape == (100, 3) else 1),
        lambda x: x * (2 if x.size(0) % 7 == 0 else 1),
        lambda x: x * (2 if x.numel() > 1e6 else 1),
        lambda x: x * (2 if x.untyped_storage().nbytes() > 1e6 else 1),
        lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(8))]),
        lambda x: torch.cat([part * (i + 1) for i, part in enumerate(torch.split(x, 8))]),
    ],
)
def test_branches_on_the_number_of_samples(forward):
    with pytest.raises(CannotTrace, match="every number of samples, got one that branches"):
        trace(module_of(lambda self, x: forward(x)), torch.rand(1, 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x[:, None].expand(x.shape[0], x.shape[0], 3),
        lambda x: x @ torch.rand(3, 2) @ torch.rand(2, 3) @ x.t(),
        lambda x: x.index_fill(0, torch.tensor([0, 1]), 0.0),
        lambda x: torch.index_put(x, [torch.tensor([0, 1])], torch.zeros(())),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_samples_that_meet_are_unproved(forward):
    graph = trace(module_of(lambda self, x: forward(x)), torch.rand(1, 3))
    assert walk(graph)[graph.output].constant is None


@pytest.mark.parametrize(
    "forward", [lambda self, x: x.view(x.shape[0], -1), lambda self, x: x.chunk(3, 1)[0] * x.shape[1]]
)
def test_sizes_may_be_read(forward):
    assert trace(module_of(forward), torch.rand(1, 3)).batch == 2


def test_what_follows_the_batch_by_itself_is_no_other_program():
    def forward(self, x):
        n = x.shape[0]
        x = torch.cat([self.token.expand(n, 1, 3), x.view(n, 1, 3), torch.zeros(n, 1, 3)], 1)
        y = x.new_zeros(n, 3) + x[:, 0] + (torch.ones_like(x) * self.token)[:, 1]
        x = torch.bmm(x, self.token.expand(n, 3, 3))
        return x.reshape(3 * n, 3).relu().view(n, -1)[:, :3] + y[:, None].expand(n, 3, 3).sum(1)

    model = module_of(forward)
    model.token = nn.Parameter(torch.rand(1, 1, 3))
    assert trace(model, torch.rand(1, 3)).batch == 2


def assembled(x):
    y = torch.zeros_like(x)
    y[:, :2] = x[:, :2]
    y[:, 2:] = x[:, 2:].abs()
    return y


def assembled_in_memory(x):
    y = torch.empty_like(x)
    y[:, ::2] = x[:, ::2]
    y[:, 1::2] = x[:, 1::2].abs()
    return y


def assembled_by_size(x):
    y = torch.zeros(x.shape[0], 4)
    y[:, 0] = x[:, 0]
    y[:, 1] = x[:, 1]
    return y


def written_into(x):
    y = x.clone()
    y[:, :2].mul_(3)
    return y


def constants_in_constants(x):
    y = torch.ones_like(x)
    y[:, 1:] = 2.0
    return x * y


@pytest.mark.parametrize(
    ("forward", "constant"),
    [
        (assembled, 1.0), (assembled_in_memory, 1.0), (assembled_by_size, 2**0.5), (written_into, 3.0),
        (constants_in_constants, 2.0),
    ],
)  # fmt: skip
def test_in_place_assembly(forward, constant):
    graph = trace(module_of(lambda self, x: forward(x)), torch.rand(1, 4))
    found = walk(graph)[graph.output].constant
    assert found is not None
    assert 1.0 <= found <= constant + 1e-9


@pytest.mark.parametrize(
    ("forward", "constant"),
    [
        (lambda x: torch.where(x > 0, x, 0.0), 1.0),
        (lambda x: torch.where(x <= 0.3, 0.3, x), 1.0),
        (lambda x: x.masked_fill(x < 0, 0), 1.0),
        (lambda x: (2 * x).masked_fill(x < 0, torch.tensor(0.0)), 2.0),
        (lambda x: x.masked_fill(x < 1, 2.0), None),
        (lambda x: x.masked_fill(x < 0, -torch.inf), None),
        (lambda x: x.masked_fill(x.flip(1) < 0, 0), None),
        (lambda x: torch.where(x > 0, x, 1e-9), None),
    ],
)
def test_numbers_chosen_by_the_sign_of_the_input(forward, constant):
    graph = trace(module_of(lambda self, x: forward(x)), torch.rand(2, 4))
    assert walk(graph)[graph.output].constant == constant


def test_outputs_without_a_step():
    graph = trace(nn.Identity(), torch.rand(2, 3))
    assert (steps(graph), graph.output) == ([("", "input")], 0)
    graph = trace(module_of(lambda self, x: torch.ones(2, 3)), torch.rand(2, 3))
    assert graph.calls[graph.output].op == "constant"


def test_autocast_inside_is_seen_as_casts():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float()

    graph = trace(module_of(forward, layer=nn.Linear(3, 3)), torch.rand(2, 3))
    assert torch.bfloat16 in {call.dtype for call in graph.calls}
    assert all(call.op != "module" for call in graph.calls)


REFUSED = [
    (lambda self, x: x if x.sum() > 0 else 2 * x, "control flow"),
    (lambda self, x: (x, x), "one tensor in and one out"),
    (lambda self, x: [x], "inside a container"),
    (lambda self, x: x.mul_(2), "leaves its input alone"),
    (lambda self, x, y: x + y, "further inputs"),
    (lambda self, x: torch.from_numpy(x.numpy()), "calls out of torch"),
    (lambda self, x: x.no_such_thing(), "AttributeError"),
]


@pytest.mark.parametrize(("forward", "words"), REFUSED)
def test_refused(forward, words, capfd):
    with pytest.raises(CannotTrace, match=words):
        trace(module_of(forward), torch.rand(2, 3))
    assert capfd.readouterr() == ("", "")


class _Tenfold(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 10 * result if func is F.linear else result


def test_refused_before_the_trace():
    with pytest.raises(CannotTrace, match="expected a torch module, got function"):
        trace(lambda x: x, torch.rand(2, 3))
    with pytest.raises(CannotTrace, match="batch axis, got shape"):
        trace(nn.ReLU(), torch.rand(3))
    with pytest.raises(CannotTrace, match=r"images.double\(\) / 255"):
        trace(nn.ReLU(), torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(CannotTrace, match="run it once"):
        trace(nn.LazyLinear(3), torch.rand(2, 3))
    with torch.autocast("cpu"), pytest.raises(CannotTrace, match="no autocast"):
        trace(nn.ReLU(), torch.rand(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    with pytest.raises(CannotTrace, match="can be copied"):
        trace(old, torch.rand(2, 3))
    special = nn.Linear(3, 3)
    special.weight = _Tenfold(torch.eye(3))
    with pytest.raises(CannotTrace, match=r"plain tensors, got _Tenfold in '0.weight'"):
        trace(nn.Sequential(special), torch.rand(2, 3))
    bad = nn.Linear(2, 2)
    nn.init.constant_(bad.weight, torch.nan)
    with pytest.raises(onelip.NonFiniteWeight):
        trace(bad, torch.rand(2, 2))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    try:
        with pytest.raises(CannotTrace, match="global forward hooks"):
            trace(nn.ReLU(), torch.rand(2, 3))
    finally:
        handle.remove()


def _assigned(self, x):
    self.layer.weight = nn.Parameter(2 * self.layer.weight)
    return self.layer(x)


def _hyper(self, x):
    return torch.func.functional_call(self.layer, {"weight": x.T @ x, "bias": self.layer.bias}, (x,))


def test_other_weights_than_the_stored_ones():
    stored = "'layer' to be called with its stored weights"
    for forward, words in ((_assigned, r"changes 'layer\.weight'"), (_hyper, stored)):
        with pytest.raises(CannotTrace, match=words):
            trace(module_of(forward, layer=nn.Linear(3, 3)), torch.rand(2, 3))


def test_a_leaf_that_writes_into_its_input_is_refused():
    class Greedy(LipschitzModule):
        proved_constant = 1.0

        def forward(self, x):
            return x.neg_()

    with pytest.raises(CannotTrace, match="writes into it"):
        trace(nn.Sequential(Greedy()), torch.rand(2, 3))
