"""The registry of losses, their base class, and the offset cross-entropy of the paper."""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import check_name_free, check_number, did_you_mean
from onelip.core.imports import load_entry_points

_LOSSES: dict[str, Callable[..., Any]] = {}

Registered = TypeVar("Registered", bound=Callable[..., Any])

# Keyword arguments that a loss may declare besides scores and labels.
_CONTEXT = ("model", "images", "progress")


def register_loss(name: str) -> Callable[[Registered], Registered]:
    """Register a loss under a name, for `create_loss` and `onelip train --loss`; use it as a decorator.

    It decorates a class, whose instances are losses and whose constructor takes the options of the loss, or a function,
    which is the loss itself:

        @register_loss("hinge")
        def hinge(scores, labels, margin=1.0):
            return torch.nn.functional.multi_margin_loss(scores, labels, margin=margin)

        loss = create_loss("hinge", margin=0.5)

    Args:
        name: name of the loss.

    Returns:
        A decorator that returns the class or function unchanged.

    Raises:
        ValueError: if the name is taken by another loss.
    """

    def register(loss: Registered) -> Registered:
        check_name_free(name, loss, _LOSSES)
        _LOSSES[name] = loss
        return loss

    return register


def list_losses() -> list[str]:
    """Return the names of all registered losses.

    Returns:
        The names in alphabetical order.

    Examples:
        >>> "emma" in list_losses()
        True
    """
    load_entry_points("onelip.losses")
    return sorted(_LOSSES)


def create_loss(name: str, **options: Any) -> Callable[..., Tensor]:
    """Create a loss by its name.

    Args:
        name: one of `list_losses()`, or "module:callable" for a custom class or function.
        **options: arguments of the class, or keyword arguments that are bound to the function.

    Returns:
        The loss, called as described in `onelip.losses`.

    Raises:
        ValueError: if the loss is unknown or an option is invalid.

    Examples:
        >>> create_loss("offset-cross-entropy", offset=1.0)
        OffsetCrossEntropy(offset=1, temperature=0.25, reduction='mean')
    """
    found = find_loss(name)
    unknown = [option for option in options if option not in _parameters(found) and not _takes_any(found)]
    if unknown:
        known = ", ".join(loss_options(name)) or "none"
        raise ValueError(
            f"the loss {name!r} has no option {unknown[0]!r}; its options: {known}"
            f"{did_you_mean(unknown[0], loss_options(name))}"
        )
    made: Any = found(**options) if inspect.isclass(found) else functools.partial(found, **options)
    return made


def find_loss(name: str) -> Callable[..., Any]:
    """Return the class or function registered under a name, or imported from "module:callable".

    Args:
        name: one of `list_losses()`, or "module:callable".

    Returns:
        The class of the loss, or the function that is the loss.

    Raises:
        ValueError: if there is none.

    Examples:
        >>> find_loss("torch.nn.functional:cross_entropy").__name__
        'cross_entropy'
    """
    if name not in _LOSSES:
        load_entry_points("onelip.losses")
    if name in _LOSSES:
        return _LOSSES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"unknown loss {name!r}; known: {', '.join(list_losses())}, or module:callable"
            f"{did_you_mean(name, _LOSSES)}; for a loss of your own, name its module with --import"
        )
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the loss {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"the loss {name!r} is not callable: {found!r}")
    return found


