"""Fail if a page loads a script, style, font or image from another host: python tools/check_site.py site"""

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

found = [
    f"{path}: {match[0]}"
    for path in sorted(Path(sys.argv[1]).rglob("*"))
    if path.suffix in (".html", ".css")
    for match in LOADED.finditer(path.read_text(encoding="utf-8"))
]
sys.exit("\n".join(found) or 0)
