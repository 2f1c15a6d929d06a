"""Check the pages of a site: python tools/check_site.py site

It fails if a page loads a script, style, font or image from another host or from outside of the site, if a docstring
was not read as one (its sections then are paragraphs such as "Args: ..."), or if an API page documents no name.
"""

import re
import sys
from pathlib import Path

# Links (<a href>) may leave the site; what a browser loads by itself may not.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|prev|next)\b)[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+\)|@import\s+["'](?:https?:)?//[^"']+""",
    re.IGNORECASE,
)

IMAGE = re.compile(r"""<img\b[^>]*\bsrc=["']?([^"'\s>:]+)["'\s>]""", re.IGNORECASE)
SECTION = re.compile(r"<p>(?:Args|Returns|Raises|Shape):[^<]*")
DOCUMENTED = re.compile(r"""<h[23] id=["']?onelip\.""")

site, found = Path(sys.argv[1]).resolve(), []
for path in sorted(site.rglob("*")):
    if path.suffix not in (".html", ".css"):
        continue
    text = path.read_text(encoding="utf-8")
    found += [f"{path}: {match[0]}" for rule in (LOADED, SECTION) for match in rule.finditer(text)]
    if path.parent.name == "api" and not DOCUMENTED.search(text):
        found.append(f"{path}: documents no name")
    images = [(path.parent / match[1]).resolve() for match in IMAGE.finditer(text) if not match[1].startswith("/")]
    found += [f"{path}: missing {image}" for image in images if not (image.is_relative_to(site) and image.is_file())]
sys.exit("\n".join(found) or 0)
