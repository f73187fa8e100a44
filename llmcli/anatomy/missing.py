"""The reason why a model lacks a tensor, and similar names that it has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

from llmcli.anatomy.graph import Graph, graph
from llmcli.config import ModelConfig
from llmcli.graph.node import Absent

_NUMBERED = re.compile(r"(?:^|\.)(blocks|cache|layers|h|blk)\.(-?\d{1,9})(?=\.|$)")


def why_absent(name: str, config: ModelConfig) -> str:
    """The reason for `this model has no …`; empty for a name unknown to every model."""
    layer = _NUMBERED.search(name)
    if layer and not 0 <= int(layer[2]) < len(config.layers):
        return layers_there_are(config, "cache" if layer[1] == "cache" else "blocks")
    model = graph(config)
    inside = _NUMBERED.sub(lambda found: "cache" if found[1] == "cache" else "", name).lstrip(".")
    layers = [int(layer[2])] if layer else range(len(config.layers))
    whys = [_why(inside, model.absent[at]) for at in layers]
    if whys and all(whys):  # some layers have it
        return whys[0]
    return "" if layer else _why(name, model.absent[None])


def _why(name: str, rows: Iterable[Absent]) -> str:
    return next((row.why for row in rows if re.match(row.names, name)), "")


def layers_there_are(config: ModelConfig, part: str = "blocks") -> str:
    """`its 30 blocks are `blocks.0` to `blocks.29``."""
    layers = len(config.layers)
    if layers == 1:
        return f"its only block is `{part}.0`"
    return f"its {layers} blocks are `{part}.0` to `{part}.{layers - 1}`"


def near(name: str, known: Collection[str], model: Graph) -> tuple[str, ...]:
    """At most three of `known` that may be meant: by another program's name, a typo, a suffix."""
    close = _similar(name, known, model)
    typed = re.match(r"blocks\.\d+\.", name)
    block = typed[0] if typed else ""
    inside = [n for n in known if n.startswith(block)]  # keep a given block
    if not close:
        parts = {n.removeprefix(block): n for n in inside}
        close = [parts[n] for n in get_close_matches(name.removeprefix(block), parts, 1, 0.8)]
    if not close:
        close = get_close_matches(name, inside, 3, 0.75)
    if not close:  # a short name such as `pattern`: add its block and part
        inner = near_ends(name, known)
        close = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    return tuple(close)


def near_ends(name: str, known: Collection[str]) -> list[str]:
    """Names with this or a similar suffix: `pattern`, `attn.patern`, `wq`, `resid`."""
    inner = [n for n in known if n.endswith(f".{name}")]
    inner = inner or [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2]]
    return inner or _misspelled(name, known)


def _misspelled(name: str, known: Collection[str]) -> list[str]:
    ends: dict[str, list[str]] = {}
    for one in known:
        inside = re.sub(r"^(blocks|cache)\.\d+\.", "", one)
        for end in {inside, inside.rpartition(".")[2]}:
            ends.setdefault(end, []).append(one)
    close = get_close_matches(name, ends, 1, 0.75)
    close = close or [end for end in ends if _letters(end) == _letters(name)]
    if not close and len(name) >= 3:
        close = [end for end in ends if end.startswith(name)]
    return [one for end in close for one in ends[end]]


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _similar(name: str, known: Collection[str], model: Graph) -> list[str]:
    """Our names for another program's name, in its block or the first."""
    number = re.search(r"\.(\d{1,9})\.", name)
    layers = [int(number[1])] if number else range(len(model.config.layers))
    for at in (*layers, None):
        for theirs, ours in model.similar.get(at, ()):
            found = re.search(rf"(?:^|\.){theirs}$", name)
            close = [one for one in map(found.expand, ours) if one in known] if found else []
            if close:
                return close[:2]
    return []


def either(names: Sequence[str]) -> str:
    """`a`, `b` or `c`, each in backticks."""
    ticked = [f"`{name}`" for name in names]
    return ticked[0] if len(ticked) == 1 else f"{', '.join(ticked[:-1])} or {ticked[-1]}"
