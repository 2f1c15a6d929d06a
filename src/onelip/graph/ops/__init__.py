"""Operations, one file per family: importing this package registers them.

activations     slopes
arithmetic      sums, products with constants
linear          stored weights
movement        views, slices, copies, padding
normalisation   stored and own statistics
pooling         maxima over windows
separable       average pooling, interpolation
sums            sums, means and cumulative sums along axes
"""

from onelip.graph.ops import (
    activations as activations,
    arithmetic as arithmetic,
    linear as linear,
    movement as movement,
    normalisation as normalisation,
    pooling as pooling,
    separable as separable,
    sums as sums,
)
