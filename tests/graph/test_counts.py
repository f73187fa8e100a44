"""Parameters and memory as counted from a configuration, against what really is allocated."""

from dataclasses import replace

import pytest
import torch
from anatomy_configs import models
from covers import in_turn
from decoder_parameters import decoder_in, packed_in, parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_kernels
from torch.profiler import ProfilerActivity, profile
from zoo import RMS, ZOO, layer, llama, variant

from llmcli import processor
from llmcli.config.attention import RopeConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import HeadConfig
from llmcli.config.experts import ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.config.formats import RUN
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import Branch, LayerConfig, sequential
from llmcli.config.ssm import SsmConfig
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.graph.cost import count_parameters
from llmcli.graph.memory import PROMPT_CHUNK, PlannedRun, longest_context, memory_need, prefill_peak
from llmcli.graph.parts.registry import layer_types
from llmcli.graph.precision import Precision, matrices
from llmcli.kernels import native
from llmcli.ops import compiled

FLOAT32 = Precision.of("float32")


@given(models())
def test_parameters_are_those_that_the_decoder_has(config):
    slots = parameters_of(Decoder(config, Precision.of("float32"), device="meta"))
    counts = count_parameters(config)
    assert counts.total == counts.active == sum(slot.numel() for slot in slots.values())

    def holding(*words):
        return sum(s.numel() for name, s in slots.items() if any(word in name for word in words))

    assert counts.embedding == holding("embed.W")
    assert counts.head == holding("head.")
    assert counts.mlp == holding(".mlp.")
    assert counts.norms == holding(".ln1.", ".ln2.", "ln_final.", "_norm.")
    assert counts.attention == holding(".attn.") - holding("_norm.")
    parts = (counts.embedding, counts.attention, counts.mlp, counts.norms, counts.head)
    assert sum(parts) == counts.total


@settings(max_examples=50)
@given(models(), st.integers(1, 3), st.integers(1, 40))
def test_weights_and_cache_take_the_bytes_that_are_allocated(config, batch, context):
    whole = {name: columns for name, columns in matrices(config).items() if columns % RUN == 0}
    formats = {name: "Q8_0" for name in whole}
    packed = Precision(dtype="float32", cache="bfloat16", formats=formats)
    for precision in (FLOAT32, Precision.of("bfloat16"), packed):
        decoder = decoder_in(config, precision, "meta")
        need = memory_need(PlannedRun(config, precision, batch=batch, context=context))
        weights = (decoder.weight(name) for name in decoder.weight_names)
        assert need.weights_bytes == sum(weight.nbytes for weight in weights)
        state = decoder.new_state(batch, context)
        assert need.cache_bytes == state.nbytes
        assert need.cache_bytes_per_token * context == need.cache_bytes
        left = state.select(range(1, batch)).nbytes if batch > 1 else 0
        assert need.cache_copies_bytes == left  # what goes on when the first sequence ends
        kept = need.weights_bytes + need.cache_bytes + need.runtime_bytes_estimate
        assert need.needed_bytes == kept + max(need.cache_copies_bytes, need.prompt_bytes_estimate)
        assert need.together == kept + need.prompt_bytes_estimate


@settings(max_examples=30)
@given(models(), st.integers(0, 400_000), st.integers(1, 2))
def test_the_longest_context_is_the_last_that_fits(config, free, batch):
    run = PlannedRun(config, FLOAT32, batch=batch, context=7)
    need = memory_need(run)
    free += need.runtime_bytes_estimate

    def total(tokens):
        return memory_need(replace(run, context=tokens)).needed_bytes

    fitting = [tokens for tokens in range(1, 33) if total(tokens) <= free]
    assert fitting == list(range(1, len(fitting) + 1))
    assert longest_context(run, need, free=free, most=32) == len(fitting)


def test_of_many_sequences_the_copies_of_those_that_go_on_count():
    config = small(layers=40)
    run = PlannedRun(config, FLOAT32, batch=40, context=20)
    need = memory_need(run)
    assert need.cache_copies_bytes > need.prompt_bytes_estimate
    one = replace(run, context=1)
    longest = longest_context(one, memory_need(one), free=need.needed_bytes, most=64)
    assert longest == 20


