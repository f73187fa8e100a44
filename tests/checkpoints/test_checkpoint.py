"""Opening files and directories: what is found, what is refused and how, and the bytes.

Most headers of safetensors files are in tests/fuzz/corpus/safetensors.
"""

import json
import os
import pickle
import struct
import sys
from pathlib import Path

import children
import numpy as np
import pytest
from gguf_bytes import STRING, gguf, pair, tensor
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from fuzz_safetensors import check, library

from llmcli.checkpoints import SAFETENSORS_BITS, files, open_checkpoint, read_safetensors
from llmcli.errors import (
    CheckpointError,
    LlmcliError,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
    WeightMismatch,
)

W = np.arange(12, dtype=np.float32).reshape(3, 4)
V = np.arange(5, dtype=np.int8)
ONE, TWO = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
CONFIG = {"model_type": "llama", "time_step_limit": [0.0, float("inf")]}
GGUF = gguf([pair("general.architecture", STRING, "llama")], [tensor("t", [8], 24, 0)], bytes(8))


def refused(path, *words: str, code: int = 4, hint: str = "") -> LlmcliError:
    with pytest.raises(CheckpointError if code == 4 else ModelNotFound) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message
    assert all(word in caught.value.message for word in words), caught.value.message
    assert hint in (caught.value.hint or "")
    return caught.value


def write_json(path, document) -> None:
    path.write_text(document if isinstance(document, str) else json.dumps(document))


