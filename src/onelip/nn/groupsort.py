"""GroupSort: the axis is cut into groups, each group is sorted.

Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019.  Inequality: ||sort(x) - sort(y)||_2 <=
||x - y||_2 within each group (rearrangement), so for all of them together.  Assumes that the group size divides the
length of the axis.  Exact in floating point.

Group j of an axis of length n consists of the elements j, j + n/g, j + 2n/g, ..., and is sorted downwards, so that
group size 2 is MaxMin to the letter.  Which elements make a group is only a permutation of the channels.
"""

import torch
from torch import Tensor

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Sort
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length
from onelip.nn.maxmin import maxmin


def groupsort(x: Tensor, group_size: int | None = None, dim: int = 1) -> Tensor:
    """Sort groups of `group_size` elements of axis `dim` downwards; None or -1 sorts the whole axis.

    Examples:
        >>> groupsort(torch.tensor([[1.0, 5.0, 3.0, 4.0]]))
        tensor([[5., 4., 3., 1.]])
        >>> groupsort(torch.tensor([[1.0, 5.0, 3.0, 4.0]]), 2)
        tensor([[3., 5., 1., 4.]])
    """
    n = axis_length(x, dim, "groupsort")
    size = n if group_size is None or group_size == -1 else group_size
    if size == 2 and n % 2 == 0:
        return maxmin(x, dim)
    if size == n:
        return torch.sort(x, dim, descending=True).values
    if n % size:
        raise ValueError(
            f"groupsort expected axis {dim} to be a multiple of the group size {size}, got length {n} "
            f"(input of shape {tuple(x.shape)}); choose a divisor of {n}, or pad with PadChannels"
        )
    dim = dim % x.dim()
    groups = x.unflatten(dim, (size, n // size))
    return torch.sort(groups, dim, descending=True).values.flatten(dim, dim + 1)


class GroupSort(LipschitzModule):
    """`groupsort` as a layer: 1-Lipschitz, and the derivative is a permutation everywhere.

    Examples:
        >>> GroupSort(4)(torch.tensor([[3.0, 1.0, 2.0, 4.0]]))
        tensor([[4., 3., 2., 1.]])
    """

    proved_constant = 1.0

    def __init__(self, group_size: int | None = None, dim: int = 1) -> None:
        super().__init__()
        self.group_size = None if group_size in (None, -1) else check_integer("group_size", group_size)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return groupsort(x, self.group_size, self.dim)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}, dim={self.dim}"


@lowers(GroupSort)
def _lower(low: Lowering) -> int:
    axis = low.sample_axis
    return low.emit(Sort, low.source, axis=axis, group_size=low.module.group_size or low.shape[axis])