@given(models())
def test_every_layer_is_in_one_group_of_its_kind(config):
    groups = layer_types(config)
    assert sorted(i for group in groups for i in group.layers) == list(range(len(config.layers)))
    for group in groups:
        for index in group.layers:
            mixer, ffn = config.layers[index].attention, config.layers[index].parts[-1]
            assert (group.heads, group.kv_heads, group.window, group.hidden, group.gated) == (
                *(mixer.heads, mixer.kv_heads, mixer.scores.window),
                *(ffn.hidden, ffn.gated),
            )
            assert (group.kind == "full attention") == (mixer.scores.window is None)


def test_layers_that_differ_are_not_folded():
    plain = small(layers=4)
    window = plain.layers[0].attention.changed(window=3)
    layers = [x.with_attention(window) if i % 2 else x for i, x in enumerate(plain.layers)]
    groups = layer_types(replace(plain, layers=tuple(layers)))
    assert [(g.kind, g.layers) for g in groups] == [
        ("full attention", (0, 2)),
        ("sliding window", (1, 3)),
    ]
    (group,) = layer_types(variant("opt-350m").config())
    assert group.norm == "LayerNorm on the residual stream"


def small(*, hidden=704, gated=True, layers=2, **attention):
    mlp = MlpConfig(hidden=hidden, activation="silu", gated=gated)
    own = {"heads": 8, "head_dim": 32, "value_dim": 32, "rope": RopeConfig(theta=1e4, dims=32)}
    return llama(
        *(layer(mlp, **(own | attention)),) * layers, vocab=500, width=256, context=4096,
        head=HeadConfig(tied=True),
    )  # fmt: skip


def allocated(config, batch, tokens, past, precision):
    """The most bytes that one call had allocated at once, by the allocator's own record."""
    decoder = decoder_in(config, precision)
    state = decoder.new_state(batch, past + tokens)
    state.lengths = [past] * batch
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    torch.set_num_threads(1)  # each has a tile of its own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        decoder(ids, state, logits="last")
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