@pytest.fixture
def folder(tmp_path):
    save_file({"w": W, "v": V}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_file({"w": W}, tmp_path / ONE)
    save_file({"v": V}, tmp_path / TWO)
    place(tmp_path, w=ONE, v=TWO)
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


def place(folder, **weight_map) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def test_a_directory_with_one_file(folder):
    write_json(folder / "generation_config.json", {"do_sample": False})
    checkpoint = open_checkpoint(folder, name="mine")
    assert (checkpoint.kind, checkpoint.name, checkpoint.path) == ("safetensors", "mine", folder)
    assert checkpoint.model_type == "llama"
    assert checkpoint.config["time_step_limit"][1] == float("inf")
    assert checkpoint.generation_config == {"do_sample": False}
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.folder == folder
    assert checkpoint.tensors["w"].shape == (3, 4)
    assert bytes(checkpoint.raw("w")) == W.tobytes()
    assert checkpoint.read("v", 1, 4) == V.tobytes()[1:4]


def test_shards(sharded):
    checkpoint = open_checkpoint(sharded)
    assert [file.name[:11] for file in checkpoint.files] == ["model-00001", "model-00002"]
    assert bytes(checkpoint.raw("w")) == W.tobytes()
    assert bytes(checkpoint.raw("v")) == V.tobytes()
    os.remove(sharded / TWO)
    refused(sharded, "`model-00002-of-00002.safetensors`")


def test_one_file_uses_the_config_beside_it(folder):
    checkpoint = open_checkpoint(folder / "model.safetensors")
    assert checkpoint.model_type == "llama"
    assert checkpoint.folder == folder
    os.remove(folder / "config.json")
    alone = open_checkpoint(folder / "model.safetensors")
    assert alone.config is None
    with pytest.raises(CheckpointError, match=r"no `config.json`"):
        _ = alone.model_type


def test_a_gguf_file_and_the_directory_that_holds_only_it(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    for opened in (open_checkpoint(path), open_checkpoint(tmp_path)):
        assert (opened.kind, opened.model_type, opened.path) == ("gguf", "llama", path)
        assert opened.folder == tmp_path
        assert bytes(opened.raw("t")) == bytes(8)


def test_content_decides_where_the_name_says_nothing(tmp_path, folder):
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(GGUF)
    assert open_checkpoint(blob).kind == "gguf"
    blob.write_bytes((folder / "model.safetensors").read_bytes())
    assert open_checkpoint(blob).kind == "safetensors"
    blob.write_bytes(b"hello, world, this is text")
    refused(blob, "neither")


def test_a_configuration_alone_opens_without_weights(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.files, dict(checkpoint.tensors)) == ((), {})
    assert checkpoint.model_type == "llama"


def test_several_files_are_listed(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(GGUF)
        save_file({"w": W}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, "`a.safetensors`, `b.safetensors`")
    for name in "ab":
        os.remove(tmp_path / f"{name}.safetensors")
    refused(tmp_path, "`a.gguf`, `b.gguf`", hint="a.gguf")
    save_file({"w": W}, tmp_path / "model.safetensors")
    refused(tmp_path, "without a config.json, and `a.gguf`, `b.gguf`", hint="a.gguf")
    write_json(tmp_path / "config.json", CONFIG)
    assert open_checkpoint(tmp_path).kind == "safetensors"


def test_an_index_may_name_tensors_that_are_elsewhere_or_nowhere_and_forget_others(sharded):
    save_file({"v": V, "x": W, "forgotten": W}, sharded / TWO)
    place(sharded, w=ONE, v=ONE, x=TWO, stale=TWO)
    found = {name: info.file.name for name, info in open_checkpoint(sharded).tensors.items()}
    assert found == {"w": ONE, "v": TWO, "x": TWO, "forgotten": TWO}


@pytest.mark.parametrize("name", [ONE, TWO, "more/overlay.safetensors"])
def test_of_a_tensor_in_several_files_the_index_decides(sharded, name):
    (sharded / "more").mkdir()
    save_file({"v": V, "w": W + 2}, sharded / TWO)
    save_file({"w": W + 3}, sharded / "more/overlay.safetensors")
    place(sharded, w=name, v=TWO)
    if name == ONE:
        place(sharded, w=name, v=TWO, nowhere="more/overlay.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors["w"].file == sharded / name
    added = {ONE: 0, TWO: 2}.get(name, 3)
    assert bytes(checkpoint.raw("w")) == (W + added).astype(np.float32).tobytes()


def test_shards_without_an_index_are_one_model(sharded):
    os.remove(sharded / "model.safetensors.index.json")
    save_file({"lora": W}, sharded / "adapter_model.safetensors")  # which is none
    for path in (sharded, sharded / ONE, sharded / TWO):
        assert set(open_checkpoint(path).tensors) == {"v", "w"}
    save_file({"v": V, "w": W}, sharded / TWO)
    refused(sharded, "`w` is in")
    os.remove(sharded / TWO)
    refused(sharded, f"lacks `{TWO}`, of the 2 shards of a model")
    assert set(open_checkpoint(sharded / ONE).tensors) == {"w"}


@pytest.mark.parametrize(("prefix", "names", "wrapper"), [
    ("module.", ["w", "v_head.w"], "module."), ("_orig_mod.", ["model.w"], "_orig_mod."),
    ("module._orig_mod.", ["w"], "module._orig_mod."),
    ("base_model.model.", ["model.w", "lm_head.w"], "base_model.model."),
    ("model.", ["model.w", "lm_head.w"], "model."), ("", ["model.w", "lm_head.w"], ""),
    ("", ["model.w", "model.norm.w"], ""), ("", ["module.w", "w"], ""), ("", ["module."], ""),
])  # fmt: skip
def test_what_a_wrapper_put_before_every_name_is_left_out(tmp_path, prefix, names, wrapper):
    save_file({prefix + name: W for name in names}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert (found.wrapper, set(found.tensors)) == (wrapper, set(names))
    assert all(info.name == name for name, info in found.tensors.items())
    assert all(bytes(found.raw(name)) == W.tobytes() for name in names)


ASIDE = {
    "adapter": ("llama", "a LoRA adapter for `Base`, not a model"),
    "mmproj": ("clip", "vision or audio part"), "imatrix": (None, "an importance matrix"),
    None: ("controlvector", "a control vector"), "model": ("clip", "vision or audio part"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ASIDE)
def test_what_belongs_to_a_model_is_called_what_it_is(tmp_path, kind):
    arch, words = ASIDE[kind]
    said = {"general.type": kind, "general.architecture": arch, "general.base_model.0.name": "Base"}
    pairs = [pair(key, STRING, value) for key, value in said.items() if value is not None]
    (tmp_path / "aaa.gguf").write_bytes(gguf(pairs, []))
    with pytest.raises(UnsupportedModel, match=words):
        open_checkpoint(tmp_path).model_type  # noqa: B018
    model = gguf([pair("general.architecture", STRING, "llama")], [])
    (tmp_path / "model.gguf").write_bytes(model)
    assert open_checkpoint(tmp_path).path.name == "model.gguf"  # beside a model it is none
    (tmp_path / "other.gguf").write_bytes(model)
    assert refused(tmp_path, "`model.gguf`, `other.gguf`").hint.endswith("model.gguf`")


@pytest.mark.parametrize(
    ("names", "beside", "words", "hint"),
    [(["base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"], {},
      "is a LoRA adapter, not a model", "give its base model"),
     (["x"], {"adapter_config.json": {"base_model_name_or_path": "a/b"}},
      "is a LoRA adapter for `a/b`, not a model", "give `-m a/b`"),
     (["tok_embeddings.weight", "norm.weight"], {}, "Meta's or Mistral's", "config.json"),
     (["x"], {"params.json": {"dim": 4}}, "Meta's or Mistral's", "config.json")],
)  # fmt: skip
def test_safetensors_that_are_no_model_are_called_what_they_are(
    tmp_path, names, beside, words, hint
):
    save_file({name: W for name in names}, tmp_path / "adapter_model.safetensors")
    for name, document in beside.items():
        write_json(tmp_path / name, document)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        open_checkpoint(tmp_path).model_type  # noqa: B018
    assert hint in caught.value.hint


@pytest.mark.parametrize("magic", [b"lmgg", b"fmgg", b"tjgg", b"algg"])
def test_a_file_from_before_gguf_is_called_so(tmp_path, magic):
    (tmp_path / "ggml-model.bin").write_bytes(magic + bytes(100))
    with pytest.raises(CheckpointError, match="a GGML file, from before GGUF"):
        open_checkpoint(tmp_path / "ggml-model.bin")


ELSEWHERE = (
    "../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "a\\x.safetensors",
    "x\0.safetensors", "..", "", "x.bin", 3, None, ["x.safetensors"],
)  # fmt: skip


@pytest.mark.parametrize("document", [
    "", "[]", "{}", {"weight_map": []}, {"weight_map": {}},
    *({"weight_map": {"w": ONE, "v": name}} for name in ELSEWHERE),
], ids=range(16))  # fmt: skip
def test_a_broken_index_and_one_that_leads_elsewhere(sharded, document):
    save_file({"w": W}, sharded.parent / "x.safetensors")
    write_json(sharded / "model.safetensors.index.json", document)
    refused(sharded, "index.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "cause"), [
    (b"{", "not valid json"), (b"[1]", "not a json object"), (b"null", "not a json object"),
    (b"\xff\xfe{}", "not utf-8"), (b"[" * 200_000, "nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", "not valid json"), (b"", "empty"),
])  # fmt: skip
def test_a_broken_configuration(folder, name, content, cause):
    (folder / name).write_bytes(content)
    refused(folder, cause, name)


@pytest.mark.parametrize("config", [{}, {"model_type": 3}, {"model_type": ""}])
def test_no_model_type(folder, config):
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match="no `model_type`"):
        _ = open_checkpoint(folder).model_type


class Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.pt", "m.pth", "m.ckpt", "m.pkl", "m.dat"])
def test_a_pickle_is_never_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "pickle", hint="save_file")
    if not name.endswith(".dat"):
        write_json(tmp_path / "config.json", CONFIG)
        refused(tmp_path, f"{name}` is a pickle")


def test_the_way_out_of_a_pickle_works(tmp_path):
    torch = pytest.importorskip("torch")
    shared = torch.arange(4.0)
    torch.save({"a": shared, "b": shared}, tmp_path / "m.bin")
    command = refused(tmp_path / "m.bin").hint.split("`")[1]
    program = command.removeprefix('python -c "').removesuffix('" FILE')
    (tmp_path / "scripted.py").write_text(program)  # begins with PyTorch imported
    argv = [sys.executable, str(tmp_path / "scripted.py"), "m.bin"]
    children.run(argv, cwd=tmp_path, check=True)
    assert set(open_checkpoint(tmp_path / "model.safetensors").tensors) == {"a", "b"}


def test_nothing_there(tmp_path):
    refused(tmp_path, "no model in the directory", code=3)
    (tmp_path / "m.gguf").mkdir()
    (tmp_path / "f").write_bytes(GGUF)
    for name in ("none.gguf", "none.safetensors", "none", "m.gguf", "f/m.gguf"):
        refused(tmp_path / name, code=3)


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ".bin", ""])
def test_files_that_are_none(tmp_path, suffix):
    empty, pipe, loop, dangling = (tmp_path / f"{name}{suffix}" for name in "epld")
    empty.touch()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "none")
    refused(empty, "empty")
    refused(pipe, "not a regular file")
    refused(Path("/dev/zero"), "not a regular file")
    refused(loop)
    refused(tmp_path / f"a\0b{suffix}")
    refused(dangling, code=3)


