"""The contract of methods, as checks on a grid of layers.

The grid (`onelip.testing.layers`) contains every kind of layer with all of its settings. The first check applies the
method to a covering of the layers that it accepts, and measures the norm of each. The other checks run on fewer layers,
which still have every trait, and every kind of module, of the first check. Rejected layers do not count: for each kind
in `method.layers`, a check must run on at least `Check.least` layers, else it fails.
"""

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.nn.utils import parametrize

from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.core.modes import rounding_room
from onelip.core.parametrization import find_parametrization, original_of
from onelip.graph.modules import bound_module
from onelip.methods.projections import project
from onelip.methods.registry import Method
from onelip.testing.layers import ALL_TYPES, FULL_TYPES, KINDS, WEIGHTS, LayerCase, covering_masks, grid, make_weight
from onelip.testing.norms import columns_of, jacobians_at, rounding_allowance

_ORDINARY = ("gaussian", "positive", "zero columns", "zero", "one tap")
# With these weights the norm of a layer comes close to its claimed constant.
_TIGHT = ("one hot", "ones")


_Run = Callable[[Method, LayerCase, nn.Module, dict[str, Any]], None]


class ContractViolation(AssertionError):
    """A method violates the contract; the message states the check, the layer and the measured values."""


def _require(holds: bool, promise: str, case: LayerCase, **seen: Any) -> None:
    if not holds:
        details = ", ".join(f"{key} = {value}" for key, value in seen.items())
        raise ContractViolation(f"expected: {promise}; got: {details}; for {case}")


# ---- applying a method


def _apply(method: Method, case: LayerCase, options: dict[str, Any]) -> nn.Module | None:
    """The layer with the method applied, or None if the method rejects it."""
    takes_size = method.needs_input_size or (case.promises_size and _takes_input_size(method.apply))
    given = {"input_size": case.size} if takes_size and case.size else {}
    _seed(case)  # some methods have a random initialisation
    layer = case.build()
    try:
        return method.apply(layer, **given, **options)
    except UnsupportedLayer as error:
        says_enough = len(str(error)) > 40
        _require(says_enough, "an error that states the problem, what is accepted and what to do", case, got=error)
        return None
    except Exception as error:
        raise ContractViolation(f"expected: a layer, or UnsupportedLayer; got: {error!r}; for {case}") from error


def _seed(case: LayerCase) -> None:
    # torch.manual_seed also records a stack trace for each GPU backend, which takes longer than building a layer.
    torch.default_generator.manual_seed(case.seed)


@lru_cache
def _takes_input_size(function: Callable[..., nn.Module]) -> bool:
    return "input_size" in inspect.signature(function).parameters


def _accepted(
    method: Method, options: dict[str, Any], kind: str, strength: int | None, seed: int
) -> Iterator[tuple[LayerCase, nn.Module]]:
    """A covering of the layers of one kind that the method accepts, with the method applied."""
    # Methods that replace the module need not support half precision.
    cases = grid(kind, dtypes=FULL_TYPES if method.replaces else ALL_TYPES, seed=seed)
    covered = 0
    for i, (case, mask) in enumerate(zip(cases, covering_masks(cases, strength), strict=True)):
        if not mask & ~covered:
            continue
        case = replace(case, weights=WEIGHTS[i % len(WEIGHTS)])
        layer = _apply(method, case, options)
        if layer is not None:
            covered |= mask
            yield _with_fitting_size(layer, case), layer


def _check_refused(method: Method, options: dict[str, Any], kind: str, seed: int) -> None:
    """Check that layers of a kind that is not in `method.layers` are rejected, whatever their settings."""
    cases = grid(kind, seed=seed)
    covered = 0
    for case, mask in zip(cases, covering_masks(cases, 1), strict=True):
        if mask & ~covered:
            covered |= mask
            refused = _apply(method, case, options) is None
            _require(refused, "an error for a kind of layer that is not in Method.layers", case, got="no error")