ATTENTION, MLP = small(hidden=512).layers[0].parts
NARROW = replace(MLP, hidden=64)
EXPERTS = ExpertsConfig(
    experts=16, hidden=96, activation="silu", routing=RoutingConfig(chosen=4),
    shared=SharedConfig(hidden=64),
)  # fmt: skip
PEAKS = {
    "plain": small(), "normalized keys of their own": small(kv_heads=8, qk_norm=RMS),
    "wide": small(hidden=3000), "narrow": small(hidden=64),
    "ungated": small(gated=False, hidden=64, rope=None), "a window": small(window=100),
} | {
    name: replace(small(), layers=(block,) * 2) for name, block in {
        "convolutions": sequential(ShortConvConfig(length=3), NARROW, norm=RMS),
        "norms after": LayerConfig(
            sublayers=tuple((Branch(part=part, post_norm=RMS),) for part in (ATTENTION, MLP))
        ),
        "parallel": LayerConfig(
            sublayers=((Branch(part=ATTENTION, pre_norm=RMS), Branch(part=MLP, shares_norm=True)),)
        ),
        "gates": sequential(replace(ATTENTION, gated=True), NARROW, norm=RMS),
        "sinks": sequential(ATTENTION.changed(sinks=True), NARROW, norm=RMS),
        "clipped": sequential(replace(ATTENTION, clip=2.0), NARROW, norm=RMS),
        "clipped norms": sequential(replace(ATTENTION, clip=2.0, qk_norm=RMS), NARROW, norm=RMS),
        "latents": sequential(LatentConfig(
            heads=8, content=32, value_dim=32, rank=64, query_rank=96, scale=0.1, norm=RMS,
            rope=RopeConfig(theta=1e4, dims=16),
        ), MLP, norm=RMS),
        "experts": sequential(ATTENTION, EXPERTS, norm=RMS),
        "ungated experts": sequential(ATTENTION, replace(EXPERTS, gated=False), norm=RMS),
        "delta": sequential(DeltaConfig(
            heads=8, key_heads=4, key_dim=32, value_dim=32, length=4, norm=RMS,
        ), NARROW, norm=RMS),
        "Mamba-2": sequential(SsmConfig(
            heads=16, head_dim=32, groups=1, state=64, length=4, norm=RMS,
        ), NARROW, norm=RMS),
        "slopes": sequential(ATTENTION.changed(rope=None, slopes=(0.1,) * 8), NARROW, norm=RMS),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "call"),
    in_turn(
        [*PEAKS],
        ["float32", "bfloat16", "float64", pytest.param("packed", marks=needs_kernels)],
        [(1, 0), (2, 1500)],
    ),
)
def test_the_peak_of_a_prompt_is_what_is_allocated_or_somewhat_more(monkeypatch, name, dtype, call):
    config, (batch, past) = PEAKS[name], call
    precision = packed_in(config) if dtype == "packed" else Precision.of(dtype)
    precision = replace(precision, portable=native.level() == "portable")
    narrow = dtype == "bfloat16"
    run = PlannedRun(config, precision, batch=batch, context=PROMPT_CHUNK + past)
    for hardware in {False, narrow and processor.has_bfloat16()}:
        monkeypatch.setattr(processor, "has_bfloat16", lambda hardware=hardware: hardware)
        monkeypatch.setattr(compiled, "EMULATED", frozenset() if hardware else {torch.bfloat16})
        real = allocated(config, batch, PROMPT_CHUNK, past, precision)
        guess = prefill_peak(replace(run, native=hardware))
        most = 2 if narrow and not hardware else 1.5  # without, products convert weights
        assert real <= guess <= most * real, f"{guess / real:.2f}, {hardware=}"


def test_a_gpu_keeps_scores_of_a_block_of_queries_and_widens_a_narrower_cache():
    def for_each_key(dtype, cache, name="sinks", **rest):
        run = PlannedRun(
            PEAKS[name], Precision(dtype=dtype, cache=cache), batch=1, context=30_001, cuda=True,
            **({"chunk": 512} | rest),
        )  # fmt: skip
        return prefill_peak(run) - prefill_peak(replace(run, context=30_000))

    scores = 4 * 256 * ATTENTION.heads * 4
    found = for_each_key("float32", "float32")
    assert scores < found < 1.1 * scores
    assert for_each_key("bfloat16", "bfloat16") == found
    widened = 2 * ATTENTION.kv_heads * ATTENTION.head_dim * 4
    assert widened < for_each_key("float32", "bfloat16") - found < 1.1 * widened
    absorbed = ATTENTION.heads * (4 + 4 + 2)  # scores, weights, and these in 16 bits
    found = for_each_key("bfloat16", "bfloat16", "latents", chunk=1)
    assert absorbed < found < 1.1 * absorbed


def test_every_type_of_model_has_an_estimate():
    for config in {one.model_type: one.config() for one in reversed(ZOO)}.values():
        need = memory_need(PlannedRun(config, FLOAT32, batch=1, context=PROMPT_CHUNK + 1))
        assert need.prompt_bytes_estimate > need.context * config.width


@pytest.mark.parametrize(
    ("kind", "batch", "chunk"),
    [("cpu", 1, 512), ("cuda", 1, 2048), ("cuda", 3, 682), ("cuda", 9, 512)],
)
def test_a_prompt_is_read_in_the_pieces_that_are_counted(kind, batch, chunk, monkeypatch):
    session, read = Session(decoder_in(small(), FLOAT32, "meta"), batch, 5000), []
    monkeypatch.setattr(session.decoder, "device", torch.device(kind))
    monkeypatch.setattr(
        session, "extend", lambda parts, **rest: read.append(len(parts[0])) or torch.ones(batch, 1)
    )
    session.prefill([[0] * (2 * chunk)] * batch)
    assert read == [chunk, chunk]
    run = PlannedRun(small(), FLOAT32, batch=batch, context=5000, cuda=kind == "cuda")
    assert prefill_peak(run) == prefill_peak(replace(run, chunk=chunk))
    assert prefill_peak(run) < prefill_peak(replace(run, chunk=chunk + 1))


