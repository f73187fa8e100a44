"""Attention as a table: read back, it is the matrices without what is masked."""

import csv
import io

import numpy as np
import pytest
from files_reports import attention_report, patterns

from llmcli.commands.attention.view.export import (
    AttentionCsv,
    csv_file_size,
    visible,
    visible_count,
)
from llmcli.ui.theme import quoted


def written(report, made, window=None):
    table = AttentionCsv()
    for layer, values in made.items():
        table.add(layer, values, window)
    return b"".join(table.pieces(report))


@pytest.mark.parametrize("window", [None, 1, 5])
def test_read_back_it_is_the_matrices(window):
    report, made = attention_report(), patterns(window=window)
    rows = list(csv.DictReader(io.StringIO(written(report, made, window).decode(), newline="")))
    back = {layer: np.zeros((4, 12, 12), np.float32) for layer in made}
    for row in rows:
        query, key = int(row["query"]), int(row["key"])
        back[int(row["layer"])][int(row["head"]), query, key] = np.float32(row["value"])
        assert row["query_token"] == quoted(report.tokens[query][1])[1:-1]
        assert row["key_token"] == quoted(report.tokens[key][1])[1:-1]
    assert len(rows) == 2 * 4 * visible_count(12, window)
    for layer, values in made.items():
        assert np.array_equal(back[layer], values)  # nine digits are all that a float32 has


def test_a_line_is_a_line_whatever_the_tokens():
    text = written(attention_report(), patterns()).decode()
    assert len(text.split("\r\n")) == 1 + 2 * 4 * 78 + 1
    assert "\n" not in text.replace("\r\n", "")
    assert "\x1b" not in text


@pytest.mark.parametrize(("tokens", "window"), [(30, None), (200, None), (200, 20)])
def test_its_size_is_known_before(tokens, window):
    report, made = attention_report(1, 4, tokens), patterns(1, 4, tokens, window)
    estimate = csv_file_size([text for _, text in report.tokens], [window], 4)
    assert len(written(report, made, window)) == pytest.approx(estimate, rel=0.12)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 9])
def test_what_is_visible_is_counted(window):
    seen = visible(7, window)
    assert seen.sum() == visible_count(7, window)
    assert (seen.sum(1) == np.minimum(np.arange(1, 8), window or 7)).all()
    assert not np.triu(seen, 1).any()
