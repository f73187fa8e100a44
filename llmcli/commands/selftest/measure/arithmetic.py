"""Properties that every small model must have on a device, and the worst deviation of each.

`random_decoder` and `copied` give the models weights, on any device and in any dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Unpack

import torch
from torch import Tensor

from llmcli.commands.selftest.report import GroupResult
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.config.samples import MODELS, VOCAB, layer, llama
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session, Watch
from llmcli.evaluate.rules import rules
from llmcli.graph.graph import Graph
from llmcli.graph.node import Node
from llmcli.graph.precision import Precision, in_no_blocks, matrices
from llmcli.inspect.kernel import Kernel
from llmcli.kernels import native
from llmcli.model import Model, dtype_name
from llmcli.nn.step import Edit
from llmcli.ops.quant import dequantize
from llmcli.ops.quant.decode import FORMATS as BLOCKS
from llmcli.ops.quant.encode import quantize
from llmcli.records.document import ViewCheck
from llmcli.records.work import Progress, no_progress
from llmcli.weights.dense import writable
from llmcli.weights.packed import Packed

TOKENS, STEPS = 11, 4
# Differences of logits as shares of the largest one, and divergences in nats: several times the
# worst that was measured on a CPU, where a wrong kernel is off by far more.
FLOAT32, BFLOAT16, CAPTURED = 5e-5, 0.05, 1e-4
# Formats whose kernels all levels of a processor compute bit for bit alike.
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")

BOUND = 1e-9  # of the magnitudes that an op adds up; float64 has 2e-16

# where a block of a format has float16 factors
_FACTORS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q5_1": (0, 2), "MXFP4": (),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """One property: `measure` returns how far a model is off, and where."""

    name: str
    words: str
    tolerance: float
    measure: Callable[[ModelConfig, torch.device], tuple[float, str]]
    models: Mapping[str, ModelConfig]


def digest() -> str:
    """Hash what packed models compute token by token at this process's level of the kernels.

    Prompts go through other libraries at some levels, so that their bits may differ.
    """
    found = hashlib.sha256()
    for config in packed_models().values():
        decoder = _of_steps(config, torch.device("cpu"))
        session = Session(decoder, 1, TOKENS + STEPS)
        for one in torch.split(prompt_ids(TOKENS + STEPS), 1, 1):
            found.update(session.extend(one).numpy().tobytes())
    return found.hexdigest()


def prompt_ids(tokens: int = TOKENS) -> Tensor:
    """The prompt of every small model, `[1, tokens]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB, (1, tokens), generator=generator)


def parity(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """Every activation in float64 beside the graph evaluated from the token ids: shares of 1e-9."""
    here = random_decoder(config)
    there = here if device.type == "cpu" else copied(here, device, torch.float64)
    emitted: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor) -> None:
        emitted[name] = tensor[0].cpu()

    ids = prompt_ids()
    there(ids.to(device), tap=tap)
    prompt = tuple(ids[0].tolist())
    found = deviations(as_model(here), prompt, emitted, Graph(config).nodes, chained=True)
    worst = max(found, key=lambda name: found[name])
    return found[worst], worst


class _Chained(Kernel):
    """Every input is what the nodes before it made, from the token ids on."""

    made: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name]

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All rows of a tensor that was made."""
        return self[name][..., rows, :]


def deviations(
    model: Model,
    prompt: tuple[int, ...],
    emitted: Mapping[str, Tensor],
    nodes: Mapping[str, Node],
    *,
    chained: bool,
) -> dict[str, float]:
    """The distance of every activation from what its node makes, as a share of the bound.

    More than 1 is wrong. `emitted`: float64, without a batch axis. The inputs of a node are what
    was emitted before it, or, `chained`, what the nodes themselves made from the token ids.
    """
    made = rules(nodes.values(), Graph(model.config).letter)
    of = _Chained if chained else Kernel
    kernel = of(model, made, prompt, emitted=emitted, alone=[False] * len(prompt))
    outputs: dict[str, Tensor] = {}
    if isinstance(kernel, _Chained):
        kernel.made = outputs
    found = {}
    for name, rule in made.items():
        outputs[name] = ours = rule.tensor(kernel)
        theirs = kernel.kernel(name)
        assert ours.shape == theirs.shape, name
        allowed = BOUND * rule.magnitudes(kernel)
        if chained:  # a number may be small because large ones cancel
            size = theirs.abs()
            allowed = allowed + BOUND * size.where(size.isfinite(), torch.tensor(0.0)).max()
        off = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
        found[name] = float(off.nan_to_num(torch.inf).max())
    return found


def steps(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """A prompt in chunks and steps beside all of it at once, in float64."""
    decoder = copied(random_decoder(config), device, torch.float64)
    ids = prompt_ids().to(device)
    whole = decoder(ids)[0]
    session = Session(decoder, 1, TOKENS)
    parts = [
        session.extend(part, logits="all", totals=[TOKENS])[0].clone()
        for part in torch.split(ids, [4, 3, 1, 1, 1, 1], 1)
    ]
    return difference(torch.cat(parts), whole)


def narrow(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[float, str]:
    """Compute with the same weights in `dtype` on the device and in float64 on the CPU."""
    there = copied(random_decoder(config), device, dtype)
    here = copied(there, "cpu", torch.float64)
    ids = prompt_ids()
    ours, exact = there(ids.to(device))[0].cpu().double(), here(ids)[0]
    if dtype == torch.float32:
        return difference(ours, exact)
    logs = exact.log_softmax(-1)
    divergence = (logs.exp() * (logs - ours.log_softmax(-1))).sum(-1)
    return float(divergence.mean()), "logits"


def observed(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """Whether anything changes where every activation is tapped: a prompt, in float32."""
    decoder = copied(random_decoder(config), device, torch.float32)
    ids = prompt_ids().to(device)
    plain, tapped = decoder(ids), decoder(ids, tap=lambda name, tensor: None)
    return float(not torch.equal(plain, tapped)), "logits"


def edited(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """An edit that changes nothing changes no bit, and one that doubles a tensor changes logits."""
    decoder = copied(random_decoder(config), device, torch.float32)
    ids, name = prompt_ids().to(device), "blocks.0.resid_post"
    plain = decoder(ids)
    same = decoder(ids, edits=[Edit(name=name, fn=lambda x, at: x)])
    other = decoder(ids, edits=[Edit(name=name, fn=lambda x, at: x.flip(1))])
    return float(not torch.equal(plain, same) or torch.equal(plain, other)), name


def replayed(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """Decode steps that are replayed beside the same ones computed, which a tap makes them."""
    decoder, ids = _of_steps(config, device), prompt_ids(TOKENS + STEPS).to(device)
    of = decoder, ids[:, :TOKENS].tolist(), STEPS, [*torch.split(ids[:, TOKENS:], 1, 1)]
    computed, _ = _decoded(*of, tap=lambda name, tensor: None)
    return difference(_decoded(*of)[0][:, 0], computed[:, 0])


def captured(config: ModelConfig, device: torch.device) -> tuple[float, str]:
    """Steps of static shapes over buckets of slots beside computed ones, in float32.

    On a GPU they are captured as graphs, one for each bucket; a CPU runs the same calls eagerly.
    """
    decoder = copied(random_decoder(config), device, torch.float32)
    decoder.first_bucket = TOKENS - 3
    difference, buckets = compare_captured(decoder, prompt_ids().tolist(), 2 * STEPS)
    if device.type == "cuda" and not decoder.by_length and len(buckets) < 2:
        return math.inf, decoder.steps.off or f"{len(buckets)} graphs"
    return difference, "logits"


def compare_captured(
    decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[float, tuple[int, ...]]:
    """Decode the same tokens after prompts with captured and with computed steps.

    Returns the largest difference of two logits and the slots of each captured graph. The
    difference is 0 on a GPU if both launch the same kernels: with Triton's, only captured steps
    apply the activation within a product. On a CPU, which runs the GPU's step eagerly, it is
    rounding. To cross a bucket border, prompt and steps must be longer than `decoder.first_bucket`.
    """
    tokens: list[Tensor] = []
    expected, _ = _decoded(decoder, prompts, steps, tokens, clock=lambda name: None)
    before = decoder.fixed_shapes
    decoder.fixed_shapes = before or (decoder.device.type == "cpu" and not decoder.by_length)
    try:
        found, session = _decoded(decoder, prompts, steps, tokens)
    finally:
        decoder.fixed_shapes = before
    buckets = tuple(sorted(slots for _, slots in session.state.recorded))
    return float((found - expected).abs().max()), buckets


def _decoded(
    decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int, tokens: list[Tensor],
    **watch: Unpack[Watch],
) -> tuple[Tensor, Session]:  # fmt: skip
    """Logits `[steps, B, V]` of `tokens`, continued by the most likely ones; watched: computed."""
    session, rows = Session(decoder, len(prompts), max(map(len, prompts)) + steps), []
    session.prefill(prompts)
    for step in range(steps):
        if step == len(tokens):
            tokens.append(session.known_logits().argmax(-1, keepdim=True))
        rows.append(session.extend(tokens[step], **watch))
    return torch.stack(rows), session


def _of_steps(config: ModelConfig, device: torch.device) -> Decoder:
    """On a GPU in float32; on a CPU packed steps are the ones that are replayed."""
    if device.type != "cpu":
        return copied(random_decoder(config), device, torch.float32)
    apart = in_no_blocks(config)
    formats = {name: config.family for name in matrices(config) if name not in apart}
    return random_decoder(config, formats=formats)


def packed_models() -> dict[str, ModelConfig]:
    """One model a format, with rows of whole blocks; its family is the format's name."""
    heads = {"heads": 8, "kv_heads": 2, "head_dim": 32, "value_dim": 32, "scale": 32**-0.5}
    one = layer(MlpConfig(hidden=256, activation="silu", gated=True), **heads)
    config = replace(llama(one, one), width=256)
    return {format: replace(config, family=format) for format in FORMATS}


def difference(ours: Tensor, exact: Tensor) -> tuple[float, str]:
    """The largest difference of logits as a share of the largest logit, and its row."""
    ours, exact = ours.cpu().double(), exact.cpu().double()
    off = (ours - exact).abs().amax(-1) / exact.abs().max()
    row = int(off.argmax())
    return float(off[row]), f"logits[{row}]"


def groups_of(device: torch.device) -> list[Group]:
    """All properties that can be measured on that device."""
    cpu = device.type == "cpu"
    wide = {} if device.type == "mps" else MODELS  # which has no float64
    # a processor replays what its kernels compute, where it has any
    recorded = MODELS if not cpu else packed_models() if native.level() is not None else {}
    off, rounded = 0.0 if cpu else FLOAT32, partial(narrow, dtype=torch.bfloat16)
    groups = (
        Group("float64", "activations equal the graph's in float64", 1.0, parity, wide),
        Group("steps", "chunks and steps equal the whole prompt", 1e-9, steps, wide),
        Group("float32", "float32 equals float64 to rounding", FLOAT32, narrow, MODELS),
        Group("bfloat16", "bfloat16 is near float64 (KL, nats)", BFLOAT16, rounded, MODELS),
        Group("taps", "observing changes no bit", 0.0, observed, MODELS),
        Group("edits", "edits change what they say, no more", 0.0, edited, MODELS),
        Group("captured", "steps of static shapes equal computed ones", CAPTURED, captured, MODELS),
        Group("replay", "replayed steps equal computed ones", off, replayed, recorded),
    )
    return [group for group in groups if group.models]


def measure_groups(device: torch.device, progress: Progress = no_progress) -> list[GroupResult]:
    """Each property over its models; of each the worst model."""
    results, groups = [], groups_of(device)
    for done, group in enumerate(groups):
        progress(f"checking {group.name}", done, len(groups))
        begin, worst, where = perf_counter(), -1.0, ""
        for name, config in group.models.items():
            value, at = group.measure(config, device)
            if math.isnan(value) or value > worst:
                worst, where = value, f"{name}: {at}"
            if math.isnan(value):
                break
        check = ViewCheck(
            name=group.name, words=group.words, value=worst, tolerance=group.tolerance, where=where
        )
        seconds = perf_counter() - begin
        results.append(GroupResult(check=check, cases=len(group.models), seconds=seconds))
    return results


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    formats: Mapping[str, str] | None = None,
) -> Decoder:
    """On the CPU: matrices that keep the size of a row, norm weights about 1, biases about 0.3.

    With `formats` as a GGUF file is run: float32, keys and values in bfloat16.
    """
    precision = Precision.of(dtype_name(dtype))
    if formats:
        precision = Precision(dtype="float32", cache="bfloat16", formats=formats)
    decoder = Decoder(config, precision, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name in decoder.weight_names:
        weight = decoder.weight(name)
        if isinstance(weight, Packed):
            *rows, columns = weight.shape
            raw = random_blocks(weight.format, math.prod(rows), columns, generator)
            weight.write(torch.arange(len(raw)), raw)
            continue
        slot = writable(weight)
        values = torch.randn(slot.shape, generator=generator, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if last == "w":
            values = 1 + 0.3 * values
        elif last.startswith("b"):
            values = 0.3 * values
        elif last in ("sink", "expert_factor", "D"):
            pass
        elif last in ("A_log", "dt_bias"):
            values = 0.5 * values
        elif "embed" not in name:
            values = 1.5 * values / slot.shape[1] ** 0.5
        slot.copy_(values)
    return decoder


def random_blocks(format: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rows of blocks as a file has them, uint8: random codes, numbers of the size of the others."""
    wanted = 1.5 / columns**0.5
    if format in ("Q8_0", "Q4_1"):
        return quantize(wanted * torch.randn(rows, columns, generator=generator), format)
    elements, size = BLOCKS[format]
    shape = rows, columns // elements, size
    raw = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if format == "MXFP4":  # powers of two
        raw[..., 0] = torch.randint(121, 125, shape[:2], generator=generator)
        return raw.flatten(1)
    factors = {
        at: 0.5 + torch.rand(shape[:2], generator=generator) for at in _FACTORS.get(format, (0,))
    }

    def scale(by: float) -> None:
        for at, factor in factors.items():
            raw[..., at : at + 2] = (by * factor).half()[..., None].view(torch.uint8)

    scale(1.0)  # which shows how large the numbers are
    large = dequantize(raw.flatten(1), format, dtype=torch.float32)
    scale(wanted / float(large.square().mean().sqrt()))
    return raw.flatten(1)


def copied(decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Copy dense weights to a device, rounded to a dtype."""
    there = Decoder(decoder.config, Precision.of(dtype_name(dtype)), device=device)
    for name in decoder.weight_names:
        writable(there.weight(name)).copy_(writable(decoder.weight(name)))
    there.check_kernels()
    return there


def as_model(decoder: Decoder) -> Model:
    """The model that loading would return, without checkpoint and tokenizer."""
    return Model(
        name="small",
        config=decoder.config,
        decoder=decoder,
        tokenizer=None,
        checkpoint=None,  # type: ignore[arg-type]
        eos_ids=frozenset(),
        random_seed=3,
    )
