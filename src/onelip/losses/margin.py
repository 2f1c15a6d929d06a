"""Losses that use the Lipschitz constant of the network: LMT, GloRo, EMMA, certificate regularisation.

All of them need a chain of modules (`nn.Sequential`), each with a constant that is known by construction or estimated
in training (`onelip.methods.free_weights.track`), so they can be combined with every method. Guarantees never depend on
these estimates: evaluation uses proved constants.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import check_number
from onelip.losses.chain import PairConstants, estimated_constant
from onelip.losses.registry import LARGEST, Loss, OffsetLoss, Reduction, register_loss, widened


@register_loss("lmt")
class LMTLoss(Loss):
    r"""LMT, Lipschitz-margin training.

    If the features have the constant $K$, a perturbation of norm $c$ moves $f_i - f_y$ by at most $c K |w_i - w_y|$
    (LMT++), which is never more than $\sqrt 2\,c L$ (LMT). Training adds this amount to every other score. A decision
    that is still right is certified for $c$. The loss is the cross-entropy of the new scores. For samples with a
    smaller margin, the amount is multiplied by a factor $\kappa$, which is treated as a constant in the derivative:

    $$ \kappa = \min\bigl(1, \max(0, \min_i (f_y - f_i) / (c K |w_i - w_y|))\bigr). $$

    Citation: Yusuke Tsuzuku, Issei Sato, Masashi Sugiyama, "Lipschitz-Margin Training: Scalable Certification of
    Perturbation Invariance for Deep Neural Networks", NeurIPS 2018.

    Args:
        radius: $c$, for images with values in [0, 1].
        ramp: fraction of the run over which $c$ increases linearly to its value.
        per_pair: use the distances between the rows of the last layer (LMT++); else sqrt(2) times the constant of the
            network.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> import onelip
        >>> model, images = nn.Sequential(onelip.nn.AOLLinear(3, 2)), torch.rand(5, 3)
        >>> loss = LMTLoss(radius=0.1)(model(images), torch.tensor([0, 1, 0, 1, 0]), model=model, images=images)
        >>> loss.backward()
    """

    def __init__(
        self, radius: float = 36 / 255, ramp: float = 0.3, per_pair: bool = True, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(reduction)
        self.radius = check_number("radius", radius, 0, LARGEST, open_low=True)
        self.ramp = check_number("ramp", ramp, 0, 1)
        self.per_pair = bool(per_pair)
        self.certificate = "pairs" if per_pair else "constant"
        self.constants = PairConstants()

    def radius_at(self, progress: float) -> float:
        """Return the radius $c$ after this fraction of the run."""
        return self.radius if progress >= self.ramp else self.radius * progress / self.ramp

    def forward(
        self, scores: Tensor, labels: Tensor, *, model: nn.Module, images: Tensor, progress: float = 1.0
    ) -> Tensor:
        scores = widened(scores)
        if self.per_pair:
            reach = self.constants(model, images).to(scores.dtype)[labels]  # (N, classes)
        else:
            reach = math.sqrt(2) * estimated_constant(model) * torch.ones_like(scores)
        added = lmt_scores(scores, labels, self.radius_at(progress) * reach)
        return self.reduce(F.cross_entropy(added, labels, reduction="none"))


def lmt_scores(scores: Tensor, labels: Tensor, added: Tensor) -> Tensor:
    r"""Add $\kappa$ times `added` to the scores of all but the right class; see `LMTLoss`.

    Args:
        scores: (N, classes).
        labels: (N), int64.
        added: amounts to add, $c K |w_i - w_y|$ (N, classes).

    Returns:
        The new scores (N, classes).

    Examples:
        >>> lmt_scores(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([[0.0, 1.0]]))
        tensor([[2., 1.]])
    """
    right = labels[:, None]
    added = added.scatter(1, right, 0.0)
    with torch.no_grad():
        # The right class itself is 0 / 0: replace it by infinity, so that it is never the smallest.
        parts = ((scores.gather(1, right) - scores) / added).scatter(1, right, math.inf)
        kappa = parts.amin(1, keepdim=True).clamp(0, 1).nan_to_num(0.0)
    return scores + kappa * added


@register_loss("gloro")
class GloRoLoss(Loss):
    r"""GloRo, globally-robust networks.

    With $K_{ij} = K |w_i - w_j|$ ($K$ the constant of the features, $w$ the rows of the last layer) and the predicted
    class $j$, the "bottom" class has the score

    $$ f_\bot = \max_{i \ne j} (f_i + \epsilon K_{ij}), $$

    the largest score relative to $f_j$ that another class can reach within $\epsilon$. A decision is certified if
    $f_j > f_\bot$. The loss is the cross-entropy over the classes and the bottom class, or in the TRADES form

    $$ \mathrm{CE}(f, y) + \lambda\, \mathrm{KL}\bigl(\mathrm{softmax}(f) \,\|\, \mathrm{softmax}([f, f_\bot])\bigr),
       \qquad \mathrm{KL} = \log(\textstyle\sum e^{f} + e^{f_\bot}) - \log \sum e^{f}. $$

    Citation: Klas Leino, Zifan Wang, Matt Fredrikson, "Globally-Robust Neural Networks", ICML 2021.

    Args:
        epsilon: the radius to certify, for images with values in [0, 1].
        form: "trades", or "cross-entropy" over the classes and the bottom class.
        weight: $\lambda$ of the TRADES form.
        ramp: fraction of the run over which the logarithm of $\epsilon$ increases linearly, from $\epsilon$ = 0.01 to
            `overshoot` times its value.
        overshoot: factor of $\epsilon$ in training.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> import onelip
        >>> model, images = nn.Sequential(onelip.nn.AOLLinear(3, 2)), torch.rand(5, 3)
        >>> GloRoLoss()(model(images), torch.tensor([0, 1, 0, 1, 0]), model=model, images=images).backward()
    """

    certificate = "pairs"

    def __init__(
        self,
        epsilon: float = 36 / 255,
        form: Literal["trades", "cross-entropy"] = "trades",
        weight: float = 1.5,
        ramp: float = 0.5,
        overshoot: float = 1.1,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction)
        if form not in ("trades", "cross-entropy"):
            raise ValueError(f"expected form to be 'trades' or 'cross-entropy', got {form!r}")
        self.epsilon = check_number("epsilon", epsilon, 0, LARGEST, open_low=True)
        self.form = form
        self.weight = check_number("weight", weight, 0, LARGEST)
        self.ramp = check_number("ramp", ramp, 0, 1)
        self.overshoot = check_number("overshoot", overshoot, 0, LARGEST, open_low=True)
        self.constants = PairConstants()

    def epsilon_at(self, progress: float) -> float:
        """Return epsilon after this fraction of the run."""
        end = self.epsilon * self.overshoot
        start = min(0.01, end)
        return end if progress >= self.ramp else start * (end / start) ** (progress / self.ramp)

    def forward(
        self, scores: Tensor, labels: Tensor, *, model: nn.Module, images: Tensor, progress: float = 1.0
    ) -> Tensor:
        scores = widened(scores)
        reach = self.epsilon_at(progress) * self.constants(model, images).to(scores.dtype)
        extended = torch.cat([scores, bottom_score(scores, reach)], 1)  # (N, classes + 1)
        if self.form == "cross-entropy":
            return self.reduce(F.cross_entropy(extended, labels, reduction="none"))
        divergence = extended.logsumexp(1) - scores.logsumexp(1)
        return self.reduce(F.cross_entropy(scores, labels, reduction="none") + self.weight * divergence)


def bottom_score(scores: Tensor, reach: Tensor) -> Tensor:
    r"""Return the score of the bottom class; see `GloRoLoss`.

    Args:
        scores: (N, classes).
        reach: $\epsilon K_{ij}$ (classes, classes).

    Returns:
        $f_\bot$ (N, 1).

    Examples:
        >>> bottom_score(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.5], [0.5, 0.0]]))
        tensor([[0.5000]])
    """
    predicted = scores.argmax(1)
    rivals = (scores + reach[predicted]).scatter(1, predicted[:, None], -math.inf)
    return rivals.amax(1, keepdim=True)


@register_loss("emma")
class EMMALoss(Loss):
    r"""EMMA, efficient margin maximisation.

    With $K_{yi} = K |w_y - w_i|$ ($K$ the constant of the features, $w$ the rows of the last layer, $y$ the label), a
    perturbation of norm $\epsilon$ increases $f_i - f_y$ by at most $\epsilon K_{yi}$. Each class is given the
    fraction $\kappa_i$ of this amount that makes its score equal to that of $y$, treated as a constant in the
    derivative:

    $$ \kappa_i = \min\bigl(1, \max(\mathrm{floor}, (f_y - f_i) / (\epsilon K_{yi}))\bigr). $$

    The loss is the cross-entropy of $f_i + \kappa_i \epsilon K_{yi}$. LMT uses one $\kappa$ for all classes; GloRo uses
    only the best other class.

    Citation: Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "Unlocking Deterministic Robustness
    Certification on ImageNet", NeurIPS 2023.

    Args:
        epsilon: the radius to certify, for images with values in [0, 1].
        start: initial factor of $\epsilon$.
        overshoot: final factor of $\epsilon$.
        ramp: fraction of the run over which the factor increases linearly.
        floor: the smallest $\kappa_i$, used for classes with a larger score than the right one.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> loss = EMMALoss(epsilon=1.0, start=0.1, overshoot=3.0, ramp=0.5)
        >>> round(loss.epsilon_at(0.25), 2)
        1.55
    """

    certificate = "pairs"

    def __init__(
        self,
        epsilon: float = 36 / 255,
        start: float = 0.1,
        overshoot: float = 3.0,
        ramp: float = 0.5,
        floor: float = 0.01,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction)
        self.epsilon = check_number("epsilon", epsilon, 0, LARGEST, open_low=True)
        self.start = check_number("start", start, 0, LARGEST, open_low=True)
        self.overshoot = check_number("overshoot", overshoot, 0, LARGEST, open_low=True)
        self.ramp = check_number("ramp", ramp, 0, 1)
        self.floor = check_number("floor", floor, 0, 1)
        self.constants = PairConstants()

    def epsilon_at(self, progress: float) -> float:
        """Return epsilon after this fraction of the run."""
        part = 1.0 if progress >= self.ramp else progress / self.ramp
        return self.epsilon * (self.start + (self.overshoot - self.start) * part)

    def forward(
        self, scores: Tensor, labels: Tensor, *, model: nn.Module, images: Tensor, progress: float = 1.0
    ) -> Tensor:
        scores = widened(scores)
        pairs = self.constants(model, images).to(scores.dtype)[labels]  # (N, classes)
        moved = emma_scores(scores, labels, self.epsilon_at(progress) * pairs, self.floor)
        return self.reduce(F.cross_entropy(moved, labels, reduction="none"))


def emma_scores(scores: Tensor, labels: Tensor, reach: Tensor, floor: float = 0.01) -> Tensor:
    r"""Return $f_i + \kappa_i \epsilon K_{yi}$; see `EMMALoss`.

    Args:
        scores: $f$ (N, classes).
        labels: $y$ (N), int64.
        reach: $\epsilon K_{yi}$ (N, classes).
        floor: the smallest $\kappa_i$.

    Returns:
        The new scores (N, classes).

    Examples:
        >>> emma_scores(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]), torch.ones(1, 3))
        tensor([[2., 2., 1.]])
    """
    right = labels[:, None]
    reach = reach.scatter(1, right, 0.0)
    with torch.no_grad():
        # 0 / 0 for the right class, and where the reach is zero: kappa does not matter there.
        kappa = ((scores.gather(1, right) - scores) / reach).nan_to_num(1.0).clamp(floor, 1.0)
    return scores + kappa * reach


@register_loss("certificate-regularisation")
class CertificateRegularisation(OffsetLoss):
    r"""CR, certificate regularisation: the offset cross-entropy minus $\gamma \max(0, R)$.

    $R$ is the certified radius of the right class,

    $$ R = \min_{i \ne y} \frac{f_y - f_i}{K |w_y - w_i|}, $$

    with $K$ the constant of the features and $w$ the rows of the last layer, or
    $(f_y - \max_{i \ne y} f_i) / (\sqrt 2\,L)$ for a network with the constant $L$. With constants that are known by
    construction, it equals the radius that evaluation reports.

    Citation: Sahil Singla, Surbhi Singla, Soheil Feizi, "Improved deterministic l2 robustness on CIFAR-10 and
    CIFAR-100", ICLR 2022.

    Args:
        gamma: $\gamma$, weight of the radius; 0.5 in the paper.
        per_pair: compute radii from the distances between the rows of the last layer; else from sqrt(2) times the
            constant of the network.
        offset: $u$ of `OffsetCrossEntropy`.
        temperature: $t$ of `OffsetCrossEntropy`.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> import onelip
        >>> scores, model = torch.tensor([[2.0, 0.0]]), nn.Sequential(nn.Identity())
        >>> loss, plain = CertificateRegularisation(gamma=0.5), onelip.OffsetCrossEntropy()
        >>> labels = torch.tensor([0])
        >>> loss(scores, labels, model=model, images=scores) - plain(scores, labels)  # -0.5 * 2 / sqrt(2)
        tensor(-0.7071)
    """

    def __init__(
        self,
        gamma: float = 0.5,
        per_pair: bool = False,
        offset: float = math.sqrt(2),
        temperature: float = 0.25,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(offset, temperature, reduction)
        self.gamma = check_number("gamma", gamma, 0, LARGEST)
        self.per_pair = bool(per_pair)
        self.certificate = "pairs" if per_pair else "constant"
        self.constants = PairConstants()

    def radius(self, scores: Tensor, labels: Tensor, *, model: nn.Module, images: Tensor) -> Tensor:
        """Return R for each image (N); it is negative if the decision is wrong."""
        right = labels[:, None]
        differences = scores.gather(1, right) - scores  # (N, classes)
        if self.per_pair:
            pairs = self.constants(model, images).to(scores.dtype)[labels]
        else:
            pairs = math.sqrt(2) * estimated_constant(model) * torch.ones_like(differences)
        # Exclude the right class itself: its 0 / 0 would make the derivative NaN.
        others = torch.ones_like(differences, dtype=torch.bool).scatter(1, right, False)
        ratios = differences / pairs.where(others, 1.0)
        return ratios.where(others, math.inf).amin(1)

    def forward(self, scores: Tensor, labels: Tensor, *, model: nn.Module, images: Tensor) -> Tensor:
        scores = widened(scores)
        radius = self.radius(scores, labels, model=model, images=images)
        return self.reduce(self.offset_cross_entropy(scores, labels) - self.gamma * radius.clamp(min=0))
