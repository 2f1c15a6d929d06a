"""Audit a network: the proved constant of each step, measured lower bounds, and the steps without a proof.

    measured lower bound <= the Lipschitz constant (L2, one sample, eval mode, real arithmetic) <= proved upper bound

The upper bound is computed from the graph (`trace`), the rules (`walk`) and the stored weights, without estimates. If
a step has no rule, there is no upper bound.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.bounds.falsify import Claims, example_points, falsify
from onelip.bounds.fast import Effort
from onelip.certification.summary import aligned, title_of
from onelip.core.bake import check_module
from onelip.core.errors import CannotTrace, ChangingModel, UnsoundBound
from onelip.core.rounding import rounded_up
from onelip.core.state import unchanged
from onelip.graph.reference import Reference, check_model_itself, claims_of_graph, is_linear
from onelip.graph.step import Call, Graph, StepBound
from onelip.graph.trace import check_example, trace
from onelip.graph.walk import walk
from onelip.nn.channels import Normalize


@dataclass(frozen=True)
class AuditRow:
    """One step of a network: a layer or an operation.

    Attributes:
        place: name of the module that runs it; "" for the model itself.
        layer: name of the layer or operation.
        upper: proved bound of the step by itself; None if it has several operands, or is unproved.
        lower: measured lower bound of the step; None if it was not measured.
        constant: proved bound from the input of the model up to here, or None.
        why: short reason.
        is_refused: whether no bound of the step itself is known.
    """

    place: str
    layer: str
    upper: float | None
    lower: float | None
    constant: float | None
    why: str
    is_refused: bool


@dataclass(frozen=True)
class Audit:
    """The result of `audit`; `print` shows it as a table.

    Attributes:
        rows: the steps of the network.
        upper: proved upper bound of its Lipschitz constant, or None.
        lower: measured lower bound; None if it was not measured.
        unproved: steps without a proof, each with the reason.
        findings: remarks, such as a model in training mode.
        input_shape: shape of one sample.
    """

    rows: tuple[AuditRow, ...]
    upper: float | None
    lower: float | None
    unproved: list[str]
    findings: list[str]
    input_shape: tuple[int, ...]

    def __str__(self) -> str:
        head = ("module", "step", "at most", "at least", "so far", "why")
        table = [head] + [
            (
                row.place or "(model)",
                row.layer,
                "?" if row.is_refused else "" if row.upper is None else rounded_up(row.upper, 7),
                "" if row.lower is None else f"{row.lower:.6g}",
                "?" if row.constant is None else rounded_up(row.constant, 7),
                row.why,
            )
            for row in self.rows
        ]
        findings = [f"finding: {finding}" for finding in self.findings]
        return "\n".join([*aligned(table), *findings, self._verdict()])

    def _verdict(self) -> str:
        measured = "" if self.lower is None else f", at least {self.lower:.6g} (measured)"
        if self.upper is not None:
            bound = rounded_up(self.upper, 10)
            return f"Lipschitz constant at most {bound} (proved, eval mode, real arithmetic){measured}."
        names = "; ".join(self.unproved[:6]) + ("; ..." if len(self.unproved) > 6 else "")
        return f"NO PROOF{measured}. Unproved: {names}"

    def to_json(self) -> dict[str, Any]:
        """Return the audit as a dictionary for `json.dumps`."""
        return {
            "upper": self.upper,
            "lower": self.lower,
            "input_shape": list(self.input_shape),
            "unproved": list(self.unproved),
            "findings": list(self.findings),
            "rows": [asdict(row) for row in self.rows],
        }


def audit(
    model: nn.Module,
    example_input: Tensor,
    *,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    lower: bool = True,
    effort: Effort = "normal",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Audit:
    """Bound the Lipschitz constant of a network from above (proved) and below (measured), step by step.

    The model is not changed.

    Args:
        model: any torch module from one tensor to one tensor; it is audited in eval mode.
        example_input: an input with a batch axis. The constant is in its units, e.g. pixels in [0, 1].
        normalize: (mean, std) per channel, if images are standardised before the model; the standardisation is
            included in the constant.
        lower: whether to measure a lower bound, which takes most of the time for small networks.
        effort: more effort gives tighter bounds of the stored weights; see `onelip.bounds.bound_weight`.
        seed: seed of the measurement.
        progress: function that is called with a line of text from time to time.

    Returns:
        The audit: a table when printed.

    Raises:
        CannotTrace: if the model has no fixed graph of operations; the message states the reason.
        UnsoundBound: if a measurement contradicts a proof, which is a bug in onelip.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.eye_(model[1].weight)
        >>> found = audit(model, torch.rand(1, 1, 2, 2))
        >>> 1 <= found.upper < 1 + 1e-9, found.unproved
        (True, [])
    """
    return audited(model, example_input, normalize, lower, effort, seed, progress)[0]


def audited(
    model: nn.Module,
    example_input: Tensor,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    lower: bool = False,
    effort: Effort = "normal",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[Audit, Claims]:
    """`audit`, and the claims that were tested."""
    say = progress or (lambda line: None)
    check_module(model)
    check_example(example_input)
    findings = _findings_before(model, example_input, normalize)
    whole = model
    if normalize is not None:
        first = Normalize(*normalize).to(example_input)
        whole = nn.Sequential(OrderedDict(normalize=first, model=model))
    rounded = _ambient_autocast(example_input)
    with torch.autocast(example_input.device.type, enabled=False), _traced_errors(), unchanged(whole):
        say("tracing the graph")
        graph = trace(whole, example_input)
        bounds = walk(graph, effort=effort, progress=lambda call: say(f"proving {call.place or '(model)'}"))
        upper = bounds[graph.output].constant
        claims = claims_of_graph(graph, bounds)
        say("searching for the steepest slope" if lower else "trying to refute the bound")
        points = example_points(example_input, 8 if lower else 4, seed)
        found, measured = _measure(graph, claims, points, lower, seed, findings)
        if upper is not None:
            reference = Reference(claims, [call.dtype for call in graph.calls])
            check_model_itself(whole, reference, points[:4], example_input)
    has_prefix = normalize is not None
    rows = tuple(
        _row(call, bound, measured.get(call.index), has_prefix)
        for call, bound in zip(graph.calls, bounds, strict=True)
        if call.op != "input" and (call.op != "getitem" or bound.is_refused)
    )
    unproved = [f"{row.place or '(model)'} ({row.layer}): {row.why}" for row in rows if row.is_refused]
    if rounded is not None:
        unproved.insert(0, f"(model): called under torch.autocast, which rounds to {rounded}; leave the region")
        upper = None
    findings += _findings_after(rows, graph, bounds, measured, has_prefix)
    return Audit(rows, upper, found, unproved, findings, tuple(graph.input_shape[1:])), claims


def _row(call: Call, bound: StepBound, measured: float | None, has_prefix: bool) -> AuditRow:
    layer = title_of(call.module) if call.module is not None else _short(call.op)
    place = _own_place(call.place, has_prefix)
    return AuditRow(place, layer, bound.factor, measured, bound.constant, bound.why, bound.is_refused)


def _own_place(place: str, has_prefix: bool) -> str:
    """The place in the user's model, not in the one with the standardisation in front."""
    return place.removeprefix("model").removeprefix(".") if has_prefix else place


