"""Compare methods: the same network, data and budget, one run for each method, and its cost.

    plan = Plan.make("aol,bcop", budget="20ep", recipe=onelip.training.preset("digits"))
    comparison = compare(plan, "comparisons/first")

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.compare.run import (
        Budget as Budget,
        Plan as Plan,
        compare as compare,
        comparison_tables as comparison_tables,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
