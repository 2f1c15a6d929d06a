"""The registry of methods: the record `Method`, `register_method`, helpers that apply methods, and descriptions.

`onelip.constrain`, the command line, the documentation and the contract test find methods here. The modules of
`onelip.methods` register theirs when the package is imported.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

from onelip.core.docstrings import arguments_in
from onelip.core.errors import UnsupportedLayer, check_name_free, did_you_mean
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.imports import load_entry_points
from onelip.core.parametrization import LipschitzParametrization, attach, weight_of
from onelip.nn.aol import aol

Guarantee = Literal["proved", "at convergence"]
Mechanism = Literal["parametrization", "projection", "penalty", "loss"]
Mark = Literal["yes", "partly", "no"]
Layer = TypeVar("Layer", bound=nn.Module)

NOT_TRANSPOSED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

METHODS: dict[str, "Method"] = {}


@dataclass(frozen=True)
class PaperRow:
    """A row of the property table of the AOL paper (Table 1).

    Attributes:
        E: efficiency.
        F: formal guarantee.
        G: generality.
        M: modularity.
        notes: the footnote of a column, e.g. {"F": 2}.
    """

    E: Mark
    F: Mark
    G: Mark
    M: Mark
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method:
    r"""A method: how it is applied to a layer, its guarantee, and how it is trained.

    All arguments are keywords; `name`, `title` and `apply` are required. `onelip.register_method` makes a method
    available by name; `onelip.testing.check_contract(method)` tests its guarantee.

    Attributes:
        name: name in `onelip.constrain(model, name)` and `onelip train --method`.
        title: title and paper, for tables.
        apply: function `(module, **options)` that returns the layer to use: the same module, changed in place, or a new
            one if `replaces`. It raises `onelip.UnsupportedLayer` for layers and settings that it does not support.
        layers: the torch layers that it supports; all linear layers by default.
        guarantee: the status of the stated constant: "proved" for every parameter, "at convergence" of an iteration
            (then evaluation divides by a proved bound), or None if no constant is known by construction.
        mechanism: "parametrization": the weight is computed from a parameter at each access. "projection": the weight
            is moved after each step of the optimizer (`onelip.project`). "penalty": the loss contains a term of the
            weights or of the gradient. "loss": the loss uses the Lipschitz constant of the network. For the last two
            see `onelip.losses`.
        options: keyword settings with which the contract test runs in addition to the defaults.
        replaces: whether `apply` can return a new module.
        needs_input_size: whether `apply` needs `input_size=(height, width)` for convolutions. Methods that only
            estimate a norm do not: their proofs hold for every size, and on a small image, where zero padding makes the
            norm of a kernel smaller (by 6 % for 3x3 on 4x4), training would rely on a norm that evaluation cannot
            prove.
        train_equals_eval: whether training and evaluation compute the same function; if not, the constant is that of
            evaluation.
        paper: row of the property table of the AOL paper.
        hyperparameters: fields of a training recipe, recommended by the authors or best on held-out images; used where
            the user gives none.
        fast_lr: learning rate of SGD with momentum 0.9 for networks `aol-fast` and batches of 500 images, used with
            `--budget`: the best in results/methods_by_time.json. None to use the `hyperparameters`.
        loss: name of the loss of the method (`onelip.losses.list_losses()`); None for the loss of the recipe.
        loss_options: options of that loss that differ from its defaults.
        certificate: "constant": radii are margin / (sqrt(2) L); "pairs": from the distances of the rows of the last
            layer.
        activation: function `(channels)` that makes the activation of the method; MaxMin by default.
        head: function for the last layer, instead of `apply`.
        note: one line for docs/methods.md.
        citation: the paper.

    Examples:
        >>> import onelip
        >>> method = Method(name="half-aol", title="AOL with constant 1/2", guarantee="proved",
        ...                 apply=lambda module: onelip.aol(module, lipschitz=0.5))
        >>> onelip.summary(onelip.constrain(nn.Linear(3, 3), method)).constant
        0.5
    """

    name: str
    title: str
    apply: Callable[..., nn.Module]
    layers: tuple[type[nn.Module], ...] = LINEAR_LAYERS
    guarantee: Guarantee | None = None
    mechanism: Mechanism = "parametrization"
    options: tuple[dict[str, object], ...] = ()
    replaces: bool = False
    needs_input_size: bool = False
    train_equals_eval: bool = True
    paper: PaperRow | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    fast_lr: float | None = None
    loss: str | None = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    certificate: Literal["constant", "pairs"] = "constant"
    activation: Callable[[int], nn.Module] | None = None
    head: Callable[..., nn.Module] | None = None
    note: str = ""
    citation: str = ""

    @property
    def function(self) -> Callable[..., nn.Module]:
        """The documented function: that of `apply`, without the arguments of a `functools.partial`."""
        return self.apply.func if isinstance(self.apply, functools.partial) else self.apply


def attach_new(
    kind: Callable[..., LipschitzParametrization],
    module: Layer,
    name: str,
    *,
    input_size: int | Sequence[int] | None = None,
    **options: Any,
) -> Layer:
    """Parametrize a weight by `kind(geometry, weight_shape, **options)`, in place, and return the module.

    Args:
        kind: class of the parametrization.
        module: the layer.
        name: name of its weight.
        input_size: spatial size of the inputs, if it is known.
        **options: passed to `kind`.

    Returns:
        The same module.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.

    Examples:
        >>> from onelip.nn.aol import AOL
        >>> layer = attach_new(AOL, nn.Linear(3, 3), "weight", side="auto")
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, kind(geometry, weight.shape, **options), name)


