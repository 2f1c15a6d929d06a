"""Models that compute another function at the next call are rejected, wherever their state is, and restored."""

import collections
import contextvars
import copy
import enum
import functools
import importlib
import importlib.util
import io
import itertools
import logging
import queue
import random
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import onelip
from onelip.core.errors import CannotTrace, ChangingModel
from onelip.core.state import Snapshot, unchanged
from onelip.graph.trace import trace
from onelip.nn import LipschitzModule


class Holder(nn.Module):
    """A model with one attribute, and a forward that uses it."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.ReLU()
        self.work = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.layer(self.inner(x)) * self.work(self)


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Notes:
    def __init__(self):
        self.lines = []


def doubles_entry(self):
    self.gain[0] *= 2
    return self.gain[0]


def doubles_setting(self):
    self.cfg["gain"] *= 2
    return self.cfg["gain"]


def appends(self):
    self.history.append(1)
    return 1.0 if len(self.history) < 10 else 100.0


def lengthens(self):
    self.name += "x"
    return float(len(self.name))


def doubles_tensor(self):
    self.t = self.t * 2
    return self.t


def writes_tensor(self):
    self.t *= 2
    return 1.0


def writes_through_data(self):
    self.layer.weight.data.mul_(1.5)
    return 1.0


def counts(self):
    self.calls += 1
    return 1.0  # no effect


def counts_to_fifty(self):
    self.calls += 1
    return 1.0 if self.calls < 50 else 1000.0


def toggles(self):
    self.calls = (self.calls + 1) % 3
    return 1.0


def counts_in_slots(self):
    self.helper.calls += 1
    return float(self.helper.calls)


def writes_notes(self):
    self.helper.lines.append("call")
    return 1.0


def next_one(self):
    return float(next(self.numbers))


def counts_in_partial(self):
    self.helper.keywords["calls"] += 1
    return 1.0


def writes_array(self):
    self.array[0] += 1
    return float(self.array[0])


def draws(self):
    return float(self.source.random())


def draws_with_generator(self):
    return torch.rand(1, generator=self.source)


def counts_in_layer(self):
    self.inner.calls = getattr(self.inner, "calls", 0) + 1
    return 1.0


def adds_to_set(self):
    self.seen.add(len(self.seen))
    return 1.0


def counts_in_class(self):
    Counted.calls += 1
    return float(Counted.calls)


def notes_in_class(self):
    Counted.notes.append(1)
    return 1.0


class Counted:
    calls = 0
    notes = []  # noqa: RUF012


GLOBAL = {"calls": 0}
NUMBERS = itertools.count()


def counts_globally(self):
    GLOBAL["calls"] += 1
    return 1.0


def next_global(self):
    next(NUMBERS)
    return 1.0


def counts_in_closure():
    calls = 0

    def forward(self):
        nonlocal calls
        calls += 1
        return 1.0

    return forward


def counts_in_default(self, calls=[0]):  # noqa: B006
    calls[0] += 1
    return 1.0


CHANGING = {
    "list": (doubles_entry, {"gain": [1.0]}, r"gain\[0\]"),
    "dict": (doubles_setting, {"cfg": {"gain": 1.0}}, r"cfg\['gain'\]"),
    "list that grows": (appends, {"history": []}, "history"),
    "deque": (appends, {"history": collections.deque(maxlen=7)}, "history"),
    "string": (lengthens, {"name": ""}, "name"),
    "tensor": (doubles_tensor, {"t": torch.ones(1)}, "'t'"),
    "tensor in place": (writes_tensor, {"t": torch.ones(1)}, "'t'"),
    "weight": (writes_through_data, {}, "layer.weight"),
    "counter": (counts, {"calls": 0}, "calls"),
    "counter that acts late": (counts_to_fifty, {"calls": 0}, "calls"),
    "turns": (toggles, {"calls": 0}, "calls"),
    "object with slots": (counts_in_slots, {"helper": Slots()}, "helper.calls"),
    "object": (writes_notes, {"helper": Notes()}, "helper.lines"),
    "namespace": (counts_in_slots, {"helper": types.SimpleNamespace(calls=0)}, "helper.calls"),
    "itertools.count": (next_one, {"numbers": itertools.count()}, "numbers"),
    "itertools.cycle": (next_one, {"numbers": itertools.cycle([1.0, 2.0])}, "numbers"),
    "iterator": (next_one, {"numbers": iter(range(1000))}, "numbers"),
    "partial": (counts_in_partial, {"helper": functools.partial(print, calls=0)}, r"helper.keywords\['calls'\]"),
    "array": (writes_array, {"array": np.ones(2)}, "array"),
    "random.Random": (draws, {"source": random.Random(0)}, "source"),
    "numpy's generator": (draws, {"source": np.random.default_rng(0)}, "source"),
    "torch's generator": (draws_with_generator, {"source": torch.Generator()}, "source"),
    "submodule": (counts_in_layer, {}, "inner.calls"),
    "set": (adds_to_set, {"seen": set()}, "seen"),
    "class": (counts_in_class, {}, "Counted"),
    "list of a class": (notes_in_class, {}, "Counted"),
    "global": (counts_globally, {}, "GLOBAL"),
    "global iterator": (next_global, {}, "NUMBERS"),
    "closure": (counts_in_closure(), {}, "closure calls"),
    "default argument": (counts_in_default, {}, "work"),
    "Python's random numbers": (lambda self: random.random(), {}, "random state of Python"),
    "NumPy's random numbers": (lambda self: np.random.rand(), {}, "random state of NumPy"),  # noqa: NPY002
}


def everything(model):
    """The state of the model and of its class, as plain values."""
    held = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    held |= {f"inner.{name}": value for name, value in vars(model.inner).items() if not name.startswith("_")}
    texts = {name: repr(value) for name, value in held.items() if name not in ("work", "source", "numbers")}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = repr(model.numbers) if hasattr(model, "numbers") else None
    shared = (Counted.calls, list(Counted.notes), dict(GLOBAL), repr(NUMBERS), counts_in_default.__defaults__)
    randoms = hash(random.getstate()), hash(bytes(torch.get_rng_state())), hash(str(np.random.get_state()))  # noqa: NPY002
    return texts, {name: tensor.tolist() for name, tensor in state.items()}, numbers, copy.deepcopy(shared), randoms


@pytest.mark.parametrize("kind", CHANGING)
def test_changing_models_are_refused_and_left_as_they_were(kind):
    forward, attributes, words = CHANGING[kind]
    model = Holder(forward, **copy.deepcopy(attributes)).double().eval()
    before = everything(model)
    with pytest.raises(CannotTrace, match=words):
        onelip.audit(model, torch.full((1, 3), 0.5).double())
    assert everything(model) == before


@pytest.mark.parametrize("kind", ["list", "dict", "tensor", "counter", "class", "closure", "itertools.count"])
def test_changing_models_have_neither_proof_nor_radii(kind):
    forward, attributes, words = CHANGING[kind]
    model = Holder(forward, **copy.deepcopy(attributes)).double().eval()
    before = everything(model)
    with pytest.raises(ValueError, match=words):
        onelip.prove(model, (3,))
    for mode in ("sound", "real-arithmetic"):
        with pytest.raises(ValueError, match=words):
            onelip.certify(model, torch.full((1, 3), 0.5), mode=mode)
    assert everything(model) == before


def test_buffers_that_are_written():
    model = nn.Sequential(nn.Linear(3, 3), Seen())
    with pytest.raises(CannotTrace, match=r"changes '1.seen'"):
        trace(model, torch.rand(2, 3))
    assert float(model[1].seen) == 0


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * self.seen


class Begins(nn.Module):
    """Another function at the first call."""

    def __init__(self):
        super().__init__()
        self.has_begun = False

    def forward(self, x):
        gain = 1.0 if self.has_begun else 1000.0
        self.has_begun = True
        return x * gain


def test_the_first_call_is_a_call():
    with pytest.raises(CannotTrace, match="a different one at the second call"):
        trace(Begins(), torch.rand(2, 3))


class Remembers(nn.Module):
    """Uses a value stored by the previous call, which is always the same here."""

    def __init__(self):
        super().__init__()
        self.last = 2

    def forward(self, x):
        before, self.last = self.last, len(x)
        return x * before


def test_what_depends_on_the_call_before():
    with pytest.raises(CannotTrace, match="changes 'last'"):
        trace(Remembers(), torch.rand(2, 3))


class Lazy(nn.Module):
    """A cache that is filled by the first call, as in positional encodings."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return x + self.table


