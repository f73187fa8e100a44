"""The decode step that can be captured: here on a processor, on a card in `test_gpu.py`."""

import pytest
import torch
from covers import covered
from small_models import ids, random_decoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from zoo import MODELS

from llmcli.engine.session import Session
from llmcli.nn.decoder import Decoder
from llmcli.ops.attention import _attend_one, attend
from llmcli.ops.rope import depends_on_length


@pytest.fixture(params=covered(MODELS))
def decoder(request):
    return random_decoder(MODELS[request.param])


def fixed(decoder, batch, capacity=20):
    """A session as on a card."""
    decoder.fixed_shapes = True
    try:
        return Session(decoder, batch, capacity)
    finally:
        decoder.fixed_shapes = False


class Trace(TorchDispatchMode):
    """What is launched: every operation with the shapes, strides and places of its tensors, and
    with its numbers. A number that is read from a tensor is not there when a graph is captured.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        leaves, _ = tree_flatten((args, kwargs or {}))
        said = [
            (x.shape, x.stride(), x.storage_offset(), x.dtype) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        self.calls.append((func, said))
        return func(*args, **(kwargs or {}))


def traced(session, tokens):
    here = tokens.clone()  # its own memory, always the same for a captured step
    with Trace() as trace:
        session.extend(here)
    return trace.calls


def test_it_computes_what_the_step_that_reads_live_keys_does(decoder):
    tokens = ids(3, 12)
    for lengths in ([5, 5, 5], [5, 2, 3]):
        live, captured = Session(decoder, 3, 20), fixed(decoder, 3)
        prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        for session in (live, captured):
            session.prefill(prompts)
        for at in range(6, 12):
            new = tokens[:, at : at + 1]
            torch.testing.assert_close(captured.extend(new), live.extend(new), rtol=0, atol=1e-9)
        assert captured.lengths == live.lengths == captured.state.lengths_B.tolist()
        assert captured.ids == live.ids


@pytest.mark.parametrize("batch", [1, 3])
def test_every_step_launches_the_same(decoder, batch):
    tokens, session = ids(batch, 9), fixed(decoder, batch)
    session.prefill([row[:4].tolist() for row in tokens])
    for at in (4, 5):  # makes the rotation's tables, then what steps are captured with
        session.extend(tokens[:, at : at + 1])
    first, second, third = (traced(session, tokens[:, at : at + 1]) for at in (6, 7, 8))
    ropes = [layer.attention.rope for layer in decoder.config.layers if layer.attention]
    if any(rope and depends_on_length(rope) for rope in ropes):
        assert first != second  # and so it is off there
        return
    assert first == second == third
    live = Session(decoder, batch, 20)
    live.prefill([row[:4].tolist() for row in tokens])
    live.extend(tokens[:, 4:5])
    assert traced(live, tokens[:, 5:6]) != traced(live, tokens[:, 6:7])
    assert live.state.lengths_B is None


def test_the_lengths_on_the_device_follow_those_of_the_host(decoder):
    session = fixed(decoder, 2)
    kept = session.state.lengths_B

    def same():
        return session.state.lengths_B.tolist() == session.lengths

    session.prefill([[1, 2, 3], [4]])
    assert same()
    saved = session.snapshot()
    for step in (
        lambda: session.extend([[5], [6]]),
        lambda: session.extend([[5, 7], [6]]),
        lambda: session.rewind(1 if session.state.rewinds else 0),
        lambda: session.restore(saved),
    ):
        step()
        assert same()
        assert session.state.lengths_B is kept  # a captured step reads this memory
    session.select([1, 0, 1])
    assert session.lengths == [1, 3, 1]
    assert same()
    session.extend([[9], [8], [7]])
    alone = Session(decoder, 1, 20)
    alone.extend([session.ids[2]])
    torch.testing.assert_close(session.logits_BV[2], alone.logits_BV[0], rtol=0, atol=1e-9)


def test_a_full_state_is_refused(decoder):
    session = fixed(decoder, 1, 3)
    session.extend([[1, 2]])
    session.extend([[3]])
    with pytest.raises(ValueError, match="4 tokens do not fit a state of 3"):
        session.extend([[4]])
    assert session.ids == [[1, 2, 3]]


def test_a_mask_hides_what_a_slice_leaves_out():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, generator=g).double() for n, s in ((6, 1), (2, 9), (2, 9)))
    mask = (torch.arange(9) < 5).view(1, 1, 1, 9).expand(2, 1, 1, 9)
    masked = _attend_one(q, k, v, 0.3, mask)
    torch.testing.assert_close(masked, attend(q, k[:, :, :5], v[:, :, :5], scale=0.3))
    torch.testing.assert_close(masked, attend(q, k, v, scale=0.3, mask=mask))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_card_it_is_off(device):
    assert not Decoder(MODELS["llama"], device=device, dtype=torch.float32).fixed_shapes
