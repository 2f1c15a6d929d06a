"""What every method promises, as one table of checks that run over hypothesis-made layers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.bounds.modules import vouch
from onelip.export import bake
from onelip.geometry import UnsupportedLayer
from onelip.methods._method import Method
from onelip.testing.layers import LayerCase, layer_cases
from onelip.testing.norms import exact_jacobian, rounding_allowance

ALL_MODES = ("zeros", "circular", "reflect", "replicate")
ALL_TYPES = (torch.float32, torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ContractViolation(AssertionError):
    """A method does not keep its promise; the message says which, on which layer, by how much."""


def _require(holds: bool, promise: str, case: LayerCase, **seen: Any) -> None:
    if not holds:
        details = ", ".join(f"{key} = {value}" for key, value in seen.items())
        raise ContractViolation(f"expected: {promise}; got: {details}; for {case}")


def _apply(method: Method, case: LayerCase, options: dict[str, Any]) -> nn.Module | None:
    """The layer with the method on it, or None where the method refuses it, which it may.

    Where training and evaluation differ, the sound one of them is what the contract is about.
    """
    if method.needs_input_size and case.size:
        options = {"input_size": case.size} | options
    try:
        layer = method.apply(case.build(), **options)
    except UnsupportedLayer as error:
        _require(
            len(str(error)) > 40, "a refusal that says what came, what is accepted and what to do", case, error=error
        )
        return None
    return layer if method.train_equals_eval else layer.eval()


def norm_within_claim(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Applied or refused; and if applied, no singular value of the exact Jacobian is above the constant claimed."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    _check_norm(method, layer, case)
    _move(layer)
    _check_norm(method, layer, case)


def _check_norm(method: Method, layer: nn.Module, case: LayerCase) -> None:
    claimed = vouch(layer).constant
    if claimed is None:
        _require(method.guarantee != "proved", "a claimed constant", case, why=vouch(layer).why)
        return
    if method.replaces:
        _norm_at_points(layer, case, claimed)
        return
    jacobian = exact_jacobian(layer, case.input_shape)
    norm = float(torch.linalg.matrix_norm(jacobian, 2))
    allowed = claimed + claimed * rounding_allowance(jacobian / claimed, case.dtype)
    _require(norm <= allowed, f"norm <= {claimed} up to rounding ({allowed})", case, norm=norm)


@torch.no_grad()
def _move(layer: nn.Module) -> None:
    """Other parameters than those the method was applied to: what it has found out about them must not matter."""
    for parameter in layer.parameters():
        if parameter.dim() >= 2:
            other = parameter.flip(tuple(range(parameter.dim())))
            parameter.copy_(3 * other if bool((3 * other).isfinite().all()) else other)


def _norm_at_points(layer: nn.Module, case: LayerCase, claimed: float) -> None:
    """A module of its own may be no linear map: its Jacobian at some points, computed in the case's own precision."""
    layer.eval()
    generator = torch.Generator().manual_seed(case.seed)
    for scale in (0.0, 1.0, 30.0):
        x = scale * torch.randn(1, *case.input_shape, generator=generator, dtype=torch.float64).to(case.dtype)
        jacobian = torch.autograd.functional.jacobian(layer, x)
        assert isinstance(jacobian, Tensor)
        matrix = jacobian.reshape(-1, x.numel()).double()
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        # Derivatives are summed along other ways than outputs: more roundings than in the weight alone.
        allowed = claimed * (1 + 4 * rounding_allowance(matrix / claimed, case.dtype))
        _require(norm <= allowed, f"norm <= {claimed} up to rounding ({allowed})", case, norm=norm, at=scale)


