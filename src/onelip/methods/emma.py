"""EMMA, efficient margin maximisation.

Citation: Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "Unlocking Deterministic Robustness Certification
on ImageNet", NeurIPS 2023.

With K_yi = K |w_y - w_i| (K the constant of the features, w the last layer's rows, y the label), a perturbation of norm
epsilon lets class i gain at most epsilon K_yi on y. Each rival is given the part of it with which it just draws level,
    kappa_i = min(1, max(floor, (f_y - f_i) / (epsilon K_yi))),    a constant for the derivative,
and the loss is the cross-entropy of f_i + kappa_i epsilon K_yi. LMT takes one kappa for all classes, GloRo one rival.
Assumes: a chain of modules; layers are free, their norms are followed by power iteration.
Guarantee: none in training. Evaluation goes by proved bounds of the stored weights, and the distances of the rows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from onelip.geometry import LINEAR_LAYERS
from onelip.methods._method import Method, Step
from onelip.methods._tracking import PairConstants, track


def emma_scores(scores: Tensor, labels: Tensor, reach: Tensor, floor: float = 0.01) -> Tensor:
    """f_i + kappa_i reach_i of scores (N, classes) and reach = epsilon K_y (N, classes); the right class keeps its own.

    Example:
        >>> emma_scores(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]), torch.ones(1, 3))
        tensor([[2., 2., 1.]])
    """
    right = labels[:, None]
    reach = reach.scatter(1, right, 0.0)
    with torch.no_grad():
        # 0 / 0 for the right class, and wherever nothing can be reached: whatever part, it is a part of nothing.
        kappa = ((scores.gather(1, right) - scores) / reach).nan_to_num(1.0).clamp(floor, 1.0)
    return scores + kappa * reach


class EMMALoss:
    """The cross-entropy of `emma_scores`.

    Args:
        epsilon: the radius to be certified, in units of the images, which lie in [0, 1].
        begin: epsilon at first, in parts of its value.
        overshoot: epsilon at last, in parts of its value: training asks for more than evaluation.
        ramp: part of the run over which it rises, straight.
        floor: the smallest kappa, for rivals that have won already.

    Example:
        >>> round(EMMALoss(epsilon=1.0, begin=0.1, overshoot=3.0, ramp=0.5).epsilon_at(0.25), 2)
        1.55
    """

    def __init__(
        self,
        epsilon: float = 36 / 255,
        begin: float = 0.1,
        overshoot: float = 3.0,
        ramp: float = 0.5,
        floor: float = 0.01,
    ) -> None:
        if not 0 < epsilon < math.inf or not begin > 0 or not overshoot > 0:
            raise ValueError(
                f"expected a positive epsilon, begin and overshoot, got {epsilon!r}, {begin!r} and {overshoot!r}"
            )
        if not 0 <= ramp <= 1 or not 0 <= floor <= 1:
            raise ValueError(f"expected ramp and floor from 0 to 1, got {ramp!r} and {floor!r}")
        self.epsilon, self.begin, self.overshoot = float(epsilon), float(begin), float(overshoot)
        self.ramp, self.floor = float(ramp), float(floor)
        self.constants = PairConstants()

    def epsilon_at(self, progress: float) -> float:
        """epsilon at a part of the run."""
        part = 1.0 if progress >= self.ramp else progress / self.ramp
        return self.epsilon * (self.begin + (self.overshoot - self.begin) * part)

    def __call__(self, step: Step) -> Tensor:
        pairs = self.constants(step.model, step.images).to(step.scores.dtype)[step.labels]  # (N, classes)
        scores = emma_scores(step.scores, step.labels, self.epsilon_at(step.progress) * pairs, self.floor)
        return F.cross_entropy(scores, step.labels, reduction="none")


METHOD = Method(
    name="emma",
    title="EMMA, efficient margin maximisation (Hu et al., 2023)",
    mechanism="loss",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=track,
    loss=EMMALoss,
    term_options=("epsilon", "begin", "overshoot", "ramp", "floor"),
    certificate="pairs",
    # The derivative of a product of norms is as long as the product is large: up to 130 on the digits. The authors clip
    # at 3, too; without it a rate that is right at first throws the weights about later.
    hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 6e-3, "weight_decay": 0.0, "gradient_clip": 3.0},
    note="bound of the stored weights in evaluation, per pair of classes",
)
