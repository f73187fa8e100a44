"""The list of models and what was removed, at every width and with names of every kind."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.models.view import render_models, render_pulled, render_removal
from llmcli.reports.models import (
    CacheUse,
    ModelsReport,
    PulledModel,
    Removal,
    RemovalReport,
    StoredModel,
    ago,
)

NOW = 1_800_000_000.0
DAY = 86400.0


def model(name="org/name", **changes):
    return StoredModel(
        **{
            "name": name, "place": "hub cache", "path": "/hub/x", "bytes": 3 << 20, "files": 2,
            "revision": "0123456789abcdef", "refs": ("main",), "last_used": NOW - 3 * DAY,
            "state": "complete", **changes,
        }
    )  # fmt: skip


NOWHERE = {"place": "nowhere", "bytes": 0, "files": 0, "revision": None, "last_used": None,
           "state": "not fetched"}  # fmt: skip


def report(*models, **changes):
    caches = (
        CacheUse(place="llmcli cache", path="/own", bytes=0),
        CacheUse(place="hub cache", path="/hub", bytes=3 << 20, others=1),
    )
    return ModelsReport(
        **{"models": models, "caches": caches, "left_over": 0, "warnings": (), **changes}
    )


def removal(name="org/name@v1", **changes):
    return Removal(
        **{
            "name": name, "place": "hub cache", "why": "no snapshot links to it", "bytes": 2048,
            "paths": ("/hub/models--org--name/blobs/" + "e" * 64, "/hub/y"), **changes,
        }
    )  # fmt: skip


def shown(renderable, width=80):
    to = Console(
        file=io.StringIO(), width=width, color_system=None, no_color=True, highlight=False,
        markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    to.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in to.file.getvalue().splitlines())


def test_a_table_where_there_is_room():
    one = report(model(), model("tiny", **NOWHERE), left_over=1024)
    assert shown(render_models(one, now=NOW), 100).splitlines() == [
        "name        size   state         last used    place       files   revision",
        "─" * 78,
        "org/name   3 MiB   complete      3 days ago   hub cache       2   0123456789ab",
        "tiny               not fetched",
        "",
        "llmcli cache 0 B · /own",
        "hub cache 3 MiB · /hub · besides 1 repository that is no model",
        "stale downloads and replaced versions 1 KiB · `llmcli models prune` removes them",
    ]


def test_two_columns_less_and_then_lines():
    one = report(model(), model("tiny", **NOWHERE))
    head = shown(render_models(one, now=NOW), 70).splitlines()[0]
    assert head == "name        size   state         last used    place"
    assert shown(render_models(one, now=NOW), 40).splitlines()[:4] == [
        "org/name",
        "    3 MiB · complete · used 3 days ago",
        "    hub cache · 2 files · 0123456789ab",
        "tiny",
    ]


@pytest.mark.parametrize("width", range(40, 241, 20))
def test_no_line_is_too_long_and_no_name_is_cut(width):
    names = ["a" * 30, "hf:org/" + "n" * 90 + ".gguf", "日本語/模型"]
    one = report(*map(model, names), left_over=5)
    text = shown(render_models(one, now=NOW), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert all(name in text.replace("\n", "") for name in names)
    gone = RemovalReport(removed=tuple(map(removal, names)), kept=(), dry_run=True)
    text = shown(render_removal(gone), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert all(name in text.replace("\n", "") for name in names)


def test_what_goes_why_and_where():
    gone = RemovalReport(removed=(removal(), removal("b", why="")), kept=(), dry_run=True)
    assert shown(render_removal(gone), 200).splitlines() == [
        "org/name@v1  2 KiB",
        f"    no snapshot links to it · {removal().paths[0]} and 1 more",
        "b  2 KiB",
        f"    {removal().paths[0]} and 1 more",
        "",
        "would free 4 KiB",
    ]
    done = RemovalReport(removed=gone.removed, kept=(), dry_run=False)
    assert shown(render_removal(done)).endswith("\nfreed 4 KiB")
    nothing = RemovalReport(removed=(), kept=(), dry_run=False)
    assert shown(render_removal(nothing)) == "nothing to remove"
    used = RemovalReport(removed=(), kept=("`x` is in use",), dry_run=False)
    assert shown(render_removal(used)) == "nothing was removed"


def test_what_was_pulled_is_one_line_for_scripts():
    pulled = PulledModel(name="a\x1b[2Jb", path="/" + "x" * 200, bytes=2048, fetched=True)
    line = f"a\\x1b[2Jb  2 KiB  fetched  /{'x' * 200}"
    assert shown(render_pulled(pulled), 10_000) == line
    assert shown(render_pulled(pulled), len(line)) == line
    narrow = shown(render_pulled(pulled), 60).splitlines()
    assert narrow[0] == "a\\x1b[2Jb  2 KiB  fetched"
    assert "".join(part.strip() for part in narrow[1:]) == "/" + "x" * 200
    assert all(cell_len(part) <= 60 for part in narrow)


def test_control_characters_are_spelled():
    text = shown(render_models(report(model("a\x1b[2J\nb")), now=NOW), 120)
    assert "a\\x1b[2J\\nb" in text
    gone = RemovalReport(removed=(removal("\x07", paths=("\x1b",)),), kept=(), dry_run=False)
    assert not set(shown(render_removal(gone))) & {"\x07", "\x1b"}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "just now"), (59, "just now"), (60, "1 minute ago"), (7200, "2 hours ago"),
     (DAY, "1 day ago"), (59 * DAY, "59 days ago"), (61 * DAY, "2 months ago"),
     (400 * DAY, "13 months ago"), (800 * DAY, "2 years ago")],
)  # fmt: skip
def test_ages(seconds, words):
    assert ago(seconds) == words
