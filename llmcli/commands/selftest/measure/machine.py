"""Speed and memory of models of real sizes with random weights.

Rates are measured in turns with what they are compared with: the rate at which this machine reads
memory, or multiplies matrices, and transformers where it is installed.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.arithmetic import Arithmetic, arithmetic, matrices
from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.work import total_work
from llmcli.commands.selftest.report import MemoryResult, RateResult, shape_words
from llmcli.config import ModelConfig
from llmcli.devices import DTYPES, available_bytes
from llmcli.engine.session import Session
from llmcli.families import find
from llmcli.formats.dense import writable
from llmcli.graph.spec import Call, Phase
from llmcli.kernels import native
from llmcli.measure.ceilings import matrix_rate, read_rate
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.measure.runs import in_turns, timed
from llmcli.nn.decoder import Decoder
from llmcli.records.work import Progress, no_progress

PROMPT, TOKENS, ROUNDS = 512, 8, 5
_BLOCK = 1 << 20  # random numbers, repeated: zeros are read faster
_READ = 1 << 28  # bytes that no cache holds
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "hidden_act": "silu", "vocab_size": 128_256,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1B": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The first `layers` of a model of `SHAPES`."""

    name: str
    layers: int

    @property
    def whole(self) -> ModelConfig:
        """All layers of it."""
        return find("llama", "safetensors").from_hf(SHAPES[self.name])

    @property
    def config(self) -> ModelConfig:
        """The layers that are run."""
        return replace(self.whole, layers=self.whole.layers[: self.layers])

    @property
    def words(self) -> str:
        """See `shape_words`."""
        return shape_words(self.name, self.layers, SHAPES[self.name]["num_hidden_layers"])


def numbers_on(device: torch.device, config: ModelConfig) -> Arithmetic:
    """The arithmetic that a bfloat16 checkpoint is run in on that device."""
    return arithmetic(
        config, dtype="auto", quantize="auto", device=device.type, stored={"BF16"},
        bfloat16=devices.multiplies_bfloat16(device), kernels=native.kernels_of(device.type),
        packable=dict.fromkeys(matrices(config), "bfloat16"),
    )  # fmt: skip


