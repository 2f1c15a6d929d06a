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
    check_contract(method, checks=(check,), options=options, examples=_examples(method, options, check))


def _examples(method, options, check):
    """AOL, which all else here stands on, gets every example; of the others the theorem gets the most."""
    if method.name == "aol":
        return 1.0
    return 0.6 if check == "norm within claim" and not options else 0.2
