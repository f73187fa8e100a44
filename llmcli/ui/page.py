"""A page for a browser: the frame, a style, a script and data, in one file that needs no other.

Everything the page runs is in it and named by its hash; a browser refuses to run or
fetch anything else. Tokens are data, and never become HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from llmcli.records.document import ViewCheck
from llmcli.records.text import Token
from llmcli.ui.palette import DECADES, DIVERGING, VIRIDIS
from llmcli.ui.theme import one_line, quoted

SCRIPTS = {
    "attention": ("common", "cells", "heads", "matrix", "token", "attention"),
    "diff": ("common", "diff"),
    "experts": ("common", "experts"),
    "lens": ("common", "lens"),
    "maps": ("common", "maps"),
}


def page(
    kind: str, title: str, data: Mapping[str, Any], blocks: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The page `kind`, one of `SCRIPTS`, as UTF-8.

    `data` is what its script finds, JSON without NaN. `blocks`: (id, base64) of larger data.
    """
    script = "\n".join(_part(f"{name}.js") for name in SCRIPTS[kind])
    style = _part("page.css")
    shared = {
        "decades": DECADES,
        "colours": {"plain": packed(VIRIDIS), "signed": packed(DIVERGING)},
    }
    holders = [f'<script type="application/json" id="data">{_json({**data, **shared})}</script>']
    holders += [f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blocks]
    parts = {
        "title": html.escape(one_line(title)),
        "style": style,
        "style-hash": _hash(style),
        "body": _part(f"{kind}.html"),
        "data": "\n".join(holders),
        "script": script,
        "script-hash": _hash(script),
    }
    # one pass: a part may have {{…}} in it, as a token may
    filled = re.sub(r"\{\{([a-z-]+)\}\}", lambda match: parts[match[1]], _part("frame.html"))
    return filled.encode()


def packed(numbers: Any) -> str:
    """A uint8 array as base64."""
    return base64.b64encode(numbers.tobytes()).decode()


def token(one: Token) -> dict[str, Any]:
    """A token for the page's script: control characters are spelled out."""
    return {"id": one.id, "text": quoted(one.text)[1:-1]}


def checks(found: Sequence[ViewCheck]) -> list[dict[str, Any]]:
    """Checks for the page's script."""
    return [{**vars(check), "value": finite(check.value), "ok": check.ok} for check in found]


def finite(value: float, digits: int = 17) -> float | None:
    """So many digits of it; JSON has no NaN and no infinity."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script around it, nor a line of it; no address is in it either."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("/", "\\/")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _part(name: str) -> str:
    return (files("llmcli") / "assets" / "pages" / name).read_text(encoding="utf-8")
