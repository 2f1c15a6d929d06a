"""Exact norms of layers, and the contract that every method must satisfy, as checks for your own methods.

    from onelip.testing import Method, check_contract
    check_contract(Method(name="mine", ..., apply=my_function))

It needs only torch.
"""

from onelip.methods.registry import Method
from onelip.testing.contract import CHECKS, ContractViolation, Coverage, check_contract
from onelip.testing.layers import LayerCase
from onelip.testing.norms import exact_jacobian, exact_norm, jacobians_at, rounding_allowance

__all__ = [
    "CHECKS",
    "ContractViolation",
    "Coverage",
    "LayerCase",
    "Method",
    "check_contract",
    "exact_jacobian",
    "exact_norm",
    "jacobians_at",
    "rounding_allowance",
]
