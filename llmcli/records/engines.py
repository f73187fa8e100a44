"""Engines that run a model: their facts, a test of speed, one run of it, llama.cpp's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llmcli.records.text import PhasePeak

EngineName = Literal["llmcli", "transformers", "llama.cpp"]

# llama-bench's names of what computes, by the type of a PyTorch device
BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "Metal", "meta": "meta"}
FLASH = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type
# enum ggml_type, as far as a cache can have them
CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "bf16": 30,
}  # fmt: skip
# what llama.cpp calls our dtypes in a cache
CACHE_OF = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class SpeedTest:
    """`n_prompt` tokens read at once, then `n_gen` one by one, after `n_depth` cached ones."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128`, with ` @ d1024` where there is a depth."""
        both = [f"{word}{n}" for word, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(both) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def tokens(self) -> int:
        """Tokens of one run that are counted."""
        return self.n_prompt + self.n_gen

    @property
    def capacity(self) -> int:
        """Tokens that the cache must have room for."""
        return self.n_depth + self.tokens


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine and the model that it has loaded; fields as in bench's `Row`.

    `load_s` is None where nothing was loaded (then all this is known from the model's headers) or
    where loading was not reading a file. `load_peak`: the most bytes that were held during it.
    """

    engine: EngineName
    engine_version: str | None = None
    model_type: str
    model_size: int = 0
    model_n_params: int = 0
    backends: str
    device: str
    dtype: str
    weight_format: str | None = None
    product_format: str | None = None
    type_k: str
    gpu_layers: int | None = None
    load_s: float | None = None
    base_bytes: int | None = None
    load_peak: PhasePeak | None = None

    def without_memory(self) -> EngineInfo:
        """Without the memory of loading: not measured, or that of two engines in one process."""
        return replace(self, base_bytes=None, load_peak=None)

    @property
    def bits_per_weight(self) -> float | None:
        """None where the number of parameters is not known."""
        return 8 * self.model_size / self.model_n_params if self.model_n_params else None

    @property
    def formats(self) -> str:
        """`float32`, or `Q4_1 + Q8_0, int8 products, float32 activations, bf16 cache`."""
        found = [str(self.weight_format)]
        if self.product_format != self.weight_format:
            found += [f"{self.product_format} products", f"{self.dtype} activations"]
        if CACHE_OF.get(str(self.weight_format)) != self.type_k:
            found.append(f"{self.type_k} cache")
        return ", ".join(found)


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """Nanoseconds of one repetition, `total` of reading and writing together.

    `first` until the prompt's last logits are there, None without a prompt; `tokens` of each
    generated one.
    """

    total: int
    first: int | None = None
    tokens: tuple[int, ...] = ()
