"""The few mechanisms there are, and the record of a method that the registry collects.

parametrization   the weight is computed from a parameter at each access
projection        the weight is moved after each step of the optimizer (`onelip.project`)
penalty           the loss contains a term of the weights or of the gradient (`onelip.losses`)
loss              the loss uses the network's constant (`onelip.losses`)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Guarantee = Literal["proved", "at convergence", "none"]
Mechanism = Literal["parametrization", "projection", "penalty", "loss"]
Mark = Literal["yes", "partly", "no"]


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's property table (Table 1): efficiency, formal guarantee, generality, modularity.

    `notes` are the numbers of the table's footnotes per column, e.g. {"F": 2}.
    """

    E: Mark
    F: Mark
    G: Mark
    M: Mark
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One method of the literature.

    Attributes:
        name: how users call it.
        title: the method's own name, and the paper it is from.
        mechanism: what it acts on: the weight at each access, the weight after each step, or the loss.
        guarantee: what is known of the constant it claims: proved for every weight, true only once an iteration has
            converged, or nothing. The contract test proves "proved".
        layers: the torch layers it serves.
        apply: verb (layer, **options) -> layer: the same, changed in place, or with `replaces` a new module.
        options: keyword settings that the contract test runs besides the defaults.
        replaces: whether `apply` gives a new module instead of a torch layer with another weight.
        needs_input_size: whether `apply` is only possible with input_size=(height, width). Methods that only estimate
            a norm do without: their proofs hold for every size, and on a small image, where zero padding makes a
            kernel's norm smaller (by 6 % for 3x3 on 4x4), training would rely on what evaluation cannot prove.
        train_equals_eval: whether training and evaluation compute the same function; if not, eval is the sound one.
        paper: its row in the paper's property table.
        hyperparameters: fields of a training Recipe that its authors recommend, or that did best on images held out;
            used where the user gives none.
        after_step: called with the model after each step of the optimizer.
        loss: name of the loss that belongs to the method (`onelip.losses.list_losses()`); None for the recipe's own.
        loss_options: options of that loss, where they differ from its defaults.
        certificate: "constant": radii from sqrt(2) L; "pairs": from the distances of the last layer's rows.
        activation: factory of the activation that belongs to the method, instead of MaxMin.
        head: verb for the last layer, instead of `apply`.
        note: one line for docs/methods.md.
        citation: the paper; by default the paragraph "Citation:" in the docstring of the method's file.
    """

    name: str
    title: str
    mechanism: Mechanism
    guarantee: Guarantee
    layers: tuple[type[nn.Module], ...]
    apply: Callable[..., nn.Module]
    options: tuple[dict[str, object], ...] = ()
    replaces: bool = False
    needs_input_size: bool = False
    train_equals_eval: bool = True
    paper: PaperRow | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    after_step: Callable[[nn.Module], None] | None = None
    loss: str | None = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    certificate: Literal["constant", "pairs"] = "constant"
    activation: Callable[[int], nn.Module] | None = None
    head: Callable[..., nn.Module] | None = None
    note: str = ""
    citation: str = ""
