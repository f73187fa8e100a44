"""What `score` prints: without a tokenizer, of long texts, of two models."""

from __future__ import annotations

import os

import pytest
from cli_tiny import write_tiny


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "m", weights=True)


def test_ids_without_a_tokenizer_are_scored_but_not_in_bytes(cli, folder):
    os.remove(folder / "tokenizer.json")
    base = ("score", "-m", str(folder), "--ids", "70,71,72,73", "--dtype", "float64")
    shown = cli(*base).out
    assert "undefined: no tokenizer, so no bytes" in shown
    assert {token["bytes"] for token in cli(*base, "--json").json()["tokens"]} == {None}
    assert "nothing was scored" not in shown
    assert '""' not in shown
    assert "token " not in shown.splitlines()[1]
    assert cli(*base, "--versus", str(folder)).out.splitlines()[-1].startswith("identical")
    other = write_tiny(folder.parent / "o", weights=True, rms_norm_eps=0.5)
    compared = cli(*base, "--versus", str(other)).out
    assert "has the higher mean logprob" in compared
    assert "nothing was scored" not in compared


def test_models_are_named(cli, folder):
    base = ("score", "-m", str(folder), "hello", "--dtype", "float64")
    title = f"{folder} (float64 on cpu)"
    assert cli(*base).out.splitlines()[0] == title
    assert cli(*base, "--versus", str(folder)).out.splitlines().count(title) == 2


def test_all_tokens_only_where_asked_for(cli, folder):
    base = ("score", "-m", str(folder), "ab" * 40)
    assert "… 40 tokens not shown: --all or --json has them all" in cli(*base).out
    whole = cli(*base, "--all").out
    assert "not shown" not in whole
    assert len(whole.splitlines()) == 1 + 2 + 80 + 5
    assert len(cli(*base, "--json").json()["tokens"]) == 80
