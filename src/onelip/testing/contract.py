"""What every method promises, as one table of checks that run over hypothesis-made layers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from onelip.bounds.modules import vouch
from onelip.export import bake
from onelip.geometry import UnsupportedLayer
from onelip.methods._registry import Method
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
    """The layer with the method on it, or None where the method refuses it, which it may."""
    try:
        return method.apply(case.build(), **options)
    except UnsupportedLayer as error:
        _require(
            len(str(error)) > 40, "a refusal that says what came, what is accepted and what to do", case, error=error
        )
        return None


def norm_within_claim(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Applied or refused; and if applied, no singular value of the exact Jacobian is above the constant claimed."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    claimed = vouch(layer).constant
    _require(claimed is not None, "a claimed constant", case, claimed=claimed)
    assert claimed is not None
    jacobian = exact_jacobian(layer, case.input_shape)
    norm = float(torch.linalg.matrix_norm(jacobian, 2))
    allowed = claimed + claimed * rounding_allowance(jacobian / claimed, case.dtype)
    _require(norm <= allowed, f"norm <= {claimed} up to rounding ({allowed})", case, norm=norm)


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
    """First derivatives of the weight agree with finite differences, in float64."""
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
    plain = bake(layer)
    _require(type(plain) is getattr(nn, case.kind), f"a plain {case.kind}", case, got=type(plain))
    _require(list(plain.state_dict()) == ["weight", "bias"], "plain keys", case, keys=list(plain.state_dict()))
    _require(
        torch.equal(plain(x), before), "the same outputs after bake", case, difference=(plain(x) - before).abs().max()
    )
    _require(torch.equal(layer(x), before), "the original untouched by bake", case, after=layer(x))


def copies_and_loads(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """deepcopy and a state-dict round trip reproduce the layer."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    expected = layer(x)
    _require(torch.equal(copy.deepcopy(layer)(x), expected), "a deep copy that computes the same", case)
    other = method.apply(copy.deepcopy(case).build(), **options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(layer.state_dict())
    _require(torch.equal(other(x), expected), "a state dict that restores the layer", case)


def train_equals_eval(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Training and evaluation compute the same function."""
    layer = _apply(method, case, options)
    if layer is None:
        return
    x = torch.randn(2, *case.input_shape, dtype=case.dtype, generator=torch.Generator().manual_seed(case.seed))
    _require(torch.equal(layer.train()(x), layer.eval()(x)), "the same function in training and evaluation", case)


def autocast_harmless(method: Method, case: LayerCase, options: dict[str, Any]) -> None:
    """Autocast does not touch how the weight is computed."""
    layer = _apply(method, case, options)
    if layer is None:
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
        method: the method, registered or not. For `guarantee` other than "proved" the norm is not checked.
        checks: names from CHECKS.
        examples: factor on the number of layers per check.
        options: keyword settings for the method's verb; by default its defaults and then each of `method.options`.

    Raises:
        ContractViolation: what was promised, what was seen, and the layer.
    """
    for name in checks:
        check, layers, count = CHECKS[name]
        if check is norm_within_claim and method.guarantee != "proved":
            continue
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
