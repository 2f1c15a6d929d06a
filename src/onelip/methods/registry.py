"""The registry of methods, used by `onelip.constrain`, the command line, the documentation and the contract test."""

from onelip.core.arguments import did_you_mean
from onelip.core.plugins import load_entry_points
from onelip.methods.aol import METHOD as AOL
from onelip.methods.fourier import bro, cayley, eco, lot, sandwich
from onelip.methods.free_weights import EMMA, GLORO, GRADIENT_PENALTY, LMT, OCNN
from onelip.methods.method import Method
from onelip.methods.norms import clipping, last_layer, lcc, parseval, spectral_norm
from onelip.methods.orthogonal import aoc, bcop, bjorck, cholesky, oni, soc
from onelip.methods.residual import cpl, liresnet, sll

# In the order of the table of the paper, then later methods.
_METHODS: tuple[Method, ...] = (
    clipping.METHOD,
    GRADIENT_PENALTY,
    parseval.METHOD,
    OCNN,
    spectral_norm.METHOD,
    spectral_norm.RESHAPED,
    lcc.METHOD,
    LMT,
    GLORO,
    bcop.METHOD,
    bjorck.METHOD,
    oni.METHOD,
    cayley.METHOD,
    soc.METHOD,
    eco.METHOD,
    AOL,
    soc.WITH_REGULARISATION,
    last_layer.METHOD,
    sll.METHOD,
    cpl.METHOD,
    lot.METHOD,
    sandwich.METHOD,
    bro.METHOD,
    liresnet.METHOD,
    EMMA,
    cholesky.METHOD,
    aoc.METHOD,
)

METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def list_methods() -> list[str]:
    """Return the names of all methods, sorted.

    Examples:
        >>> list_methods()[:2]
        ['aoc', 'aol']
    """
    load_entry_points("onelip.methods")
    return sorted(METHODS)


def register_method(method: Method) -> Method:
    """Make a method available by its name: in `onelip.constrain`, `onelip train --method` and `onelip methods`.

    Test a new method with `onelip.testing.check_contract(method)`.

    Args:
        method: the method.

    Returns:
        The same method.

    Raises:
        ValueError: if the name is taken.

    Examples:
        >>> import onelip
        >>> from torch import nn
        >>> def scaled(module, *, lipschitz=1.0):
        ...     return onelip.methods.spectral_norm(module, iterations=3, lipschitz=lipschitz)
        >>> method = onelip.methods.Method(
        ...     name="scaled",
        ...     title="Spectral normalisation with three iterations",
        ...     mechanism="parametrization",
        ...     guarantee="at convergence",
        ...     layers=(nn.Linear, nn.Conv2d),
        ...     apply=scaled,
        ...     train_equals_eval=False,
        ... )
        >>> _ = register_method(method)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> model = onelip.constrain(model, "scaled", lipschitz=0.5)
        >>> round(onelip.summary(model.eval()).constant, 6)
        0.25
        >>> _ = METHODS.pop("scaled")
    """
    if method.name in METHODS:
        raise ValueError(f"{method.name!r} is registered already; choose another name")
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Return a method by its name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.

    Examples:
        >>> get_method("aol").guarantee
        'proved'
    """
    if name not in METHODS:
        load_entry_points("onelip.methods")
    if name not in METHODS:
        known = ", ".join(list_methods())
        raise ValueError(f"expected one of the methods {known}, got {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]
