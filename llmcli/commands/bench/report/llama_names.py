"""llama.cpp's names and numbers for what its options and results speak of."""

from __future__ import annotations

FLASH = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type

# enum ggml_type, as far as a cache can have them
CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "bf16": 30,
}  # fmt: skip

# what it calls our dtypes, in a cache …
CACHE_OF = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# … and in a file
FILE_OF = {"float64": "all F64", "float32": "all F32", "float16": "F16", "bfloat16": "BF16"}


def size_words(nbytes: int) -> str:
    """Bytes of a model as llama-bench writes them: `258.05 MiB`, `1.25 GiB`."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def count_words(number: int) -> str:
    """Parameters of a model as llama-bench writes them: `134.52 M`, `1.10 B`."""
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"
