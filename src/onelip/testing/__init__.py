"""Exact norms of layers, and the contract that every method must satisfy, as checks for your own methods.

    from onelip.testing import Method, check_contract
    check_contract(Method(name="mine", ..., apply=my_function))

It needs only torch.
"""

from onelip.methods.registry import Method as Method
from onelip.testing.contract import (
    CHECKS as CHECKS,
    ContractViolation as ContractViolation,
    Coverage as Coverage,
    check_contract as check_contract,
)
from onelip.testing.layers import LayerCase as LayerCase
from onelip.testing.norms import (
    exact_jacobian as exact_jacobian,
    exact_norm as exact_norm,
    jacobians_at as jacobians_at,
    rounding_allowance as rounding_allowance,
)