def loss_options(name: str) -> dict[str, Any]:
    """Return the options of a loss with their defaults, except those that the training recipe sets.

    Args:
        name: one of `list_losses()`, or "module:callable".

    Returns:
        The defaults by the name of the option.

    Examples:
        >>> loss_options("certificate-regularisation")
        {'gamma': 0.5, 'per_pair': False}
    """
    found = find_loss(name)
    others = ("scores", "labels", "offset", "temperature", "reduction", *_CONTEXT)
    required = 0 if inspect.isclass(found) else 2  # scores and labels, whatever a function calls them
    listed = list(_parameters(found).values())[required:]
    return {
        p.name: p.default for p in listed if p.name not in others and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def call_loss(
    loss: Callable[..., Tensor],
    scores: Tensor,
    labels: Tensor,
    *,
    model: nn.Module,
    images: Tensor,
    progress: float = 1.0,
) -> Tensor:
    """Call any loss with scores, labels, and the keyword arguments that its signature declares.

    Args:
        loss: a callable of (scores, labels), and optionally of the keyword arguments `model`, `images` and `progress`.
        scores: output of the network (N, classes).
        labels: labels (N), int64.
        model: the network.
        images: the batch of images.
        progress: completed fraction of the run, from 0 to 1.

    Returns:
        The value of the loss.

    Examples:
        >>> import torch
        >>> scores, labels = torch.zeros(1, 2), torch.tensor([0])
        >>> round(float(call_loss(nn.functional.cross_entropy, scores, labels, model=nn.Identity(), images=scores)), 4)
        0.6931
    """
    context = {"model": model, "images": images, "progress": progress}
    called = loss.forward if isinstance(loss, nn.Module) else loss  # the signature of nn.Module.__call__ is (*args)
    named = context if _takes_any(called) else {key: context[key] for key in context if key in _parameters(called)}
    return loss(scores, labels, **named)


def _parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return {}


def _takes_any(called: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(called).values())


# ---- Base class of the losses, and the offset cross-entropy of the paper


LARGEST = 1e30  # of the options of a loss: larger values overflow

Reduction = Literal["mean", "sum", "none"]


class Loss(nn.Module):
    """Base class of losses: `forward(scores, labels, ...)` computes a value per image and returns `self.reduce` of it.

    Besides scores and labels, `forward` declares the keyword arguments `model`, `images` and `progress` that it needs;
    see `onelip.losses`.

    Args:
        reduction: "mean" over the batch, "sum", or "none" for one value per image.

    Attributes:
        certificate: the kind of radius that the loss increases, which evaluation then reports: from the "constant" of
            the network, or from the constants of all "pairs" of classes.
        needs_input_gradient: whether the images must require a gradient when the network is run.

    Examples:
        >>> import torch
        >>> class Hinge(Loss):
        ...     def forward(self, scores, labels):
        ...         return self.reduce(F.multi_margin_loss(scores, labels, reduction="none"))
        >>> Hinge()(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.)
    """

    certificate: Literal["constant", "pairs"] = "constant"
    needs_input_gradient: bool = False

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"expected reduction to be 'mean', 'sum' or 'none', got {reduction!r}")
        self.reduction: Reduction = reduction

    def reduce(self, values: Tensor) -> Tensor:
        """Reduce the values of the images (N) by `reduction`."""
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()


