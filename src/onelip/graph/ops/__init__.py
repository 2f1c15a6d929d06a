"""Operations, one file per family: importing this package registers them.

activations     slopes
arithmetic      sums, products with constants; sums, means and cumulative sums along axes
linear          stored weights
movement        views, slices, copies, padding
normalisation   batch normalisation (stored statistics), layer and group normalisation (those of the sample)
pooling         average pooling, interpolation, maxima over windows
potential       residual layers x - c A^T s(A x + b), as in SLL and CPL
squares         roots of sums of squares, such as L2 pooling
"""

from onelip.graph.ops import (
    activations as activations,
    arithmetic as arithmetic,
    linear as linear,
    movement as movement,
    normalisation as normalisation,
    pooling as pooling,
    potential as potential,
    squares as squares,
)