def _short(op: str) -> str:
    name = op.split(".")[1] if op.count(".") == 2 else op
    return "batch_norm" if name == "_native_batch_norm_legit_no_training" else name.lstrip("_")


def _ambient_autocast(example: Tensor) -> str | None:
    kind = example.device.type
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


@contextmanager
def _traced_errors() -> Iterator[None]:
    """Raise `ChangingModel` as `CannotTrace`: a changing state is one of the reasons for it."""
    try:
        yield
    except ChangingModel as error:
        raise CannotTrace(str(error)) from error


def _measure(
    graph: Graph, claims: Claims, points: Tensor, is_long: bool, seed: int, findings: list[str]
) -> tuple[float | None, dict[int, float]]:
    """The largest ratios that were measured: of the network, and of its linear steps. A short search returns none."""
    first: dict[Any, int] = {}  # a layer used twice is measured once
    for call in graph.calls:
        if is_long and is_linear(call):
            shape = graph.calls[call.inputs[0]].shape
            first.setdefault((id(call.module), shape) if call.module is not None else call.index, call.index)
    try:
        if not is_long:
            falsify(claims, points[:2], seed=seed)
            return None, {}
        found = falsify(claims, points, steps=24, thorough=set(first.values()), seed=seed)
    except RuntimeError as error:
        if isinstance(error, UnsoundBound):
            raise
        findings.append(f"the network could not be measured: {str(error).splitlines()[0]}")
        return None, {}
    measured: dict[int, float] = {}
    for call in graph.calls:
        if is_linear(call):
            shape = graph.calls[call.inputs[0]].shape
            key = (id(call.module), shape) if call.module is not None else call.index
            measured[call.index] = found.steps[first[key]]
    return found.network, measured


