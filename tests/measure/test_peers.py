"""Peers of a benchmark: what they are fed, what they say of themselves, and how they fail."""

import ctypes
import importlib.util
import os
import re
import sys
import types
from unittest.mock import MagicMock, Mock

import pytest
import torch
from decoder_parameters import parameters_of
from gguf_bytes import gguf, pair
from load_files import write_gguf
from tiny_checkpoints import write_gpt2, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.errors import CheckpointError, OutOfMemory, UsageError
from llmcli.loading.load import load_checkpoint, load_shapes
from llmcli.measure.engines import LlmcliEngine, engine_info
from llmcli.measure.llama_cpp import LlamaCpp, cache_type
from llmcli.measure.peers import open_peer, same_model, silent

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def model(folder, write=write_llama, **options):
    checkpoint = open_checkpoint(write(folder))
    return load_checkpoint(checkpoint, device="cpu", dtype="float32", text=False, **options)


@pytest.fixture
def ours(tmp_path):
    return model(tmp_path)


@pytest.mark.parametrize("name", ["llmcli", "transformers"])
def test_only_off_takes_the_fused_kernel_away(ours, monkeypatch, name):
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **options):
        seen.append(SDPBackend.FLASH_ATTENTION in _cur_sdpa_kernel_backends())
        return fused(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for way, fast in (("on", True), ("off", False), ("auto", True)):
        if name == "llmcli":
            engine = LlmcliEngine(ours, engine_info(ours, 0.0), flash=way != "off")
        else:
            engine = open_peer(name, ours, flash_attn=way)
        engine.start(9, 1, 8)
        with engine.computing():
            engine.read([1, 2, 3])
            engine.step(4)
        assert set(seen) == {fast}
        seen.clear()
    assert SDPBackend.FLASH_ATTENTION in _cur_sdpa_kernel_backends()  # and it is back


def test_a_token_is_made_on_the_device_and_threads_are_those_of_the_test(ours, monkeypatch):
    peer = open_peer("transformers", ours)
    peer.start(9, 2, 8)
    assert torch.get_num_threads() == 2
    peer.read([1, 2, 3])
    monkeypatch.setattr(torch, "tensor", None)  # a list of the host would be copied there
    peer.step(4)


def test_both_read_one_text_that_begins_with_bos(ours, monkeypatch):
    read = {}
    peer = open_peer("transformers", ours)
    peer.bos = 7
    compute, theirs = type(ours.decoder).__call__, type(peer).read

    def of_ours(decoder, ids, *args, **options):
        read["ours"] = ids[0].tolist()
        return compute(decoder, ids, *args, **options)

    def of_theirs(peer, ids):
        read["theirs"] = list(ids)
        return theirs(peer, ids)

    monkeypatch.setattr(type(ours.decoder), "__call__", of_ours)
    monkeypatch.setattr(type(peer), "read", of_theirs)
    assert same_model(ours, peer, threads=1, seed=3).ok
    assert read["ours"] == read["theirs"]
    assert read["ours"][0] == 7
    assert len(set(read["ours"])) > 10


class LlamaLibrary:
    """llama.cpp's functions over a list of tokens; a state is taken back unless `full`."""

    llama_token = ctypes.c_int32
    full, loads, __version__ = False, 1, "0.3"

    def __init__(self):
        self.memory, self.made, self.copies, self.calls = [], None, 0, MagicMock()
        # `swa_full` as in the C interface
        self.llama_context_default_params = lambda: types.SimpleNamespace(swa_full=True)
        self.llama_n_batch = lambda context: self.made.n_batch
        self.llama_batch_get_one = lambda tokens, count: list(tokens)
        self.llama_init_from_model = lambda model, params: setattr(self, "made", params) or 1
        self.llama_decode = lambda context, batch: self.memory.extend(batch)
        self.llama_memory_clear = lambda memory, data: self.memory.clear()
        self.llama_state_seq_get_size = lambda context, sequence: len(self.memory)
        self.llama_log_callback = lambda hear: hear

    def __getattr__(self, name):
        return getattr(self.calls, name)

    def llama_model_load_from_file(self, path, params):
        self.opened = path, params.n_gpu_layers, params.split_mode, params.main_gpu
        hear = self.calls.llama_log_set.call_args.args[0]
        hear(4, b"bad magic\nmore", None)
        hear(2, b"a warning", None)
        return self.loads

    def llama_state_seq_get_data(self, context, state, size, sequence):
        state[:] = self.memory
        self.copies += 1
        return size

    def llama_state_seq_set_data(self, context, state, size, sequence):
        self.memory[:] = state
        return 0 if self.full else size


def test_llama_cpp_runs_as_llama_bench_does(monkeypatch):
    """Windows keep their keys only, a depth comes back from its copy, the first log stays alive."""
    library = LlamaLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    checkpoint = types.SimpleNamespace(kind="gguf", files=["m.gguf"])
    ours = Mock(checkpoint=checkpoint, random_seed=None, device=torch.device("cuda:1"))
    ours.config.layers = [1, 2]
    peer = LlamaCpp(ours, n_batch=64, flash_attn="on")
    assert library.opened == (b"m.gguf", 999, 0, 1)
    assert (peer.info.gpu_layers, peer.info.device, peer.info.type_k) == (3, "cuda:1", "f16")
    ours.device = torch.device("cpu")
    assert LlamaCpp(ours).info.gpu_layers == library.opened[1] == 0
    peer.start(20, 1, 4)
    made = library.made
    assert (made.swa_full, made.type_k, made.flash_attn_type) == (False, 1, 1)
    peer.read([1, 2, 3])
    for _ in range(2):
        peer.rewind(3)
        peer.read([4, 5])
        assert library.memory == [1, 2, 3, 4, 5]
    assert library.copies == 1
    with pytest.raises(UsageError, match="cannot go back to the first 4 tokens"):
        peer.rewind(4)
    library.full = True
    with pytest.raises(OutOfMemory, match="did not take back its first 3 tokens: bad magic"):
        peer.rewind(3)
    peer.rewind(0)
    assert library.memory == []
    peer.read([6, 7, 8])
    peer.rewind(3)  # another text of the same length
    peer.rewind(3)
    assert (library.copies, library.memory) == (2, [6, 7, 8])
    for _ in range(2):
        peer.close()
    library.calls.llama_model_free.assert_called_once()
    library.loads = None
    with pytest.raises(CheckpointError, match=r"llama\.cpp cannot load `.*`: bad magic$"):
        LlamaCpp(ours)
    library.calls.llama_backend_init.assert_called_once()


@pytest.mark.parametrize("fault", ["weight", "nan"])
def test_other_weights_are_seen(ours, fault):
    peer = open_peer("transformers", ours)
    good = same_model(ours, peer, threads=1)
    assert good.ok
    assert good.words == "transformers predicts the same after 8 × 32 random tokens, KL in nats"
    weight = parameters_of(ours.decoder)["blocks.1.attn.W_v"]
    weight[0] = weight[1] if fault == "weight" else torch.nan
    assert not same_model(ours, peer, threads=1).ok


def test_transformers_on_a_gguf_file(tmp_path, capfd):
    ours = model(tmp_path, lambda folder: write_gguf(folder / "m.gguf", llama__vocab_size=97))
    same = same_model(ours, open_peer("transformers", ours), threads=1)
    assert same.ok
    assert same.value < 1e-9
    assert capfd.readouterr() == ("", "")


def test_more_tokens_than_learned_positions_are_refused(tmp_path):
    peer = open_peer("transformers", model(tmp_path, write_gpt2))
    peer.start(32, 1, 32)
    with pytest.raises(UsageError, match="33 tokens does not fit the 32 positions"):
        peer.start(33, 1, 32)


@pytest.mark.parametrize(("name", "module", "package", "old"), [
    ("transformers", "transformers", "transformers", "4.57.1"),
    ("llama.cpp", "llama_cpp", "llama-cpp-python", "0.2.90"),
])
def test_a_peer_that_is_not_installed_or_too_old_is_a_usage_error(
    ours, monkeypatch, name, module, package, old
):
    if name == "llama.cpp":
        object.__setattr__(ours.checkpoint, "kind", "gguf")
    there = types.ModuleType(module)
    there.__version__ = old
    for found, words, hint in (
        (None, "is not installed", f"run `pip install {package}`"),  # what `import` then finds
        (there, f"{package} {old} is too old", f"run `pip install --upgrade {package}`"),
    ):
        monkeypatch.setitem(sys.modules, module, found)
        with pytest.raises(UsageError, match=re.escape(words)) as error:
            open_peer(name, ours)
        assert error.value.hint == hint


def test_what_cannot_be_compared_is_refused(tmp_path, ours):
    with pytest.raises(UsageError, match=r"GGUF files, and .* is safetensors"):
        open_peer("llama.cpp", ours)
    drawn = model(tmp_path, random_weights=1)
    with pytest.raises(UsageError, match=r"GGUF files, and .* is random weights"):
        open_peer("llama.cpp", drawn)
    with pytest.raises(UsageError, match=r"directories and GGUF files, and .* is random weights"):
        open_peer("transformers", drawn)
    lone = load_checkpoint(open_checkpoint(tmp_path / "model.safetensors"), device="cpu")
    with pytest.raises(UsageError, match=r"directories and GGUF files, and .* is a single file"):
        open_peer("transformers", lone)
    shapes = load_shapes(open_checkpoint(tmp_path), dtype="float32")
    for name in ("transformers", "llama.cpp"):
        with pytest.raises(UsageError, match="meta device"):
            open_peer(name, shapes)


def test_what_transformers_cannot_load_is_one_line_and_loading_says_nothing(ours, tmp_path, capfd):
    open_peer("transformers", ours)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UsageError, match=r"transformers cannot load `.*`: ") as error:
        open_peer("transformers", ours)
    assert "\n" not in error.value.message
    assert capfd.readouterr() == ("", "")


