"""The registry of methods, used by `onelip.constrain`, the command line, the documentation and the contract test."""

from onelip.core.arguments import did_you_mean
from onelip.core.plugins import load_entry_points
from onelip.methods.aol import METHOD as AOL
from onelip.methods.fourier.bro import METHOD as BRO
from onelip.methods.fourier.cayley import METHOD as CAYLEY
from onelip.methods.fourier.eco import METHOD as ECO
from onelip.methods.fourier.lot import METHOD as LOT
from onelip.methods.fourier.sandwich import METHOD as SANDWICH
from onelip.methods.free_weights import EMMA, GLORO, GRADIENT_PENALTY, LMT, OCNN
from onelip.methods.method import Method
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
from onelip.methods.orthogonal.soc import METHOD as SOC, WITH_REGULARISATION as SOC_CR
from onelip.methods.residual.cpl import METHOD as CPL
from onelip.methods.residual.liresnet import METHOD as LIRESNET
from onelip.methods.residual.sll import METHOD as SLL

# In the order of the table of the paper, then later methods.
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
