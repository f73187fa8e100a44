"""Maps of models of every size: each head and each layer is there, at every width.

What views say is in the transcripts; models of so many heads and layers would be too large there.
"""

import re

import pytest
from attention_reports import LABELS, METRICS, head, report
from drawn import lines_of
from rich.cells import cell_len

from llmcli.commands.attention.report import LayerReport
from llmcli.commands.attention.view.heads import head_map, kinds_found, metric_table
from llmcli.commands.attention.view.screen import FollowUps, overview
from llmcli.ui.numbers import short

ENTROPY, _, PREVIOUS, _ = METRICS


def of(*heads, layer=0, group=1, **changed):
    """A report of one layer of those heads."""
    one = LayerReport(layer=layer, kind="full", kv_heads=len(heads) // group or 1, heads=heads)
    return report(layers=(one,), **changed)


def tall(layers, heads, group=1):
    """So many layers of plain heads; the metric of head h of layer n is n + h / heads."""
    found = []
    for n in range(layers):
        row = (head(h, h // group, previous_token=(n + h / heads) / layers) for h in range(heads))
        kv_heads = heads // group
        found.append(LayerReport(layer=n, kind="full", kv_heads=kv_heads, heads=tuple(row)))
    return report(layers=tuple(found))


@pytest.mark.parametrize(
    ("layers", "heads", "group", "width", "lines"),
    [(30, 9, 3, 80, 10), (12, 12, 1, 80, 6), (24, 16, 8, 80, 8), (32, 32, 4, 80, 16),
     (32, 32, 4, 120, 11), (30, 9, 3, 40, 10), (80, 64, 8, 80, 80), (9, 9, 3, 80, 9)],
)  # fmt: skip
def test_layers_stand_beside_each_other_where_there_are_many(layers, heads, group, width, lines):
    drawn = head_map(tall(layers, heads, group), ENTROPY, numbers=False)
    *found, _, _ = lines_of(drawn, width=width)
    assert len(found) == 1 + lines
    assert all(cell_len(line) <= width for line in found)
    # what is beside each other is read down, then on to the right
    columns = [re.findall(r"(?:^|  ) ?(\d+) (?=[ -])", line) for line in found[1:]]
    numbers = sorted(int(number) for row in columns for number in row)
    assert numbers == list(range(layers))
    assert [int(row[0]) for row in columns] == list(range(lines))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("heads", [1, 9, 32, 71, 128])
@pytest.mark.parametrize("numbers", [False, True])
def test_every_head_is_there_at_every_width(width, heads, numbers):
    group = {9: 3, 32: 4, 128: 16}.get(heads, 1)
    one = of(*(head(n, n // group, previous_token=n / heads) for n in range(heads)), group=group)
    found = lines_of(head_map(one, PREVIOUS, numbers=numbers), width=width)
    assert all(cell_len(line) <= width for line in found)
    rows = [re.sub("^0 +", "", line) for line in found if re.match("0 +[-.]", line)]
    signs = [sign for row in rows for sign in re.split(r"[ │]+", row) if sign]
    if numbers:
        assert signs == [short(n / heads, True) for n in range(heads)]
    else:
        assert "".join(signs) == "-" * heads
    assert "".join(rows).count("│") <= heads // group - 1


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 7, 90, 300])
def test_as_many_heads_are_named_as_a_line_holds(width, count):
    kind = ("previous-token",)
    heads = (head(n, labels=kind, previous_token=0.9 - n / 1000) for n in range(count))
    lines = lines_of(kinds_found(of(*heads, layer=10, labels=LABELS[:1])), width=width)
    assert len(lines) <= (1 if width > 40 else 2)  # of 40 columns the rule alone fills one
    assert max(map(len, lines)) <= width
    named = re.findall(r"10\.\d+ \.\d\d", " ".join(lines))
    more = re.search(r"(\d+) more$", lines[-1])
    assert len(named) + (int(more[1]) if more else 0) == count
    assert named == [f"10.{n} {short(0.9 - n / 1000, True)}" for n in range(len(named))]
    if width >= 80 and more:
        assert sum(map(len, lines)) > width - 25  # no room is left for two more


def test_kinds_of_few_heads_are_marked_and_no_value_is_rounded_up_to_a_threshold():
    def shown(*labels, **changed):
        heads = [head(n, labels=one, previous_token=0.3999) for n, one in enumerate(labels)]
        return lines_of(kinds_found(of(*heads, **changed)), width=200)

    assert shown((), ())[0].startswith("no head: previous-token (highest 0.0 .39) · ")
    assert shown(("broad",), ())[0] == "· broad ≥ 0.8: 1 of 2 heads · 0.0 .10"
    assert shown(("broad",), (), (), ())[0] == "b broad ≥ 0.8: 1 of 4 heads · 0.0 .10"
    # that others cannot be told is said beside heads that are of a kind
    untold = shown(("induction",), unlabelled={"broad": "only 2 rows qualify"})
    assert untold[0] == "i induction ≥ 0.4: 1 of 1 heads · 0.0 .10"
    assert untold[-1] == "undetermined: broad (only 2 rows qualify)"
    three = of(*(head(n, labels=("previous-token", "induction")[:n]) for n in range(3)))
    assert lines_of(head_map(three, ENTROPY, numbers=False))[1].split() == ["0", "-", "p", "pi"]


def test_repeated_text_leads_to_an_induction_head_and_other_text_to_the_first_kind():
    """No model of the tests has such heads: the order of kinds is seen here alone."""
    first = head(0, labels=("previous-token",), previous_token=0.9)
    heads = first, head(1, labels=("induction",), induction=0.5)
    for repeated, named in ((None, "4.1 (induction)"), ("y", "4.0 (previous-token)")):
        page = overview(of(*heads, layer=4), FollowUps(same="x", repeated=repeated))
        *_, last = lines_of(page, width=200)
        assert last == f"head {named}: x --layer 4 --head {named[2]}"


def test_a_metric_that_is_wider_than_the_screen_stands_beside_its_heads():
    for width, tables in ((20, 2), (60, 1)):
        lines = lines_of(metric_table(of(head(0), head(1)), METRICS[:2]), width=width)
        headers = [line.split() for line in lines if line.startswith("head")]
        assert len(headers) == tables
        assert headers[0][:2] == ["head", "normalized_entropy"]
