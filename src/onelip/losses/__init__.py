"""Losses for Lipschitz networks. Any loss can be combined with any method.

A loss is called like those of torch, with scores (N, classes) and labels (N), and returns the mean over the batch. A
loss that needs more declares keyword arguments in its signature: `model` (the network, as an `nn.Sequential`), `images`
(the batch) and `progress` (the completed fraction of the run, from 0 to 1, for losses with a ramp):

    loss = onelip.losses.EMMALoss(epsilon=36 / 255)
    for step, (images, labels) in enumerate(loader):
        scores = model(images)
        loss(scores, labels, model=model, images=images, progress=step / steps).backward()

`call_loss` calls any loss with the arguments that it declares. `onelip train --loss NAME` accepts a registered name or
`module:callable`. A custom callable may return one value per image (N) instead of the mean.
"""

from onelip.losses.chain import NotAChain, PairConstants, estimated_constant
from onelip.losses.margin import (
    CertificateRegularisation,
    EMMALoss,
    GloRoLoss,
    LMTLoss,
    bottom_score,
    emma_scores,
    lmt_scores,
)
from onelip.losses.offset import Loss, OffsetCrossEntropy
from onelip.losses.optimal_transport import HKRLoss, KRLoss
from onelip.losses.penalties import (
    GradientPenaltyLoss,
    OrthogonalityLoss,
    gradient_penalty,
    orthogonality_penalty,
    orthogonality_residual,
)
from onelip.losses.registry import call_loss, create_loss, find_loss, list_losses, loss_options, register_loss

__all__ = [
    "CertificateRegularisation",
    "EMMALoss",
    "GloRoLoss",
    "GradientPenaltyLoss",
    "HKRLoss",
    "KRLoss",
    "LMTLoss",
    "Loss",
    "NotAChain",
    "OffsetCrossEntropy",
    "OrthogonalityLoss",
    "PairConstants",
    "bottom_score",
    "call_loss",
    "create_loss",
    "emma_scores",
    "estimated_constant",
    "find_loss",
    "gradient_penalty",
    "list_losses",
    "lmt_scores",
    "loss_options",
    "orthogonality_penalty",
    "orthogonality_residual",
    "register_loss",
]