def check_kind(module: nn.Module, kinds: tuple[type[nn.Module], ...], method: str, advice: str) -> None:
    """Raise `UnsupportedLayer` for a layer that is none of the kinds.

    Examples:
        >>> check_kind(nn.Conv1d(1, 1, 1), (nn.Linear,), "lln", "use 'aol'")
        Traceback (most recent call last):
        onelip.core.errors.UnsupportedLayer: expected Linear for lln, got Conv1d; use 'aol'
    """
    if not isinstance(module, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        one_of = "one of " if len(kinds) > 1 else ""
        raise UnsupportedLayer(f"expected {one_of}{names} for {method}, got {type(module).__name__}; {advice}")


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
        ValueError: if the name is taken by a method with another function.

    Examples:
        >>> import onelip
        >>> from torch import nn
        >>> def scaled(module, *, lipschitz=1.0):
        ...     return onelip.methods.spectral_norm(module, iterations=3, lipschitz=lipschitz)
        >>> method = onelip.methods.Method(
        ...     name="scaled",
        ...     title="Spectral normalisation with three iterations",
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
    check_name_free(method.name, method.function, {name: known.function for name, known in METHODS.items()})
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


register_method(
    Method(
        name="aol",
        title="AOL, almost-orthogonal layers (Prach and Lampert, 2022)",
        citation="Bernd Prach, Christoph H. Lampert, "
        '"Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks", ECCV 2022.',
        guarantee="proved",
        apply=aol,
        options=(
            {"side": "outputs"},
            {"side": "auto"},
            {"steps": 2},
            {"steps": 3, "side": "outputs"},
            {"learn_weights": True},
            {"learn_weights": True, "steps": 2},
            {"lipschitz": 0.5},
        ),
        paper=PaperRow(E="yes", F="yes", G="yes", M="yes"),
    )
)


# ---- Descriptions, from the registry and the docstrings: for `onelip methods` and docs/methods.md


_LAST_LAYER = "rows of the last layer have norm 1, and radii are certified per pair of classes."

FOOTNOTES = {
    1: "requires a regularisation loss",
    2: "internal methods would have to be run to convergence",
    3: "iterative procedure that can be split between training steps",
    4: "requires matrix orthogonalisation",
    5: "requires inversion of an input-sized matrix",
    6: "requires circular padding and full-image kernel size",
    7: "requires large kernel sizes to ensure orthogonality",
}


@dataclass(frozen=True)
class Option:
    """An option of a method: a keyword of its function, and a key of --method-options.

    Attributes:
        name: name of the keyword.
        default: its default.
        text: its description.
    """

    name: str
    default: Any
    text: str


def options_of(method: Method) -> list[Option]:
    """Return the options of a method, without those of its loss.

    Args:
        method: a method.

    Examples:
        >>> [(option.name, option.default) for option in options_of(METHODS["oni"])]
        [('steps', 5), ('lipschitz', 1.0), ('normalise_last_layer', False)]
    """
    texts = arguments_in(method.function)
    parameters = inspect.signature(method.apply).parameters.values()
    # input_size is given by the model, layer by layer.
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "input_size"]
    options = [Option(p.name, p.default, texts.get(p.name, "")) for p in keywords]
    return [*options, Option("normalise_last_layer", False, _LAST_LAYER)]


def about(method: Method) -> dict[str, Any]:
    """Return a method as a JSON object.

    Args:
        method: a method.

    Examples:
        >>> about(METHODS["aol"])["guarantee"]
        'proved'
    """
    return {
        "name": method.name,
        "title": method.title,
        "mechanism": method.mechanism,
        "guarantee": method.guarantee,
        "train_equals_eval": method.train_equals_eval,
        "paper": None if method.paper is None else {c: getattr(method.paper, c) for c in "EFGM"},
        "hyperparameters": dict(method.hyperparameters),
        "fast_lr": method.fast_lr,
        "options": {option.name: option.default for option in options_of(method)},
        "loss": method.loss,
        "certificate": method.certificate,
        "needs_input_size": method.needs_input_size,
        "note": method.note,
        "layers": [layer.__name__ for layer in method.layers],
        "citation": method.citation,
    }


def supported_layers(method: Method) -> str:
    """Return the names of the layers that a method supports.

    Examples:
        >>> supported_layers(METHODS["aol"]), supported_layers(METHODS["lln"])
        ('all linear layers', 'Linear')
    """
    if set(method.layers) == set(LINEAR_LAYERS):
        return "all linear layers"
    return ", ".join(layer.__name__ for layer in method.layers)


def by_year() -> list[Method]:
    """Return all methods, the oldest paper first; those without a year in their citation come last.

    Examples:
        >>> [method.name for method in by_year()][:2]
        ['clipping', 'gradient-penalty']
    """
    years = {name: re.findall(r"\b(?:19|20)\d\d\b", method.citation) for name, method in METHODS.items()}
    return sorted(METHODS.values(), key=lambda method: (max(years[method.name], default="9999"), method.name))
