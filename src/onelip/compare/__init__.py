"""Methods side by side: the same network, the same data, the same budget, one run each, and what each one costs.

    plan = Plan.make("aol,bcop", budget="20ep", recipe=onelip.training.preset("digits"))
    comparison = compare(plan, "comparisons/first")

Names are loaded when they are first used: plans need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelip.compare.page import render_page
    from onelip.compare.plan import Budget, Plan
    from onelip.compare.run import compare
    from onelip.compare.table import comparison_tables

_WHERE = {
    "Budget": "plan",
    "Plan": "plan",
    "compare": "run",
    "comparison_tables": "table",
    "render_page": "page",
}

__all__ = ["Budget", "Plan", "compare", "comparison_tables", "render_page"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip.compare' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onelip.compare.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