def fill(tensors: list[Tensor]) -> None:
    """Small random numbers, the same block again and again."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(_BLOCK, generator=generator) * 0.02
    for tensor in tensors:
        flat, part = tensor.view(-1), block.to(tensor.device, tensor.dtype)
        for start in range(0, len(flat), _BLOCK):
            piece = flat[start : start + _BLOCK]
            piece.copy_(part[: len(piece)])


def built(one: Shape, device: torch.device) -> Decoder:
    """A decoder of that shape with random weights."""
    config = one.config
    numbers = numbers_on(device, config)
    decoder = Decoder(
        config, device=device, dtype=DTYPES[numbers.dtype], cache_dtype=DTYPES[numbers.cache],
        formats=numbers.formats, as_stored=numbers.as_stored, pairs=numbers.pairs,
    )  # fmt: skip
    with torch.inference_mode():
        fill([writable(decoder.weight(name)) for name in decoder.weight_names])
    return decoder


def measure_shape(
    one: Shape, device: torch.device, *, against: bool, progress: Progress | None = None
) -> tuple[list[RateResult], MemoryResult]:
    """Decode and prefill of that model, and the memory that it took; `against` transformers, too.

    Raises OutOfMemory.
    """
    report = progress or no_progress
    report(f"{one.name}: building", 0, 3)
    cuda = device.type == "cuda"
    need = memory_need(
        one.config, numbers_on(device, one.config), batch=1, context=PROMPT + TOKENS * (ROUNDS + 1),
        cuda=cuda, native=devices.multiplies_bfloat16(device),
    )  # fmt: skip
    devices.require_memory(
        need.needed_bytes, device, f"the {one.name} shape", "give fewer layers, or free some memory"
    )
    gc.collect()
    devices.release_freed_memory()
    base = torch.cuda.memory_allocated(device) if cuda else resident_bytes()
    with Peak(device) as peak:
        decoder = built(one, device)
        session = Session(decoder, 1, need.context)
        session.extend(_prompt(device))
    held = peak.nbytes
    peer = open_peer(one, device, decoder.dtype) if against else None
    report(f"{one.name}: prefill", 1, 3)
    prefill = _rate(one, session, peer, "prefill")
    report(f"{one.name}: decode", 2, 3)
    decode = _rate(one, session, peer, "decode")
    measured = None if held is None or base is None else held - base
    memory = MemoryResult(shape=one.words, estimated=need.needed_bytes, measured=measured)
    del session, decoder, peer
    gc.collect()
    torch.cuda.empty_cache()  # nothing where CUDA was never used
    return [decode, prefill], memory


def _prompt(device: torch.device) -> Tensor:
    return torch.arange(PROMPT, device=device)[None] % 1000


class Peer:
    """transformers' model of the same shape, with random weights in the same dtype, on its own."""

    def __init__(self, one: Shape, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
        from transformers.utils import logging

        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        settings = SHAPES[one.name] | {"num_hidden_layers": one.layers}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with no_init_weights():
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        with torch.inference_mode():
            fill(list(self._model.parameters()))
        self._cache: Any = None

    def rewind(self, tokens: int) -> None:
        """Forget all tokens; `tokens` has to be 0."""
        assert not tokens
        self._cache = None

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> None:
        """Tokens after what was read."""
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values


def open_peer(one: Shape, device: torch.device, dtype: torch.dtype) -> Peer | None:
    """None where transformers is not installed, or where there is no memory for its model."""
    numbers = numbers_on(device, one.config).weight_bytes(one.config)
    free = available_bytes(device)
    if find_spec("transformers") is None or (free is not None and free < 1.5 * numbers):
        return None
    return Peer(one, device, dtype)


def _rate(one: Shape, session: Session, peer: Peer | None, phase: Phase) -> RateResult:
    """Run the phase in turns with its ceiling and the peer, after a warm-up round.

    The rate is extrapolated to all layers by the counted work: layers that were not run take as
    long as those that were, and embedding and head are run once in either case.
    """
    numbers, device = session.decoder.arithmetic, session.decoder.device
    prefill = phase == "prefill"
    buffer = torch.rand(0 if prefill else _READ // 4).to(device)
    ids = _prompt(device) if prefill else torch.zeros(1, 1, dtype=torch.long, device=device)

    def seconds(side: Session | Peer) -> float:
        def run() -> None:
            if prefill:
                side.rewind(0)
            for _ in range(1 if prefill else TOKENS):
                side.extend(ids)

        return timed(device, run)[1]

    def ceiling() -> float:
        if prefill:
            return matrix_rate(device, numbers.products, 0.3).flops_per_s
        return read_rate(buffer, _READ, 0.2, cached=False)

    past = 0 if prefill else PROMPT + TOKENS - 1
    call = Call(batch=1, tokens=ids.shape[1], past=past, phase=phase)
    some, every = (
        total_work(config, call, numbers=numbers, logits="last")
        for config in (one.config, one.whole)
    )
    if prefill:
        rounds, tokens, done, part = 2, PROMPT, some.flops, some.flops / every.flops
    else:  # a step streams weights and cache
        streamed = some.weights + some.cache
        rounds, tokens, done, part = ROUNDS, TOKENS, TOKENS * streamed, some.bytes / every.bytes
    sides = [lambda: seconds(session), ceiling]
    if peer is not None:
        sides.append(lambda: seconds(peer))
    turns = list(islice(in_turns(*sides), 1, 1 + rounds))
    return RateResult(
        shape=one.name,
        phase=phase,
        format=str(numbers.describe(one.config)["weight_format"]),
        tokens_per_s=tokens / median(seconds for seconds, *_ in turns) * part,
        share=median(done / seconds / rate for seconds, rate, *_ in turns),
        layers=one.layers,
        all_layers=len(one.whole.layers),
        versus=None if peer is None else median(other / own for own, _, other in turns),
    )


def fitting_layers(name: str, device: torch.device, most: int) -> int:
    """The layers, at most `most`, that fit into half of the free memory; 0 if none does."""
    free = available_bytes(device)
    for layers in range(most, 0, -1):
        config = Shape(name, layers).config
        if free is None or 2 * numbers_on(device, config).weight_bytes(config) <= free:
            return layers
    return 0
