"""Every view of every family, as a directory and as GGUF: all checks green, numbers transformers'.

The commands run as a user runs them; what they print and write is compared with transformers'
eager attention and residual stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from covers import covered, crossed, in_turn, layers_of, once
from parity_gguf import write_gguf
from parity_models import build, opened, prompt
from parity_reference import last_norms, load_reference, reference_inside
from planned import departures, wrongly_filled
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from zoo import TYPES, ZOO, attending, recurring, variant

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.locate import open_model
from llmcli.cli.app import main
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.info.measure import measure_info
from llmcli.commands.lens.measure import measure_lens
from llmcli.commands.load.measure.run import check_files
from llmcli.commands.load.report import OUTLIERS
from llmcli.commands.shapes.measure import stored_tensors
from llmcli.families import describe, translate
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes
from llmcli.prepare.prepared import prepare
from llmcli.records.work import LoadTimings

NEW = 3
VIEWED = [one for one in ZOO if one.views]
IDS = prompt(tokens=40)[0].tolist()
FILES = once(covered(one.name for one in VIEWED if one.gguf), ["gguf", "hf"])
FILES += once(covered(one.name for one in VIEWED if not one.gguf), ["hf"])
FILES = [pytest.param(".".join(one.values), marks=one.marks) for one in FILES]


@dataclass
class Both:
    """A checkpoint, and transformers' model of the same weights."""

    path: Path
    theirs: PreTrainedModel

    @cached_property
    def inside(self):
        """What it has of `IDS`: the residual stream, the patterns."""
        return reference_inside(self.theirs, torch.tensor([IDS]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`llama.gguf` → that file and its reference, each made once."""
    folder = tmp_path_factory.mktemp("views")

    @cache
    def make(name):
        family = name.rpartition(".")[0]
        model = build(variant(family), seed=3)
        model.save_pretrained(folder / f"{family}.hf")
        if name.endswith(".gguf"):
            write_gguf(model, folder / name, "F32")
        return Both(folder / name, load_reference(folder / f"{family}.hf", torch.float32))

    return make


@pytest.fixture
def view(capsys):
    """The document of one command, which has to end well with every check green."""

    def run(path, command, *options):
        capsys.readouterr()
        # without a dtype of their own: what is compared at float32's precision is computed in it
        dtype = () if "--dtype" in options else ("--dtype", "float32")
        code = main([command, "-m", str(path), *options, *dtype, "--json"])
        said, err = capsys.readouterr()
        assert code == 0, (err, said[-2000:])
        document = json.loads(said)
        assert document["checks"], "a view without checks says nothing of itself"
        assert all(check["ok"] for check in document["checks"].values())
        return document

    return run


def _arrays(file):
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "metadata"}


GIVEN = ("--ids", ",".join(map(str, IDS)))


@pytest.mark.parametrize(("name", "new"), [*once(FILES, [NEW]), (f"{VIEWED[0].name}.hf", 0)])
def test_attention(name, new, made, view, tmp_path):
    """Patterns of the rows of the prompt and of the new tokens."""
    both, file = made(name), tmp_path / "heads.npz"
    said = view(both.path, "attention", *GIVEN, "--generate", str(new), "-o", str(file))
    assert ("steps" in said["checks"]) == (new > 0)
    ids = [token["id"] for token in said["tokens"]]
    assert ids[: len(IDS)] == IDS
    assert len(ids) > len(IDS) or new == 0
    ours = _arrays(file)
    _, theirs = reference_inside(both.theirs, torch.tensor([ids]))
    assert len(ours) == len(said["layers"])
    assert len(theirs) == sum(".attn." in name for name in ours)
    layers = attending(translate(open_checkpoint(both.path))[0])
    for layer, pattern in zip(layers, theirs, strict=True):
        found = ours[f"blocks.{layer}.attn.pattern"]
        assert found.shape == pattern.shape[1:]
        assert np.abs(found - pattern[0].numpy()).max() < 1e-5


def finished(config, logits):
    """What some models do to the logits after the head."""
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if cap is None else (logits / cap).tanh() * cap
    return logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


@pytest.mark.parametrize("name", FILES)
def test_lens(name, made, view):
    """Every row is what transformers' own final norm and head make of its residual stream."""
    both = made(name)
    said = view(both.path, "lens", *GIVEN, "--mid", "--top", "3")
    stream, _ = both.inside
    base = both.theirs.base_model
    names = ("ln_f", "embedding_norm", "final_layer_norm", "norm", "norm_f")
    opt = both.theirs.config.model_type == "opt"
    found = last_norms(both.theirs) if opt else (getattr(base, name, None) for name in names)
    *_, norm = filter(None, found)
    rows = {row["name"]: row["cells"] for row in said["rows"]}
    blocks = describe(open_checkpoint(both.path)).layers  # nothing between parts side by side
    assert len(rows) == 1 + sum(len(block.sublayers) for block in blocks)
    with torch.no_grad():  # the last of `stream` is behind the norm already
        head = both.theirs.get_output_embeddings()
        if opt and base.decoder.project_out is not None:
            head = nn.Sequential(base.decoder.project_out, head)
        read = [head(norm(x))[0].double() for x in stream[:-1]]
        read.append(head(stream[-1])[0].double())
    read = [finished(both.theirs.config, logits) for logits in read]
    output = read[-1].log_softmax(-1)
    for layer, logits in enumerate(read):
        row = f"blocks.{layer - 1}.resid_post" if layer else "blocks.0.resid_pre"
        theirs = logits.softmax(-1).numpy()
        for cell, p in zip(rows[row], theirs, strict=True):
            top = [(token["id"], token["probability"]) for token in cell["top"]]
            assert [value for _, value in top] == pytest.approx(-np.sort(-p)[:3], abs=2e-6)
            assert [p[id] for id, _ in top] == pytest.approx([value for _, value in top], abs=2e-6)
        entropies = -(logits.log_softmax(-1).exp() * logits.log_softmax(-1)).sum(-1)
        divergences = (output.exp() * (output - logits.log_softmax(-1))).sum(-1)
        assert np.allclose([cell["entropy"] for cell in rows[row]], entropies, atol=2e-5)
        assert np.allclose([cell["kl"] for cell in rows[row]], divergences, atol=2e-5)


@pytest.mark.parametrize("name", FILES)
def test_dump_of_everything(name, made, view, tmp_path):
    both, file = made(name), tmp_path / "all.npz"
    said = view(both.path, "dump", *GIVEN, "--name", "*", "-o", str(file))
    config = translate(open_checkpoint(both.path))[0]
    checks = {"formulas", "cache", "values"}
    checks |= {"row_sums", "masks"} if attending(config) else set()
    checks |= {"state", "causal"} if recurring(config) else set()
    assert set(said["checks"]) == checks
    there = [name for name, one in known(config).items() if one.kind != "parameter"]
    ours = _arrays(file)
    assert [tensor["name"] for tensor in said["tensors"]] == list(ours) == there
    stream, attentions = both.inside
    for layer, pattern in zip(attending(config), attentions, strict=True):
        found = ours[f"blocks.{layer}.attn.pattern"]
        assert np.abs(found - pattern[0].numpy()).max() < 1e-5
    for layer, x in enumerate(stream[:-1]):
        assert np.abs(ours[f"blocks.{layer}.resid_pre"] - x[0].numpy()).max() < 2e-5
    assert np.abs(ours["ln_final.out"] - stream[-1][0].numpy()).max() < 2e-5


@pytest.mark.parametrize("name", FILES)
def test_shapes(name, made, view):
    """The specs against the file's headers, and against a run of the loaded model."""
    path = made(name).path
    said = view(path, "shapes", *GIVEN)
    assert {"symbols", "folded", "stored"} == set(said["checks"])
    checkpoint = open_checkpoint(path)
    prepared = prepare(checkpoint)
    assert {tensor["name"] for tensor in said["tensors"]} == set(known(prepared.config))
    model = opened(path, "float32")
    assert departures(model, 1, len(IDS)) == {}
    assert wrongly_filled(model.ledger, stored_tensors(prepared)) == []


# A tolerance depends on what rounding goes through, the kinds of layers: one file of each.
OF_EACH_KIND = {
    layers_of(variant(one.values[0].rpartition(".")[0]).config()): one
    for one in FILES if not one.marks
}.values()  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn([*OF_EACH_KIND], ["float64", "bfloat16", "float16"])
)
def test_checks_are_green_in_every_precision(name, dtype, made, view):
    """`view` holds every check against what that precision allows: no false alarm."""
    path, options = made(name).path, (*GIVEN, "--dtype", dtype, "--generate", str(NEW))
    assert view(path, "attention", *options)["dtype"] == dtype
    assert view(path, "lens", *options)["dtype"] == dtype
    assert view(path, "dump", *options, "--name", "*")["dtype"] == dtype
    assert view(path, "shapes", "--dtype", dtype)["model"]["weight_format"] == dtype


# What a view says does not depend on what was looked at before, to the last bit. The kinds of
# rotation whose tables depend on the length of the sequence are among the models: in transformers a
# long prompt changes what a short one gives after it.
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
    return {"report": measure_lens(Passes(model, ids, 2), span=range, mid=True)}


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


@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "rope-dynamic", "rope-longrope"])
def test_two_orders_of_looking_give_the_same(name, checkpoints):
    order = [(view, which) for which in ("short", "long") for view in range(len(VIEWS))]
    one, other = (opened(checkpoints(name), "float32") for _ in range(2))
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
    model = opened(checkpoints("gpt2"), "float32")
    for view in VIEWS:
        one, other = view(model, SHORT), view(model, [*SHORT[:-1], SHORT[-1] ^ 1])
        assert not all(same(one[key], other[key]) for key in one), view.__name__


def outliers(checkpoint):
    """What `load --check` calls an outlier."""
    report = check_files(checkpoint, LoadTimings())
    return next(check for check in report.checks if check.name == OUTLIERS).where


@pytest.mark.parametrize("name", crossed(one.name for one in ZOO))
def test_a_file_of_the_zoo_is_green(checkpoints, name):
    """What `load --check` and `info` check of it, outliers too."""
    checkpoint = open_checkpoint(checkpoints(name))
    checks = *check_files(checkpoint, LoadTimings()).checks, *measure_info(checkpoint, ()).checks
    assert {OUTLIERS, "ledger", "stored_numbers"} <= {check.name for check in checks}
    assert [check for check in checks if not check.ok] == []


@pytest.mark.parametrize("kind", TYPES)
def test_there_is_no_outlier_in_what_transformers_begins_with(tmp_path, kind):
    """Decays, biases and norms as they are before training."""
    config = AutoConfig.for_model(**next(one for one in ZOO if one.model_type == kind).settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert outliers(open_checkpoint(tmp_path)) == ""


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_there_is_no_outlier_in_a_real_model(name):
    assert outliers(open_model(name)) == ""
