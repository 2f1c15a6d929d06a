"""A Markdown extension that turns formulas into MathML while the site is built.

`pymdownx.arithmatex` finds the formulas. Browsers draw MathML themselves, so the pages need no script and no network.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


class _Formulas(Postprocessor):
    def run(self, text: str) -> str:
        return _FORMULA.sub(self._formula, text)

    def _formula(self, found: re.Match[str]) -> str:
        if found[2] == "(":
            return convert(html.unescape(found[3]), display="inline")
        # A wide formula scrolls on a phone.
        return f'<div class="formula" tabindex="0">{convert(html.unescape(found[3]), display="block")}</div>'


class MathML(Extension):
    """Formulas as MathML."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_Formulas(md), "mathml", -10)


def makeExtension(**settings: Any) -> MathML:
    """What Markdown calls to load the extension."""
    return MathML(**settings)
