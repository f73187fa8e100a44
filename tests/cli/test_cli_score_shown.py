"""What `score` prints: without a tokenizer, of long texts, of two models."""

import json
import math
import tracemalloc

import pytest
from cli_tiny import write_tiny

from llmcli.commands.score import measure as measured


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "m", weights=True)


@pytest.mark.parametrize("text", [
    "🙂 日本語 né<|end|>", "🙂 日本語 ne\u0301<|end|>", "ne\u0301\u0323 \u1112\u1161\u11ab日",
    "a🙂  <|begin|> \n b日\u0301",
])
def test_each_byte_of_the_text_is_scored_once(cli, folder, text):
    """Byte-level tokens share the characters that a normalizer or a special token touches."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    tokenizer["added_tokens"][4] |= {"lstrip": True, "rstrip": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").unlink()
    run = cli("score", "-m", str(folder), text, "--json", "--versus", str(folder))
    report = run.json()
    counted = len(text.encode()) - 1  # the first token, which nothing predicts, is one byte
    for body in (report, report["versus"]):
        assert body["bytes_scored"] == counted
        nats = -sum(token["logprob"] for token in body["tokens"][1:])
        assert body["bits_per_byte"] == pytest.approx(nats / math.log(2) / counted)
    spelled = cli("score", "-m", str(folder), "--ids", "70,71,72", "--json").json()
    assert spelled["bytes_scored"] == 2


@pytest.mark.measured
@pytest.mark.parametrize("argv", [(), ("--json",)])
def test_a_long_text_needs_little_memory(cli, folder, monkeypatch, argv):
    """A token is 250 bytes, of which JSON and the view make no second copy."""

    def predicted(model, ids, first):
        for at in range(first, len(ids)):
            yield -0.5 - at / 7, 1000 + at

    plain = measured.measure_score

    def counted(*given, **options):
        score = plain(*given, **options)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.reset_peak()
        return score

    held, count = [], 50_000
    monkeypatch.setattr("llmcli.commands.score.measure._window", predicted)
    monkeypatch.setattr("llmcli.commands.score.measure.measure_score", counted)
    monkeypatch.setattr("llmcli.shell.streams.write", lambda text, flush=True: None)
    (folder / "long.txt").write_text("ab cd" * (count // 5))
    base = ("score", "-m", str(folder), *argv)
    assert cli(*base, "warm").code == 0
    tracemalloc.start()
    try:
        assert cli(*base, "-f", str(folder / "long.txt")).code == 0
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held[1] < 310 * count
    assert most - held[1] < 50 * count
