"""Optimisers that keep the operators of Lipschitz layers near orthogonality, where AOL loses nothing.

    optimizer = onelip.optim.LipschitzMuon(model, lr=0.05)      # in the place of torch.optim.SGD
    onelip.optim.retract_after(any_optimizer, model)            # or beside any other optimizer

AOL divides the columns of a parameter P by the roots of the absolute row sums of its Gram matrix. Noise in P enters
each sum once per column, so a wide layer loses much of its norm to a small step; a P with orthonormal columns loses
none. The guarantee of a layer never depends on these functions: AOL is applied to whatever P they leave.
"""

from typing import TYPE_CHECKING

from onelip.core.lazy import lazy_names

if TYPE_CHECKING:
    from onelip.optim.layers import retract_ as retract_, unscaled as unscaled
    from onelip.optim.muon import LipschitzMuon as LipschitzMuon
    from onelip.optim.operators import orthogonalize as orthogonalize, retract as retract, tangent as tangent
    from onelip.optim.retraction import retract_after as retract_after

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
