"""Activations.

Note [Leaky]
    LeakyReLU of slope a in [0, 1] is a x + (1 - a) relu(x), read so with a constant of a + (1 - a): 1. Torch computes
    it otherwise: x where x > 0, a x elsewhere. That is within the error of the four nodes: from the same x^ it is off
    by U a |x^| at most where x^ <= 0, and by |1 - a - fl(1 - a)| x^ <= U (1 - a) x^ elsewhere, and the nodes count
    U a |x^|, U fl(1 - a) |x^| and their sum's rounding.
"""

from onelip.core.errors import ProofError
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.lowerings.arithmetic import number, times
from onelip.nn.absolute import Abs
from onelip.nn.groupsort import GroupSort
from onelip.nn.maxmin import MaxMin


@lowers("aten.relu.default")
def relu(low: Lowering) -> int:
    return low.emit(kinds.Relu, low.source)


@lowers("aten.abs.default")
def absolute(low: Lowering) -> int:
    return low.emit(kinds.Abs, low.source)


@lowers(Abs)
def abs_layer(low: Lowering) -> int:
    return low.emit(kinds.Abs, low.source) if low.module.fraction == 1.0 else low.refuse()


@lowers(MaxMin)
def maxmin(low: Lowering) -> int:
    return low.emit(kinds.Sort, low.source, axis=sample_axis(low), group_size=2)


@lowers(GroupSort)
def group_sort(low: Lowering) -> int:
    axis = sample_axis(low)
    return low.emit(kinds.Sort, low.source, axis=axis, group_size=low.module.group_size or low.shape[axis])


@lowers("aten.leaky_relu.default")
def leaky_relu(low: Lowering) -> int:
    """Note [Leaky]."""
    x, slope = low.source, number(low, low.argument("negative_slope"))
    if slope is None or not 0 <= slope <= 1:
        return low.refuse()
    part = times(low, x, slope)
    rest = times(low, low.emit(kinds.Relu, x), 1.0 - slope)
    return low.emit(kinds.Add, part, rest)


def sample_axis(low: Lowering) -> int:
    """The axis of a layer, counted within one sample."""
    axis = low.module.dim % len(low.call.shape) - 1
    if axis < 0:
        raise ProofError(f"{low.title}: expected an axis of one sample, got the batch axis")
    return axis
