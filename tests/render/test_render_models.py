"""The list of models and what was removed, at every width and with names of every kind."""

from __future__ import annotations

from drawn import shown

from llmcli.commands.models.view import render_models, render_pulled, render_removal
from llmcli.records import models as made

NOW = 1_800_000_000.0


def model(name="org/name", **changes):
    return made.StoredModel(
        **{
            "name": name, "place": "hub cache", "path": "/hub/x", "bytes": 3 << 20, "files": 2,
            "revision": "0123456789abcdef", "refs": ("main",), "last_used": NOW - 3 * 86400.0,
            "state": "complete", **changes,
        }
    )  # fmt: skip


NOWHERE = {"place": "nowhere", "bytes": 0, "files": 0, "revision": None, "last_used": None,
           "state": "not fetched"}  # fmt: skip


def report(*models, **changes):
    caches = (
        made.CacheUse(place="llmcli cache", path="/own", bytes=0),
        made.CacheUse(place="hub cache", path="/hub", bytes=3 << 20, others=1),
    )
    return made.ModelsReport(
        **{"models": models, "caches": caches, "left_over": 0, "warnings": (), **changes}
    )


def removal(name="org/name@v1", **changes):
    return made.Removal(
        **{
            "name": name, "place": "hub cache", "why": "no snapshot links to it", "bytes": 2048,
            "paths": ("/hub/models--org--name/blobs/" + "e" * 64, "/hub/y"), **changes,
        }
    )  # fmt: skip


def test_screens(golden):
    """What transcripts/models.txt has not: other repositories, reasons, hostile names, widths."""
    two = report(model(), model("tiny", **NOWHERE), left_over=1024)
    both = (removal("\x07"), removal("b", why=""))
    gone = made.RemovalReport(removed=both, kept=(), dry_run=True)
    in_use = made.RemovalReport(removed=(), kept=("`x` is in use",), dry_run=False)
    pulled = made.PulledModel(name="a\x1b[2Jb", path="/" + "x" * 200, bytes=2048, fetched=True)
    golden("models", {
        "a table where there is room": shown(render_models(two, now=NOW), width=100),
        "and lines where there is none": shown(render_models(two, now=NOW), width=40),
        "what goes, why and where": shown(render_removal(gone), width=200),
        "it is in use": shown(render_removal(in_use)),
        "what was pulled is one line for scripts": shown(render_pulled(pulled), width=10_000),
        "and several on a narrow screen": shown(render_pulled(pulled), width=60),
    })  # fmt: skip
    line = shown(render_pulled(pulled), width=10_000)
    assert shown(render_pulled(pulled), width=len(line)) == line