def test_nothing_of_a_library_is_heard_and_nothing_of_ours_is_lost(capfd):
    libc = ctypes.CDLL(None)
    print("before")
    with silent():
        print("python, buffered")
        sys.stderr.write("python, stderr")
        os.write(1, b"written")
        libc.dprintf(2, b"c, stderr")
    print("after")
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert (out, err) == ("before\nafter\n", "")
    with pytest.raises(ZeroDivisionError), silent():
        _ = 1 / 0
    os.write(1, b"heard again")
    assert capfd.readouterr().out == "heard again"


def test_types_of_llama_cpps_cache():
    assert [cache_type(name) for name in ("auto", "f16", "bfloat16", "f32", "q8_0")] == [
        1, 1, 30, 0, 8,
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no cache of type `q9`"):
        cache_type("q9")


@needs_llama_cpp
@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_cpp_computes_what_we_do(smollm2_path, dtype, capfd):
    ours = load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype=dtype)
    peer = open_peer("llama.cpp", ours)
    assert same_model(ours, peer, threads=1).ok
    ran = peer.info
    assert ran.model_n_params == 134515008
    assert ran.model_size == sum(info.nbytes for info in ours.checkpoint.tensors.values())
    assert ran.bits_per_weight == 8 * ran.model_size / ran.model_n_params
    assert (ran.dtype, ran.type_k, ran.backends) == ("Q4_1", "f16", "CPU")
    ids = ours.tokenizer.encode("The capital of France is Paris. The capital of Italy is")
    peer.start(len(ids) + 40, 1, 4)
    peer.read(ids[:6])
    peer.rewind(6)
    for id in ids[:5]:
        peer.step(id)  # forgotten again
    peer.rewind(6)
    peer.read(ids[6:-1])
    peer.step(ids[-1])
    own = ours.decoder(torch.tensor([ids]), logits="last")[0, -1]
    theirs, mine = peer.logits().log_softmax(-1), own.log_softmax(-1)
    assert ours.tokenizer.decode([int(theirs.argmax())]) == " Rome"
    assert float((mine.exp() * (mine - theirs)).sum()) < 0.05
    parameters_of(ours.decoder)["blocks.3.mlp.W_down"].mul_(1.5)
    assert not same_model(ours, peer, threads=1).ok
    peer.close()
    assert capfd.readouterr() == ("", "")


@needs_llama_cpp
def test_what_llama_cpp_cannot_load_is_one_line(ours, tmp_path, capfd):
    file = tmp_path / "bad.gguf"
    file.write_bytes(gguf([pair("general.architecture", 8, "llama")]))
    object.__setattr__(ours.checkpoint, "kind", "gguf")
    object.__setattr__(ours.checkpoint, "files", (file,))
    with pytest.raises(CheckpointError, match=r"llama\.cpp cannot load `.*`: ") as error:
        open_peer("llama.cpp", ours)
    assert "\n" not in error.value.message
    assert capfd.readouterr() == ("", "")
