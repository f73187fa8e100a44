"""What a view says does not depend on what was looked at before, to the last bit.

The kinds of rotation whose tables depend on the length of the sequence are among the models: in
transformers a long prompt changes what a short one gives after it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from parity_models import prompt

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.lens.measure import measure_lens
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes
from llmcli.loading.load import load_checkpoint

Numbers = Mapping[str, Any]
SHORT = prompt(tokens=9, seed=1)[0].tolist()
LONG = prompt(tokens=150, seed=2)[0].tolist()


def attention(model, ids):
    found = {}

    def keep(layer, values_HTS):
        found[str(layer)] = values_HTS.copy()

    options = AttentionOptions(metrics="effective_rank", top_pairs=5)
    found["report"] = measure_attention(Passes(model, ids, 2), options, on_matrix=keep)
    return found


def lens(model, ids):
    report = measure_lens(Passes(model, ids, 2), span=range, mid=True)
    return {"report": report}


def dump(model, ids):
    found = {}

    def keep(name, shape, dtype, parts):
        found[name] = np.concatenate([part.reshape(-1).copy() for part in parts])

    names = [name for name, one in known(model.config).items() if one.kind != "parameter"]
    plan = plan_dump(model, names, len(ids))
    found["report"] = measure_dump(Passes(model, ids), plan, write=keep)
    return found


VIEWS = (attention, lens, dump)


def look(model, order):
    return {
        (view, which): VIEWS[view](model, LONG if which == "long" else SHORT)
        for view, which in order
    }


def same(one, other):
    """Bit for bit; NaN is NaN, and the `repr` of a report has every digit."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    return repr(one) == repr(other)


@pytest.mark.parametrize(
    "name", ["gpt2", "mistral-window", "qwen3", "rope-dynamic", "rope-longrope"]
)
def test_two_orders_of_looking_give_the_same(name, checkpoints):
    order = [(view, which) for which in ("short", "long") for view in range(len(VIEWS))]
    one, other = (
        load_checkpoint(open_checkpoint(checkpoints(name)), device="cpu", dtype="float32")
        for _ in range(2)
    )
    first, last = look(one, order), look(other, order[::-1])
    for place in order:
        assert first[place].keys() == last[place].keys()
        differing = [key for key in first[place] if not same(first[place][key], last[place][key])]
        assert differing == [], place
    again = look(one, order[:3])
    for place in again:
        assert all(same(first[place][key], again[place][key]) for key in again[place]), place


def test_another_prompt_gives_other_numbers(checkpoints):
    """What is compared above would tell."""
    model = load_checkpoint(open_checkpoint(checkpoints("gpt2")), device="cpu", dtype="float32")
    for view in VIEWS:
        one, other = view(model, SHORT), view(model, [*SHORT[:-1], SHORT[-1] ^ 1])
        assert not all(same(one[key], other[key]) for key in one), view.__name__
