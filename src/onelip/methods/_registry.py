"""The one table of methods, read by `onelip.constrain`, the documentation and the contract test."""

import difflib

from onelip.methods._method import Guarantee, Mechanism, Method, PaperRow, Step, Term
from onelip.methods._table import markdown_tables
from onelip.methods.aoc import METHOD as AOC
from onelip.methods.aol import METHOD as AOL
from onelip.methods.bcop import METHOD as BCOP
from onelip.methods.bjorck import METHOD as BJORCK
from onelip.methods.bro import METHOD as BRO
from onelip.methods.cayley import METHOD as CAYLEY
from onelip.methods.certificate_regularisation import METHOD as SOC_CR
from onelip.methods.cholesky import METHOD as CHOLESKY
from onelip.methods.clipping import METHOD as CLIPPING
from onelip.methods.cpl import METHOD as CPL
from onelip.methods.eco import METHOD as ECO
from onelip.methods.emma import METHOD as EMMA
from onelip.methods.gloro import METHOD as GLORO
from onelip.methods.gradient_penalty import METHOD as GRADIENT_PENALTY
from onelip.methods.last_layer import METHOD as LAST_LAYER
from onelip.methods.lcc import METHOD as LCC
from onelip.methods.liresnet import METHOD as LIRESNET
from onelip.methods.lmt import METHOD as LMT
from onelip.methods.lot import METHOD as LOT
from onelip.methods.ocnn import METHOD as OCNN
from onelip.methods.oni import METHOD as ONI
from onelip.methods.parseval import METHOD as PARSEVAL
from onelip.methods.sandwich import METHOD as SANDWICH
from onelip.methods.sll import METHOD as SLL
from onelip.methods.soc import METHOD as SOC
from onelip.methods.spectral_norm import METHOD as SPECTRAL_NORM
from onelip.methods.spectral_norm import RESHAPED as SPECTRAL_NORM_RESHAPED

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


def get_method(name: str) -> Method:
    """Look a method up.

    Example:
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
    "Step",
    "Term",
    "get_method",
    "list_methods",
    "markdown_table",
]
