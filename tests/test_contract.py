"""The contract of DESIGN.md, over every registered method with its defaults and each of its options."""

import pytest

from onelip.methods._registry import METHODS
from onelip.testing import CHECKS, check_contract

CASES = [
    pytest.param(method, dict(options), check, id=f"{method.name}-{options or 'defaults'}-{check}")
    for method in METHODS.values()
    for options in ({}, *method.options)
    for check in CHECKS
]


@pytest.mark.parametrize(("method", "options", "check"), CASES)
def test_contract(method, options, check):
    check_contract(method, checks=(check,), options=options)
