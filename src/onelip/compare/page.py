"""One page to look at: the table, the pictures, what failed and how it was made. It needs nothing but itself."""

from importlib.resources import files
from typing import Any

from onelip.compare.drawing import dots, spectra
from onelip.compare.table import columns


def render_page(record: dict[str, Any]) -> str:
    """The page of a comparison, as comparison.json has it, in HTML."""
    from jinja2 import Environment, StrictUndefined  # comes with torch

    # autoescape: names of data and messages of errors are not ours.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = page.from_string(files("onelip.compare").joinpath("page.html.j2").read_text(encoding="utf-8"))
    done = [row for row in record["rows"] if row["status"] == "done"]
    measured = [row for row in done if "histogram" in row["singular_values"]]
    return template.render(
        record=record,
        recipe=record["plan"]["recipe"],
        columns=columns(record),
        meanings=_meanings(record),
        failed=[row for row in record["rows"] if row["status"] != "done"],
        unproved=[row for row in done if row["constant"]["proved"] is None],
        dots=dots(done, record["split"]) if done else None,
        spectra=spectra(measured) if measured else None,
        ways=sorted({layer["how"] for row in measured for layer in row["singular_values"]["layers"]}),
    )


def _meanings(record: dict[str, Any]) -> dict[str, str]:
    """What columns mean, by their titles; those that mean the same stand together."""
    titles: dict[str, list[str]] = {}
    for column in columns(record):
        titles.setdefault(column.meaning, []).append(column.title)
    return {", ".join(names): meaning for meaning, names in titles.items()}
