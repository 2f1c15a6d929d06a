"""The contract of a method, as checks that anybody can run on a method of their own.

    from onelip.testing import Method, check_contract
    check_contract(Method(name="mine", ..., apply=my_verb))

Needs hypothesis (`pip install onelip[testing]`) for `check_contract` and `layer_cases`; the norms need only torch.
"""

from onelip.methods._registry import Method
from onelip.testing.contract import CHECKS, ContractViolation, check_contract
from onelip.testing.layers import LayerCase
from onelip.testing.norms import exact_jacobian, exact_norm, rounding_allowance

__all__ = [
    "CHECKS",
    "ContractViolation",
    "LayerCase",
    "Method",
    "check_contract",
    "exact_jacobian",
    "exact_norm",
    "rounding_allowance",
]
