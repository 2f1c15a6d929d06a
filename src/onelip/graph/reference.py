"""Run a traced graph in float64, and check that a model computes the same as its traced program."""

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from onelip.bounds.falsify import UNIT, Claim, Claims, Search, sample_norms
from onelip.core.errors import CannotTrace, UnsoundBound
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.modes import full_precision
from onelip.core.state import Snapshot, unchanged
from onelip.graph.step import Call, Graph, Ref, StepBound, aten


def claims_of_graph(graph: Graph, bounds: Sequence[StepBound]) -> Claims:
    """The constants that the rules have proved for a graph, as claims to test."""
    claims = []
    for call, bound in zip(graph.calls, bounds, strict=True):
        factor = bound.factor if len(call.inputs) == 1 else None
        run = _Runner(call, [graph.calls[i].dtype for i in call.inputs])
        title = f"{call.place or 'the model'} ({type(call.module).__name__ if call.module is not None else call.op})"
        claims.append(Claim(title, call.inputs, run, bound.constant, factor))
    return Claims(claims[: graph.output + 1])


class _Runner:
    """A call as a function of its operands in float64, whatever type it was traced in: real arithmetic, nearly."""

    def __init__(self, call: Call, dtypes: list[torch.dtype]) -> None:
        self.call, self.dtypes = call, dtypes
        self.unit = UNIT
        self._wide: nn.Module | None = None

    def __call__(self, *operands: Any) -> Any:
        if self.unit == UNIT:
            try:
                return self._run(operands, widen=True)
            except UnsoundBound:
                raise
            except Exception:  # a forward of somebody else that works in one type only
                self.unit = 2.0**-14
        narrow = [_cast(operand, dtype) for operand, dtype in zip(operands, self.dtypes, strict=True)]
        return _cast(self._run(narrow, widen=False), torch.float64)

    def _run(self, operands: Sequence[Any], *, widen: bool) -> Any:
        call = self.call
        if call.op == "getitem":
            return operands[0][call.arguments[1]]
        if call.module is not None:
            if widen and self._wide is None:
                self._wide = copy.deepcopy(call.module).cpu().double().requires_grad_(False)
            layer = self._wide if widen else call.module
            assert layer is not None
            return layer.forward(operands[0])
        given = dict(zip(call.inputs, operands, strict=True))

        def fill(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return given[argument.index]
            if not widen:
                return argument
            if isinstance(argument, Tensor):
                return argument.detach().cpu().double() if argument.is_floating_point() else argument.detach().cpu()
            if isinstance(argument, torch.device):
                return torch.device("cpu")
            return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument

        arguments, keywords = tree_map(fill, tuple(call.arguments)), tree_map(fill, dict(call.keywords))
        return arguments[0] if call.op == "constant" else aten(call.op)(*arguments, **keywords)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value)


