"""The matrices that `measure_attention` hands on are transformers' eager attentions."""

import numpy as np
import pytest
import torch
from covers import crossed
from parity_models import prompt
from parity_reference import reference_attentions
from parity_smollm2 import transformers_from_gguf
from zoo import ZOO, attending, recurring, variant

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.inspect.passes import Passes
from llmcli.loading.load import load_checkpoint

TOKENS = 70
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And God said, Let there be light."
)


@pytest.mark.parametrize("name", crossed(one.name for one in ZOO))
def test_every_layer_and_head(name, models, references):
    ids = prompt(tokens=TOKENS)
    found = {}
    passes = Passes(models(name, "float32"), ids[0].tolist())
    report = measure_attention(passes, on_matrix=found.__setitem__, block_rows=32)
    assert report.ok, report.checks
    theirs, wide = (
        reference_attentions(references(name, dtype), ids) for dtype in ("float32", "float64")
    )
    config = variant(name).config()
    layers = attending(config)
    assert list(found) == sorted(layers + recurring(config))
    reports = {layer.layer: layer for layer in report.layers}
    for layer, pattern, exact in zip(layers, theirs, wide, strict=True):
        assert found[layer].shape == pattern.shape[1:]
        moved = float((pattern - exact).abs().max())  # theirs, between float32 and float64
        assert np.abs(found[layer] - pattern[0].numpy()).max() < max(1e-5, 5 * moved)
        if reports[layer].sinks:
            taken = 1 - exact[0].sum(-1).mean(-1)
            assert taken.max() > 0.05
            shown = [head.metrics["learned_sink"] for head in reports[layer].heads]
            assert shown == pytest.approx(taken.tolist(), abs=1e-5)


@pytest.mark.real
def test_every_layer_and_head_of_smollm2(smollm2_path):
    model = load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype="float32")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(TEXT)
    assert len(ids) >= 40
    found = {}
    report = measure_attention(Passes(model, ids), on_matrix=found.__setitem__)
    assert report.ok, report.checks
    theirs = reference_attentions(transformers_from_gguf(smollm2_path), torch.tensor([ids]))
    assert len(found) == len(theirs) == 30
    for layer, pattern in enumerate(theirs):
        assert found[layer].shape == (9, len(ids), len(ids))
        assert np.abs(found[layer] - pattern[0].numpy()).max() < 1e-5
