"""Reports about one or several runs: one HTML page that loads nothing else.

onelip.report.write_report(["runs/first"], "report.html")
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.report.page import (
        Written as Written,
        comparison_page as comparison_page,
        write_report as write_report,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