def test_each_stream_of_a_gpu_has_a_workspace():
    """Prompts are read on one, steps are captured on another."""
    run = PlannedRun(small(), FLOAT32, batch=1, context=64, cuda=True)
    assert memory_need(run).runtime_bytes_estimate == 2 * (32 << 20)


def test_what_the_libraries_take_goes_with_the_arithmetic_the_tokenizer_and_the_device():
    def runtime(dtype="float32", tokenizer=0, **where):
        run = PlannedRun(small(), Precision.of(dtype), batch=1, context=64, **where)
        return memory_need(run, tokenizer=tokenizer).runtime_bytes_estimate

    assert runtime() == runtime("float64") < runtime("bfloat16") == runtime("float16")
    assert runtime(tokenizer=50_000) == runtime() + 50_000
    kept = replace(Precision.of("float32"), formats={"head.W": "Q8_0"})
    run = PlannedRun(small(), kept, batch=1, context=64)
    assert memory_need(run).runtime_bytes_estimate < runtime()
    assert runtime(cuda=True) == runtime("bfloat16", cuda=True, tokenizer=50_000)


def test_what_is_generated_goes_with_the_shapes_of_products():
    """Of 16 bits where the processor multiplies them: for every number of rows anew."""

    def runtime(config, dtype="bfloat16", context=64, **where):
        precision = Precision.of(dtype)
        run = PlannedRun(config, precision, batch=1, context=context, **where)
        return memory_need(run).runtime_bytes_estimate

    plain = runtime(small())
    one = 600 << 10
    assert runtime(small(), native=True) == plain + 4 * one  # qkv, out, gate and up, down
    assert runtime(small(), context=600, native=True) == plain + 8 * one  # a shorter last chunk
    for where in (
        {"dtype": "float32", "native": True}, {"dtype": "float16", "native": True},
        {"cuda": True, "native": True},
    ):  # fmt: skip
        assert runtime(small(), **where) == runtime(small(), **where | {"native": False})
    experts = ExpertsConfig(
        experts=6, hidden=24, activation="silu", routing=RoutingConfig(chosen=2)
    )
    config = small()
    attention = config.layers[0].parts[0]
    layer = sequential(attention, experts, norm=config.final_norm)
    mixed = replace(config, layers=(config.layers[0], layer))
    router = one
    for tokens, lots in ((64, 2), (512, 16)):
        more = runtime(mixed, context=tokens, native=True) - plain
        assert more == 4 * one + router + 2 * lots * one


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "copies"),
    [
        ("float32", 8, 0),
        ("float32", 2, 8 * (32 + 32) * 4),  # key and value for every head
        ("float64", 8, 8 * 2 * 512 * 8),  # scores and pattern
    ],
)
def test_what_a_further_key_takes_on_a_gpu(dtype, kv_heads, copies):
    """Its column of the mask: as it is, in the queries' dtype, and aligned."""
    config, precision = small(kv_heads=kv_heads), Precision.of(dtype)
    more, less = (
        prefill_peak(PlannedRun(config, precision, batch=1, context=n, chunk=512, cuda=True))
        for n in (4001, 4000)
    )
    found = 512 * (1 + 2 * int(dtype[-2:]) // 8) + copies
    assert found < more - less < 1.1 * found  # with what the plan lacks


def test_masked_shared_keys_cost_more_on_a_gpu():
    config, own = small(), small(kv_heads=8)
    args = {"precision": Precision.of("bfloat16"), "batch": 1}
    for context, more in ((2048, False), (4000, True)):
        gpu, alone = (
            memory_need(PlannedRun(one, **args, context=context, cuda=True)).prompt_bytes_estimate
            for one in (config, own)
        )
        assert (gpu > alone) == more
