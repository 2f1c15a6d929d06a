"""The tables and figures of the paper: their runs, and a table of the paper's numbers beside those of the runs.

    found = reproduce("table-5", "runs/reproduce", budget="10m", data_root="data")
    print(found.table.to_markdown())

Names are loaded on first use, so that the list of experiments does not import torch.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.reproduce.experiments import (
        Experiment as Experiment,
        Row as Row,
        find_experiment as find_experiment,
        list_experiments as list_experiments,
    )
    from onelip.reproduce.run import Reproduction as Reproduction, reproduce as reproduce
    from onelip.reproduce.tables import TextTable as TextTable

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