def _findings_before(model: nn.Module, example: Tensor, normalize: Any) -> list[str]:
    findings = []
    if isinstance(example, Tensor) and example.is_floating_point() and example.numel():
        least, most = float(example.min()), float(example.max())
        if not (least >= 0 and most <= 1):
            way = "give an example in [0, 1]" if normalize else (
                "pass normalize=(mean, std) with an example in [0, 1], or put onelip.nn.Normalize first"
            )  # fmt: skip
            findings.append(
                f"input is not in raw pixel units: expected [0, 1], got {least:.4g} to {most:.4g}. If it was "
                f"standardised, the constant is not per pixel unit, and radii made of it are wrong; {way}"
            )
    for name, module in model.named_modules():
        findings += _misplaced(name, module)
    if model.training and any(isinstance(m, nn.modules.batchnorm._NormBase | nn.Dropout) for m in model.modules()):
        findings.append("the model is in training mode, and the audit is about its eval mode: call model.eval()")
    return findings


def _misplaced(name: str, module: nn.Module) -> list[str]:
    """torch's parametrizations that norm the matrix (out, in * taps), which is not the operator of a convolution."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return []
    parts: list[Any] = [*module._forward_pre_hooks.values()]  # where the older torch.nn.utils.spectral_norm is
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        parts += [part for maps in lists.values() for part in maps]
    kinds = {type(part).__name__.strip("_") for part in parts if type(part).__module__ in _TORCHS}
    return [
        f"{name or '(model)'}: torch's {kind} norms the weight as a matrix, not the convolution, whose norm can be "
        "several times larger"
        for kind in sorted(kinds & {"SpectralNorm", "Orthogonal"})
    ]


_TORCHS = ("torch.nn.utils.parametrizations", "torch.nn.utils.spectral_norm")


def _findings_after(
    rows: tuple[AuditRow, ...],
    graph: Graph,
    bounds: tuple[StepBound, ...],
    measured: dict[int, float],
    has_prefix: bool,
) -> list[str]:
    remarks = dict.fromkeys(
        f"{_own_place(call.place, has_prefix) or '(model)'}: {bound.remark}"
        for call, bound in zip(graph.calls, bounds, strict=True)
        if bound.remark
    )
    above = [row for row in rows if row.lower is not None and row.lower > 1 + 1e-6]
    findings = list(remarks)
    if above:
        above.sort(key=lambda row: -(row.lower or 0.0))
        names = ", ".join(f"{row.place or '(model)'} ({row.lower:.4g})" for row in above[:5])
        findings.append(
            f"{len(above)} of {len(measured)} linear steps have a norm above 1 (measured): {names}"
            + (", ..." if len(above) > 5 else "")
        )
    return findings
