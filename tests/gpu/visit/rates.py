"""Decode and prefill of the 1B and 8B shapes beside this device's rates, part by part.

`selftest` says how fast they are; this says where the rest of the time is: the graph of a step
alone, the step for the host, the step computed, sampling, long contexts, several sequences, and
prompts of a length that was not there before. A line each, until $VISIT_SECONDS have passed.
Without a card everything is small.

    python tests/gpu/visit/rates.py [1B] [8B]
"""

import os
import statistics
import sys
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F

from llmcli.commands.selftest.measure.run import SHAPES, Shape, fill, precision_of
from llmcli.decoder.decoder import Decoder
from llmcli.devices import free_unreferenced, resolve_device, wait_for
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.engine.speculation import decode
from llmcli.graph.cost import step_bytes
from llmcli.measure.ceilings import measure_ceilings
from llmcli.weights.dense import writable

DEVICE = resolve_device("auto")
CARD = DEVICE.type == "cuda"
PROMPT, STEPS, LONG, CHUNKED = (512, 64, 7000, 4096) if CARD else (8, 3, 20, 32)
BEGIN, LIMIT = perf_counter(), float(os.environ.get("VISIT_SECONDS", "inf"))
SAMPLINGS = {
    "greedy": Sampling(temperature=0), "default": Sampling(seed=1),
    "top-p alone": Sampling(seed=1, top_k=0, min_p=0),
}  # fmt: skip
if not CARD:
    SHAPES["1B"] |= {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512}
# attention as it is called: of a step in a bucket, of a prompt, of a chunk behind it
CALLS = {"step": (1, 256, False), "prompt": (64, 64, True), "chunk": (64, 256, False)}


def say(name, **figures):
    print(f"{name:<34}", *(f"{key} {value}" for key, value in figures.items()), flush=True)


def wall(call, times=1):
    """Seconds of a call for the host, the device's work included."""
    wait_for(DEVICE)
    begin = perf_counter()
    for _ in range(times):
        call()
    wait_for(DEVICE)
    return (perf_counter() - begin) / times


def fused_attention():
    """Which of PyTorch's attentions takes each of our calls."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, (queries, keys, causal) in CALLS.items():
        q = torch.randn(1, 32, queries, 128, device=DEVICE, dtype=torch.bfloat16)
        kv = torch.randn(1, 8, keys, 128, device=DEVICE, dtype=torch.bfloat16)
        mask = None if causal else torch.ones(queries, keys, dtype=torch.bool, device=DEVICE)
        taken = []
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            try:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    F.scaled_dot_product_attention(
                        q, kv, kv, attn_mask=mask, is_causal=causal, enable_gqa=True
                    )
                taken.append(backend)
            except RuntimeError:
                continue
        say(f"attention of a {name}", taken=", ".join(taken))


def kernels(replay):
    """The kernels of a step that take longest, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            replay()
        wait_for(DEVICE)
    rows = [one for one in found.key_averages() if one.device_time_total]
    say("all", launches=sum(row.count for row in rows) / 5)
    for row in sorted(rows, key=lambda row: -row.device_time_total)[:14]:
        say(row.key[:60], us=round(row.device_time_total / 5, 1), launches=row.count / 5)


def prefills(name, session, ids):
    """The first time of each length, when what depends on it is made, and later ones."""
    for tokens in (PROMPT, PROMPT - 3, min(4 * PROMPT, ids.shape[1])):
        took = []
        for _ in range(4):
            session.rewind(0)
            took.append(wall(partial(session.extend, ids[:, :tokens])))
        again = statistics.median(took[1:])
        say(f"{name} prompt of {tokens}", ms=round(again * 1e3, 2), first=round(took[0] * 1e3, 2),
            tokens_s=round(tokens / again))  # fmt: skip
    for chunk in (2048, 512):
        session.rewind(0)
        seconds = wall(partial(session.prefill, ids[:, :CHUNKED].tolist(), chunk=chunk))
        say(f"{name} prompt in chunks of {chunk}", tokens_s=round(CHUNKED / seconds))


