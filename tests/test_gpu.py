"""On a CUDA device: the same numbers as on the CPU, loaded, prefilled, stepped and batched."""

from contextlib import contextmanager
from statistics import median

import pytest
import torch
from small_models import ids, random_decoder
from tiny_checkpoints import write_llama
from zoo import MODELS, VOCAB

from llmcli.checkpoints import open_checkpoint
from llmcli.cli.app import main
from llmcli.commands.ladder.measure.runner import plan_workload, run_ladder
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.selftest.measure.arithmetic import compare_captured, copied, difference
from llmcli.decoder.decoder import Decoder
from llmcli.decoder.steps import GraphRecorder
from llmcli.engine.session import Session
from llmcli.graph.precision import Precision
from llmcli.loading.load import load_checkpoint
from llmcli.ops.linear import each_own
from llmcli.ops.product import product_float32
from llmcli.weights.dense import writable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@contextmanager
def no_waiting():
    """The host that waits for the device in it ends in an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def models(tmp_path):
    checkpoint = open_checkpoint(write_llama(tmp_path))
    return [load_checkpoint(checkpoint, device=d, dtype="float64") for d in ("cpu", "cuda")]


def test_whole_prompt_and_steps(models):
    ids = torch.arange(20)[None] % 97
    outs = []
    for model in models:
        decoder = model.decoder
        here = ids.to(decoder.device)
        whole = decoder(here)
        state = decoder.new_state(1, 24)
        parts = [decoder(part, state) for part in here.split([9, 1, 10], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
        outs.append(whole.log_softmax(-1).cpu())
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def test_unequal_batch(models):
    ids = torch.arange(24).view(2, 12) % 97
    outs = []
    for model in models:
        decoder = model.decoder
        state = decoder.new_state(2, 16)
        decoder(ids.to(decoder.device), state, lengths=[12, 5], logits="last")
        step = torch.tensor([[3], [4]], device=decoder.device)
        outs.append(decoder(step, state).log_softmax(-1).cpu())
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 2])
def test_captured_steps_have_the_bits_of_computed_ones(models, batch):
    """Over borders of buckets; the host never waits for the device."""
    decoder = models[1].decoder
    decoder.first_bucket = 8
    assert compare_captured(decoder, [[5, 9, 2], [7]][:batch], 20) == (0, (8, 16, 23))
    assert decoder.steps.off is None


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_that_the_caller_captures(models, batch):
    """Nothing in it depends on the position but what lies on the device."""
    decoder = models[1].decoder
    prompt = (torch.arange(9 * batch, device="cuda").view(batch, 9) * 5) % 97
    more = (torch.arange(6 * batch, device="cuda").view(6, batch, 1) * 7) % 97
    wanted = Session(decoder, batch, 32)
    wanted.extend(prompt)
    logits = [wanted.extend(ids).clone() for ids in more]
    session, ids = Session(decoder, batch, 32), more[0].clone()
    session.extend(prompt)
    with no_waiting():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                session.extend(ids)
                session.rewind(9)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = session.extend(ids)
    session.rewind(9)
    for step, given in enumerate(more):
        ids.copy_(given)
        captured.replay()
        torch.testing.assert_close(out, logits[step], rtol=0, atol=0)
    mine, theirs = (one.state.tensors() for one in (session, wanted))
    assert all(torch.equal(mine[name][:, :, :15], theirs[name][:, :, :15]) for name in mine)


MECHANISMS = (
    "llama", "gpt2", "window", "caps", "sinks", "qk norm", "clamped gates", "experts",
    "latent attention", "mamba-2", "gated deltanet", "short convolutions", "experts by groups",
    "keys and values of another layer", "embeddings for each layer", "gated attention",
    "longrope", "mixers side by side", "growing queries", "partial rotation", "chunks",
)  # fmt: skip
# of the largest logit, of the prompt and every step; of bfloat16 of the median step, for a router
# that is near a tie may choose another expert in one of them
BOUNDS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MECHANISMS)
def test_decoding_beside_the_processor(name, dtype):
    """Unequal prompts in chunks, steps over borders of buckets, and after a rewind."""
    there = copied(random_decoder(MODELS[name]), "cuda", dtype)
    here = copied(there, "cpu", torch.float64)
    prompts, tokens, logits = ids(2, 30).tolist(), ids(2, 27, 1), []
    for decoder in (there, here):
        decoder.first_bucket = 16
        session = Session(decoder, 2, 60)
        rows = [session.prefill([prompts[0], prompts[1][:19]], chunk=13)]
        rows += [session.extend(one.to(decoder.device)) for one in tokens.split(1, 1)]
        if session.state.rewinds:
            session.rewind(20)
            rows.append(session.extend(tokens[:, :1].to(decoder.device)))
        logits.append(rows)
    off = [difference(mine, exact)[0] for mine, exact in zip(*logits, strict=True)]
    worst = max if dtype != torch.bfloat16 else median
    assert worst(off) <= BOUNDS[dtype], off
    assert there.by_length or there.steps.off is None


def test_after_a_capture_that_cuda_cannot_end_the_next_one_succeeds():
    """The host may not wait for a stream that is captured."""
    recorder, waits = GraphRecorder(torch.device("cuda")), [True]
    x = torch.ones(4, device="cuda")

    def step():
        y = x + 1
        if waits and torch.cuda.is_current_stream_capturing():
            y.tolist()
        return y

    with pytest.raises(RuntimeError):
        recorder.capture(step, lambda: None, None)
    torch.cuda.empty_cache()
    waits.clear()
    graph, out, _ = recorder.capture(step, lambda: None, None)
    graph.replay()
    assert out.tolist() == [2] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_have_float32_results(dtype):
    x, w, b = (torch.randn(shape).to(dtype).cuda() for shape in ((2, 3, 576), (300, 576), (300,)))
    out = product_float32(x, w, b)
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
    bound = torch.nn.functional.linear(x.double().abs(), w.double().abs(), b.double().abs())
    assert out.dtype == torch.float32
    assert ((out - exact).abs() <= bound * 577 * 2**-24).all()
    assert (out != out.to(dtype).float()).any()


def test_auto_picks_the_card_and_the_checkpoints_dtype(tmp_path):
    model = load_checkpoint(open_checkpoint(write_llama(tmp_path)))
    assert model.device.type == "cuda"
    assert model.dtype == torch.float32
    assert model.decoder(torch.tensor([[1, 2]], device="cuda")).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ladder_agrees(tmp_path, dtype):
    model = load_checkpoint(open_checkpoint(write_llama(tmp_path)), device="cuda", dtype=dtype)
    weights = Weights.of(model.decoder)
    run = plan_workload(weights, [5, 9, 2, 7], more=2, sequences=3, rounds=1)
    assert all(rung.ok for rung in run_ladder(weights, run))


@pytest.mark.parametrize("name", ["blocks.1.attn.pattern[2,3,1]", "blocks.0.mlp.post[3,5]"])
def test_explain_derives_what_the_card_computed(tmp_path, name, capsys):
    folder = str(write_llama(tmp_path))
    argv = ["explain", name, "-m", folder, "--ids", "5,9,2,7", "--device", "cuda", "--depth", "all"]
    assert main(argv) == 0, capsys.readouterr()


@pytest.fixture(params=["experts", "experts by groups", "experts after the choice"])
def mixtures(request):
    """A small mixture on the processor, and the same on the card."""
    here = random_decoder(MODELS[request.param])
    there = Decoder(MODELS[request.param], Precision.of("float64"), device="cuda")
    for name in here.weight_names:
        writable(there.weight(name)).copy_(writable(here.weight(name)))
    return here, there


@pytest.mark.parametrize("batch", [1, 3])
def test_experts_that_are_gathered_in_a_captured_step(mixtures, batch):
    """A prompt is grouped by expert, a step has no shape and no host that knows the choice."""
    prompt = torch.randint(VOCAB, (batch, 9), generator=torch.Generator().manual_seed(3))
    more = torch.randint(VOCAB, (5, batch, 1), generator=torch.Generator().manual_seed(4))
    outs = []
    for decoder in mixtures:
        session = Session(decoder, batch, 20)
        session.extend(prompt.to(decoder.device))
        outs.append([session.extend(ids.to(decoder.device)).cpu() for ids in more])
    for here, there in zip(*outs, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)
    decoder = mixtures[1]
    session, ids = Session(decoder, batch, 20), more[0].cuda()
    session.extend(prompt.cuda())
    with no_waiting():
        session.extend(ids)


def test_products_of_experts_in_16_bits_have_wide_sums():
    w = torch.randn(4, 6, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 32, device="cuda", dtype=torch.bfloat16)
    expert = torch.tensor([2, 0, 3], device="cuda")
    out = each_own(x, w, expert, at_once=2, wide=True)
    right = torch.einsum("pk,pnk->pn", x.double(), w.double()[expert])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
