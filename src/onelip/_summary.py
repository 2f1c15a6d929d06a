"""Layer by layer: which constant each module has by construction, and for which nobody vouches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from onelip.bounds.modules import Vouch, vouch, weights_of
from onelip.methods.aol import find_aol
from onelip.nn._base import LipschitzModule


@dataclass(frozen=True)
class LayerSummary:
    """One row: the module's name in the model, what it is, and what is known of it."""

    name: str
    layer: str
    vouch: Vouch
    advice: str | None = None


@dataclass(frozen=True)
class Summary:
    """The rows, and what they come to. `print` it."""

    layers: tuple[LayerSummary, ...]
    is_chain: bool

    @property
    def not_vouched(self) -> list[str]:
        """Names of the modules for which no constant is known."""
        return [row.name for row in self.layers if row.vouch.constant is None]

    @property
    def constant(self) -> float | None:
        """Product of all constants, if all are known and the model is a chain of modules; else None."""
        if not self.is_chain or self.not_vouched:
            return None
        return math.prod(row.vouch.constant for row in self.layers if row.vouch.constant is not None)

    def __str__(self) -> str:
        rows = [("module", "layer", "constant", "why")]
        for row in self.layers:
            constant = "?" if row.vouch.constant is None else f"{row.vouch.constant:.6g}"
            rows.append((row.name or "(model)", row.layer, constant, row.vouch.why))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        lines.insert(1, "-" * max(len(line) for line in lines))
        lines += [f"advice for {row.name}: {row.advice}" for row in self.layers if row.advice]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        missing = self.not_vouched
        if missing:
            names = ", ".join(name or "(model)" for name in missing[:6]) + (", ..." if len(missing) > 6 else "")
            return f"NOT vouched for: {len(missing)} of {len(self.layers)} modules ({names})."
        if self.constant is not None:
            return f"Lipschitz constant of the model at most {self.constant:.6g} (eval mode, real arithmetic)."
        return (
            "Every module has a constant; what the model's own forward does between them (sums, concatenations, "
            "functional calls) is not looked at here."
        )


def summary(model: nn.Module) -> Summary:
    """Tell, module by module, which Lipschitz constant each has by construction.

    Only modules are looked at, not what a `forward` of your own does with them.

    Example:
        >>> import onelip
        >>> summary(nn.Sequential(onelip.nn.AOLLinear(4, 4), nn.ReLU())).constant
        1.0
    """
    rows = []
    for name, module in _modules(model):
        if _is_leaf(module):
            aol = find_aol(module)
            rows.append(LayerSummary(name, _title(module), vouch(module), aol.advice() if aol else None))
        elif own := weights_of(module):
            why = f"uses parameters of its own in forward: {', '.join(own)}"
            rows.append(LayerSummary(name, _title(module), Vouch(None, why)))
    return Summary(tuple(rows), _is_chain(model))


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Named modules without the insides of leaves."""
    hidden: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in hidden):
            continue
        yield name, module
        if _is_leaf(module):
            hidden.append(f"{name}." if name else "")
            if not name:
                return


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, LipschitzModule) or parametrize.is_parametrized(module):
        return True
    return next(module.children(), None) is None


def _is_chain(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:
        return all(_is_chain(child) for child in module)
    return _is_leaf(module)


def _title(module: nn.Module) -> str:
    kind = parametrize.type_before_parametrizations(module).__name__
    weight = getattr(module, "weight", None) if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) else None
    return kind if weight is None else f"{kind} {'x'.join(str(n) for n in weight.shape)}"