def steps(name, session, past, nbytes, read):
    """A step for the host, its graph alone, and computed."""
    session.rewind(0)
    session.prefill([[7] * past])
    id_11 = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    for _ in range(3):
        session.extend(id_11)
    found = {"step": wall(partial(session.extend, id_11), STEPS)}
    recorded = session.state.recorded
    if CARD and recorded:
        replay = recorded[max(recorded)]._graph.replay
        found["graph alone"] = wall(replay, STEPS)
        if past == PROMPT:
            kernels(replay)
    found["computed"] = wall(partial(session.extend, id_11, clock=lambda name: None), STEPS // 3)
    for way, seconds in found.items():
        say(f"{name} at {past}, {way}", ms=round(seconds * 1e3, 3), tokens_s=round(1 / seconds, 1),
            share=round(nbytes / seconds / read, 3), off=session.decoder.steps.off)  # fmt: skip


def samples(name, session, vocab, ids):
    """Tokens as `generate` picks them."""
    for way, sampling in SAMPLINGS.items():
        session.rewind(0)
        session.extend(ids[:, :PROMPT])
        sampler = Sampler(sampling, [[1]], vocab=vocab, device=DEVICE, limit=2 * STEPS)
        tokens = decode(session, sampler, 2 * STEPS, None)
        for _ in range(STEPS // 2):
            next(tokens)
        seconds = wall(partial(next, tokens), STEPS)
        say(f"{name} {way}", ms=round(seconds * 1e3, 3), tokens_s=round(1 / seconds, 1))


@torch.inference_mode()
def measured(one, read):
    config = one.config
    precision = precision_of(DEVICE, config)
    decoder = Decoder(config, precision, device=DEVICE)
    fill([writable(decoder.weight(name)) for name in decoder.weight_names])
    session = Session(decoder, 1, max(LONG, CHUNKED) + 2 * STEPS + 8)
    ids = torch.randint(0, 1000, (1, CHUNKED), generator=torch.Generator().manual_seed(1))
    ids = ids.to(DEVICE)
    prefills(one.name, session, ids)
    for past in (PROMPT, LONG):
        nbytes = step_bytes(config, past + STEPS, precision=precision)
        steps(one.name, session, past, nbytes, read)
    samples(one.name, session, config.vocab, ids)
    if CARD:
        held = torch.cuda.max_memory_allocated(), precision.weight_bytes(config)
        peak, weights = (f"{one / 2**30:.2f}" for one in held)
        say(f"{one.name} memory in GiB", peak=peak, weights=weights)
    del session
    for batch in (4, 16):
        session = Session(decoder, batch, 1024)
        session.extend(ids[:, :PROMPT].expand(batch, -1).contiguous())
        id_B1 = torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)
        for _ in range(3):
            session.extend(id_B1)
        seconds = wall(partial(session.extend, id_B1), 16 if CARD else 1)
        say(f"{one.name}, {batch} sequences", tokens_s=round(batch / seconds))


def main(names):
    torch.manual_seed(0)
    one = Shape(names[0], 1)
    found = measure_ceilings(DEVICE, precision_of(DEVICE, one.whole))
    read = found.reads[-1].bytes_per_s
    tflops = round(found.matrices[0].flops_per_s / 1e12, 1)
    say("ceilings", read_gbs=round(read / 1e9), tflops=tflops)
    if CARD:
        fused_attention()
    for name in names:
        one = Shape(name, SHAPES[name]["num_hidden_layers"] if CARD else 1)
        if perf_counter() - BEGIN > LIMIT:
            say(name, left_out="no time")
            continue
        measured(one, read)
        free_unreferenced()


if __name__ == "__main__":
    main(sys.argv[1:] or ["1B", "8B"])
