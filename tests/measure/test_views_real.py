"""SmolLM2: each view runs it once, changes no bit of it, and keeps little of what it sees."""

import re
from pathlib import Path

import pytest
import torch
from continued import stream
from decoder_parameters import parameters_of

from llmcli.commands.attention.command import synthetic
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.lens.measure import measure_lens
from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampling import Sampling
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes

pytestmark = pytest.mark.real

TEXT = "In the beginning God created the heaven and the"
NEW = 3
GREEDY = Sampling(temperature=0.0)
STATUS = Path("/proc/self/status")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def attention(model, ids, new):
    return measure_attention(Passes(model, ids, new), AttentionOptions(top_pairs=5))


def lens(model, ids, new):
    return measure_lens(Passes(model, ids, new), span=range, mid=True)


def planned(model, ids, new, begin=""):
    """Everything that is no parameter, and whose name begins so."""
    there = known(model.config).items()
    names = [name for name, one in there if one.kind != "parameter" and name.startswith(begin)]
    return plan_dump(model, names, len(ids) + new)


def dump(model, ids, new, begin=""):
    """All of it, written nowhere."""

    def write(name, shape, dtype, parts):
        for _ in parts:
            pass

    plan = planned(model, ids, new, begin)
    return measure_dump(Passes(model, ids, new), plan, write=write)


@pytest.mark.parametrize(
    ("view", "dtype", "new"),
    [
        (attention, "float32", 0), (attention, "bfloat16", NEW), (lens, "bfloat16", NEW),
        (dump, "bfloat16", NEW),
    ],
)
def test_one_pass_whose_numbers_are_the_usual_ones(view, dtype, new, models, monkeypatch):
    """Each call of the decoder gives bit for bit what it gives when nobody looks."""
    smollm2 = models(dtype)
    ids = smollm2.tokenizer.encode(TEXT)
    usual = [token.id for token in stream(smollm2, [ids], GREEDY, limit=NEW)]
    before = sums(smollm2)
    calls = []
    plain = Decoder.__call__

    def counted(decoder, tokens, state=None, **options):
        out = plain(decoder, tokens, state, **options)
        calls.append((tokens, options, out.clone()))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "__call__", counted)
        report = view(smollm2, ids, new)
    assert report.ok, report.checks
    every = [token.id for token in report.tokens]
    assert every == [*ids, *usual][: len(ids) + new]
    *steps, (read, *_) = calls  # new tokens are generated first, then all are read at once
    assert [tokens.shape[1] for tokens, *_ in steps] == ([len(ids), *[1] * new] if new else [])
    assert read[0].tolist() == every
    with torch.inference_mode():
        state = smollm2.decoder.new_state(1, len(ids) + NEW)
        for number, (tokens, options, out) in enumerate(calls):
            state = None if number == len(steps) else state
            assert options.pop("tap") is not None
            assert torch.equal(plain(smollm2.decoder, tokens, state, **options), out)
    assert sums(smollm2) == before


def sums(model):
    """The bits of each parameter, read as whole numbers and added up."""
    whole = {2: torch.int16, 4: torch.int32}
    slots = parameters_of(model.decoder).items()
    return {name: int(slot.view(whole[slot.itemsize]).sum()) for name, slot in slots}


def resident(mark):
    """Bytes of memory: `VmRSS` now, `VmHWM` the most since it was last reset."""
    return int(re.search(rf"{mark}:\s*(\d+) kB", STATUS.read_text())[1]) * 1024


def test_heads_of_every_kind_are_found_and_all_is_proven(models):
    smollm2 = models("float32")
    report = measure_attention(Passes(smollm2, synthetic(smollm2, 40, 0)))
    assert report.ok, report.checks
    kinds = {label for layer in report.layers for head in layer.heads for label in head.labels}
    assert {"previous-token", "induction", "sink"} <= kinds
    assert report.rows["induction"] == 40
    assert [len(layer.heads) for layer in report.layers] == [9] * 30
    assert {head.kv_head for head in report.layers[0].heads} == {0, 1, 2}


def most_during(look):
    """What it gives, and how many bytes more than before were held meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    report = look()
    assert report.ok, report.checks
    return report, resident("VmHWM") - before


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_a_dump_keeps_about_one_layer_and_attention_copies_no_weights(models):
    smollm2 = models("float32")
    ids = torch.randint(5, 40_000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    dump(smollm2, ids[:10], 0, "blocks.")  # what is allocated once
    with torch.inference_mode():
        smollm2.decoder(torch.tensor([ids]), logits="last")
    report, most = most_during(lambda: dump(smollm2, ids, 0, "blocks."))
    assert len(report.tensors) > 30 * 20
    assert most < sum(one.bytes for one in planned(smollm2, ids, 0, "blocks.")) / 4
    ids = synthetic(smollm2, 60, 0)
    measure_attention(Passes(smollm2, ids[:10], 1))
    _, most = most_during(lambda: attention(smollm2, ids, 4))
    assert most < smollm2.weight_bytes / 4
