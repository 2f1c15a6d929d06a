"""The constant that each module of a model has by construction, and the modules without one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils import parametrize

from onelip.bounds.falsify import falsify_layer, falsify_module
from onelip.core.bake import check_module
from onelip.core.errors import NonFiniteWeight, UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.lipschitz_module import Bound, LipschitzModule, is_changed, part_in_training
from onelip.core.modes import rounding_room
from onelip.core.parametrization import find_parametrization, original_of
from onelip.graph.modules import bound_chain, bound_module, links

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LayerSummary:
    """One row of a summary: a module, its name in the model, and its constant."""

    name: str
    layer: str
    bound: Bound
    advice: str | None = None
    is_inside: bool = False  # part of a layer that has its own row and constant: shown, not counted


@dataclass(frozen=True)
class Summary:
    """The constant of a model and of each of its layers. `print` it."""

    layers: tuple[LayerSummary, ...]
    chain: Bound  # of the modules, one after the other

    @property
    def unproved(self) -> list[str]:
        """Names of the modules for which no constant is known."""
        return [row.name for row in self.layers if row.bound.constant is None and not row.is_inside]

    @property
    def constant(self) -> float | None:
        """Product of all constants, if all are known and the model is a chain of modules; else None."""
        return None if self.unproved else self.chain.constant

    def __str__(self) -> str:
        rows = [("module", "layer", "constant", "why")]
        for row in self.layers:
            constant = "?" if row.bound.constant is None else f"{row.bound.constant:.6g}"
            layer = f"  {row.layer}" if row.is_inside else row.layer
            rows.append((row.name or "(model)", layer, constant, row.bound.why))
        advice = [f"advice for {row.name}: {row.advice}" for row in self.layers if row.advice]
        return "\n".join([*aligned(rows), *advice, self._verdict()])

    def _verdict(self) -> str:
        missing = self.unproved
        if missing:
            names = ", ".join(name or "(model)" for name in missing[:6]) + (", ..." if len(missing) > 6 else "")
            return f"UNPROVED: no bound is known for {len(missing)} of {len(self.layers)} modules ({names})."
        if self.constant is not None:
            return f"Lipschitz constant of the model at most {self.constant:.6g} (eval mode, real arithmetic)."
        return (
            "Every module has a constant; what the model's own forward does between them (sums, concatenations, "
            "functional calls) is not evaluated here."
        )


def summary(model: nn.Module) -> Summary:
    """Summarise the Lipschitz constant that each module has by construction.

    Linear layers without a method are bounded by their stored weights if these need no gradient, else not at all:
    training would change them. Only modules are evaluated, not the operations between them in a `forward` of your own.
    Every constant is compared with ratios that are measured on copies of the module: of linear layers with their
    weights, of others on the first of some usual shapes that they accept. A module of your own that accepts none of
    these is not measured; `onelip.audit` runs it on your images.

    Raises:
        UnsoundBound: if a measurement contradicts a constant: a mistake in the library.

    Examples:
        >>> import onelip
        >>> summary(nn.Sequential(onelip.nn.AOLLinear(4, 4), nn.ReLU())).constant
        1.0
    """
    check_module(model)
    rows = tuple(_rows(model, "", set(), in_chain=True, is_inside=False))
    part = part_in_training(model)
    if part is None:
        return Summary(rows, bound_chain(links(model)))
    why = "in training mode, and the model is in eval mode; call model.eval()"
    rows = tuple(replace(row, bound=Bound(None, why), is_inside=False) if row.name == part[0] else row for row in rows)
    return Summary(rows, Bound(None, f"{part[0]}: {why}"))


def _rows(module: nn.Module, name: str, seen: set[int], *, in_chain: bool, is_inside: bool) -> Iterator[LayerSummary]:
    """`in_chain`: only Sequentials are above, so the module is applied where it stands, and counts wherever it does."""
    if id(module) in seen and not in_chain:  # how often a forward of one's own uses it is not known
        return
    seen.add(id(module))
    if _has_constant_of_its_own(module):
        found = find_parametrization(module)
        yield LayerSummary(name, title_of(module), _tested(module), found.advice() if found else None, is_inside)
        is_inside = True
    elif changed := is_changed(module):
        yield LayerSummary(name, title_of(module), Bound(None, changed), None, is_inside)
    elif own := [key for key, parameter in module._parameters.items() if parameter is not None]:
        why = f"uses parameters of its own in forward: {', '.join(own)}"
        yield LayerSummary(name, title_of(module), Bound(None, why), None, is_inside)
    in_chain = in_chain and type(module) is nn.Sequential
    if not parametrize.is_parametrized(module):
        for key, child in module._modules.items():  # named_children would give a child that stands twice once
            if child is not None:
                path = f"{name}.{key}" if name else key
                yield from _rows(child, path, seen, in_chain=in_chain, is_inside=is_inside)


def _tested(module: nn.Module) -> Bound:
    """The bound of a module, after a measurement has not contradicted it."""
    known = bound_module(module)
    if known.constant is None:
        return known
    if isinstance(module, LINEAR_LAYERS) and not parametrize.is_parametrized(module):
        return known  # fixed weights, whose bound was measured when it was computed
    try:
        if isinstance(module, LINEAR_LAYERS):
            falsify_layer(module, known.constant * rounding_room(original_of(module).dtype))
        else:
            falsify_module(module, known.constant)
    except (UnsupportedLayer, NonFiniteWeight) as error:  # settings that torch does not run; diverged training
        return Bound(None, str(error))
    return known


def _has_constant_of_its_own(module: nn.Module) -> bool:
    if isinstance(module, LipschitzModule) or parametrize.is_parametrized(module):
        return True
    return next(module.children(), None) is None and type(module) not in _CONTAINERS


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table whose first row is the head; its last column is not padded.

    Examples:
        >>> aligned([("layer", "why"), ("ReLU", "slope at most 1")])
        ['layer  why', '----------------------', 'ReLU   slope at most 1']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in table]
    return [lines[0], "-" * min(120, max(map(len, lines))), *lines[1:]]


def title_of(module: nn.Module) -> str:
    """The class of a layer and the numbers of its channels."""
    kind = parametrize.type_before_parametrizations(module).__name__
    if isinstance(module, nn.Linear):
        return f"{kind} {module.in_features} -> {module.out_features}"
    if isinstance(module, nn.modules.conv._ConvNd):
        return f"{kind} {module.in_channels} -> {module.out_channels}, {'x'.join(map(str, module.kernel_size))}"
    return kind
