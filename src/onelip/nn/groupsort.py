"""GroupSort: sort groups of channels."""

import torch
from torch import Tensor

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Sort
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length
from onelip.nn.maxmin import maxmin


def groupsort(x: Tensor, group_size: int | None = None, dim: int = 1) -> Tensor:
    """Sort groups of `group_size` elements of axis `dim` in descending order; see `GroupSort`.

    Args:
        x: the input.
        group_size: elements of each group; None or -1 for one group with the whole axis.
        dim: axis that is split into groups.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: if the group size does not divide the length of the axis.

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
            f"(input of shape {tuple(x.shape)}); use a divisor of {n}, or append zeros with PadChannels"
        )
    dim = dim % x.dim()
    groups = x.unflatten(dim, (size, n // size))
    return torch.sort(groups, dim, descending=True).values.flatten(dim, dim + 1)


class GroupSort(LipschitzModule):
    r"""Sort each group of channels in descending order.

    Group $j$ of an axis of length $n$ with group size $g$ consists of the elements $j, j + n/g, j + 2n/g, \ldots$, so
    that group size 2 is `MaxMin`. Which elements form a group is only a permutation of the channels.

    The layer is 1-Lipschitz because $\|\mathrm{sort}(x) - \mathrm{sort}(y)\|_2 \le \|x - y\|_2$ (rearrangement
    inequality) in each group. It is exact in floating point, and its Jacobian is a permutation everywhere.

    From Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019.

    Args:
        group_size: elements of each group, a divisor of the number of channels; None or -1 sorts all of them.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape that has the axis `dim`; the group size divides $C$.
        - Output: same shape as the input.

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
