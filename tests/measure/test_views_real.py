"""SmolLM2: each view runs it once, changes no bit of it, and keeps little of what it sees."""

import gc
from functools import cache

import pytest
import torch
from continued import stream
from covers import in_turn
from decoder_parameters import parameters_of
from needs import most_during
from planned import departures
from small_models import ids as random_ids
from small_models import random_model
from test_measure_info import agrees_with_loading
from test_measure_shapes import requested
from zoo import MODELS

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.attention.command import synthetic
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.lens.measure import measure_lens
from llmcli.commands.shapes.measure import model_shapes, stored_tensors
from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampling import Sampling
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes
from llmcli.loading.load import load_checkpoint
from llmcli.prepare.prepared import prepare
from llmcli.records.text import Token

TEXT = "In the beginning God created the heaven and the"
NEW = 2
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(smollm2_path):
    """SmolLM2 by dtype, each loaded once."""
    opened = open_checkpoint(smollm2_path)
    return cache(lambda dtype: load_checkpoint(opened, device="cpu", dtype=dtype))


@pytest.fixture
def smollm2(models):
    return models("float32")


def attention(model, ids, new):
    return measure_attention(Passes(model, ids, new), AttentionOptions(top_pairs=5))


def matrices(model, ids, new):
    heads = AttentionOptions(layer="1", head="0", top_pairs=3)
    return measure_attention(Passes(model, ids, new), heads, on_matrix=lambda *drawn: None)


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


def check_one_pass(view, model, ids, new, patch):
    """Each call of the decoder gives bit for bit what it gives when nobody looks.

    And none of what was captured is changed, nor a weight.
    """
    usual = [token.id for token in stream(model, [ids], GREEDY, limit=new)] if new else []
    weights = {name: slot.clone() for name, slot in parameters_of(model.decoder).items()}
    calls, captured, plain = [], [], Decoder.__call__

    def counted(decoder, tokens, state=None, *, tap, **options):
        def both(name, tensor):
            captured.append((name, tensor, tensor.clone()))
            tap(name, tensor)

        out = plain(decoder, tokens, state, tap=both, **options)
        calls.append((tokens, options, out.clone(), state is not None))
        return out

    with patch.context() as within:
        within.setattr(Decoder, "__call__", counted)
        report = view(model, ids, new)
    assert report.ok, report.checks
    every = [token.id for token in report.tokens]
    assert every == [*ids, *usual]
    *steps, (read, *_) = calls  # new tokens are generated first, then all are read at once
    assert [tokens.shape[1] for tokens, *_ in steps] == [len(ids)] * bool(new) + [1] * new
    assert read[0].tolist() == every
    with torch.inference_mode():
        state = model.decoder.new_state(1, len(every))
        for number, (tokens, options, out, cached) in enumerate(calls):
            if number == len(steps):  # with a cache as there: products see its strides
                state = model.decoder.new_state(1, len(every)) if cached else None
            assert torch.equal(plain(model.decoder, tokens, state, **options), out)
    assert len(captured) > 20
    for name, tensor, before in captured:
        assert torch.equal(tensor, before), name
    for name, slot in parameters_of(model.decoder).items():
        assert torch.equal(slot, weights[name]), name


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize(
    ("view", "dtype"), in_turn([attention, matrices, lens, dump], [torch.float32, torch.bfloat16])
)
def test_one_pass_of_a_small_model(view, dtype, new, monkeypatch):
    model = random_model(MODELS["window"], dtype)
    check_one_pass(view, model, random_ids(1, 18)[0].tolist(), new, monkeypatch)


@pytest.mark.parametrize("view", [attention, lens, dump])
def test_one_pass_whose_numbers_are_the_usual_ones(view, models, monkeypatch):
    smollm2 = models("bfloat16")
    check_one_pass(view, smollm2, smollm2.tokenizer.encode(TEXT), NEW, monkeypatch)


def test_heads_of_every_kind_are_found_and_all_is_proven(smollm2):
    report = measure_attention(Passes(smollm2, synthetic(smollm2, 40, 0)))
    assert report.ok, report.checks
    kinds = {label for layer in report.layers for head in layer.heads for label in head.labels}
    assert {"previous-token", "induction", "sink"} <= kinds
    assert report.rows["induction"] == 40
    assert [len(layer.heads) for layer in report.layers] == [9] * 30
    assert {head.kv_head for head in report.layers[0].heads} == {0, 1, 2}


def test_a_dump_keeps_about_one_layer_and_attention_copies_no_weights(smollm2):
    ids = torch.randint(5, 40_000, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    dump(smollm2, ids[:10], 0, "blocks.0")  # what is allocated once
    with torch.inference_mode():
        smollm2.decoder(torch.tensor([ids]), logits="last")
    report, most = most_during(lambda: dump(smollm2, ids, 0, "blocks."))
    assert len(report.tensors) > 30 * 20
    assert most < sum(one.bytes for one in planned(smollm2, ids, 0, "blocks.")) / 4
    ids = synthetic(smollm2, 60, 0)
    _, most = most_during(lambda: attention(smollm2, ids, 1))
    assert most < smollm2.weight_bytes / 4


def held():
    """Bytes of all tensors there are, each memory once."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if type(one) is torch.Tensor
    }
    return sum(storages.values())


def test_the_last_row_of_the_lens_is_the_output_and_weights_are_there_once(smollm2):
    ids = tuple(smollm2.tokenizer.encode("In the beginning God created the heaven and the earth."))
    sizes, before = [], held()
    weights = sum(slot.nbytes for slot in parameters_of(smollm2.decoder).values())
    passes = Passes(smollm2, ids, 0, lambda *_: sizes.append(held()))
    assert measure_lens(passes, span=range, top=20).ok
    assert before >= weights > 500e6
    assert max(sizes) - before < weights / 20  # rows of the stream, and no second copy of weights


def test_it_knows_paris_late(smollm2):
    ids = tuple(smollm2.tokenizer.encode("The capital of France is"))
    report = measure_lens(Passes(smollm2, ids), span=lambda total: range(total - 1, total))
    assert report.ok
    assert report.targets[0].text == " Paris"
    assert report.settled == ("blocks.29.resid_post",)
    top = smollm2.decoder(torch.tensor([ids]))[0, -1].softmax(0).topk(5)
    last = report.rows[-1].cells[0]
    assert [token.id for token in last.top] == top.indices.tolist()
    assert [token.probability for token in last.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert report.rows[0].cells[0].target_rank > 1000


def test_info_says_what_loading_takes(smollm2):
    report = agrees_with_loading(smollm2.checkpoint, smollm2)
    (layers,) = report.architecture.layers
    assert (layers.heads, layers.kv_heads, len(layers.layers)) == (9, 3, 30)
    assert report.tokenizer.chat_template
    assert report.tokenizer.bos == Token(id=1, text="<|im_start|>")


def test_its_shapes_are_those_that_are_shown(smollm2):
    assert departures(smollm2, 1, 4) == {}
    prepared = prepare(smollm2.checkpoint)
    request = requested(prepared.config, tokens=4)
    report = model_shapes(request, stored_tensors(prepared))
    assert sum(spec.count for spec in request.parameters()) == 134_515_008
    assert {len(row.layers) for row in report.rows} == {0, 1, 29, 30}