def test_what_may_not_be_read(folder, monkeypatch):
    def denied(path, *rest, **more):
        raise PermissionError(13, "Permission denied", str(path))

    (folder / "m.gguf").write_bytes(GGUF)
    monkeypatch.setattr(files.os, "open", denied)
    for path in (folder / "m.gguf", folder / "model.safetensors", folder):
        refused(path, "permission denied")
    monkeypatch.undo()
    monkeypatch.setattr("llmcli.checkpoints.folder.os.listdir", denied)
    refused(folder, "permission denied")


def test_ranges_outside_a_tensor(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read("v", 5, 5) == b""
    for start, stop in ((0, 6), (-1, 3), (3, 2)):
        with pytest.raises(ValueError, match="bytes"):
            checkpoint.read("v", start, stop)
    with pytest.raises(KeyError):
        checkpoint.raw("none")


def test_raw_shares_one_mapping_and_reading_needs_none(folder):
    checkpoint = open_checkpoint(folder)
    view = checkpoint.raw("w")
    assert view.readonly
    assert view.obj is checkpoint.raw("v").obj
    other = open_checkpoint(folder)
    before = mapped_times(folder)
    other.read("w", 0, 4)
    assert mapped_times(folder) == before == 1


def mapped_times(folder):
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return maps.count(str(folder / "model.safetensors"))


def test_release_keeps_views_valid_and_no_descriptor_is_left_behind(folder):
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(folder)
    view = checkpoint.raw("w")
    checkpoint.release()
    assert bytes(view) == W.tobytes()
    view.release()
    checkpoint.release()
    assert (mapped_times(folder), len(os.listdir("/proc/self/fd"))) == (0, before)
    assert bytes(checkpoint.raw("w")) == W.tobytes()
    assert checkpoint.read("w", 0, 8) == W.tobytes()[:8]
    assert len(os.listdir("/proc/self/fd")) > before
    del view, checkpoint
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_changed_since_it_was_opened_or_is_truncated_while_it_is_read(folder):
    opened, reading = open_checkpoint(folder), open_checkpoint(folder)
    reading.read("w", 0, 4)
    os.truncate(folder / "model.safetensors", 60)
    for attempt in (lambda: opened.raw("w"), lambda: opened.read("w", 0, 4)):
        with pytest.raises(CheckpointError, match="has changed"):
            attempt()
    with pytest.raises(CheckpointError, match="truncated"):
        reading.read("w", 0, 48)


def test_a_wrong_shape_names_both_and_says_what_to_do():
    error = WeightMismatch(misshapen=[("head.W", "lm_head.weight", (9, 4), (8, 4))])
    assert "`head.W` from `lm_head.weight` should be [9, 4] but is [8, 4]" in error.message
    assert "are of different models" in error.hint
    assert "are of different models" in WeightMismatch(unexpected=["lm_head.weight"]).hint
    assert "a file of the weights may not be here" in WeightMismatch(missing=["head.W"]).hint


# headers of safetensors files


def file_bytes(header: str | bytes, data: bytes = bytes(4)) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def one(dtype="F32", shape="[1]", span="[0,4]") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}}}'


