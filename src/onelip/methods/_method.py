"""The few mechanisms there are, and the record of a method that the registry collects.

parametrization   the weight is computed from a parameter at each access
projection        the weight is moved after each step of the optimizer (`onelip.project`)
penalty           a term is added to the loss (`onelip.penalty`)
loss              the loss itself uses the network's constant (LMT, GloRo, EMMA, CR)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

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
class Step:
    """What a loss or a penalty sees of a training step.

    Attributes:
        model: the network, not wrapped for several processes.
        images: (N, C, H, W), of this process; they require a gradient if the term asks for it.
        labels: (N) int64.
        scores: (N, classes), in float32 or wider.
        progress: the part of the run that is done, from 0 to 1.
        ordinary: the recipe's own loss (scores, labels) -> (N).
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    scores: Tensor
    progress: float
    ordinary: Callable[[Tensor, Tensor], Tensor]


class Term(Protocol):
    """A loss or a penalty: called with a Step; gives one number per image (N), or one for the weights alone ().

    `needs_input_gradient` is an optional attribute; True makes the loop set requires_grad on the images.
    """

    def __call__(self, step: Step, /) -> Tensor: ...


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
        penalty: factory (**options of the term) -> Term, added to the loss.
        loss: factory (**options of the term) -> Term, instead of the recipe's loss.
        term_options: those of the method's options that go to the term and not to the layers.
        certificate: "constant": radii from sqrt(2) L; "pairs": from the distances of the last layer's rows.
        activation: factory of the activation that belongs to the method, instead of MaxMin.
        head: verb for the last layer, instead of `apply`.
        note: one line for docs/methods.md.
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
    penalty: Callable[..., Term] | None = None
    loss: Callable[..., Term] | None = None
    term_options: tuple[str, ...] = ()
    certificate: Literal["constant", "pairs"] = "constant"
    activation: Callable[[int], nn.Module] | None = None
    head: Callable[..., nn.Module] | None = None
    note: str = ""
