"""Every call of the fuzzer into onelip, so that a new name or a moved function changes this file only."""

import contextlib
import copy
import functools
import io
import json
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.export.exported_program as exporting
from torch import Tensor, nn

import onelip
import onelip.nn as layers
from onelip.bounds import bound_layer, exact_bound_layer
from onelip.certification import ProofError, write_certificate
from onelip.certification.audit import UnsoundBound
from onelip.certification.certificate import WeightFile
from onelip.checker import Rejected, check
from onelip.export import list_zoo
from onelip.export.hub import load_pretrained
from onelip.graph import CannotTrace, step as _step
from onelip.graph.modules import bound_module
from onelip.methods.registry import METHODS

REFUSALS = (onelip.UnsupportedLayer, onelip.NonFiniteWeight, CannotTrace, ProofError)
__all__ = ["METHODS", "REFUSALS", "Rejected", "UnsoundBound", "check", "layers"]
_ROOT = str(Path(onelip.__file__).parent)


def is_refusal(error: BaseException) -> bool:
    """Whether the library has declined on purpose: its own errors, and ValueErrors that it raises itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_own = trace is not None and _ROOT in trace.tb_frame.f_code.co_filename
    return isinstance(error, REFUSALS) or (isinstance(error, ValueError | TypeError) and is_own)


def audit(model: nn.Module, example: Tensor, *, lower: bool) -> float | None:
    """The proved constant of a model, or None."""
    return onelip.audit(model, example, lower=lower).upper


def apply_method(name: str, layer: nn.Module, size: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    """The layer with a method on it, in eval mode where only that is sound."""
    method = METHODS[name]
    given = {"input_size": size} if method.needs_input_size and size else {}
    return method.apply(layer, **given, **options)


def claim(layer: nn.Module) -> float | None:
    """The constant that a layer states by construction."""
    return bound_module(layer).constant


def stated(model: nn.Module) -> float | None:
    """The constant that the summary states of a chain of modules."""
    return onelip.summary(model).constant


def stored_bounds(layer: nn.Module, size: tuple[int, ...] | None, effort: str, exact: bool) -> dict[str, float]:
    """Proved bounds of the weights that a torch layer has, by the name of what proved them."""
    efforts: Any = effort
    found = {"fast": bound_layer(layer, size, effort=efforts).value}
    if exact:
        found["exact"] = exact_bound_layer(layer, size).value
    return found


class methods:
    """Methods that put modules of their own in place, for programs."""

    sll = staticmethod(METHODS["sll"].apply)
    cpl = staticmethod(METHODS["cpl"].apply)
    soc = staticmethod(METHODS["soc"].apply)


bake = onelip.bake
jtj = onelip.jtj
project = onelip.project
prove = onelip.prove


def zoo() -> list[str]:
    """Names of the trained networks in the package."""
    return [entry.name for entry in list_zoo()]


def pretrained(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A trained network, and the shape of its images."""
    found = load_pretrained(name)
    return found.model, tuple(found.config.shape)


def certify(model: nn.Module, images: Tensor, **settings: Any) -> Any:
    function: Any = onelip.certify
    return function(model, images, **settings)


def save_certificate(folder: Path, model: nn.Module, images: Tensor, labels: Tensor | None) -> dict[str, Any]:
    """Weights, images and certificate of a float64 model as files in a folder; the content of the certificate."""
    from safetensors.torch import save_file

    save_file(
        {name: value.contiguous().clone() for name, value in model.state_dict().items()}, folder / "w.safetensors"
    )
    np.save(folder / "images.npy", images.numpy())
    found = certify(model, images, labels=labels, exact=True)
    files = WeightFile(folder / "w.safetensors")
    write_certificate(folder / "cert.json", found, images, files, source="fuzz", images_file=folder / "images.npy")
    return json.loads((folder / "cert.json").read_text())


