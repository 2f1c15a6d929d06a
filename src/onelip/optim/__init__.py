"""Optimisers that keep the operators of Lipschitz layers near orthogonality, where AOL loses nothing.

    optimizer = onelip.optim.LipschitzMuon(model, lr=0.05)      # instead of torch.optim.SGD
    onelip.optim.retract_after(any_optimizer, model)            # or with any other optimizer

    with onelip.optim.training_weights(model, optimizer):       # the forward pass at the cost of the plain network
        loss = ...

AOL divides each column of a parameter P by the square root of a sum: the absolute inner products of this column with
all columns. A step that makes the columns slightly less orthogonal adds to every term, so a wide layer loses much of
its norm; a P with orthonormal columns loses none. The guarantee of a layer does not depend on these functions: AOL is
applied to every P.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.optim.layers import retract_ as retract_, unscaled as unscaled
    from onelip.optim.muon import LipschitzMuon as LipschitzMuon
    from onelip.optim.operators import orthogonalize as orthogonalize, retract as retract, tangent as tangent
    from onelip.optim.retraction import (
        keeps_norms as keeps_norms,
        retract_after as retract_after,
        training_weights as training_weights,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
