"""Momentum, orthogonalised with AOL, and a retraction after each step: the optimiser for AOL layers."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed as dist, nn
from torch.optim import Optimizer

from onelip.core.errors import Diverged, check_integer, did_you_mean
from onelip.optim.layers import OrthogonalParameter, linear_weights, orthogonal_parameters
from onelip.optim.operators import (
    RETRACTIONS,
    Retraction,
    orthogonalize as orthogonalized,
    retract,
    tangent as to_tangent,
)

Products = Literal["auto", "float32", "bfloat16"]
PRODUCTS: tuple[str, ...] = get_args(Products)


class LipschitzMuon(Optimizer):
    r"""SGD with momentum whose steps and parameters are kept orthogonal where layers are orthogonal.

    For the parameter $P$ of each AOL layer (and of Björck's dense layers), with gradient $g$, momentum $\mu$ and rate
    $\eta$,

    $$M \leftarrow \mu M + g, \qquad D = g + \mu M, \qquad D \leftarrow D - P\,\mathrm{sym}(P^\top D), \qquad
    P \leftarrow \mathrm{R2}\big(P - \eta\,\mathrm{orth}(D)\big)$$

    with `onelip.optim.tangent`, `onelip.optim.orthogonalize` and `onelip.optim.retract`; each can be switched off. A
    layer with more columns than rows on its rescaled side cannot be orthogonal there: it has no tangent projection, and
    its retraction is the rescaling alone. All other parameters (biases, plain layers) get SGD with Nesterov momentum.

    The step is a function of the gradients and of the state alone, so it works with gradient clipping,
    DistributedDataParallel and schedulers of the learning rate. Since $\mathrm{orth}(D)$ does not depend on the scale
    of the gradient, $\eta$ is about the angle of a step: 0.02 to 0.08 for short runs, 0.005 to 0.02 for batches of
    fewer than 100 images, 0.005 for deep networks with 3x3 kernels.

    Args:
        model: a module; or a list of dictionaries, each with the key "module" and options of its own, such as "lr".
        lr: learning rate.
        momentum: $\mu$, from 0 to below 1.
        weight_decay: for orthogonal layers $P$ is multiplied by $1 - \eta \lambda$ before the step (a retraction undoes
            that); for the weights of other linear layers $\lambda$ times the weight is added to the gradient. No other
            parameter decays.
        retraction: "r1", "r2" or None.
        tangent: whether to project the direction to the tangent space.
        orthogonalize: iterations of Newton and Schulz; 0 keeps the direction as it is, and $\eta$ is then that of SGD.
        every: retract after every `every`-th step of a parameter. Between retractions $P^\top P$ drifts from the
            identity: the tangent projection removes most of the drift of first order in $\eta$, but the
            orthogonalisation after it adds some again, most where P is not square. AOL adds this up over a row. No loss
            was seen with 4 at $\eta = 0.08$ for layers of up to 256 columns (results/fast_ablation.json); wider layers
            need more retractions. Above 4 `onelip.optim.training_weights` does not leave AOL out. The count is part of
            the state.
        products: type of the products of `tangent` and `orthogonalize`: "float32", "bfloat16", or "auto" for bfloat16
            where it is measured to be faster, at the first step; the choice becomes part of the state. The Gram
            matrix of the retraction always has the precision of the parameter.

    Raises:
        onelip.core.errors.Diverged: by `step`, if a gradient has a NaN or an infinity; nothing is changed then.

    Examples:
        >>> import onelip
        >>> model = nn.Sequential(onelip.nn.AOLLinear(8, 8), onelip.nn.MaxMin(), onelip.nn.AOLLinear(8, 2))
        >>> optimizer = LipschitzMuon(model, lr=0.05)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 8)).square().sum().backward()
        ...     optimizer.step()
        >>> P = model[0].parametrizations.weight.original.detach()
        >>> bool((P.T @ P - torch.eye(8)).abs().max() < 1e-2)
        True
    """

    def __init__(
        self,
        model: nn.Module | Iterable[dict[str, Any]],
        lr: float = 0.05,
        *,
        momentum: float = 0.8,
        weight_decay: float = 0.0,
        retraction: Retraction | None = "r2",
        tangent: bool = True,
        orthogonalize: int = 2,
        every: int = 1,
        products: Products = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "retraction": retraction,
            "tangent": tangent,
            "orthogonalize": orthogonalize,
            "every": every,
            "products": products,
        }
        parts = [{"module": model}] if isinstance(model, nn.Module) else list(model)
        _check_parts(parts, defaults)
        self._orthogonal: dict[Tensor, OrthogonalParameter] = {}
        seen: set[Tensor] = set()
        groups: list[dict[str, Any]] = []
        for part in parts:
            options = {key: value for key, value in part.items() if key != "module"}
            _check_options({**defaults, **options})
            found = {p.P: p for p in orthogonal_parameters(part["module"]) if p.P not in seen}
            self._orthogonal |= found
            rest = [p for p in part["module"].parameters() if p.requires_grad and p not in found and p not in seen]
            seen |= {*found, *rest}
            linear = set(linear_weights(part["module"]))
            weights = [p for p in rest if p in linear]
            others = [p for p in rest if p not in linear]
            groups += [{"params": list(found), **options}, {"params": weights, **options}]
            groups.append({"params": others, **options, "weight_decay": 0.0})
        super().__init__([group for group in groups if group["params"]], defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_orthogonal": self._orthogonal}  # for copies

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step for each parameter that has a gradient.

        Raises:
            Diverged: if a gradient has a NaN or an infinity; no parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        _check_finite([p.grad for p, _ in with_gradient])
        for parameter, group in with_gradient:
            direction = self._direction(parameter, group)
            if parameter in self._orthogonal:
                self._orthogonal_step(self._orthogonal[parameter], direction, group)
            else:
                parameter.add_(direction, alpha=-group["lr"])
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Nesterov momentum, as torch.optim.SGD has it."""
        gradient, momentum, decay = parameter.grad, group["momentum"], group["weight_decay"]
        assert gradient is not None
        if decay and parameter not in self._orthogonal:
            gradient = gradient.add(parameter, alpha=decay)
        if not momentum:
            return gradient
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = gradient.clone()
        else:
            state["momentum_buffer"].mul_(momentum).add_(gradient)
        return gradient.add(state["momentum_buffer"], alpha=momentum)

    def _orthogonal_step(self, parameter: OrthogonalParameter, direction: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter.P]
        state["step"] = state.get("step", 0) + 1
        low = products_type(group["products"], parameter.P, self, "bfloat16")
        P, D = parameter.to_kernel(parameter.P), parameter.to_kernel(direction)
        D = D.to(low or D.dtype)
        if group["tangent"] and parameter.is_tall:
            D = to_tangent(P, D, dtype=low)
        if group["orthogonalize"]:
            D = orthogonalized(D, group["orthogonalize"], dtype=low)
        if group["weight_decay"]:
            P = P * (1 - group["lr"] * group["weight_decay"])
        P = torch.add(P, D, alpha=-group["lr"])
        if group["retraction"] is not None and state["step"] % group["every"] == 0:
            P = retract(P, group["retraction"], dtype=low)
        parameter.set_kernel(P)


