"""The pictures of the page, as SVG text: no library, no network, sharp in print. Colours follow the page (CSS)."""

from typing import Any

from markupsafe import Markup, escape

_LEFT, _WIDTH, _LINE = 190, 760, 26  # space for names, whole width, height of a row
_HUES = ("#222222", "#1b6ca8", "#2a9d6f", "#d08c12", "#b3402a")  # clean, then growing radii; also told apart by shape


def dots(rows: list[dict[str, Any]], split: str) -> Markup:
    """Clean accuracy and CRA of each method as dots on a line from 0 to 100 %.

    Args:
        rows: those that worked.
        split: which images.
    """
    names = ["accuracy", *rows[0]["results"][split]["cra"]]
    parts, height = [], _LINE * len(rows) + 62
    for place, name in enumerate(names):
        x = _LEFT + 108 * place
        parts.append(_mark(place, x, 12) + _text(x + 10, 16, name if place == 0 else f"CRA {name}"))
    top = 34
    bottom = top + _LINE * len(rows)
    for percent in range(0, 101, 20):
        x = _across(percent / 100)
        parts.append(_line(x, top, x, bottom, "grid") + _text(x, bottom + 18, f"{percent} %", "middle"))
    for number, row in enumerate(rows):
        y = top + _LINE * (number + 0.5)
        found = [row["results"][split]["accuracy"], *row["results"][split]["cra"].values()]
        known = [value for value in found if value is not None]
        parts.append(_text(_LEFT - 12, y + 4, row["method"], "end"))
        parts.append(_line(_across(min(known)), y, _across(max(known)), y, "span"))
        # The largest radius first, so that the clean accuracy lies on top.
        parts += [_mark(i, _across(v), y) for i, v in reversed(list(enumerate(found))) if v is not None]
    return _picture(parts, height, f"Accuracy and certified robust accuracy of {len(rows)} methods")


def spectra(rows: list[dict[str, Any]]) -> Markup:
    """The distribution of singular values of each method, as an area over 0 to 1.24; 1 is marked.

    Args:
        rows: those whose singular values are known.
    """
    edges = rows[0]["singular_values"]["histogram"]["edges"]
    line, parts, top = 44, [], 8
    bottom = top + line * len(rows)

    def across(s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 90) * s / edges[-1]

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(across(tick), top, across(tick), bottom, "one" if tick == 1 else "grid"))
        parts.append(_text(across(tick), bottom + 18, f"{tick:g}", "middle"))
    for number, row in enumerate(rows):
        found = row["singular_values"]["histogram"]
        base = top + line * (number + 1) - 4
        highest = max(*found["shares"], 1e-12)
        steps = [f"M{across(edges[0]):.1f} {base:.1f}"]
        for share, left, right in zip(found["shares"], edges, edges[1:], strict=False):
            y = base - (line - 10) * share / highest
            steps.append(f"L{across(left):.1f} {y:.1f}L{across(right):.1f} {y:.1f}")
        parts.append(f'<path class="area" d="{"".join(steps)}L{across(edges[-1]):.1f} {base:.1f}Z"/>')
        parts.append(_text(_LEFT - 12, base - 6, row["method"], "end"))
        if found["above"] > 0.0005:
            parts.append(_text(across(edges[-1]) + 8, base - 6, f"{100 * found['above']:.1f} % above"))
    return _picture(parts, bottom + 28, f"Singular values of the layers of {len(rows)} methods")


def _across(share: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 30) * share


def _mark(place: int, x: float, y: float) -> str:
    colour = _HUES[place % len(_HUES)]
    if place == 0:
        return f'<circle class="clean" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke-width="2"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if place % 2 == 0 else ""
    if place >= 3:
        points = f"{x - 5:.1f},{y + 4:.1f} {x + 5:.1f},{y + 4:.1f} {x:.1f},{y - 5:.1f}"
        flip = f' transform="rotate(180 {x:.1f} {y:.1f})"' if place % 2 == 0 else ""
        return f'<polygon points="{points}" fill="{colour}"{flip}/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"{turn}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _picture(parts: list[str], height: float, label: str) -> Markup:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")
