"""The numbers of the AOL paper as data: paper.json, with the table and row of each."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def paper() -> dict[str, Any]:
    """The content of paper.json: the tables and figures of the paper by name; accuracies are in %.

    Examples:
        >>> paper()["columns"], paper()["tables"]["table-3"]["rows"][7]["values"]
        (['accuracy', '36/255', '72/255', '108/255', '1'], [69.8, 62.0, 54.4, 47.1, 21.8])
    """
    return json.loads(files("onelip.core").joinpath("paper.json").read_bytes())
