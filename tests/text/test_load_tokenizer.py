"""From a checkpoint to its tokenizer, and what importing that costs."""

import json
import struct
import sys

import children
import piece_models
import pytest
from text_fixtures import metadata
from tokenizer_files import write

from llmcli.checkpoints.checkpoint import open_checkpoint
from llmcli.errors import CheckpointError
from llmcli.text import load_tokenizer


@pytest.mark.parametrize(("values", "bos"), [
    (metadata(["hello"], types={"<s>": 3}, bos_token_id=260), 260),
    (piece_models.metadata("llama"), 1),
])  # fmt: skip
def test_gguf_file(tmp_path, values, bos):
    path = tmp_path / "m.gguf"
    path.write_bytes(piece_models.gguf(values))
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
    assert tokenizer.bos_id == bos


@pytest.mark.parametrize("as_file", [True, False])
def test_directory(tmp_path, as_file):
    write(tmp_path, "llama3")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2]}')
    checkpoint = open_checkpoint(weights if as_file else tmp_path)
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == {1, 2}
    assert tokenizer.add_bos
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(checkpoint) is None


def test_importing_and_rendering_loads_nothing_heavy():
    code = (
        "import sys, json, llmcli.text; from llmcli.text import ChatTemplate;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy'};"
        "first = sorted(heavy & set(sys.modules)); ChatTemplate('x').render([]);"
        "print(json.dumps([first, sorted(heavy & set(sys.modules))]))"
    )
    run = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [[], []]
