"""`--edit NAME[INDEX]=WHAT`: what becomes of activations in prompts, chunks, steps, batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from covers import KINDS
from safetensors.torch import save_file
from small_models import random_model
from test_edits import editable
from zoo import MODELS

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.dump.measure import (
    measure_difference,
    measure_dump,
    plan_dump,
    without_tokens,
)
from llmcli.commands.lens.measure import measure_lens
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.edited import parse_edit
from llmcli.graph.graph import graph
from llmcli.graph.names import Names
from llmcli.inspect.edits import apply_edits
from llmcli.inspect.passes import Passes

IDS = [5, 17, 3, 17, 42, 8, 30]
TOKENS = torch.tensor([IDS])


@pytest.fixture(params=KINDS)
def model(request):
    return random_model(MODELS[request.param])


@pytest.fixture
def llama():
    return random_model(MODELS["llama"])


class Words:
    """A tokenizer of numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]


def edit(model, *texts, prompts=(IDS,), seed=0):
    names = Names(model.config)
    model.edits = [parse_edit(text, names, seed) for text in texts]
    apply_edits(model, prompts)


def run(model, *texts, ids=TOKENS, **rest):
    edit(model, *texts, **rest)
    seen = {}
    return model.decoder(ids, tap=seen.__setitem__), seen


def named(model):
    """What is edited on the same path: maps have another, with other roundings."""
    apart = ("scores", "pattern", "expert_idx")
    return [one for one in editable(model) if not one.endswith(apart)]


def test_edits_that_change_nothing_change_no_bit_and_say_so(model):
    plain = run(model)[0], run(model, ids=TOKENS[:, :1])[0]
    texts = [f"{name}=scale 1" for name in named(model)]
    assert torch.equal(run(model, *texts)[0], plain[0])
    assert set(model.changed.values()) == {False}
    texts = [f"{','.join(named(model))}=mean"]  # of one token
    assert torch.equal(run(model, *texts, ids=TOKENS[:, :1], prompts=[IDS[:1]])[0], plain[1])
    assert model.changed == {texts[0]: False}


@pytest.mark.parametrize(("text", "place"), [
    ("blocks.1.attn.z[H=3]", (slice(None), 3)),
    ("blocks.1.attn.z[3]", (slice(None), 3)),
    ("blocks.1.attn.z[-1,2:4]", (slice(None), -1, slice(2, 4))),
    ("blocks.1.attn.z[H=0:2,dv=5]", (slice(None), slice(0, 2), slice(None), 5)),
    ("blocks.1.attn.pattern[S=0]", (..., 0)),
    ("1.mlp_out[T=-1]", (slice(None), 6)),
    ("blocks.1.hook_mlp_out[T=-3:]", (slice(None), slice(4, None))),
    ("blocks.1.mlp.post[F=:3,T=1]", (slice(None), 1, slice(3))),
    ("embed[:,D=2]", (..., 2)),
])  # fmt: skip
def test_the_index_names_numbers_by_letter_or_place(llama, text, place):
    name = Names(llama.config).one(text.partition("[")[0], ["activation"])
    _, before = run(llama, f"{name}=scale 1")
    _, after = run(llama, f"{text}=zero")
    right = before[name].clone()
    right[place] = 0
    assert torch.equal(after[name], right)
    assert llama.changed == {f"{text}=zero": True}


