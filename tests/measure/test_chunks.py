"""A prompt of several chunks: `attention`, `lens` and `dump` prove the way `generate` reads it."""

import pytest
import torch
from tiny_checkpoints import gpt2_tensors, write_gpt2, write_llama

import llmcli.measure.chunks as chunks
from llmcli.engine.session import Session
from llmcli.loading import load
from llmcli.measure.attention import measure_attention
from llmcli.measure.chunks import chunk_checks
from llmcli.measure.dump import measure_dump
from llmcli.measure.dump_plan import plan_dump
from llmcli.measure.lens import Places, measure_lens
from llmcli.nn.step import Step

IDS = (5, 17, 3, 17, 42, 8, 30, 1, 9, 11)
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0],
    "original_max_position_embeddings": 8, "factor": 4.0,
}  # fmt: skip
SMALL = {name: value * 0.3 if value.ndim > 1 else value for name, value in gpt2_tensors().items()}
WRITERS = {
    "llama": write_llama,
    "mistral": lambda path: write_llama(path, model_type="mistral", sliding_window=3),
    "longrope": lambda path: write_llama(path, rope_scaling=LONG, max_position_embeddings=64),
    "gpt2": lambda path: write_gpt2(path, SMALL),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks of four tokens."""
    monkeypatch.setattr(chunks, "PROMPT_CHUNK", 4)


def make(name, path, dtype="float32"):
    return load(str(WRITERS[name](path / name)), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITERS)
def test_the_last_chunk_is_what_the_formulas_make_of_it(name, dtype, tmp_path):
    model = make(name, tmp_path, dtype)
    for count in (5, 8, 10):
        (check,) = chunk_checks(model, IDS[:count])
        assert check.ok, (check.where, check.value)
    assert chunk_checks(model, IDS[:4]) == (), "one chunk is what the observers see"


def wrong_mask(monkeypatch):
    plain = Step.visible

    def visible(self, window):
        if self.starts[0] == 0:
            return plain(self, window)
        (seen, *_) = plain(self, None)
        mask = torch.ones_like(seen.mask)  # later tokens of the chunk are seen, too
        return (type(seen)(seen.rows, seen.first, seen.last, seen.causal, mask),)

    monkeypatch.setattr(Step, "visible", visible)


def wrong_position(monkeypatch):
    plain = Step._rope

    def rope(self, config):  # every token of a later chunk by another one's position
        return tuple(table.roll(int(self.starts[0] > 0), 0) for table in plain(self, config))

    monkeypatch.setattr(Step, "_rope", rope)


def wrong_slot(monkeypatch):
    plain = Step.write

    def write(self, cache, k, v):
        plain(self, cache, k, v)
        if self.starts[0]:
            cache.v[:, :, self.starts[0]] += 0.5

    monkeypatch.setattr(Step, "write", write)


@pytest.mark.parametrize("fault", [wrong_mask, wrong_position, wrong_slot])
def test_a_fault_in_later_chunks_turns_every_observer_red(fault, tmp_path, monkeypatch):
    model = make("llama", tmp_path)
    fault(monkeypatch)
    whole = model.decoder(torch.tensor([IDS]), logits="last")[0, 0]
    read = Session(model.decoder, 1, len(IDS)).prefill([IDS], chunk=4)
    assert not torch.allclose(read[0], whole, atol=1e-3)
    checks = {
        "attention": measure_attention(model, IDS).checks,
        "lens": measure_lens(model, IDS, span=range, places=Places(layers=(0, 1))).checks,
        "dump": measure_dump(
            model, IDS,
            plan_dump(model.config, ["blocks.0.attn.z"], tokens=len(IDS), generate=0,
                      dtype="float32"),
            texts=lambda ids: tuple((id, "") for id in ids),
        ).checks,
    }  # fmt: skip
    for name, found in checks.items():
        assert [check.name for check in found if not check.ok] == ["chunks"], name


def test_a_prompt_whose_cache_does_not_fit_is_observed_without(tmp_path, monkeypatch):
    model = make("llama", tmp_path)
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 0)
    assert chunk_checks(model, IDS) == ()
