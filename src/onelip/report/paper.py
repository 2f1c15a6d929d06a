"""Results of the AOL paper (Prach and Lampert, 2022): accuracy, and CRA at the radii of its tables, in %."""

from onelip.certification.margins import PAPER_RADII
from onelip.core.paper import paper

# Tables of the paper by the name of the data.
_TABLES = {"cifar10": "table-3", "cifar100": "table-4"}


def paper_results(data: str, model: str) -> dict[str, dict[float, float]]:
    """The published network that is nearest to a model, and its accuracies by radius; none for other data.

    Examples:
        >>> paper_results("cifar10", "aol-large")
        {'AOL-Large, 1000 epochs (paper)': {0.0: 0.716, 0.141...: 0.64, 0.282...: 0.564, 0.423...: 0.49, 1.0: 0.237}}
        >>> paper_results("digits", "patchwise-tiny")
        {}
    """
    rows = paper()["tables"][_TABLES[data]]["rows"] if data in _TABLES else []
    known = {row["name"]: row["values"] for row in rows if row["name"].startswith("AOL")}
    name = next((name for name in known if name.lower().split("-")[1] in model.lower()), "AOL-Small")
    shares = dict(zip((0.0, *PAPER_RADII), (round(p / 100, 3) for p in known.get(name, ())), strict=False))
    return {f"{name}, 1000 epochs (paper)": shares} if shares else {}
