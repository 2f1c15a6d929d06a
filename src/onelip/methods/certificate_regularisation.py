"""CR, certificate regularisation.

Citation: Sahil Singla, Surbhi Singla, Soheil Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100",
ICLR 2022.

Loss: the ordinary one minus gamma max(0, R), where R is the certified radius of the right class,
    R = min_{i != y} (f_y - f_i) / (K |w_y - w_i|),    K the constant of the features, w the last layer's rows,
or (f_y - max_i f_i) / (sqrt(2) L) where the network as a whole has the constant L.
Assumes: a chain of modules whose constants are known by construction; with them R is the radius of evaluation itself.
Guarantee: that of the layers; the loss changes none.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from onelip.methods._method import Step
from onelip.methods._tracking import PairConstants, estimated_constant, links
from onelip.methods.last_layer import lln
from onelip.methods.soc import METHOD as SOC
from onelip.nn import Householder


class CertificateRegularisation:
    """The recipe's loss minus gamma times the certified radius.

    Args:
        gamma: weight of the radius; 0.5 in the paper.
        per_pair: radii by the distances of the last layer's rows; else by sqrt(2) times the whole constant.

    Example:
        >>> from torch import nn
        >>> scores = torch.tensor([[2.0, 0.0]])
        >>> model = nn.Sequential(nn.Identity())
        >>> step = Step(model, scores, torch.tensor([0]), scores, 0.0, lambda s, y: torch.zeros(len(y)))
        >>> CertificateRegularisation(gamma=0.5)(step)  # 0 - 0.5 * 2 / sqrt(2)
        tensor([-0.7071])
    """

    def __init__(self, gamma: float = 0.5, per_pair: bool = False) -> None:
        if not gamma >= 0:
            raise ValueError(f"expected gamma to be at least 0, got {gamma!r}")
        self.gamma, self.per_pair = float(gamma), bool(per_pair)
        self.constants = PairConstants()

    def radius(self, step: Step) -> Tensor:
        """R for each image (N), negative where the decision is wrong."""
        right = step.labels[:, None]
        differences = step.scores.gather(1, right) - step.scores  # (N, classes)
        if self.per_pair:
            pairs = self.constants(step.model, step.images).to(step.scores.dtype)[step.labels]
        else:
            pairs = math.sqrt(2) * estimated_constant(list(links(step.model))) * torch.ones_like(differences)
        # The right class stands no trial against itself: 0 / 0 must not reach the derivative either.
        others = torch.ones_like(differences, dtype=torch.bool).scatter(1, right, False)
        ratios = differences / pairs.where(others, 1.0)
        return ratios.where(others, math.inf).amin(1)

    def __call__(self, step: Step) -> Tensor:
        return step.ordinary(step.scores, step.labels) - self.gamma * self.radius(step).clamp(min=0)


METHOD = replace(
    SOC,
    name="soc-cr",
    title="SOC + CR: Householder activations, normalised last layer, certificate regularisation (Singla et al., 2022)",
    paper=None,
    options=(),
    loss=partial(CertificateRegularisation, per_pair=True),
    term_options=("gamma", "per_pair"),
    certificate="pairs",
    activation=Householder,
    head=lln,
    hyperparameters={**SOC.hyperparameters, "offset": 0.0, "temperature": 1.0},
    note="layers of SOC; certified per pair of classes",
)