def _with_fitting_size(layer: nn.Module, case: LayerCase) -> LayerCase:
    """The case, at a size that the layer accepts. Unsupported settings must be rejected when the method is applied.

    A layer that was created without an input size may require multiples of the stride.
    """
    try:
        got = _output_shape(layer, case)
    except Exception as error:
        fitting = replace(case, size=tuple(-(-n // s) * s for n, s in zip(case.size, case.stride, strict=True)))
        late = "an error when the method is applied, not at the first input"
        _require(fitting != case and isinstance(error, ValueError), late, case, got=repr(error))
        return _with_fitting_size(layer, fitting)
    expected = _output_shape(case.build(), case)
    _require(got == expected, "outputs with the shape of the plain layer", case, got=got, plain=expected)
    return case


@torch.no_grad()
def _output_shape(layer: nn.Module, case: LayerCase) -> torch.Size:
    return layer(torch.zeros(2, *case.input_shape, dtype=case.dtype)).shape


def _form(layer: nn.Module) -> tuple[str, ...]:
    """The form of a layer: names of the class of the module and of its parametrizations."""
    names = [parametrize.type_before_parametrizations(layer).__name__]
    if parametrize.is_parametrized(layer):
        lists = layer.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        names += [type(map).__name__ for maps in lists.values() for map in maps]  # pyright: ignore[reportGeneralTypeIssues]
    return tuple(names)


# ---- the checks


@dataclass(frozen=True)
class Check:
    """One check of the contract; `@_check()` makes a function one, under its name in words.

    Attributes:
        run: function (method, case, layer, options); `layer` is the result of applying the method to the case.
        least: minimum number of layers of each kind in `method.layers` that it must run on.
        weights: kinds of weights of the layers; None for all.
        dtypes: dtypes of the layers.
        all_traits: whether it runs on layers with every trait, instead of one of each kind and form.
        with_options: whether it also runs with each of `method.options`.
        moving_states: whether it applies to methods with `train_equals_eval=False`.
    """

    run: _Run
    least: int = 2
    weights: tuple[str, ...] | None = _ORDINARY
    dtypes: tuple[torch.dtype, ...] = FULL_TYPES
    all_traits: bool = True
    with_options: bool = True
    moving_states: bool = True


CHECKS: dict[str, Check] = {}
NORM = "norm within claim"  # the first check, which the others follow


def _check(**settings: Any) -> Callable[[_Run], _Run]:
    def register(run: _Run) -> _Run:
        CHECKS[run.__name__.replace("_", " ")] = Check(run, **settings)
        return run

    return register


@_check(least=8, weights=None, dtypes=ALL_TYPES)
def norm_within_claim(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """For all parameters, no singular value of the Jacobian is above the claimed constant.

    The parameters are those computed from the weights of the layer, and others set afterwards: values computed when the
    method was applied must not matter.
    """
    norm = _Norm(method, case, layer, options)
    norm.check(f"as applied to {case.weights} weights")
    kinds = _TIGHT if case.seed % 2 else WEIGHTS
    kind = kinds[case.seed // 2 % len(kinds)]
    _fill(layer, kind, case.seed)
    norm.check(f"with {kind} parameters")


@_check(weights=("gaussian",))
def norm_after_training(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """The same after some optimizer steps that increase the outputs, and with other parameters after these."""
    norm = _Norm(method, case, layer, options)
    _seed(case)
    layer.train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        y = layer(torch.randn(2, *case.input_shape, dtype=case.dtype))
        (-y.square().mean()).backward()
        optimizer.step()
        project(layer)
    if all(bool(parameter.isfinite().all()) for parameter in layer.parameters()):
        norm.check("after training")
    for kind in _TIGHT:
        _fill(layer, kind, case.seed)
        norm.check(f"after training, with {kind} parameters")


@torch.no_grad()
def _fill(layer: nn.Module, kind: str, seed: int) -> None:
    """Set other parameters: free weights of one kind of WEIGHTS, the others (biases, channel weights) moderate."""
    named = dict(layer.named_parameters())
    free = [name for name in named if "original" in name] or [name for name in named if name != "bias"]
    for i, (name, parameter) in enumerate(named.items()):
        is_free = name in free and parameter.dim() >= 2
        made = make_weight(
            tuple(parameter.shape) if is_free else (parameter.numel(), 1),
            kind if is_free else "gaussian",
            parameter.dtype,
            seed + i,
        )
        parameter.copy_(made if is_free else 3 * made.reshape(parameter.shape))


class _Norm:
    """Compares the claimed constant of a layer with its norm in eval mode, for its stored tensors, in float64."""

    def __init__(self, method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
        self.method, self.case, self.layer, self.options = method, case, layer, options
        self.is_linear = parametrize.type_before_parametrizations(layer) is getattr(nn, case.kind)
        if self.is_linear:  # no bound is known where its forward is another one
            self.stored = replace(case, dtype=torch.float64, bias=False).build()
        else:
            self.stored = bake(layer, expand=False).double()

    def check(self, state: str) -> None:
        """Compare with the parameters that the layer has now."""
        self.layer.eval()
        claim = bound_module(self.layer)
        if claim.constant is None:
            may = self.method.guarantee is None or (self.method.guarantee != "proved" and bool(self.options))
            _require(may, "a claimed constant", self.case, why=claim.why, state=state)
            return
        with torch.no_grad():
            names = self.stored.state_dict()
            self.stored.eval().load_state_dict({name: attrgetter(name)(self.layer) for name in names})
        if self.is_linear:
            jacobian = columns_of(self.stored, self.case.input_shape)
            _compare(jacobian[None], claim.constant, self.case, 1, state)
        else:
            self._check_at_points(claim.constant, state)

    def _check_at_points(self, claimed: float, state: str) -> None:
        """Check a module that may be nonlinear, by Jacobians at some points and differences of outputs."""
        case = self.case
        generator = torch.Generator().manual_seed(case.seed)
        scales = torch.tensor([0.0, 1.0, 30.0], dtype=torch.float64).reshape(-1, *(1 for _ in case.input_shape))
        points = scales * torch.randn(3, *case.input_shape, generator=generator, dtype=torch.float64)
        # Derivatives are summed in another order than outputs: more roundings than in the weight alone.
        _compare(jacobians_at(self.stored, points), claimed, case, 4, state)
        step = torch.randn(points.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            moved = self.stored(points + step) - self.stored(points)
        ratio = float((moved.flatten(1).norm(dim=1) / step.flatten(1).norm(dim=1)).max())
        allowed = claimed * rounding_room(case.dtype) * (1 + 1e-10)
        promise = f"outputs that move at most {claimed} times as far as inputs"
        _require(ratio <= allowed, promise, case, got=ratio, state=state)


def _compare(jacobians: Tensor, claimed: float, case: LayerCase, times: int, state: str) -> None:
    finite = bool(jacobians.isfinite().all())
    norms = torch.linalg.matrix_norm(jacobians, 2) if finite else torch.full((1,), torch.nan)
    worst = int(norms.argmax())
    norm = float(norms[worst])
    if norm <= claimed:  # the usual case, without an allowance
        return
    allowed = claimed * (1 + times * rounding_allowance(jacobians[worst] / claimed, case.dtype)) if finite else claimed
    _require(norm <= allowed, f"norm <= {claimed} up to rounding ({allowed})", case, norm=norm, state=state)


@_check()
def gradients_finite(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """Gradients of all parameters are finite, in training and evaluation, also for zero columns and after `reset`."""
    for state in ("as applied", "as initialised by `reset`"):
        for training in (True, False):
            layer.train(training).zero_grad()
            layer(_inputs(case)).square().sum().backward()
            for name, parameter in layer.named_parameters():
                grad = parameter.grad
                finite = grad is not None and bool(grad.isfinite().all())
                _require(finite, "finite gradients", case, at=name, gradient=grad, training=training, state=state)
        found = find_parametrization(layer)
        reset = getattr(found, "reset", None)
        if reset is None:
            return
        try:
            reset(original_of(layer))
        except Exception as error:
            raise ContractViolation(f"expected: `reset` initialises the layer; got: {error!r}; for {case}") from error


# Power iteration changes its own state: the function changes from call to call.
@_check(weights=("gaussian",), dtypes=(torch.float64,), moving_states=False)
def gradients_right(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """Derivatives with respect to the parameters agree with finite differences, in float64, in random directions.

    The parameters are random: initial ones can be close to a kink, such as zeros in padded channels.
    """
    _fill(layer, "gaussian", case.seed)
    names = [name for name, _ in layer.named_parameters() if name != "bias"]
    originals = [p.detach().clone().requires_grad_() for name, p in layer.named_parameters() if name in names]
    x = _inputs(case)[:1]

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    _seed(case)  # for the random directions
    try:
        torch.autograd.gradcheck(outputs, originals, eps=1e-6, atol=1e-4, rtol=1e-3, fast_mode=True)
    except GradcheckError as error:
        _require(False, "gradients that agree with differences", case, got=error)


@_check(weights=None)
def bakes(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """bake returns a plain torch layer with the same outputs, and does not change the original."""
    layer.eval()
    x = _inputs(case)
    with torch.no_grad():
        before = layer(x)
        plain = bake(layer).eval()
        after, again = plain(x), layer(x)
    if method.replaces:
        _require(not any(map(parametrize.is_parametrized, plain.modules())), "no parametrization left", case, got=plain)
        same = torch.allclose(after, before, rtol=0, atol=_room(case, before))
    else:
        keys = ["weight", "bias"] if case.bias else ["weight"]
        _require(type(plain) is getattr(nn, case.kind), f"a plain {case.kind}", case, got=type(plain))
        _require(list(plain.state_dict()) == keys, "plain keys", case, keys=list(plain.state_dict()))
        same = torch.equal(after, before)
    _require(same, "the same outputs after bake", case, difference=(after - before).abs().max())
    _require(
        torch.equal(again, before), "the original unchanged by bake", case, difference=(again - before).abs().max()
    )


@_check()
def copies_and_loads(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """deepcopy and a state-dict round trip reproduce the layer."""
    x = _inputs(case)
    with torch.no_grad():
        expected = layer(x)
        _require(torch.equal(copy.deepcopy(layer)(x), expected), "a deep copy that computes the same", case)
        other = _apply(method, case, options)
        assert other is not None
        other.train(layer.training)
        for parameter in other.parameters():
            parameter.add_(1)
        other.load_state_dict(layer.state_dict())
        _require(torch.equal(other(x), expected), "a state dict that restores the layer", case)


@_check(weights=None, moving_states=False)
def train_equals_eval(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """Training and evaluation compute the same function."""
    x = _inputs(case)
    with torch.no_grad():
        trained, evaluated = layer.train()(x), layer.eval()(x)
    same = torch.allclose(trained, evaluated, rtol=0, atol=_room(case, trained) if method.replaces else 0.0)
    _require(same, "the same function in training and evaluation", case, off=(trained - evaluated).abs().max())


@_check(weights=None)
@torch.no_grad()
def autocast_harmless(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """Autocast does not change how the weight is computed.

    Methods that replace the module have no weight to compare: outputs may differ only by the rounding of bfloat16.
    """
    if method.replaces:
        x = _inputs(case)
        expected = layer.eval()(x).double()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = layer(x).double()
        off = float((got - expected).norm() / expected.norm().clamp(min=float(x.norm())))
        _require(off < 0.05, "outputs under autocast that differ by rounding only", case, off=off)
        return
    expected = layer.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer.weight
    assert isinstance(got, Tensor)
    assert isinstance(expected, Tensor)
    same = torch.equal(got, expected)
    _require(same, "the same weight under autocast", case, difference=(got - expected).abs().max())


@_check(least=1, all_traits=False, with_options=False)
def exports(method: Method, case: LayerCase, layer: nn.Module, options: dict[str, Any]) -> None:
    """torch.export traces the baked layer for any batch size.

    A plain layer of torch without hooks is not exported again for each method: `bakes` has compared it.
    """
    plain = bake(layer).eval()
    if type(plain) is getattr(nn, case.kind) and not plain._forward_pre_hooks and not plain._forward_hooks:
        return
    x = torch.cat([_inputs(case), _inputs(case)])
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        got, expected = program.module()(x[:3]), plain(x[:3])
    _require(torch.equal(got, expected), "the same outputs after torch.export", case)


def _room(case: LayerCase, outputs: Tensor) -> float:
    """Allowed difference, due to rounding, of outputs that are computed in another way."""
    return 64 * torch.finfo(case.dtype).eps * case.in_channels**0.5 * (1 + float(outputs.abs().max()))


def _inputs(case: LayerCase) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(2, *case.input_shape, generator=generator, dtype=torch.float64).to(case.dtype)


# ---- running them


# An accepted layer, its form, and its traits.
_Accepted = tuple[LayerCase, tuple[str, ...], frozenset[str]]


@dataclass
class Coverage:
    """The layers that the contract was run on.

    Attributes:
        layers: for each check, the number of layers of each kind.
        forms: for each check, the number of layers of each form: (kind, class of the module, classes of its
            parametrizations).
        traits: for each kind, the number of accepted layers with each trait of `LayerCase.traits`.
    """

    layers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    forms: dict[str, Counter[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(Counter))
    traits: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def count(self, check: str, case: LayerCase, layer: nn.Module) -> None:
        """Record that a check was run on a layer."""
        self.layers[check][case.kind] += 1
        self.forms[check][case.kind, *_form(layer)] += 1


def check_contract(
    method: Method,
    *,
    checks: tuple[str, ...] = tuple(CHECKS),
    options: dict[str, Any] | None = None,
    strength: int | None = 2,
    seed: int = 0,
) -> Coverage:
    """Run the contract on a method.

    Args:
        method: the method, registered or not. Whatever its guarantee, a constant that its layers claim is checked;
            with "proved" every layer has to claim one.
        checks: names from CHECKS.
        options: options of the method; by default its defaults on the whole covering, and then each of
            `method.options` on fewer layers.
        strength: every combination of this number of settings that the method accepts occurs in at least one layer;
            None for all layers of the grid, about ten thousand.
        seed: seed of the order, dtypes, sizes and weights.

    Returns:
        The number of layers of each kind that each check was run on.

    Raises:
        ContractViolation: if a check fails, or if too few layers were accepted.

    Examples:
        >>> from onelip.methods.registry import METHODS
        >>> found = check_contract(METHODS["clipping"], checks=("bakes",), options={}, strength=1)
        >>> found.layers["bakes"]["ConvTranspose2d"] >= 2
        True
    """
    with torch.random.fork_rng(devices=[]):
        return _check_contract(method, checks, options, strength, seed)


def _check_contract(
    method: Method, checks: tuple[str, ...], options: dict[str, Any] | None, strength: int | None, seed: int
) -> Coverage:
    coverage = Coverage()
    chosen = dict(options or {})
    cases: list[_Accepted] = []
    served = [layer.__name__ for layer in method.layers]
    for kind in KINDS:
        if kind not in served:
            _check_refused(method, chosen, kind, seed)
            continue
        before = len(cases)
        for case, layer in _accepted(method, chosen, kind, strength, seed):
            cases.append((case, _form(layer), case.traits()))
            coverage.traits[kind].update(cases[-1][2])
            if NORM in checks:
                norm_within_claim(method, case, layer, chosen)
                coverage.count(NORM, case, layer)
        for name in checks:
            _check_floor(name, method, kind, len(cases) - before)
    for name in checks:
        if not (method.train_equals_eval or CHECKS[name].moving_states):
            continue
        if name != NORM:
            _run(name, method, cases, chosen, coverage)
        for kind in served:
            _check_floor(name, method, kind, coverage.layers[name][kind])
        if options is None and CHECKS[name].with_options:
            for others in method.options:
                _run(name, method, cases, dict(others), coverage)
    return coverage


def _run(name: str, method: Method, cases: list[_Accepted], options: dict[str, Any], coverage: Coverage) -> None:
    check = CHECKS[name]
    is_default = not options
    for i, case in enumerate(_fewer(cases, all_traits=check.all_traits and (is_default or name == NORM))):
        weights = check.weights or WEIGHTS
        dtype = case.dtype if case.dtype in check.dtypes else check.dtypes[i % len(check.dtypes)]
        case = replace(case, weights=weights[i % len(weights)], dtype=dtype)
        layer = _apply(method, case, options)
        if layer is None and not is_default:  # options may apply to some layers only
            continue
        assert layer is not None
        # If training and evaluation differ, only evaluation is sound.
        check.run(method, case, layer.train(method.train_equals_eval), options)
        coverage.count(name, case, layer)


def _fewer(cases: list[_Accepted], *, all_traits: bool) -> Iterator[LayerCase]:
    """One layer of each kind and form; or two, and for each parametrization those with a trait that no other has."""
    met: set[object] = set()
    count: Counter[object] = Counter()
    for case, form, own in cases:
        traits = {(case.is_transposed, form[-1], trait) for trait in own}
        if count[case.kind, form] < 1 + all_traits or (all_traits and traits - met):
            met |= traits
            count[case.kind, form] += 1
            yield case


def _check_floor(name: str, method: Method, kind: str, count: int) -> None:
    if count < CHECKS[name].least:
        raise ContractViolation(
            f"expected: {name!r} to run on at least {CHECKS[name].least} layers of kind {kind}, which {method.name!r} "
            f"lists in Method.layers; got: {count}, because all others of the grid are rejected; remove the kind from "
            "Method.layers, or accept more settings"
        )
