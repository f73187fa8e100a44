"""The engine that stands for transformers in `bench --against` computes what we compute.

It reads the checkpoint by itself, directories and GGUF files.
"""

import pytest
import torch
from covers import COVER, covered
from parity_gguf import write_gguf
from parity_models import build, opened, prompt
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO, attending, packed, variant

from llmcli.errors import UsageError
from llmcli.measure.peers import open_transformers, same_model
from llmcli.records.engines import SpeedTest

# "shards", "hub", "old": the same models, in other files
ONES = [one for one in ZOO if not any(word in one.name for word in ("shards", "hub", "old"))]
OTHER_STATES = [one.name for one in ONES if len(attending(one.config())) < len(one.config().layers)]
CACHED = [one.name for one in ONES if one.name not in OTHER_STATES]
OF_EACH_TYPE = {  # of the cover, where that has one
    variant(name).model_type: name
    for name in sorted(reversed(CACHED), key=lambda name: name in COVER)
}.values()  # fmt: skip


def difference(model):
    """Largest difference of log-probabilities after a prompt in pieces, a rewind and two tokens."""
    ids = prompt(tokens=40)[0].tolist()
    peer = open_transformers(model, flash=True)
    peer.start(len(ids), 1, 7)
    peer.read(ids[:25])
    for _ in range(2):
        peer.rewind(25)
        peer.read(ids[:30])
        peer.step(ids[0])
    peer.rewind(25)
    peer.read(ids[25:38])
    worst = 0.0
    for count in (38, 39, 40):
        if count > 38:
            peer.step(ids[count - 1])
        ours = model.decoder(torch.tensor([ids[:count]]), logits="last")[0, -1].log_softmax(-1)
        theirs = peer.logits().to(ours.dtype).log_softmax(-1)
        worst = max(worst, (ours - theirs).abs().nan_to_num(torch.inf).max().item())
    assert same_model(model, peer, threads=1).ok
    peer.close()
    return worst


@pytest.mark.parametrize("name", OTHER_STATES)
def test_another_state_than_keys_and_values_is_refused(name, models):
    model = models(name, "float32")
    with pytest.raises(UsageError, match="layers of this model keep something else"):
        open_transformers(model, flash=True)


@pytest.mark.parametrize("name", covered(OF_EACH_TYPE))
def test_its_model_is_the_same_model(name, checkpoints):
    assert difference(opened(checkpoints(name), "float32")) < 1e-4


def test_layers_with_a_window_read_its_keys_only(checkpoints, monkeypatch):
    """As transformers' own `generate`: a cache without the configuration reads all of them."""
    model = opened(checkpoints("mistral-window"))
    layers = [layer.window for layer in model.config.layers]
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, *args, **options):
        seen.append(key.shape[-2])
        return fused(query, key, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    peer = open_transformers(model, flash=True)
    peer.start(80, 1, 40)
    peer.read([1] * 40)
    peer.rewind(40)
    for _ in range(2):
        peer.read([2] * 30)
        peer.rewind(40)
        seen.clear()
        peer.step(3)
        assert seen == [41 if window is None else window for window in layers]
    with pytest.raises(UsageError, match="cannot go back to the first 39 tokens"):
        peer.rewind(39)
    peer.rewind(0)
    with pytest.raises(UsageError, match="cannot go back to the first 40 tokens"):
        peer.rewind(40)


@pytest.mark.parametrize("name", ["gemma4", "llama-gqa3"])
def test_work_is_that_which_transformers_does(name, models):
    """Of calls shorter than a window, whose keys it reads and masks."""
    model = models(name, "float32")
    peer = open_transformers(model, flash=False)
    for tokens in (6, 12):
        peer.start(tokens, 1, 6)
        with peer.computing(), FlopCounterMode(display=False) as counter:
            peer.read(range(3, 3 + tokens))
        test = SpeedTest(n_prompt=tokens, n_gen=0)
        assert peer.counter.work(test, 64, 6).flops_full == counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_gguf_file_runs_in_transformers(name, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(build(packed(name), seed=3), file, "Q8_0")
    assert difference(opened(file, "float32")) < 1e-4


def test_what_transformers_does_not_read_of_a_gguf_file_is_said(tmp_path):
    """Another architecture in a line; factors of frequencies that it drops by the check."""
    file = tmp_path / "model.gguf"
    write_gguf(build(packed("ministral3"), seed=3), file, "Q8_0")
    with pytest.raises(UsageError, match="architecture mistral3 is not supported"):
        open_transformers(opened(file, "float32"), flash=True)
    # llama.cpp keeps Llama 3's scaling as a tensor of factors
    write_gguf(build(packed("llama", **variant("rope-llama3").overrides), seed=3), file, "Q8_0")
    model = opened(file, "float32")
    assert not same_model(model, open_transformers(model, flash=True), threads=1).ok