def test_caches_that_the_first_call_fills():
    model = Lazy()
    assert onelip.audit(model, torch.rand(2, 3)).upper < 1 + 1e-9
    assert model.table is None
    model(torch.rand(2, 3))
    assert onelip.audit(model, torch.rand(2, 3)).upper < 1 + 1e-9


class Lazier(Lazy):
    """A cache that is computed from another one."""

    factors = None

    def forward(self, x):
        x = super().forward(x)
        if self.factors is None:
            self.factors = self.table / 3
        return x * self.factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_caches_of_caches(dtype):
    """Stored in float32 they are rounded, in the program of the first call they are not: another function."""
    x = torch.rand(2, 3, dtype=dtype)
    model = Lazier()
    if dtype == torch.float32:
        with pytest.raises(CannotTrace, match="expected the same program at every call"):
            onelip.audit(model, x)
        model(x)
    largest = 1 / 3 if dtype == torch.float64 else float(torch.tensor(1 / 3))
    assert largest <= onelip.audit(model, x).upper < largest * (1 + 1e-9)


class Noisy(LipschitzModule):
    proved_constant = 1.0

    def forward(self, x):
        return x + torch.rand(())


class CountingLeaf(LipschitzModule):
    proved_constant = 1.0

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = min(self.calls + 1, 1)  # once
        return x * (1 + 0.0 * self.calls)