@pytest.mark.parametrize("dtype", [*SAFETENSORS_BITS, "F3", "C128", "I4"])
def test_dtypes_are_the_librarys(dtype, tmp_path):
    accepted = 0
    for nbytes in range(140):
        content = file_bytes(one(dtype, "[8]", f"[0,{nbytes}]"), bytes(nbytes))
        if nbytes % 8 == 0 or library(content) is not None:
            accepted += check(tmp_path / "a.safetensors", content)
    assert accepted == (dtype in SAFETENSORS_BITS)


def test_says_what_else_a_file_is(tmp_path):
    path = tmp_path / "a.safetensors"
    for content, cause in (
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"PK\x03\x04" + bytes(30), "pickle"),
        (b"\x80\x02}q\x00.jj" + bytes(30), "pickle"),
        (file_bytes(one("F31").replace('"a"', r'"\u001b[2J\n"')), r"`\\x1b\[2J\\n`"),  # escaped
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=cause):
            read_safetensors(path)
    path.write_bytes(file_bytes(one().ljust(0x280)))  # whose length looks like a pickle
    assert path.read_bytes().startswith(b"\x80\x02")
    assert list(read_safetensors(path)[1]) == ["a"]


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.array([1, 2, 3], dtype=np.int8),
        "h": np.ones((1, 1, 5), dtype=np.float16),
    }  # fmt: skip
    save_file(arrays, path, metadata={"format": "pt"})
    assert check(path, path.read_bytes())
    assert read_safetensors(path)[0] == {"format": "pt"}


@pytest.mark.parametrize(("free", "fits"), [(None, True), (1 << 20, True), (1 << 10, False)])
def test_a_header_that_would_not_fit_into_memory_is_not_read(tmp_path, monkeypatch, free, fits):
    """One of 100 MB, all the library allows, takes 3 GiB as objects."""
    monkeypatch.setattr("llmcli.checkpoints.safetensors.free_memory", lambda: free)
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes(one()))
    if fits:
        assert read_safetensors(path)[1].keys() == {"a"}
        return
    with pytest.raises(OutOfMemory, match=r"takes up to .* to read, but only"):
        read_safetensors(path)