@contextlib.contextmanager
def planted(rules: dict[str, float] | None = None, methods: tuple[Any, ...] = ()) -> Iterator[None]:
    """Wrong on purpose, for tests of the fuzzer: operations with these constants, and further methods."""
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(_step._RULES, dict(_step._RULES)), (METHODS, dict(METHODS))]
    for name, constant in (rules or {}).items():
        _step.register_rule(name)(lambda step, constant=constant: step.times(constant, "planted"))
    METHODS.update({method.name: method for method in methods})
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


_TRACING = ("_collect_all_valid_cia_ops", "_override_composite_implicit_decomp")
_SLOW = {name: getattr(exporting, name, None) for name in _TRACING}


@contextlib.contextmanager
def quick_tracing() -> Iterator[None]:
    """Makes torch.export about seven times faster for small networks, with the same result.

    torch overrides some 500 composite operations before each decomposition and puts them back after it, which takes
    85 % of an audit. Here they are overridden once and stay so; operations outside of a trace never see them.
    """
    collect, override = _SLOW.values()
    if collect is None or override is None:  # another torch
        yield
        return
    opened: dict[Any, Any] = {}

    @contextlib.contextmanager
    def stays_open(operations: dict[Any, Any]) -> Iterator[None]:
        key = frozenset(operations.items())
        if key not in opened:
            opened[key] = override(operations)
            opened[key].__enter__()
        yield

    with _replaced(functools.cache(collect), stays_open):
        try:
            yield
        finally:
            for context in reversed(opened.values()):
                context.__exit__(None, None, None)


@contextlib.contextmanager
def _replaced(*functions: Any) -> Iterator[None]:
    before = [getattr(exporting, name) for name in _TRACING]
    for name, function in zip(_TRACING, functions, strict=True):
        setattr(exporting, name, function)
    try:
        yield
    finally:
        for name, function in zip(_TRACING, before, strict=True):
            setattr(exporting, name, function)


def slow_tracing() -> contextlib.AbstractContextManager[None]:
    """torch's own way, inside of `quick_tracing`."""
    return _replaced(*_SLOW.values())


@contextlib.contextmanager
def shared_exports() -> Iterator[None]:
    """Export a program once for consecutive networks that differ in their weights only (`Network.program`).

    torch.export runs without values, so its graph is the same for all of them; the weights are put into a copy of it. A
    graph with weights of another network would give a false bound, which the oracle reports. Everything else of an
    audit runs for each network. A network that is exported twice (masks, a changing state) is never shared.
    """
    export, kept, exported = torch.export.export, {}, set()

    def export_once(model: nn.Module, *arguments: Any, **settings: Any) -> Any:
        key = getattr(type(model), "program", None)
        if key is None or type(model) in exported:
            kept.pop(key, None)
            return export(model, *arguments, **settings)
        exported.clear()
        exported.add(type(model))
        if (weights := _weights(model, kept.get(key))) is not None:
            program = copy.copy(kept[key])
            program._state_dict = weights
            return program
        kept.clear()
        kept[key] = export(model, *arguments, **settings)
        return kept[key]

    torch.export.export = export_once
    try:
        yield
    finally:
        torch.export.export = export


def _weights(model: nn.Module, program: Any) -> dict[str, Tensor] | None:
    """The tensors of a model by their names in an exported program; None if they do not fit."""
    if program is None or program.constants:
        return None
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fits = all(
        name in held and (held[name].shape, held[name].dtype) == (old.shape, old.dtype)
        for name, old in program.state_dict.items()
    )
    return {name: held[name] for name in program.state_dict} if fits else None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def commit() -> str:
    """The commit of the library, with a mark if files were changed since."""
    run = functools.partial(subprocess.run, cwd=Path(onelip.__file__).parent, capture_output=True, text=True)
    name = run(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip() or "unknown"
    return name + ("-changed" if run(["git", "status", "--porcelain", "."]).stdout.strip() else "")
