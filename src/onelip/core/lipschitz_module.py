"""Base class of the layers of `onelip.nn`, which state a proved Lipschitz constant."""

from typing import ClassVar

from torch import nn

from onelip.core.errors import UnknownLipschitzConstant


class LipschitzModule(nn.Module):
    r"""Base class of layers with a proved L2 Lipschitz constant.

    The constant is a number $L$ with $\lVert f(x) - f(y) \rVert_2 \le L \lVert x - y \rVert_2$ for all $x, y$. It
    describes the module as a map between whole samples (all axes but the batch axis flattened), in eval mode and in
    real arithmetic. Certificates account for rounding separately. Constants of a composition multiply,
    $L(f \circ g) \le L(f) L(g)$.

    Subclasses set `proved_constant` or override `lipschitz_constant`.

    Attributes:
        proved_constant: the constant, if it is the same for all instances; else None.

    Examples:
        >>> class Mirror(LipschitzModule):
        ...     proved_constant = 1.0
        ...     def forward(self, x):
        ...         return -x
        >>> Mirror().lipschitz_constant
        1.0
    """

    proved_constant: ClassVar[float | None] = None

    @property
    def lipschitz_constant(self) -> float:
        """A proved bound on the L2 Lipschitz constant (eval mode, real arithmetic).

        `onelip.summary` and `onelip.audit` read it. An override must never return a smaller number than it can prove.

        Raises:
            UnknownLipschitzConstant: if no constant is proved.
        """
        if self.proved_constant is None:
            raise UnknownLipschitzConstant(f"{type(self).__name__} states no constant; set `proved_constant`")
        return self.proved_constant
