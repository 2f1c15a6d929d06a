"""Methods side by side: the same network, the same data, the same budget, one run each, and what each one costs.

    plan = Plan.make("aol,bcop", budget="20ep", recipe=onelip.training.preset("digits"))
    comparison = compare(plan, "comparisons/first")

Names are loaded when they are first used: plans need no torch.
"""

from typing import TYPE_CHECKING

from onelip.core.lazy import lazy_names

if TYPE_CHECKING:
    from onelip.compare.page import render_page as render_page
    from onelip.compare.plan import Budget as Budget, Plan as Plan
    from onelip.compare.run import compare as compare
    from onelip.compare.table import comparison_tables as comparison_tables

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
