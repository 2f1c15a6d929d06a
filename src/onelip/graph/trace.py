"""Trace a module: list its calls in order, each a layer with a rule of its own or one ATen operation.

Nothing is assumed about a `forward`: torch.export runs it on tensors without values, so the graph contains everything
that the program does with inputs of this shape: sums, concatenations, functional calls, hooks. Control flow that
depends on values has no single graph and raises an error. In-place operations are rewritten (a write into a view
becomes a scatter), so that following the operands follows the data. Layers with a better rule than their operations
stay single calls, see Note [Leaves] in _opaque.py.

Note [Batch]
    A bound is about one sample. So the trace is for an unknown number of samples, about which the program may ask
    nothing, and which it may not compute with (_reader.py). The graph is that of two samples. A rule holds for a call
    only if axis 0 is the batch before and after it.

Note [Calls]
    A bound must hold every time the model is run. So a copy of the model is run before it is traced, with batches of
    several lengths and other values, with and without gradients. After the first run its state (onelip.core.state) must
    not change, so by induction all later runs are the same program. If the first run changes the state (it fills a
    cache), the program before that run is traced, too, and must be the same. A layer that stays a single call may not
    change: its program is not seen.
"""

import contextlib
import copy
import functools
import io
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from onelip.core.bake import bake, check_initialised, check_module, plain_of
from onelip.core.errors import CannotTrace, ChangingModel, NonFiniteWeight
from onelip.core.lipschitz_module import part_in_training
from onelip.core.state import Snapshot, unchanged
from onelip.graph._opaque import LeafRefused, Masks, as_one_operation, is_known, is_leaf, leaves_are
from onelip.graph._reader import Reader, conditions_on_length, is_random
from onelip.graph.step import Call, Graph, first_different_call


def trace(model: nn.Module, example: Tensor, *, is_own: bool = False) -> Graph:
    """Return the graph of a model in eval mode, for inputs with the shape of the example. The model is not changed.

    Args:
        model: takes one tensor and gives one. Parametrized layers are baked: the graph has their stored weights.
        example: an input with a batch axis, of any length (Note [Batch]). Its values do not matter.
        is_own: True for a plain model in eval mode without other users: it is not copied, the graph has its layers.

    Raises:
        CannotTrace: for several inputs or outputs, control flow that depends on values, state that changes, autocast.
        NonFiniteWeight: if a weight is not finite.

    Examples:
        >>> graph = trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.zeros(2, 4))
        >>> [(call.place, call.op) for call in graph.calls]
        [('', 'input'), ('0', 'module'), ('1', 'aten.relu.default')]
    """
    example = _checked_example(model, example)
    if is_own:  # before its state is read, which is restored below
        model.eval().requires_grad_(False)
    try:
        with unchanged(model) as state:
            return _graph(_plain(model, is_own), example, state)
    except ChangingModel as error:
        raise CannotTrace(str(error)) from error


def _graph(plain: nn.Module, example: Tensor, state: Snapshot) -> Graph:
    """The graph of a plain model, which shares with the user's what `state` holds. See Note [Calls]."""
    paths = [name for name, module in plain.named_modules() if is_leaf(module)]
    leaves = [plain.get_submodule(path) for path in paths]

    def read(model: nn.Module, batch: Tensor) -> Graph:
        program = _export(_running_copy(model, leaves, paths), batch, model, paths)
        return Reader(program, leaves, paths, tuple(batch.shape)).read()

    def fresh() -> nn.Module:
        return _shared_copy(plain, own, [])

    # A second copy would double the memory of a large network; the state shows whether a run writes into a parameter.
    own = [p for p in plain.parameters() if state.holds(p)]
    with torch.no_grad(), leaves_are(leaves):
        used, first = fresh(), None
        is_changed, draws = _run_in_turn(used, example, paths)
        state.check(own)
        if is_changed:  # Note [Calls]
            state.restore()
            first = read(plain, example[:2])
            state.restore()  # tensors without values may lie in what is shared
            used = fresh()
            _run_in_turn(used, example, paths)
        graph = read(used, example[:2])
        if first is not None and (changed := first_different_call(first, graph)) is not None:
            raise CannotTrace(
                "expected the same program at every call, got a different one at the second call, starting at "
                f"{changed.place or 'the model'!r} ({changed.op}); the forward must not change what it reads"
            )
    if draws and not any(is_random(_target(call)) for call in graph.calls):
        raise CannotTrace(
            "expected a model that is the same function at every call, got one that draws random numbers of torch in "
            "eval mode, at a place that its graph does not show; remove them"
        )
    return graph


