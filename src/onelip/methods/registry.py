"""The one table of methods, read by `onelip.constrain`, the documentation and the contract test."""

import difflib

from onelip.methods.aol import METHOD as AOL
from onelip.methods.fourier.bro import METHOD as BRO
from onelip.methods.fourier.cayley import METHOD as CAYLEY
from onelip.methods.fourier.eco import METHOD as ECO
from onelip.methods.fourier.lot import METHOD as LOT
from onelip.methods.fourier.sandwich import METHOD as SANDWICH
from onelip.methods.free_weights import EMMA, GLORO, GRADIENT_PENALTY, LMT, OCNN
from onelip.methods.method import Guarantee, Mechanism, Method, PaperRow
from onelip.methods.norms.clipping import METHOD as CLIPPING
from onelip.methods.norms.last_layer import METHOD as LAST_LAYER
from onelip.methods.norms.lcc import METHOD as LCC
from onelip.methods.norms.parseval import METHOD as PARSEVAL
from onelip.methods.norms.spectral_norm import METHOD as SPECTRAL_NORM, RESHAPED as SPECTRAL_NORM_RESHAPED
from onelip.methods.orthogonal.aoc import METHOD as AOC
from onelip.methods.orthogonal.bcop import METHOD as BCOP
from onelip.methods.orthogonal.bjorck import METHOD as BJORCK
from onelip.methods.orthogonal.cholesky import METHOD as CHOLESKY
from onelip.methods.orthogonal.oni import METHOD as ONI
from onelip.methods.orthogonal.soc import METHOD as SOC
from onelip.methods.orthogonal.soc_cr import METHOD as SOC_CR
from onelip.methods.residual.cpl import METHOD as CPL
from onelip.methods.residual.liresnet import METHOD as LIRESNET
from onelip.methods.residual.sll import METHOD as SLL
from onelip.methods.table import markdown_tables

# In the order of the paper's table, then what came after.
_METHODS: tuple[Method, ...] = (
    CLIPPING,
    GRADIENT_PENALTY,
    PARSEVAL,
    OCNN,
    SPECTRAL_NORM,
    SPECTRAL_NORM_RESHAPED,
    LCC,
    LMT,
    GLORO,
    BCOP,
    BJORCK,
    ONI,
    CAYLEY,
    SOC,
    ECO,
    AOL,
    SOC_CR,
    LAST_LAYER,
    SLL,
    CPL,
    LOT,
    SANDWICH,
    BRO,
    LIRESNET,
    EMMA,
    CHOLESKY,
    AOC,
)

METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def list_methods() -> list[str]:
    """Names of all methods, for `onelip.constrain`."""
    return sorted(METHODS)


def register_method(method: Method) -> Method:
    """Make a method known to `onelip.constrain`, `onelip train --method` and `onelip methods` by its name.

    Raises:
        ValueError: if the name is taken.
    """
    if method.name in METHODS:
        raise ValueError(f"{method.name!r} is registered already; choose another name")
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Look a method up.

    Examples:
        >>> get_method("aol").guarantee
        'proved'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of the methods {', '.join(list_methods())}, got {name!r}{hint}")
    return METHODS[name]


def markdown_table() -> str:
    """The registry as the tables of docs/methods.md."""
    return markdown_tables(_METHODS)


__all__ = [
    "METHODS",
    "Guarantee",
    "Mechanism",
    "Method",
    "PaperRow",
    "get_method",
    "list_methods",
    "markdown_table",
    "register_method",
]
