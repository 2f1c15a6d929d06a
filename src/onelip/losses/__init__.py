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

from onelip.losses.chain import (
    NotAChain as NotAChain,
    PairConstants as PairConstants,
    estimated_constant as estimated_constant,
)
from onelip.losses.margin import (
    CertificateRegularisation as CertificateRegularisation,
    EMMALoss as EMMALoss,
    GloRoLoss as GloRoLoss,
    LMTLoss as LMTLoss,
    bottom_score as bottom_score,
    emma_scores as emma_scores,
    lmt_scores as lmt_scores,
)
from onelip.losses.optimal_transport import HKRLoss as HKRLoss, KRLoss as KRLoss
from onelip.losses.penalties import (
    GradientPenaltyLoss as GradientPenaltyLoss,
    OrthogonalityLoss as OrthogonalityLoss,
    gradient_penalty as gradient_penalty,
    orthogonality_penalty as orthogonality_penalty,
    orthogonality_residual as orthogonality_residual,
)
from onelip.losses.registry import (
    GeneralisedCrossEntropy as GeneralisedCrossEntropy,
    LogitAnnealingLoss as LogitAnnealingLoss,
    Loss as Loss,
    OffsetCrossEntropy as OffsetCrossEntropy,
    call_loss as call_loss,
    create_loss as create_loss,
    find_loss as find_loss,
    list_losses as list_losses,
    loss_options as loss_options,
    register_loss as register_loss,
)