class OffsetLoss(Loss):
    """Base class of losses that add a term to the offset cross-entropy; see `OffsetCrossEntropy`.

    Args:
        offset: subtracted from the score of the right class; 0 for none.
        temperature: positive.
        reduction: "mean" over the batch, "sum", or "none".
    """

    def __init__(self, offset: float = math.sqrt(2), temperature: float = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        self.offset = check_number("offset", offset, -LARGEST, LARGEST)
        self.temperature = check_number("temperature", temperature, 0, LARGEST, open_low=True)

    def offset_cross_entropy(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the offset cross-entropy of each image (N), computed in at least float32, also under autocast."""
        scores, probabilities = with_probabilities(scores, labels)
        shifted = (scores - self.offset * probabilities) / self.temperature
        is_soft = labels.is_floating_point()
        return self.temperature * F.cross_entropy(shifted, probabilities if is_soft else labels, reduction="none")

    def extra_repr(self) -> str:
        return f"offset={self.offset:g}, temperature={self.temperature:g}, reduction={self.reduction!r}"


@register_loss("offset-cross-entropy")
class OffsetCrossEntropy(OffsetLoss):
    r"""Cross-entropy with an offset and a temperature. The defaults are those of the paper.

    $$ \mathcal L(s, y) = t \cdot \mathrm{crossentropy}\bigl(y, \mathrm{softmax}((s - u\,y) / t)\bigr) $$

    (paper, section Experiments; $y$ is the one-hot label). The offset $u$ is subtracted from the score of the right
    class, so that the loss rewards a margin of $u$: with $u = \sqrt 2$ and a 1-Lipschitz network that is a certified
    radius of 1. The temperature $t$ keeps the gradient close to 1 as long as the margin is well below $u$, and the
    factor $t$ keeps it from growing as $t$ shrinks. The labels can also be probabilities, such as those of another
    network; $y$ is then their vector.

    Args:
        offset: $u$, subtracted from the score of the right class; 0 for none.
        temperature: $t$, positive.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64, or probabilities (N, classes); output a scalar, or (N) with
        `reduction="none"`.

    Examples:
        >>> import torch
        >>> loss = OffsetCrossEntropy()
        >>> round(float(loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))), 4)
        0.0229
    """

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.reduce(self.offset_cross_entropy(scores, labels))


@register_loss("logit-annealing")
class LogitAnnealingLoss(OffsetLoss):
    r"""Logit annealing: the offset cross-entropy, with less weight for samples that already have their margin.

    With the probability $p_y$ of the right class after the offset, that is $\log p_y = -\mathcal L / t$ for the loss
    $\mathcal L$ of `OffsetCrossEntropy`,

    $$ (1 - p_y)^\beta\, \mathcal L. $$

    A network of constant 1 cannot give every sample a large margin. The offset cross-entropy increases margins beyond
    $u$ as well; this loss leaves them, so that a larger offset costs less at small radii.

    Citation: Bo-Han Lai, Pin-Han Huang, Bo-Han Kung, Shang-Tse Chen, "Enhancing Certified Robustness via Block
    Reflector Orthogonal Layers and Logit Annealing Loss", ICML 2025. The paper uses $u = 2$, $t = 0.75$ and
    $\beta = 5$.

    Args:
        beta: $\beta$, at least 0; 0 for the offset cross-entropy.
        offset: $u$ of `OffsetCrossEntropy`.
        temperature: $t$ of `OffsetCrossEntropy`.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> scores, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
        >>> LogitAnnealingLoss(beta=1.0, reduction="none")(scores, labels)  # little for the first, all for the second
        tensor([2.0083e-03, 3.4142e+00])
    """

    def __init__(
        self,
        beta: float = 1.0,
        offset: float = math.sqrt(2),
        temperature: float = 0.25,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(offset, temperature, reduction)
        self.beta = check_number("beta", beta, 0, LARGEST)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        if labels.dim() != 1:
            raise ValueError(f"logit annealing takes class indices as labels (N), got {tuple(labels.shape)}")
        value = self.offset_cross_entropy(scores, labels)
        wrong = -torch.expm1(-value / self.temperature)  # 1 - p
        # For an exponent below 1 the derivative is infinite at zero.
        weight = wrong.clamp_min(torch.finfo(wrong.dtype).eps) ** self.beta
        return self.reduce(weight * value)

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, {super().extra_repr()}"


@register_loss("generalised-cross-entropy")
class GeneralisedCrossEntropy(OffsetLoss):
    r"""Generalised cross-entropy: an offset cross-entropy that stays bounded, so that it gives up hopeless samples.

    With the probability $p_y = \mathrm{softmax}((s - u\,y) / t)_y$ of the right class after the offset,

    $$ \mathcal L(s, y) = t \, \frac{1 - p_y^{\,q}}{q}. $$

    For $q \to 0$ this is `OffsetCrossEntropy`; for $q = 1$ it is $t\,(1 - p_y)$, proportional to the probability of an
    error. The weight of a sample in the gradient is $p_y^{\,q}$ times that of the cross-entropy. A network of constant
    1 cannot certify all samples: here the gradient comes from those that it can. The larger $q$ and $u$, the larger
    the radii of the certified samples, and the fewer samples are right.

    Training with a large exponent does not start from random weights, because all samples seem hopeless then. Over the
    part of the run from `start` to `end`, the exponent rises from 0 to $q$ and the offset changes to `final_offset`.

    Citation: Zhilu Zhang, Mert R. Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy
    Labels", NeurIPS 2018; there without offset and temperature.

    Args:
        exponent: $q$ at the end, 0 to 1.
        offset: $u$ of `OffsetCrossEntropy`, at the beginning.
        final_offset: $u$ at the end. Default: `offset`.
        temperature: $t$ of `OffsetCrossEntropy`.
        start: fraction of the run after which exponent and offset begin to change.
        end: fraction of the run after which they have their final values.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64, or probabilities $y$ (N, classes): the loss is then
        $\sum_i y_i\, t\,(1 - p_i^{\,q}) / q$; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> scores, labels = torch.tensor([[2.0, 0.0], [0.0, 9.0]]), torch.tensor([0, 0])
        >>> GeneralisedCrossEntropy(exponent=1.0, reduction="none")(scores, labels)  # the second is hopeless
        tensor([0.0219, 0.2500])
    """

    def __init__(
        self,
        exponent: float = 0.5,
        offset: float = math.sqrt(2),
        final_offset: float | None = None,
        temperature: float = 0.25,
        start: float = 0.3,
        end: float = 0.7,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(offset, temperature, reduction)
        self.exponent = check_number("exponent", exponent, 0, 1)
        final = offset if final_offset is None else final_offset
        self.final_offset = check_number("final_offset", final, -LARGEST, LARGEST)
        self.start, self.end = check_number("start", start, 0, 1), check_number("end", end, 0, 1)
        if not start <= end:
            raise ValueError(f"expected start before end, got start {start:g} and end {end:g}")

    def changed(self, progress: float) -> float:
        """Return how far exponent and offset have changed after this fraction of the run, 0 to 1.

        Examples:
            >>> GeneralisedCrossEntropy(start=0.25, end=0.75).changed(0.375)
            0.25
        """
        if progress >= self.end:
            return 1.0
        return 0.0 if progress <= self.start else (progress - self.start) / (self.end - self.start)

    def forward(self, scores: Tensor, labels: Tensor, *, progress: float = 1.0) -> Tensor:
        part = self.changed(progress)
        offset = self.offset + part * (self.final_offset - self.offset)
        exponent = part * self.exponent
        scores, probabilities = with_probabilities(scores, labels)
        logs = F.log_softmax((scores - offset * probabilities) / self.temperature, dim=1)
        values = -torch.expm1(exponent * logs) / exponent if exponent else -logs
        return self.reduce(self.temperature * (probabilities * values).sum(1))

    def extra_repr(self) -> str:
        ramp = f"final_offset={self.final_offset:g}, start={self.start:g}, end={self.end:g}"
        return f"exponent={self.exponent:g}, {ramp}, {super().extra_repr()}"


def with_probabilities(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores in at least float32, and the labels as probabilities of their type (N, classes)."""
    is_soft = labels.shape == scores.shape and labels.is_floating_point()
    if scores.dim() != 2 or not (is_soft or labels.shape == scores.shape[:1]):
        raise ValueError(
            f"expected scores (N, classes) and labels (N), got {tuple(scores.shape)} and {tuple(labels.shape)}; "
            "labels are class indices, or probabilities (N, classes) in floating point"
        )
    scores = widened(scores)
    return scores, (labels if is_soft else F.one_hot(labels, scores.shape[1])).to(scores.dtype)


def widened(scores: Tensor) -> Tensor:
    """Return scores in at least float32; scores computed under autocast may be in half precision."""
    return scores if scores.dtype.itemsize >= 4 else scores.float()
