"""Operations, one file per family: importing this package registers them.

activations     slopes
arithmetic      sums, products with constants
linear          stored weights
movement        views, slices, copies, padding
normalisation   batch normalisation (stored statistics), layer and group normalisation (those of the sample)
pooling         maxima over windows
potential       residual layers x - c A^T s(A x + b), as in SLL and CPL
separable       average pooling, interpolation
squares         roots of sums of squares, such as L2 pooling
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
