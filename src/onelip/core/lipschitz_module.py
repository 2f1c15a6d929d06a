"""What every layer of `onelip.nn` promises: a number L with ||f(x) - f(y)||_2 <= L ||x - y||_2 for all x, y.

The number is about the module as a map between whole samples (all axes but the batch axis flattened), in eval mode,
in real arithmetic. Rounding of the program is a matter for the certificate, not for this number.
Composition: L(f after g) <= L(f) L(g), the only rule used here; anything else is the work of the audit.
"""

from typing import ClassVar

from torch import nn

from onelip.core.errors import UnknownLipschitzConstant


class LipschitzModule(nn.Module):
    """Base of the layers with a proved constant: set `proved_constant`, or override `lipschitz_constant`.

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

        Read by `onelip.summary`, and by the audit of whole networks.  A layer that overrides it must never
        return a smaller number than it can prove, and raises `UnknownLipschitzConstant` where it can prove none.
        """
        if self.proved_constant is None:
            raise UnknownLipschitzConstant(f"{type(self).__name__} states no constant; set `proved_constant`")
        return self.proved_constant