def test_layers_that_state_a_constant_keep_nothing():
    with pytest.raises(CannotTrace, match="draws random numbers of torch"):
        trace(nn.Sequential(Noisy()), torch.rand(2, 3))
    with pytest.raises(CannotTrace, match=r"0.calls"):
        trace(nn.Sequential(CountingLeaf()), torch.rand(2, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_cannot_be_compared(tmp_path):
    with open(tmp_path / "log", "w") as file, pytest.raises(CannotTrace, match=r"TextIOWrapper in 'thing' .*buffer"):
        trace(Holder(lambda self: 1.0, thing=file), torch.rand(2, 3))
    with pytest.raises(CannotTrace, match=r"'thing._c'"):
        trace(Holder(lambda self: 1.0, thing=torch.jit.script(nn.ReLU())), torch.rand(2, 3))
    for value in ((i for i in range(3)), threading.Lock()):
        with pytest.raises(CannotTrace, match=r"can be copied.* move locks, files and generators out"):
            trace(Holder(lambda self: 1.0, thing=value), torch.rand(2, 3))
        with pytest.raises(CannotTrace, match=r"can be copied"):
            onelip.prove(Holder(lambda self: 1.0, thing=value), (3,))


class Colour(types.SimpleNamespace):
    pass


LEGITIMATE = {
    "config": types.SimpleNamespace(width=3, names=["a"], nested={"a": (1, 2.0, None)}),
    "callable": torch.relu,
    "lambda": lambda x: x,
    "partial": functools.partial(torch.clamp, min=0),
    "method": nn.Linear(2, 2).forward,
    "generator of torch that is not used": torch.Generator(),
    "generator of numpy that is not used": np.random.default_rng(0),
    "module outside of the model": [nn.Linear(2, 2)],
    "array": np.arange(3),
    "tensor": torch.arange(3),
    "type": torch.float32,
    "device": torch.device("cpu"),
    "class": Colour,
    "path": __import__("pathlib").Path("."),
    "logger": __import__("logging").getLogger("onelip.test"),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, a=[1]),
    "no_grad": torch.no_grad(),
    "operation": torch.ops.aten.relu.default,
    "nothing": None,
    "not a number": float("nan"),
    "cached": functools.lru_cache(maxsize=None)(abs),
    "sparse settings": slice(1, 2),
    "size": torch.Size([1, 2]),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_what_does_not_change_is_not_refused(kind):
    model = Holder(lambda self: 1.0, thing=LEGITIMATE[kind])
    state = Snapshot(model)
    model(torch.rand(2, 3))
    assert state.difference() is None
    assert trace(model, torch.rand(2, 3)).batch == 2


def test_an_equal_object_in_the_place_of_another_is_no_change():
    def copies(self):
        self.cfg = {"gain": [1.0, {"deep": torch.ones(2)}]}
        return self.cfg["gain"][0]

    assert trace(Holder(copies, cfg={"gain": [1.0, {"deep": torch.ones(2)}]}), torch.rand(2, 3)).batch == 2


def test_references_in_a_circle():
    model = Holder(lambda self: 1.0, ring=[])
    model.ring.append(model.ring)
    model.own = [model]
    assert Snapshot(model).difference() is None
    model.ring.append(1)
    with unchanged(model) as state:
        model.ring.append(2)
        assert "ring" in state.difference()
    assert len(model.ring) == 2


def test_everything_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.notes, model.table = {"a": [1]}, np.zeros(2)
    memory = model[1].weight.data_ptr()
    version = model[1].weight._version
    before = copy.deepcopy(model.state_dict())
    with unchanged(model):
        model.train()
        model(torch.rand(4, 3))
        model.eval()
        model.notes["a"].append(2)
        model.notes["b"] = 1
        model.table += 1
        model[1].weight.data = torch.zeros(3, 3)
        model.new = 1
        del model[0].momentum
        model.add_module("2", nn.ReLU())
        torch.rand(3)
        random.random()
    assert model.notes == {"a": [1]}
    assert model.table.tolist() == [0, 0]
    assert model.training
    assert model[0].momentum == 0.1
    assert not hasattr(model, "new")
    assert len(model) == 2
    assert model[1].weight.data_ptr() == memory
    assert model[1].weight._version == version
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Moves(nn.Module):
    """A parametrization with state."""

    def __init__(self, only_in_training=False):
        super().__init__()
        self.register_buffer("gain", torch.ones(()))
        self.only_in_training = only_in_training

    def forward(self, weight):
        if self.training or not self.only_in_training:
            self.gain *= 2
        return weight * self.gain


class CountsWeights(nn.Module):
    calls = 0

    def forward(self, weight):
        type(self).calls += 1
        return weight


@pytest.mark.parametrize("moving", [Moves, CountsWeights])
def test_parametrizations_that_move_in_eval_mode(moving):
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", moving())
    model = nn.Sequential(layer).double().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = CountsWeights.calls
    with pytest.raises(ChangingModel, match=r"parametrizations.weight.0"):
        onelip.bake(model)
    with pytest.raises(CannotTrace, match=r"parametrizations.weight.0"):
        onelip.audit(model, torch.rand(1, 3).double())
    with pytest.raises(ValueError, match=r"parametrizations.weight.0"):
        onelip.prove(model, (3,))
    with pytest.raises(ValueError, match=r"parametrizations.weight.0"):
        onelip.certify(model, torch.rand(1, 3))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert CountsWeights.calls == calls


@pytest.mark.parametrize(
    "apply", [parametrizations.spectral_norm, parametrizations.orthogonal, parametrizations.weight_norm, onelip.aol]
)
def test_parametrizations_that_move_in_training_alone(apply):
    model = nn.Sequential(apply(nn.Linear(3, 3)))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert onelip.audit(model, torch.rand(1, 3)).upper is not None
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Moves(only_in_training=True))
    gain = layer.parametrizations.weight[0].gain.clone()
    assert torch.equal(onelip.bake(layer).weight, gain * layer.parametrizations.weight.original)
    assert torch.equal(layer.parametrizations.weight[0].gain, gain)


def test_weights_that_torch_has_cached_are_not_taken():
    layer = onelip.aol(nn.Linear(3, 3))
    with parametrize.cached():
        old = layer.weight.clone()
        with torch.no_grad():
            layer.parametrizations.weight.original.zero_()
        assert torch.equal(layer.weight, old)
        assert not onelip.bake(layer).weight.any()
        assert torch.equal(layer.weight, old)


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(6, 6)], ids=repr)
@pytest.mark.parametrize("method", ["cpl", "spectral-norm", "spectral-norm-reshaped", "lcc", "soc"])
def test_bounds_in_training_mode_change_nothing(method, layer):
    """A power iteration goes on when a weight is computed in training mode."""
    torch.manual_seed(0)
    model = onelip.constrain(nn.Sequential(copy.deepcopy(layer)), method).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    shape = (6,) if isinstance(layer, nn.Linear) else (4, 5, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    onelip.summary(model)
    plain = onelip.bake(model)
    onelip.audit(model, torch.rand(2, *shape), lower=False)
    onelip.prove(nn.Sequential(model, nn.Flatten()), shape)
    if isinstance(model[0], nn.Linear | nn.Conv2d):
        assert onelip.bounds.bound_layer(model[0]).value == onelip.bounds.bound_layer(plain[0]).value
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class WritesOnce(nn.Module):
    """Doubles its weight in the first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 40)
        self.is_used = False

    def forward(self, x):
        if not self.is_used and not torch.compiler.is_compiling():
            self.is_used = True
            self.layer.weight.data.mul_(2)
        return self.layer(x)


def test_parameters_that_the_first_call_writes():
    model = WritesOnce().double().eval()
    before = model.layer.weight.detach().clone()
    with pytest.raises(CannotTrace):
        onelip.prove(model, (40,))
    with pytest.raises(CannotTrace):
        trace(model, torch.zeros(2, 40, dtype=torch.float64), is_own=True)
    assert torch.equal(model.layer.weight, before)
    assert model.is_used is False


def test_equal_tensors_are_copied_once():
    model = nn.Linear(64, 64)
    other = copy.deepcopy(model)
    with unchanged(model) as outer:
        inner, later = Snapshot(other), Snapshot(model)
        kept = [state._read[id(part.weight)].parts.fixed.values.data_ptr() for state, part in
                ((outer, model), (inner, other), (later, model))]  # fmt: skip
        assert len(set(kept)) == 1
        with torch.no_grad():
            model.weight[0, 0] += 1
            other.weight[1, 1] = -other.weight[1, 1]
        assert (outer.difference(), later.difference()) == ("'weight'", "'weight'")
        assert inner.difference() == "'weight'"
        changed = Snapshot(model)
        assert changed.difference() is None
        inner.restore()
    assert changed.difference() == "'weight'"
    assert torch.equal(model.weight, other.weight)


class NoGrad(torch.no_grad):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __enter__(self):
        self.calls += 1
        return super().__enter__()


class Member(enum.Enum):
    ONE = 1


class Helper:
    calls = 0


Helper.__module__ = "typing_helpers"  # begins like the name of a module whose state does not matter
VARIABLE = contextvars.ContextVar("variable", default=0)
LOCAL = threading.local()
LOGGER = logging.getLogger("a test of onelip")


def _count_up():
    yield from itertools.count()


GENERATOR = _count_up()
QUEUE = queue.SimpleQueue()


@functools.cache
def _table():
    return [0]


@functools.lru_cache(maxsize=4)
def _bounded_table():
    return [0]


def _count_in(table):
    table[0] += 1
    return table[0]


def _count_on(obj):
    obj.calls = getattr(obj, "calls", 0) + 1
    return obj.calls


def _write(stream, text):
    stream.write(text)
    return stream.tell()


def _enter(context):
    with context:
        pass
    return context.calls


def _put_in_queue(self):
    QUEUE.put(1)
    return QUEUE.qsize()


def _count_in_grad(self):
    if self.held.grad is None:
        self.held.grad = torch.zeros(1)
        return 0
    self.held.grad += 1
    return int(self.held.grad)


def _add_node(graph):
    graph.placeholder("y")
    return len(graph.nodes)


def _set_variable(self):
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


# In a namespace of its own: that of a test module leads to everything that pytest holds.
_NAMESPACE = {"__name__": "users_module"}
exec(
    "def set_global(self):\n"
    "    scope = globals()\n"
    "    scope['A_NEW_NAME'] = scope.get('A_NEW_NAME', 0) + 1\n"
    "    return scope['A_NEW_NAME']\n",
    _NAMESPACE,
)


HIDDEN = {
    "method of an iterator": (lambda self: self.held(), itertools.count().__next__),
    "method of a list": (lambda self: self.held(), list(range(5000))[::-1].pop),
    "method of a deque": (lambda self: self.held(), collections.deque(range(5000)).popleft),
    "bytes": (lambda self: _write(self.held, b"a"), io.BytesIO()),
    "text": (lambda self: _write(self.held, "a"), io.StringIO()),
    "graph": (lambda self: _add_node(self.held), torch.fx.Graph()),
    "context": (lambda self: _enter(self.held), NoGrad()),
    "name of a module": (lambda self: _count_on(self.held), Helper()),
    "enum": (lambda self: _count_on(Member.ONE), None),
    "cached function": (lambda self: _count_in(_table()), None),
    "cached function of limited size": (lambda self: _count_in(_bounded_table()), None),
    "context variable": (_set_variable, None),
    "thread": (lambda self: _count_on(LOCAL), None),
    "logger": (lambda self: _count_on(LOGGER), None),
    "namespace": (_NAMESPACE["set_global"], None),
    "generator in another": (lambda self: next(GENERATOR), None),
    "gradient": (_count_in_grad, nn.Parameter(torch.zeros(1))),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_state_behind_objects_of_c_and_of_libraries(kind):
    count, held = HIDDEN[kind]
    model = Holder(lambda self: 1.0 if count(self) < 1000 else 100.0, held=held)
    with pytest.raises(CannotTrace, match="same function at every call"):
        onelip.audit(model, torch.rand(2, 3), lower=False)


def test_global_objects_that_cannot_be_compared():
    model = Holder(lambda self: 1.0 if _put_in_queue(self) < 1000 else 100.0)
    with pytest.raises(CannotTrace, match=r"can be compared.*SimpleQueue.*global QUEUE"):
        onelip.audit(model, torch.rand(2, 3), lower=False)


def _doubled(x):
    return 2 * x


class Doubled(nn.Module):
    def forward(self, x):
        return _doubled(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_functions_keep_nothing(monkeypatch):
    monkeypatch.setitem(globals(), "_doubled", torch.jit.script(_doubled))
    assert onelip.audit(Doubled(), torch.rand(2, 3), lower=False).upper == 2


def test_gradients_are_put_back():
    model = nn.Linear(2, 2)
    before = Snapshot(model)
    model.weight.grad = torch.ones(2, 2)
    assert before.difference() == "'weight.grad' (from None to Tensor)"
    before.restore()
    assert model.weight.grad is None


def test_a_module_of_the_user_with_the_name_of_a_standard_one(tmp_path):
    (tmp_path / "cmd.py").write_text(
        "from torch import nn\n\ncount = 0\n\n\nclass Model(nn.Module):\n    def forward(self, x):\n"
        "        global count\n        count += 1\n        return x * (1.0 if count < 60 else 100.0)\n"
    )
    spec = importlib.util.spec_from_file_location("cmd", tmp_path / "cmd.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(CannotTrace, match="global count"):
        onelip.audit(module.Model(), torch.rand(2, 3), lower=False)


# Found by a review: state behind modules, compiled models, classes and keys.

_SOURCE = """
import torch
from torch import nn
import {package}
from {package} import config as held

class Nested(nn.Module):
    def forward(self, x):
        {package}.config.n += 1
        return x * (1000.0 if {package}.config.n > 30 else 1.0)

class Local(nn.Module):
    def forward(self, x):
        from {package} import config
        config.n += 1
        return x * (1000.0 if config.n > 30 else 1.0)

class OfClass(nn.Module):
    config = held
    def forward(self, x):
        self.config.n += 1
        return x * (1000.0 if self.config.n > 30 else 1.0)

class Default(nn.Module):
    def forward(self, x, config=held):
        config.n += 1
        return x * (1000.0 if config.n > 30 else 1.0)

def get():
    return held

class Returned(nn.Module):
    def forward(self, x):
        get().n += 1
        return x * (1000.0 if get().n > 30 else 1.0)

class ByName(nn.Module):
    def forward(self, x):
        import sys
        config = sys.modules["{package}.config"]
        config.n += 1
        return x * (1000.0 if config.n > 30 else 1.0)

class Dunder(nn.Module):
    __calls__ = [0]
    def forward(self, x):
        self.__calls__[0] += 1
        return x * (1000.0 if self.__calls__[0] > 30 else 1.0)

class Meta(type(nn.Module)):
    n = 0

class OfMeta(nn.Module, metaclass=Meta):
    def forward(self, x):
        Meta.n += 1
        return x * (1000.0 if type(type(self)).n > 30 else 1.0)

class Key:
    n = 0
    def __init__(self):
        self.n = 0

class Keys(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {{(Key(), 1): 0}}
    def forward(self, x):
        ((key, _),) = self.table
        key.n += 1
        return x * (1000.0 if key.n > 30 else 1.0)

class Counting(nn.Module):
    n = 0
    def forward(self, x):
        self.n += 1
        return x * (1000.0 if self.n > 30 else 1.0)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user with a module `config`, and models that count in all sorts of places."""
    name = f"users_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "config.py").write_text("n = 0\n")
    (folder / "models.py").write_text(_SOURCE.format(package=name))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(f"{name}.models")


@pytest.mark.parametrize(
    "kind", ["Nested", "Local", "OfClass", "Default", "Returned", "ByName", "Dunder", "OfMeta", "Keys", "Counting"]
)
def test_state_behind_modules_classes_and_keys(package, kind):
    model = getattr(package, kind)()
    with pytest.raises(CannotTrace):
        onelip.audit(model, torch.rand(1, 3), lower=False)
    assert package.held.n == 0  # restored


def test_state_inside_of_compiled_models(package):
    model = package.Counting().train()
    compiled = torch.compile(model, backend="eager")
    for whole in (compiled, nn.Sequential(compiled)):
        with pytest.raises(CannotTrace, match=r"_orig_mod\.n"):
            onelip.audit(whole, torch.rand(1, 3), lower=False)
    assert model.training
    assert model.n == 0


def test_too_many_global_objects_are_refused(monkeypatch):
    monkeypatch.setattr("onelip.core.state._MOST_SHARED", 3)
    with pytest.raises(CannotTrace, match="at most 3 objects in the global names"):
        onelip.audit(UsesGlobals(), torch.rand(1, 3), lower=False)


MANY = [[i] for i in range(10)]


class UsesGlobals(nn.Module):
    def forward(self, x):
        return x * MANY[0][0]