def test_what_is_put_there(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama.tokenizer = Words()
    name, other = "blocks.1.mlp_out", [9, 8, 7, 6, 5, 4, 3]
    _, seen = run(llama)
    x_TD = seen[name][0]
    _, seen = run(llama, ids=torch.tensor([other]))
    other_TD = seen[name][0]
    width = x_TD.shape[1]
    vector, rows = np.arange(width), np.random.default_rng(0).normal(size=(len(IDS), width))
    np.savez("a.npz", vector=vector, metadata=np.array("{}"))
    np.save("a.npy", rows)
    save_file({"a": torch.tensor(rows), "b": torch.ones(width)}, "a.safetensors")
    (tmp_path / "texts").write_text("9 8 7\n\n6 5\n")
    means = [run(llama, ids=torch.tensor([ids]))[1][name][0] for ids in ([9, 8, 7], [6, 5])]
    last = x_TD.clone()
    last[-1] = other_TD[-1]
    right = {
        "mean": x_TD.mean(0).expand_as(x_TD),
        "mean texts": torch.cat(means).mean(0).expand_as(x_TD),
        "scale -0.5": -0.5 * x_TD,
        "add a.npz": x_TD + torch.tensor(vector),
        "add a.npy * -2": x_TD - 2 * torch.tensor(rows),
        "add a.safetensors:b*3": x_TD + 3,
        "from a.safetensors:a": torch.tensor(rows),
        'from "9 8 7 6 5 4 3"': other_TD,
        "zero": torch.zeros_like(x_TD),
    }
    for what, expected in right.items():
        _, seen = run(llama, f"{name}={what}")
        torch.testing.assert_close(seen[name][0], expected, rtol=0, atol=1e-12, msg=what)
    for prompt in ("9 8 7 6 5 4 3", "2 9 8 7 6 5 4 3"):
        _, seen = run(llama, ids=torch.tensor([[int(word) for word in prompt.split()]]))
        last[-1] = seen[name][0, -1]
        _, seen = run(llama, f"{name}[T=-1]=from '{prompt}'")
        assert torch.equal(seen[name][0], last)


def test_the_difference_of_two_prompts_means(llama):
    found, names = {}, ["blocks.0.attn.z", "blocks.1.resid_post"]

    def keep(name, shape, dtype, parts):
        found[name] = np.concatenate([part.reshape(-1).copy() for part in parts]).reshape(shape)

    plan = without_tokens(plan_dump(llama, names, len(IDS)))
    measure_difference(Passes(llama, IDS), plan, [9, 8, 7], keep)
    ours, theirs = (run(llama, ids=torch.tensor([ids]))[1] for ids in (IDS, [9, 8, 7]))
    for name in names:
        right = (ours[name][0].mean(-2) - theirs[name][0].mean(-2)).float()
        torch.testing.assert_close(torch.tensor(found[name]), right)


def test_heads_get_arrays_of_their_own(llama, tmp_path):
    name, file = "blocks.0.attn.z", tmp_path / "z.npy"
    _, before = run(llama)
    z_HTe = before[name][0]
    by_head = np.random.default_rng(1).normal(size=(z_HTe.shape[0], z_HTe.shape[2]))
    np.save(file, by_head)
    _, seen = run(llama, f"{name}[H=1]=add {file}")
    right = z_HTe.clone()
    right[1] += torch.tensor(by_head)[1]
    assert torch.equal(seen[name][0], right)


@pytest.mark.parametrize("kind", ["llama", "mamba-2", "latent attention", "experts"])
@pytest.mark.parametrize("what", ["noise 0.5", "mean", "from '1 2 3 4 5 6 7'"])
def test_chunks_steps_and_batches_are_edited_alike(kind, what):
    model = random_model(MODELS[kind])
    model.tokenizer = Words()
    name = [one for one in named(model) if one.startswith("blocks.1.")][-2]
    texts = [f"{name}={what}", f"{name}[T=1:3]=scale 3"]
    whole, _ = run(model, *texts, seed=4)
    edits = model.decoder.edits
    session = Session(model.decoder, 2, 9)
    found = session.extend([IDS[:3], IDS[:4]], logits="all")
    rest = [session.extend(torch.tensor([[a], [b]])) for a, b in pairwise(IDS[3:])]
    assert model.decoder.edits == edits
    torch.testing.assert_close(found[1], whole[0, :4], rtol=0, atol=1e-9)
    for step, logits in enumerate(rest):
        torch.testing.assert_close(logits[1], whole[0, 4 + step], rtol=0, atol=1e-9)
        torch.testing.assert_close(logits[0], whole[0, 3 + step], rtol=0, atol=1e-9)


def test_noise_is_normal_and_of_its_seed(llama):
    name = "blocks.1.resid_pre"
    _, plain = run(llama)
    _, seen = run(llama, f"{name}=noise 0.5", seed=1)
    off = seen[name] - plain[name]
    assert 0.3 < float(off.std()) < 0.7
    assert not torch.equal(off[:, 0], off[:, 1])
    _, again = run(llama, f"{name}=noise 0.5", seed=1)
    _, other = run(llama, f"{name}=noise 0.5", seed=2)
    assert torch.equal(again[name], seen[name])
    assert not torch.equal(other[name], seen[name])


def test_new_tokens_are_edited_where_no_position_is_named(llama):
    session = Session(llama.decoder, 1, 9)
    for text, reached in (("1.mlp_out=zero", True), ("1.mlp_out[T=-1]=zero", False)):
        session.rewind(0)
        edit(llama, text)
        session.prefill([IDS])
        seen = {}
        session.extend([[3]], tap=seen.__setitem__)
        assert bool((seen["blocks.1.mlp_out"] == 0).all()) == reached


def test_looks_stay_green_with_edits_and_red_with_faults(model):
    """Every activation of a look but the edited ones follows from its formula."""
    names = named(model)
    edit(model, *(f"{name}[T=1:]=scale 1.5" for name in names[2::3]))
    looks = {
        "lens": lambda: measure_lens(Passes(model, IDS, 2), span=range, mid=True),
        "dump": lambda: measure_dump(
            Passes(model, IDS), plan_dump(model, names, len(IDS)), write=lambda *_: None
        ),
        "attention": lambda: measure_attention(Passes(model, IDS, 2), AttentionOptions()),
    }
    if not graph(model.config).mixers:
        del looks["attention"]
    for look, measure in looks.items():
        report = measure()
        assert [one for one in report.checks if not one.ok] == [], look
        assert all(model.changed.values()), look


def test_maps_that_are_computed_from_queries_and_keys_are_not_shown_edited(llama):
    edit(llama, "blocks.0.attn.pattern[S=0]=zero")
    assert measure_lens(Passes(llama, IDS), span=range).checks[0].ok
    with pytest.raises(UsageError, match=r"`blocks.0.attn.pattern` is computed here"):
        measure_attention(Passes(llama, IDS), AttentionOptions())
    plan = plan_dump(llama, ["blocks.0.attn.pattern"], len(IDS))
    with pytest.raises(UsageError, match="without its edit"):
        measure_dump(Passes(llama, IDS), plan, write=lambda name, shape, dtype, parts: list(parts))


@pytest.mark.parametrize("text", ["embed[T=-1]=zero", "embed=mean"])
def test_several_prompts(llama, text):
    with pytest.raises(UsageError, match="depends on the prompt, which has to be the only one"):
        edit(llama, text, prompts=[IDS, IDS[:2]])
    edit(llama, text.replace("-1", "0").replace("mean", "zero"), prompts=[IDS, IDS[:2]])
    assert llama.decoder.edits