def products_type(products: Products, P: Tensor, optimizer: Optimizer, key: str) -> torch.dtype | None:
    """The type of the products for a parameter; None for its own type.

    Args:
        products: "auto" to measure it, once.
        P: the parameter.
        optimizer: its state keeps what was measured, so that a resumed run does not measure again.
        key: of the state of P.
    """
    if products == "float32" or P.dtype == torch.float64:
        return None
    state = optimizer.state[P]
    if products == "auto" and key not in state:
        measured = next((s[key] for s in optimizer.state.values() if key in s), None)
        state[key] = bfloat16_is_faster(P.device) if measured is None else measured
    return torch.bfloat16 if products == "bfloat16" or state[key] else None


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether products of matrices in bfloat16 take less than 3/4 of the time of float32, measured in milliseconds.

    With several processes the first one decides for all.
    """
    size = 256 if device.type == "cpu" else 2048  # a GPU takes the same time for all small products
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        X = torch.ones(size, size, device=device, dtype=dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            float((X @ X)[0, 0])  # waits for a GPU
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    faster = [seconds[torch.bfloat16] < 0.75 * seconds[torch.float32]]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(faster, src=0, device=device if device.type == "cuda" else None)
    return faster[0]


def _check_finite(gradients: list[Tensor]) -> None:
    # A finite sum has finite terms, and takes a tenth of the time of the largest; a sum of finite terms can overflow.
    sums = [gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    if all(torch.stack([s.to(sums[0].device, torch.float32) for s in sums]).isfinite().tolist() if sums else ()):
        return
    if not bool(nn.utils.get_total_norm(gradients, torch.inf).isfinite()):
        raise Diverged("a gradient has a NaN or an infinity")


def _check_parts(parts: list[Any], known: Collection[str]) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("module"), nn.Module):
            raise TypeError(
                "expected a module, because its layers decide which parameters are kept orthogonal, or dictionaries "
                f'with the key "module", such as [{{"module": net, "lr": 0.05}}], got {type(part).__name__}'
            )
        for name in part.keys() - {"module", *known}:
            raise ValueError(f"unknown option {name!r}{did_you_mean(name, known)}")


def _check_options(options: dict[str, Any]) -> None:
    for name, low, is_open in (("lr", 0.0, False), ("momentum", 0.0, True), ("weight_decay", 0.0, False)):
        value = options[name]
        if not isinstance(value, int | float | Tensor) or not low <= value < (1 if is_open else math.inf):
            bound = "from 0 to below 1" if is_open else "of at least 0"
            raise ValueError(f"expected {name} {bound}, got {value!r}")
    if not isinstance(options["tangent"], bool):
        raise ValueError(f"expected tangent to be true or false, got {options['tangent']!r}")
    if options["retraction"] is not None and options["retraction"] not in RETRACTIONS:
        raise ValueError(f"expected retraction to be 'r1', 'r2' or None, got {options['retraction']!r}")
    if options["products"] not in PRODUCTS:
        raise ValueError(f"expected products to be 'auto', 'float32' or 'bfloat16', got {options['products']!r}")
    check_integer("orthogonalize", options["orthogonalize"], 0, 100)
    check_integer("every", options["every"])
