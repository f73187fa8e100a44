"""What a configuration cannot be: the kind, the message and the hint of every refusal.

`refused.txt` has a section for each kind of configuration; below each row, which says in Python
what is given or changed, stands what comes of it, but for the usual hint of that kind of error.
`pytest tests/families/test_families_refused.py --update` writes it.
"""

from pathlib import Path

import test_families_gguf as gguf
import test_families_hf as hf
import test_families_mamba as mamba
import test_families_multimodal as multimodal
import test_families_numbers as numbers
import test_families_quantized as quantized
import test_families_rope as rope
import test_families_translate as translate

from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import find

FILE = Path(__file__).with_name("refused.txt")
HINTS = {  # which are not written down
    CheckpointError: "correct the file, or fetch it again from where it came",
    UnsupportedModel: "`llmcli info --families` lists what can be run",
}


def read(model_type, base):
    """What reads a configuration of that type with changes to `base`."""
    whole = {"model_type": model_type} | base
    return lambda changes: find(model_type, "safetensors").from_hf(whole | changes)


def base(model_type):
    return read(model_type, hf.TYPES[model_type].base)


# the first words of a section's title → what is called, and whose names its rows may use
BASES = {
    "llama of a GGUF file": (lambda changes: gguf.config(**changes), gguf),
    "llama": (read("llama", translate.LLAMA), translate),
    "layer types of Qwen 3": (
        lambda types: read("qwen3", translate.QWEN)({"layer_types": types}), translate
    ),
    "windows that are switched off": (read("qwen3", translate.QWEN), translate),
    "settings of types": (lambda name, changes: base(name)(changes), hf),
    "whole configurations": (lambda one: read(one["model_type"], one)({}), translate),
    "gated DeltaNet of a GGUF file": (lambda changes: gguf.hybrid(**changes), gguf),
    "gated DeltaNet": (read("qwen3_5_text", hf.HYBRID), hf),
    "experts of DeepSeek": (
        read("deepseek_v2", hf.ROPED | hf.CHOOSING | {"num_hidden_layers": 3}), hf
    ),
    "experts of a GGUF file": (lambda changes: gguf.mixture(**changes), gguf),
    "gpt-oss": (base("gpt_oss"), hf),
    "Gemma 4": (base("gemma4_text"), hf),
    "Mamba-2": (lambda model_type, changes: mamba.read(model_type, **changes), mamba),
    "Nemotron-H": (lambda changes: mamba.from_gguf(mamba.NEMOTRON | changes), mamba),
    "rotations of a GGUF file": (lambda tensors, keys: rope.gguf(tensors, **keys), rope),
    "rotations": (rope.rope, rope),
    "schemes": (quantized.scheme, quantized),
    "architectures": (find, translate),
    "multimodal models": (lambda changes: numbers.read({
        "model_type": "mistral3", "text_config": multimodal.TEXT, "vision_config": {}, **changes
    }), multimodal),
    "numbers": (lambda name, path, value: numbers.read(
        numbers.changed(numbers.settings_of(name), path, value)), numbers),
}  # fmt: skip


def refused(title, row):
    """What comes of a row, in lines."""
    call, module = next(BASES[name] for name in BASES if title.startswith(name))
    try:
        call(*eval(f"({row},)", vars(module)))
    except CheckpointError as error:
        text = f"{error.message} {error.hint}"
        assert text.isprintable()
        assert len(text) < 400
        said, kind = [f"  {type(error).__name__}: {error.message}"], type(error)
        return said if error.hint == HINTS[kind] else [*said, f"  {error.hint}"]
    raise AssertionError(f"{title}: {row} is not refused")


def test_what_cannot_be_is_refused(as_written):
    text = FILE.read_text(encoding="utf-8")
    lines, title = [], ""
    for line in text.splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
        if not line.startswith(" "):
            lines.append(line)
        if line and line[0] not in " =":
            lines += refused(title, line)
    as_written(FILE, "\n".join(lines) + "\n")
