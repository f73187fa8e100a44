"""Freeze llama.cpp's tokenizations: `python make_llama_cpp_ids.py [SMOLLM2.gguf]`.

Needs llama-cpp-python (the fixtures were made with 0.3.36). Writes into data/ next to this file:

- smollm2_ids.json.gz: ids of 6,000 strings under SmolLM2's vocabulary, with special tokens parsed
  and (where that differs) not, without BOS; and the ids that llama.cpp counts as end of generation.
- pretokenizer_ids.json.gz: for one name of each pre-tokenizer rule, ids under a vocabulary in which
  any two bytes may merge, so that nearly every boundary between pieces shows in the ids (made with
  llama.cpp v0.5.0, which knows names that the other one does not).
- sentencepiece_ids.json.gz: the metadata of three SentencePiece models (piece_models.py; needs
  sentencepiece) and their ids of 2,200 strings, with special tokens parsed and not.
- spaced_ids.json.gz (llama.cpp v0.5.0 too): the same for BPE over characters, with `▁` for spaces.
"""

import ctypes
import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp_strings import comparable, pair_vocabulary, strings

DATA = Path(__file__).parent / "data"
PRES = [
    "default", "falcon", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken",
    "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3", "bailingmoe", "seed-coder",
    "exaone-moe", "minicpm5", "bloom", "viking", "kimi-k2", "youtu", "tiny_aya", "superbpe",
    "granite-embed-multi-97m", "spark2_5", "afmoe", "jais-2", "chameleon", "laguna", "ufakzeka",
]  # fmt: skip
TAILS = [
    "<|user|> hi<|end|>\n <think>  x</think>", "a<s> b</s>c", "<|end|>", "<think><think> a",
    "<|user|>\n\n<|end|>  <unk>  x<|endoftext|>  y",
]  # fmt: skip
TRICKY = [" \t" * 3 + "x", "\t " * 3 + "x", "in  2024", "x1234y ab123 1234567 12ab", "\n  a\n"]
_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def main(path: Path | None) -> None:
    """Write the fixtures; without the model's file, all but those that need it."""
    provenance = provenance_of(__file__)
    if path is not None:
        _write("smollm2_ids.json.gz", _smollm2(path, provenance))
    _write("pretokenizer_ids.json.gz", _pretokenizers(provenance))
    _write("sentencepiece_ids.json.gz", _sentencepiece(provenance))
    _write("spaced_ids.json.gz", _spaced(provenance))


def provenance_of(script: str) -> dict[str, str]:
    """What made a file; from here on llama.cpp says nothing by itself."""
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    return {
        "llama_cpp_python": llama_cpp.__version__, "script": Path(script).name,
        "system": llama_cpp.llama_print_system_info().decode(),
    }  # fmt: skip


def _smollm2(path: Path, provenance: dict[str, str]) -> dict[str, Any]:
    model, vocab = _open(path)
    rows = []
    for text in strings(6000, seed=1):
        parsed, plain = ids_of(vocab, text, True), ids_of(vocab, text, False)
        rows.append([text, parsed] if parsed == plain else [text, parsed, plain])
    ends = _ends(vocab)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    llama_cpp.llama_model_free(model)
    return {"provenance": provenance | {"sha256": digest}, "ends": ends, "rows": rows}


def _pretokenizers(provenance: dict[str, str]) -> dict[str, Any]:
    texts = [*strings(400, seed=2), *TRICKY]
    rows: dict[str, list[list[int] | None]] = {}
    for pre in PRES:
        model, vocab = _loaded(_gguf(pre))
        rows[pre] = [ids_of(vocab, t, True) if comparable(pre, t) else None for t in texts]
        llama_cpp.llama_model_free(model)
    return {"provenance": provenance, "texts": texts, "rows": rows}


def _sentencepiece(provenance: dict[str, str]) -> dict[str, Any]:
    import sentencepiece
    from piece_models import metadata

    texts = strings(2000, seed=11)
    texts += [text + tail for text in texts[:40] for tail in TAILS] + TAILS
    models = {kind: metadata(kind) for kind in ("llama", "gemma", "small")}
    models["phi3"] = metadata("llama", end="<|endoftext|>") | {"general.name": "Phi-3 mini"}
    provenance |= {"sentencepiece": sentencepiece.__version__}
    return {"provenance": provenance, **_of_models(texts, models)}


def _spaced(provenance: dict[str, str]) -> dict[str, Any]:
    from tokenizer_files import spaced

    texts = strings(500, seed=13)
    texts += [text + tail for text in texts[:20] for tail in TAILS]
    texts += ["\n" * count + "the" for count in range(9)]
    named = {"gemma4": {"model": "gemma4"}, "sarvam-moe": {"model": "gpt2", "pre": "sarvam-moe"}}
    models = {
        name: {f"tokenizer.ggml.{key}": value for key, value in (spaced() | own).items()}
        for name, own in named.items()
    }
    return {"provenance": provenance, **_of_models(texts, models)}


def _of_models(texts: list[str], models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from piece_models import gguf

    rows = {}
    for kind, values in models.items():
        model, vocab = _loaded(gguf(values))
        ids = [[ids_of(vocab, text, True), ids_of(vocab, text, False)] for text in texts]
        rows[kind] = {
            "metadata": values, "ids": ids, "ends": _ends(vocab), "pieces": _pieces(vocab)
        }  # fmt: skip
        llama_cpp.llama_model_free(model)
    return {"texts": texts, "models": rows}


def _pieces(vocab: Any) -> list[str]:
    """The bytes of every token, in hexadecimal."""
    return [piece(vocab, id).hex() for id in range(llama_cpp.llama_vocab_n_tokens(vocab))]


def piece(vocab: Any, token: int) -> bytes:
    """The bytes of a token."""
    buffer = ctypes.create_string_buffer(256)
    size = llama_cpp.llama_token_to_piece(vocab, token, buffer, 256, 0, True)
    return buffer.raw[:size]


def _open(path: Path) -> tuple[Any, Any]:
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, f"llama.cpp cannot load {path}"
    return model, llama_cpp.llama_model_get_vocab(model)


def ids_of(vocab: Any, text: str, parse_special: bool) -> list[int]:
    """The tokens of a text, without BOS."""
    data = text.encode()
    room = len(data) + 16
    buffer = (llama_cpp.llama_token * room)()
    got = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, room, False, parse_special)
    assert got >= 0, text
    return list(buffer[:got])


def _gguf(pre: str) -> bytes:
    from piece_models import gguf

    values = {"model": "gpt2", "pre": pre, "bos_token_id": 0, "eos_token_id": 0}
    values |= pair_vocabulary()
    return gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


def _loaded(content: bytes) -> tuple[Any, Any]:
    """The model and the vocabulary of a GGUF file with these bytes."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        return _open(Path(file.name))


def _ends(vocab: Any) -> list[int]:
    count = llama_cpp.llama_vocab_n_tokens(vocab)
    return [index for index in range(count) if llama_cpp.llama_vocab_is_eog(vocab, index)]


def _write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    with gzip.GzipFile(DATA / name, "wb", 9, mtime=0) as file:
        file.write(text.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
