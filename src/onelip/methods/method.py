"""The record of a method, `Method`, and the helper with which most methods are applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

from onelip.core.geometry import geometry_of
from onelip.core.parametrization import LipschitzParametrization, attach, weight_of

Guarantee = Literal["proved", "at convergence"]
Mechanism = Literal["parametrization", "projection", "penalty", "loss"]
Mark = Literal["yes", "partly", "no"]
Layer = TypeVar("Layer", bound=nn.Module)


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


@dataclass(frozen=True)
class Method:
    r"""A method: how it is applied to a layer, what is known of the result, and how it is trained.

    Only the first attributes, up to `apply`, are required. `onelip.register_method` makes a method available by name;
    `onelip.testing.check_contract(method)` tests that it keeps what it states.

    Attributes:
        name: name in `onelip.constrain(model, name)` and `onelip train --method`.
        title: title and paper, for tables.
        mechanism: "parametrization": the weight is computed from a parameter at each access. "projection": the weight
            is moved after each step of the optimizer (`onelip.project`). "penalty": the loss contains a term of the
            weights or of the gradient. "loss": the loss uses the Lipschitz constant of the network. For the last two
            see `onelip.losses`.
        guarantee: what is known of the stated constant: "proved" for every parameter, "at convergence" of an iteration
            (then evaluation divides by a proved bound), or None if no constant is known by construction.
        layers: the torch layers that it supports.
        apply: function `(module, **options)` that returns the layer to use: the same module, changed in place, or a new
            one if `replaces`. It raises `onelip.UnsupportedLayer` for layers and settings that it does not support.
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
        >>> method = Method("half-aol", "AOL with constant 1/2", "parametrization", "proved", (nn.Linear,),
        ...                 lambda module: onelip.aol(module, lipschitz=0.5))
        >>> onelip.summary(onelip.constrain(nn.Linear(3, 3), method)).constant
        0.5
    """

    name: str
    title: str
    mechanism: Mechanism
    guarantee: Guarantee | None
    layers: tuple[type[nn.Module], ...]
    apply: Callable[..., nn.Module]
    options: tuple[dict[str, object], ...] = ()
    replaces: bool = False
    needs_input_size: bool = False
    train_equals_eval: bool = True
    paper: PaperRow | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    loss: str | None = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    certificate: Literal["constant", "pairs"] = "constant"
    activation: Callable[[int], nn.Module] | None = None
    head: Callable[..., nn.Module] | None = None
    note: str = ""
    citation: str = ""


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
