"""What a changed setting does: fields of the configuration and their values, or a refusal.

`table.txt` has a section for each kind of configuration. Below each row, which says in Python what
is given or changed, are the fields that differ where the last of these is left out, or the kind,
the message and the hint of the error, but for the usual hint of that kind.
`pytest tests/families/test_families_table.py --update` writes it.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path

import test_families_gguf as gguf
import test_families_hf as hf
import test_families_multimodal as multimodal
import test_families_numbers as numbers
import test_families_quantized as quantized
import test_families_rope as rope
import test_families_translate as translate
from zoo import TYPES

from llmcli.config.norm import HeadNorm, JoinedNorm
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import find

FILE = Path(__file__).with_name("table.txt")
HINTS = {  # which are not written down
    CheckpointError: "correct the file, or fetch or convert it again",
    UnsupportedModel: "`llmcli info --families` lists what can be run",
}


def read(model_type, base):
    """What reads a configuration of that type with changes to `base`."""
    whole = {"model_type": model_type} | base
    return lambda changes={}: find(model_type, "safetensors").from_hf(whole | changes)


def base(model_type):
    return read(model_type, TYPES[model_type].base)


# the first words of a section's title → what is called, and whose names its rows may use
BASES = {
    "llama of a GGUF file": (lambda changes={}: gguf.config(**changes), gguf),
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
    "GGUF architectures with experts": (
        lambda arch="llama", changes={}: gguf.with_experts(arch, **changes), gguf
    ),
    "GGUF architectures with gated DeltaNet": (
        lambda arch="qwen35", changes={}: gguf.hybrid(arch, **changes), gguf
    ),
    "types of config.json": (
        lambda kind, changes={}: hf.read(kind, **TYPES[kind].base | changes), hf
    ),
    "experts of a GGUF file": (lambda changes: gguf.with_experts(**changes), gguf),
    "gpt-oss": (base("gpt_oss"), hf),
    "Gemma 4": (base("gemma4_text"), hf),
    "Mamba-2": (hf.changed, hf),
    "Nemotron-H": (lambda changes={}: gguf.nemotron(changes), gguf),
    "rotations of a GGUF file": (lambda tensors, keys={}: rope.gguf(tensors, **keys), rope),
    "rotations": (lambda settings=None, raw={}: rope.rope(settings, **raw), rope),
    "schemes": (lambda config={}: quantized.scheme(config), quantized),
    "architectures": (find, translate),
    "files of images and text": (
        lambda one=None: numbers.read(one or TYPES["qwen2"].base | {"model_type": "qwen2"}), hf
    ),
    "multimodal models": (lambda changes: numbers.read({
        "model_type": "mistral3", "text_config": multimodal.TEXT, "vision_config": {}, **changes
    }), multimodal),
    "numbers": (lambda name, path, *value: numbers.read(
        numbers.changed(numbers.settings_of(name), path, *value)), numbers),
}  # fmt: skip


def leaves(value, path=(), default=None):
    """Yield (path, value, default) of every field; a part is called by its type."""
    if is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            name = type(inner).__name__ if field.name == "part" else field.name
            name += " (joined)" * isinstance(inner, JoinedNorm)
            name += " (by head)" * isinstance(inner, HeadNorm)
            if name == "scaling" and inner is not None:
                name = type(inner).__name__
            yield from leaves(inner, (*path, name), field.default)
    elif isinstance(value, tuple) and "layers" in f"{path[-2:]}":
        yield (*path, "count"), len(value), None
        for number, one in enumerate(value):
            yield from leaves(one, (*path, number))
    else:
        yield path, value, default


def changed(found, base):
    """The fields of `found` that differ from `base`, in lines; those of several layers together.

    Of parts that `base` has not there, the fields without their default.
    """
    before, layers = {path: value for path, value, _ in leaves(base)}, {}
    for path, value, default in leaves(found):
        if value != before.get(path, default):
            name = ".".join(one for one in path if isinstance(one, str) and "layers" not in one)
            inside = path[1:2] * (path[0] == "layers" and len(path) > 2)
            layers.setdefault(f"  {name} = {value!r}", []).extend(inside)
    return [
        line + f" in {', '.join(map(str, dict.fromkeys(numbers)))}" * bool(numbers)
        for line, numbers in layers.items()
    ] or ["  no difference"]


def comes_of(title, row):
    """What comes of a row, in lines."""
    call, module = next(BASES[name] for name in BASES if title.startswith(name))
    try:
        given = eval(f"({row},)", vars(module))
        return changed(call(*given), call(*given[:-1]))
    except CheckpointError as error:
        text = f"{error.message} {error.hint}"
        assert text.isprintable()
        assert len(text) < 400
        said, kind = [f"  {type(error).__name__}: {error.message}"], type(error)
        return said if error.hint == HINTS[kind] else [*said, f"  {error.hint}"]


def test_what_comes_of_settings(as_written):
    text = FILE.read_text(encoding="utf-8")
    lines, title = [], ""
    for line in text.splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
        if not line.startswith(" "):
            lines.append(line)
        if line and line[0] not in " =":
            lines += comes_of(title, line)
    as_written(FILE, "\n".join(lines) + "\n")