def gradients_finite(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Finite gradients in every parameter, also for zero columns."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    torch.manual_seed(case.seed)
    x = torch.randn(2, *case.input_shape, dtype=case.dtype)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        _require(grad is not None and bool(grad.isfinite().all()), "finite gradients", case, at=name, gradient=grad)


def gradients_right(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """First derivatives of the weight agree with finite differences, in float64.

    Not where training moves a state besides the weight (power iteration): its function changes from call to call.
    """
    if not method.train_equals_eval:
        return
    layer = _apply(method, case, options)
    if layer is None:
        return
    names = [name for name, _ in layer.named_parameters() if name != "bias"]
    originals = [
        parameter.detach().clone().requires_grad_() for name, parameter in layer.named_parameters() if name in names
    ]

    def weight(*values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(1, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    torch.autograd.gradcheck(weight, originals, eps=1e-6, atol=1e-4, rtol=1e-3)


def bakes(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """bake gives a plain torch layer with the same outputs, and leaves the original as it was."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    layer.eval()
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    before = layer(x)
    plain = bake(layer).eval()
    if method.replaces:
        _require(not any(map(parametrize.is_parametrized, plain.modules())), "nothing computed anew", case, got=plain)
        room = 64 * torch.finfo(case.dtype).eps * (1 + float(before.detach().abs().max()))
        same = torch.allclose(plain(x), before, rtol=0, atol=room)
    else:
        _require(type(plain) is getattr(nn, case.kind), f"a plain {case.kind}", case, got=type(plain))
        _require(list(plain.state_dict()) == ["weight", "bias"], "plain keys", case, keys=list(plain.state_dict()))
        same = torch.equal(plain(x), before)
    _require(same, "the same outputs after bake", case, difference=(plain(x) - before).abs().max())
    _require(torch.equal(layer(x), before), "the original untouched by bake", case, after=layer(x))


def copies_and_loads(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """deepcopy and a state-dict round trip reproduce the layer."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    expected = layer(x)
    _require(torch.equal(copy.deepcopy(layer)(x), expected), "a deep copy that computes the same", case)
    other = _apply(method, copy.deepcopy(case), options)
    assert other is not None
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(layer.state_dict())
    _require(torch.equal(other(x), expected), "a state dict that restores the layer", case)


def train_equals_eval(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Training and evaluation compute the same function, or the method says that they do not."""
    if not method.train_equals_eval:
        return
    layer = _apply(method, case, options)
    if layer is None:
        return
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    trained, evaluated = layer.train()(x), layer.eval()(x)
    room = 64 * torch.finfo(case.dtype).eps * (1 + float(trained.detach().abs().max())) if method.replaces else 0.0
    same = torch.allclose(trained, evaluated, rtol=0, atol=room)
    _require(same, "the same function in training and evaluation", case, off=(trained - evaluated).abs().max())


def autocast_harmless(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Autocast does not touch how the weight is computed."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    if method.replaces:
        _outputs_under_autocast(layer, case)
        return
    with torch.no_grad():
        expected = layer.weight
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = layer.weight
    assert isinstance(got, Tensor)
    assert isinstance(expected, Tensor)
    _require(
        torch.equal(got, expected), "the same weight under autocast", case, difference=(got - expected).abs().max()
    )


def _outputs_under_autocast(layer: nn.Module, case: LayerCase) -> None:
    """A module of its own has no weight to compare: its outputs may move by the rounding of bfloat16, not by more."""
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    with torch.no_grad():
        expected = layer.eval()(x).double()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = layer(x).double()
    off = float((got - expected).norm() / expected.norm().clamp(min=float(x.norm())))
    _require(off < 0.05, "outputs under autocast that differ by rounding only", case, off=off)


def exports(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """torch.export takes the baked layer, with a batch of any size."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    plain = bake(layer).eval()
    x = torch.randn(3, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    got = program.module()(x[:2])
    _require(torch.equal(got, plain(x[:2])), "the same outputs after torch.export", case)


Check = Callable[[Method, LayerCase, dict[str, Any]], None]
_DOUBLE = (torch.float64,)
_ORDINARY = ("gaussian", "positive", "zero columns", "zero", "one tap")

# Each check with the layers it is run on and how many examples it takes by default.
CHECKS: dict[str, tuple[Check, dict[str, Any], int]] = {
    "norm within claim": (norm_within_claim, {"padding_modes": ALL_MODES, "dtypes": ALL_TYPES}, 100),
    "gradients finite": (gradients_finite, {"weights": _ORDINARY}, 25),
    "gradients right": (gradients_right, {"weights": ("gaussian",), "dtypes": _DOUBLE, "with_wide": False}, 8),
    "bakes": (bakes, {}, 15),
    "copies and loads": (copies_and_loads, {"weights": _ORDINARY}, 10),
    "train equals eval": (train_equals_eval, {}, 10),
    "autocast harmless": (autocast_harmless, {}, 15),
    "exports": (exports, {"weights": _ORDINARY}, 2),
}


def check_contract(
    method: Method,
    *,
    checks: tuple[str, ...] = tuple(CHECKS),
    examples: float = 1.0,
    options: dict[str, Any] | None = None,
) -> None:
    """Run the contract on a method; hypothesis shrinks what fails to the smallest layer that does.

    Args:
        method: the method, registered or not. Whatever its guarantee, a constant that its layers claim is checked;
            with "proved" every layer has to claim one.
        checks: names from CHECKS.
        examples: factor on the number of layers per check.
        options: keyword settings for the method's verb; by default its defaults and then each of `method.options`.

    Raises:
        ContractViolation: what was promised, what was seen, and the layer.
    """
    for name in checks:
        check, found, count = CHECKS[name]
        layers: dict[str, Any] = dict(found)
        if method.replaces and "dtypes" in layers:  # modules of their own need not know half precision
            layers["dtypes"] = tuple(t for t in layers["dtypes"] if t.itemsize >= 4)
        kinds = tuple(layer.__name__ for layer in method.layers)
        for chosen in ({}, *method.options) if options is None else (options,):
            _run(check, method, dict(chosen), layer_cases(kinds=kinds, **layers), max(1, math.ceil(count * examples)))


def _run(check: Check, method: Method, options: dict[str, Any], strategy: Any, count: int) -> None:
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

    @settings(max_examples=count, deadline=None, suppress_health_check=slow, derandomize=True, database=None)
    @given(strategy)
    def run(case: LayerCase) -> None:
        check(method, case, options)

    run()