def _check_modes(model: nn.Module) -> None:
    """Refuse a model in eval mode with a part in training mode: its calls are not those of eval mode."""
    if (part := part_in_training(model)) is not None:
        name, module = part
        raise CannotTrace(
            f"expected a model in eval mode, got {name!r} ({type(module).__name__}) in training mode; call model.eval()"
        )


def check_example(example: object) -> None:
    """Check that an example input is a batch of numbers.

    Raises:
        CannotTrace: if it is not.
    """
    if isinstance(example, Tensor) and (
        example.layout != torch.strided or example.is_nested or example.is_quantized or example.is_meta
    ):
        raise CannotTrace("expected a dense example with values, got a sparse, nested, quantized or meta tensor")
    if not isinstance(example, Tensor) or example.dim() < 2 or example.numel() == 0:
        got = f"shape {tuple(example.shape)}" if isinstance(example, Tensor) else type(example).__name__
        raise CannotTrace(f"expected an example input with a batch axis, got {got}; give a tensor (batch, ...)")
    if not example.is_floating_point():
        raise CannotTrace(
            f"expected a floating-point example, got {example.dtype}; for uint8 images pass images.double() / 255; "
            "the constant is in the units of this input"
        )


def _checked_example(model: nn.Module, example: Tensor) -> Tensor:
    check_module(model)
    _check_modes(model)
    check_example(example)
    if torch.is_autocast_enabled(example.device.type):
        raise CannotTrace(
            f"expected no autocast, got torch.autocast to {torch.get_autocast_dtype(example.device.type)} around the "
            "call: its rounding has no proof; call it outside of torch.autocast"
        )
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        raise CannotTrace("expected no global forward hooks, got some: they may change every layer; remove them")
    return torch.cat([example] * 4)[:4]


def _plain(model: nn.Module, is_own: bool) -> nn.Module:
    check_initialised(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter):  # such a class can replace F.linear and all other functions
            raise CannotTrace(
                f"expected parameters and buffers that are plain tensors, got {type(tensor).__name__} in {name!r}, "
                "which may compute something else (quantised, distributed); turn it into a plain tensor"
            )
    try:
        plain = plain_of(model, fold=False) if is_own else bake(model, fold=False)
        return plain.eval().requires_grad_(False)
    except (NonFiniteWeight, ChangingModel, CannotTrace):
        raise
    except Exception as error:  # of somebody else's classes
        raise CannotTrace(
            f"expected weights that can be computed, got {type(error).__name__}: {_first_line(error)}; run the model "
            "once to see where"
        ) from error