class Reference:
    """The outputs of a traced program, to compare those of a running model with.

    Args:
        claims: the program; its output has a constant.
        dtypes: dtypes that the model computes in; the coarsest decides the tolerance.
    """

    def __init__(self, claims: Claims, dtypes: Iterable[torch.dtype]) -> None:
        self.claims = claims
        self.coarsest = max((torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point), key=lambda f: f.eps)
        # 32 roundings of the model's own type for each step, and not less than 2^-4 of Note [Slack] (falsify.py).
        self.scale = max(2.0**-4, 16 * self.coarsest.eps / UNIT)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (N, ...) for inputs in float64, and how far from these those of the model may be, in L2.

        The distance is infinite where the model may overflow.
        """
        search = Search(self.claims.steps, torch.Generator(), 4 * self.coarsest.tiny)
        is_pair, c = self.claims.at_once == 1, self.claims.steps[-1].constant or 0.0
        parts, near = [], []
        for some in x.split(2 * self.claims.at_once):
            count = len(some)
            values, off = search.run(torch.cat([some, some]) if is_pair and count == 1 else some)
            y = values[-1]
            rounding = self.scale * (c * torch.from_numpy(off[-1]) + UNIT * sample_norms(y))
            allowed = rounding + c * search.underflow + self.coarsest.tiny
            fits = torch.from_numpy(search.longest < 2.0**-10 * self.coarsest.max)
            parts.append(y[:count])
            near.append(torch.where(fits, allowed, math.inf)[:count])
        return torch.cat(parts), torch.cat(near)

    def check(self, x: Tensor, y: Tensor, what: str) -> None:
        """Refuse outputs y of a model that are not those of the program at inputs x.

        Raises:
            CannotTrace: with the largest distance.
        """
        expected, allowed = self.outputs(x.detach().double().cpu())
        got = y.detach().double().cpu()
        if expected.shape != got.shape:
            raise CannotTrace(f"expected outputs of shape {tuple(expected.shape)} {what}, got {tuple(got.shape)}")
        distance = sample_norms(got - expected)
        is_near = (distance <= allowed) | allowed.isinf()
        if not bool(is_near.all()):
            worst = int((~is_near).nonzero()[0, 0])
            raise CannotTrace(
                "expected the model to compute what its traced program does, got outputs at a distance of "
                f"{float(distance[worst]):.3g}, more than rounding explains ({float(allowed[worst]):.3g}), {what}: "
                "it depends on something that the trace does not contain, such as the length of the batch, the "
                "gradient mode, whether it is exported, the memory layout or type of its input, or state outside of "
                "the model"
            )


def check_model_itself(model: nn.Module, reference: Reference, points: Tensor, like: Tensor) -> None:
    """Run the model itself, as different callers would, and compare it with the program that was traced.

    Args:
        model: the user's; in eval mode meanwhile, and put back afterwards.
        reference: the program.
        points: four inputs in float64.
        like: has the type and the device of the model's inputs.

    Raises:
        CannotTrace: if they differ by more than rounding.
        ChangingModel: if that changes the model.
    """
    far = torch.stack([10 * points[0], -100 * points[1], 1000 * points[2]])  # a branch may act far away only
    x = torch.cat([points, far]).to(like)
    calls = [
        ([0, 1, 2, 3, 0], torch.no_grad(), "without gradients"),
        ([3, 5, 6], torch.enable_grad(), "with gradients"),
        ([2, 6], torch.inference_mode(), "in inference mode"),
        ([1], torch.no_grad(), "without gradients"),
        ([0, 1, 2, 3, 4, 5, 6], torch.no_grad(), "without gradients"),
        ([5, 6], torch.no_grad(), "that are not contiguous"),
    ]
    state = None
    with unchanged(model), torch.inference_mode(False), full_precision(like.device):
        model.eval()
        for order, mode, words in calls:
            what = f"in a call with {len(order)} samples {words}"
            try:
                # Cached in each call by itself: a weight may depend on the gradient mode.
                with mode, warnings.catch_warnings(), parametrize.cached():
                    warnings.simplefilter("ignore")
                    given = x[order].clone().requires_grad_(torch.is_grad_enabled())
                    y = model(_in_other_memory(given) if "contiguous" in words else given.clone())
            except Exception as error:  # whatever a forward of somebody else raises
                if isinstance(error, RuntimeError) and words != "without gradients":
                    continue  # a layer may refuse to be differentiated, and `view` a tensor that is not contiguous
                raise CannotTrace(
                    f"expected a model that takes any number of samples, got {type(error).__name__} {what}: {error}"
                ) from error
            reference.check(x[order], y.detach().clone(), what)
            state = state or Snapshot(model)
        if state is not None:
            state.check()


def _in_other_memory(x: Tensor) -> Tensor:
    """A copy that is not contiguous, with other strides, inside of a larger tensor."""
    room = x.new_zeros((2 * x[0].numel(), len(x) + 1))
    return room[1::2, 1:].unflatten(0, x.shape[1:]).movedim(-1, 0).copy_(x)


def is_linear(call: Call) -> bool:
    """Whether the call is affine with stored weights."""
    return isinstance(call.module, LINEAR_LAYERS) or (call.op in _LINEAR and len(call.inputs) == 1)


_LINEAR = {
    f"aten.{name}"
    for name in [
        "linear.default",
        "addmm.default",
        "matmul.default",
        "mm.default",
        "bmm.default",
        "einsum.default",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "conv1d.padding",
        "conv2d.padding",
        "conv3d.padding",
        "convolution.default",
        "conv_transpose1d.default",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
    ]
}