def _shared_copy(plain: nn.Module, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> nn.Module:
    """A copy that shares the memory of some parameters and buffers."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in parameters}
    return copy.deepcopy(plain, shared | {id(b): b.detach() for b in buffers})


def _running_copy(plain: nn.Module, leaves: list[nn.Module], paths: list[str]) -> nn.Module:
    """The copy that torch.export runs, with the leaves at the given paths as single operations."""
    # torch.export replaces the parameters of the module that it runs by tensors without values. It runs a copy, so that
    # the leaves keep theirs. The copy's own modules stay where they are, since a forward may read `self.layer.weight`.
    # Memory is shared: nothing runs on the numbers themselves.
    running = _shared_copy(plain, plain.parameters(), plain.buffers())
    for number, path in enumerate(paths):
        running.get_submodule(path).__dict__["forward"] = as_one_operation(
            running.get_submodule(path), leaves[number], number
        )
    return running


def _is_functional(program: torch.export.ExportedProgram) -> bool:
    """Whether a program consists of operations that write into nothing."""
    return all(
        node.target is operator.getitem
        or (isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable)
        for node in program.graph.nodes
        if node.op not in ("placeholder", "output")
    )


def _run_in_turn(model: nn.Module, example: Tensor, leaves: list[str]) -> tuple[bool, bool]:
    """Run a model several times, as different callers would. Note [Calls].

    Returns:
        Whether the first run changes the state of the model, and whether any run draws random numbers of torch.

    Raises:
        ChangingModel: if a later call changes the state of the model.
        CannotTrace: if the model does not take the example.
    """
    strict = [Snapshot(module, path) for path in leaves if not is_known(module := model.get_submodule(path))]
    generator = torch.Generator().manual_seed(0)
    calls = [torch.rand((n, *example.shape[1:]), generator=generator).to(example) for n in (2, 3, 1)]
    before = Snapshot(model)
    with torch.inference_mode(False), _quietly():
        try:
            with torch.no_grad():
                model(example[:2].clone())
        except TypeError:  # a missing argument: the export reports it
            return False, False
        except Exception as error:  # whatever a forward of somebody else raises
            raise CannotTrace(
                f"expected a model that takes inputs of shape {tuple(example.shape[1:])}, the batch axis left out, got "
                f"{type(error).__name__} when it ran: {_first_line(error)}; give inputs of the shape that it is made "
                "for, with a batch axis: image[None] for one image"
            ) from error
        for state in strict:
            state.check()
        is_changed = before.difference() is not None
        after = Snapshot(model)
        for x, mode in zip(calls, (torch.no_grad(), torch.enable_grad(), torch.inference_mode()), strict=True):
            # Errors are left to the export: a layer that states its constant may refuse to be differentiated.
            with contextlib.suppress(Exception), mode:
                model(x.requires_grad_(torch.is_grad_enabled()).clone())
            after.check()  # each time: a state that alternates is the same again after some calls
        return is_changed, after.draws()


def _export(running: nn.Module, example: Tensor, plain: nn.Module, leaves: list[str]) -> torch.export.ExportedProgram:
    """The functional ATen program of the running copy; `plain` is the model itself, with single calls at some paths."""
    try:
        with torch.inference_mode(False), torch.no_grad(), _quietly():
            program = _program(running, example.detach(), plain, leaves)
            conditions = conditions_on_length(program)
            if not _is_functional(program):
                # An empty table of decompositions only rewrites in-place operations, and inlines regions (autocast).
                # It takes most of the time of tracing a small network, so it is left out where there is nothing to do.
                program = program.run_decompositions({})
    except LeafRefused as refused:
        raise CannotTrace(str(refused)) from refused
    except Exception as error:  # whatever a forward of somebody else raises, and torch's own refusals
        if "Constraints violated" in str(error):
            raise CannotTrace(
                "expected the same program for every number of samples, got one that needs the number itself: len(x), "
                "int(x.shape[0]), a loop over the samples, or a constant for two samples; use x.shape[0] for sizes, or "
                "x.flatten(1)"
            ) from error
        raise CannotTrace(
            f"expected a model with one graph for all inputs of shape {tuple(example.shape)}, got "
            f"{type(error).__name__}: {_first_line(error)}; control flow that depends on values (if, while, "
            ".item()), further inputs and calls out of torch cannot be traced: write them with torch operations, "
            "or put them into a LipschitzModule that states its constant"
        ) from error
    if conditions:
        raise CannotTrace(
            "expected the same program for every number of samples, got one that branches on this number; it was "
            f"traced for {conditions[0]}; the forward must not depend on the length of the batch"
        )
    _check_signature(program)
    return program


def _program(running: nn.Module, example: Tensor, plain: nn.Module, leaves: list[str]) -> torch.export.ExportedProgram:
    """torch.export for an unknown number of samples, with the places of constant masks put in (_opaque.py)."""

    def export() -> torch.export.ExportedProgram:
        sizes: Any = torch.export.ShapesCollection()
        sizes[example] = {0: torch.export.Dim.DYNAMIC}
        return torch.export.export(running, (example,), dynamic_shapes=sizes, strict=False)

    program = None
    with Masks() as masks:
        try:
            program = export()
        except Exception:
            if not masks.is_used:
                raise
    if program is not None and not masks.is_used:
        return program
    with Masks(Masks().count(copy.deepcopy(plain), example, leaves)):
        return export()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress deprecation warnings that torch causes itself, and its log of an error that `CannotTrace` reports."""
    names = ("torch", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


def _check_signature(program: torch.export.ExportedProgram) -> None:
    signature = program.graph_signature
    written = [*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()]
    if written:
        raise CannotTrace(
            f"expected a model that is the same function at every call, got one that writes into {', '.join(written)} "
            "in eval mode; remove this assignment, or make it in training mode only"
        )
    if signature.user_inputs_to_mutate:
        raise CannotTrace("expected a model that leaves its input alone, got one that writes into it; clone it first")
    if len(signature.user_inputs) != 1 or len(signature.user_outputs) != 1:
        raise CannotTrace(
            f"expected one tensor in and one out, got {len(signature.user_inputs)} and {len(signature.user_outputs)}; "
            "wrap the model in a module that picks one"
        )
    if program.call_spec.out_spec != tree_flatten(0)[1]:
        raise CannotTrace(
            "expected the model to return a tensor, got one inside a container; wrap the model to return the tensor"
        )


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _target(call: Call) -> Any:
    """The operation of a call, or None."""
    return functools.reduce(getattr, call.op.split("."), torch.ops) if call.op.count(".") == 2 else None
