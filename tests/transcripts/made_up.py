"""What the transcripts run on: a machine that is made up, and small models."""

import hashlib
import importlib
import itertools
import json
import os
import shutil
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("render", "cli", "checkpoints")]
import numpy as np
import torch  # noqa: F401  # before OMP_NUM_THREADS goes, which it reads
from cli_tiny import TEMPLATE, write_mixture, write_tiny
from gguf_bytes import ARRAY, F32, I32, STRING, U32, gguf, pair, tensor
from gguf_model import write_model
from hub_cache_files import OLD, write_revision
from linear_family import write
from safetensors.numpy import load_file, save_file
from timing_reports import idle, variant
from unplanned.family import CONFIGS, register

from llmcli import OPENMP_SPIN
from llmcli.checkpoints import open_model
from llmcli.commands.bench.report.row import BuildInfo
from llmcli.commands.selftest.report import GroupResult, MemoryResult, RateResult, SelftestReport
from llmcli.commands.timing.report import Stage
from llmcli.records.document import ViewCheck
from llmcli.records.machine import Ceilings, Environment, MatrixRate, ReadRate

RESULTS = Path(__file__).parents[1] / "data" / "llama_bench"
# which kernels computed is shown for what was measured alone
MACHINE = {
    "python": "3.11.7", "platform": "Linux-6.1.0-x86_64-with-glibc2.36", "cores": 2,
    "processor": "Processor of 2 Cores @ 2.50GHz", "features": ("avx2", "fma", "avx512f"),
    "memory_bytes": 24 * 2**30, "gpus": (), "driver": None, "torch": "2.12.0+cpu", "cuda": None,
    "threads": 2, "kernel_level": "avx2", "triton": "not installed", "llmcli": "1.2.3",
}  # fmt: skip


def made_up_machine(monkeypatch, home):
    """Nothing of this machine's caches and settings, a pager that is none, and times that stand."""
    for name in (
        "OMP_NUM_THREADS", "LLMCLI_KERNELS", "LLMCLI_CACHE", "HF_ENDPOINT", "HF_TOKEN",
        "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "KMP_BLOCKTIME",
        "LLMCLI_TRITON",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("HF_HUB_CACHE", "hf_hub_cache"), ("HF_HOME", "hf_home")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(home / folder))
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    for name, value in {
        "HOME": str(home), "LLMCLI_PAGER": "", "HF_HUB_OFFLINE": "1",
        "GOMP_SPINCOUNT": OPENMP_SPIN["GOMP_SPINCOUNT"],
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    register(monkeypatch)
    _once(monkeypatch, "llmcli.measure.ceilings.measure_ceilings", seconds=0.02)
    _once(monkeypatch, "llmcli.commands.ladder.command._measured")
    # `--threads` is shown; beside another worker a second thread would only wait for the first
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    for target, value in (_machine() | _bench()).items():
        monkeypatch.setattr(f"llmcli.{target}", value)


def _machine():
    """What stands for the machine and for what it measures."""
    places = {}  # stages of loading are listed by their times

    def add(self, name, seconds, nbytes=0):
        self.seconds[name] = 0.9 / (1 + places.setdefault(name, len(places)))
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    begun = [
        Stage(name="import torch", seconds=1.5),
        Stage(name="load the weights", seconds=0.4, nbytes=100_000_000),
    ]
    return {
        # `TIMED=NAME` before the command, `SELFTEST=KIND`, `READ=16`
        "commands.timing.measure.run.measure_timing":
            lambda *_, **__: variant(os.environ.get("TIMED", "")),
        "commands.selftest.measure.run.measure_selftest":
            lambda *_, **__: _selftest(os.environ.get("SELFTEST", "")),
        "engine.speculation.DraftLengthController.rows":
            lambda self, key, most: min(most, int(os.environ.get("READ", "1"))),
        "measure.machine.CpuContention.load": lambda self, threads: idle(threads=threads),
        "measure.machine.Environment": lambda **of: Environment(**of | MACHINE),
        "processor.name": lambda: MACHINE["processor"],
        "commands.env.command.processors": lambda: MACHINE["cores"],
        "commands.ladder.measure.runner.ROUNDS_S": 0.0,
        "commands.timing.command._stages": lambda loaded: [*begun],
        "records.work.LoadTimings.add": add,
    }  # fmt: skip


def _bench():
    """Of `bench`: the clock of its runs, its memory, the machine's ceilings, date and versions."""
    build = BuildInfo(
        build_commit="1a2b3c4d", build_number=321, cpu_info=MACHINE["processor"], gpu_info=""
    )
    clock = itertools.accumulate(itertools.cycle([1_300_000, 1_200_000, 1_250_000]))
    seconds, reads = itertools.count(), ReadRate(nbytes=10**9, bytes_per_s=1e9, level="memory")
    return {
        "commands.bench.command.build_info": lambda: build,
        "commands.bench.measure.loader.perf_counter": lambda: next(seconds) / 4,
        "commands.bench.measure.loader.resident_bytes": lambda: 300 << 20,
        "commands.bench.measure.loader.ceilings": SimpleNamespace(
            measure_ceilings=lambda device, precision, **_: Ceilings(
                device=str(device), dtype=precision.dtype, threads=1, caches=(), seconds=0.5,
                reads=(reads,), matrices=(MatrixRate(dtype=precision.products, flops_per_s=1e10),),
            )
        ),
        "commands.bench.measure.sweep.datetime":
            SimpleNamespace(now=lambda zone: datetime(2026, 11, 22)),
        "measure.engines.llmcli": SimpleNamespace(__version__="1.2.3"),
        "measure.engines.perf_counter_ns": lambda: next(clock),
        "measure.peaks._mark": lambda: 900 << 20, "measure.peaks._set_back": lambda: True,
    }  # fmt: skip


def _selftest(kind):
    """A check that holds, but where it is `wrong`, and a rate, of half where it is `slow`."""
    assert kind != "refused", "before anything runs"
    check = ViewCheck(
        name="taps", words="observing changes no bit", value=float(kind == "wrong"), tolerance=0.0
    )
    rate = RateResult(
        shape="1B", phase="decode", format="bfloat16", tokens_per_s=5.0 if kind == "slow" else 10.0,
        share=0.7, layers=16, all_layers=16, versus=1.5,
    )  # fmt: skip
    return SelftestReport(
        device="cpu", groups=(GroupResult(check=check, cases=60, seconds=1.0),), rates=(rate,),
        memory=(MemoryResult(shape="1B", estimated=1 << 30, measured=1 << 30),), ceilings=None,
        refused=("8B: no memory for one layer of it",), seconds=2.0,
    )  # fmt: skip


def _once(monkeypatch, target, **more):
    """What a function returns first, it returns again: one screen is shown in several ways."""
    module, _, name = target.rpartition(".")
    function, found = getattr(importlib.import_module(module), name), {}

    def first(*args, **options):
        asked = repr(args[1:4])  # ladder's ids, rungs and options
        if asked not in found:
            found[asked] = function(*args, **options | more)
        return found[asked]

    monkeypatch.setattr(target, first)


def _talker(folder, answers=(("<|assistant|>", "Y", "e", "s", "."),), comment=""):
    """One that answers `Yes.` in every arithmetic: its layers add nothing, its tokens are chains.

    `answers`: chains of tokens that follow each other, and then it ends, as after any other token.
    Tokens that its tokenizer lacks are added to it. `comment`: what its template says to nobody.
    """
    chains = list(map(list, answers))
    write_tiny(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    for piece in (piece for chain in chains for piece in chain if piece not in ids):
        ids[piece] = len(ids)
        tokenizer["added_tokens"].append(
            tokenizer["added_tokens"][0] | {"id": ids[piece], "content": piece, "special": False}
        )
    write_tiny(
        folder, weights=True, template=TEMPLATE + comment, vocab_size=len(ids), hidden_size=64,
        max_position_embeddings=600, tie_word_embeddings=False,
    )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name][:] = 0
    embed, head = (np.zeros_like(tensors["model.embed_tokens.weight"]) for _ in range(2))
    embed[:, -1] = 1
    pairs = (pair for chain in chains for pair in itertools.pairwise(chain))
    for axis, (token, follower) in enumerate(pairs):
        embed[ids[token], [axis, -1]] = 1, 0
        head[ids[follower], axis] = 10
    head[ids["<|end|>"], -1] = 10
    head += np.linspace(0, 1e-3, len(head), dtype=head.dtype)[:, None]  # no two are alike
    tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")


# what it says where the template ends in a variable's letter, in tokens that cut markers in two
THOUGHTS = (
    ("<|assistant|>", "<thi", "nk>\nHm, ", "*so*.\nWell.", "\n</think>", "\n\nYes, **it*",
     "* is.\n- one"),
    ("n", "No."), ("t", "No <tool"), ("o", "<think>\nHm,  "),
    ("c", "I look.\n<tool_", 'call>\n{"a": 1}\n</tool_call>\n'),
    ("b", "<think>a</think>I look.\n", '<tool_call>\n{"a": 1}', "\n</tool_call>\n"),
    ("w", "Two atoms of hydro", "gen, one of oxygen.\n\n```\nfor every_line in the_", "code: stay(",
     "as_it_is)\n```\nThe e", "nd"),
    ("h", "<think>a\x1b[2J\r</think>b\x1b]0;x\x07\n```\x1b\n\x9b\n```\n| \x1b |"),
)  # fmt: skip


def _tiny(folder, *, flip=0):
    """`flip`: of a weight's bits, as in a model that was trained on."""
    shutil.copytree(open_model("tiny").path, folder)
    _flipped(folder / "model.safetensors", flip)


def _flipped(file, flip):
    data = bytearray(file.read_bytes())
    data[-3] ^= flip
    file.write_bytes(data)


def _linked(folder, *, flip=0):
    """Its weights are behind a link, as in the hub's cache: the file is named by its sha256."""
    weights = write_tiny(folder, weights=True) / "model.safetensors"
    blob = weights.rename(folder / hashlib.sha256(weights.read_bytes()).hexdigest())
    weights.symlink_to(blob.name)
    _flipped(blob, flip)


def _mixtral(folder):
    """The configuration of a small mixture beside `tiny`'s tokenizer; without weights."""
    source = open_model("tiny").path
    write_tiny(
        folder, vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
        architectures=["MixtralForCausalLM"], model_type="mixtral", tie_word_embeddings=False,
        rope_theta=1e6, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)


FILES = {"config.json": b"{}", "model.safetensors": b"w" * 2048, "tokenizer.json": b"{}"}


def _hub_of_nan(folder):
    MODELS["nan"](made := folder.with_name("nan-cached"))
    write_revision(folder, "org/name", {one.name: one.read_bytes() for one in made.iterdir()})


def _commits(folder):
    """Three commits of it, a name that would move the cursor, and what is no model."""
    write_revision(folder, "org/name", FILES)
    for commit, config in ((OLD, b"{ }"), (f"{OLD[:20]}{'c' * 20}", b"{  }")):
        changed = FILES | {"config.json": config}
        write_revision(folder, "org/name", changed, commit=commit, refs=[])
    write_revision(folder, "org/\x1b[2Jx", {"\x1b]0;title\x07.gguf": b"x"}, refs=["\x1b[1m"])
    (folder / "datasets--org--data" / "snapshots").mkdir(parents=True)


def _llama(*, weights=True, without=(), beside=None, changed=None, **config):
    """A small Llama: without some files, with others beside it, and its tensors changed."""

    def write(folder):
        write_tiny(folder, weights=weights, **config)
        for name in without:
            (folder / name).unlink()
        for name, content in (beside or {}).items():
            old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            (folder / name).write_text(json.dumps(old | content))
        if changed is not None:
            tensors = load_file(folder / "model.safetensors")
            changed(tensors)
            save_file(tensors, folder / "model.safetensors")

    return write


def _gemma4(**config):
    """A Gemma 4 without weights: a layer with a window, then two without."""
    return _llama(weights=False, **{
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "head_dim": 8,
        "global_head_dim": 16, "sliding_window": 21, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "hidden_activation": "gelu_pytorch_tanh",
    } | config)  # fmt: skip


def _gguf(folder):
    """A GGUF file that says who made it, and a window that no program reads there."""
    folder.mkdir()
    about = {"name": "Smol\x1b[31m", "organization": "HF", "license": "mit"}
    write_model(folder / "m.gguf", more=[
        *(pair(f"general.{key}", STRING, value) for key, value in about.items()),
        pair("general.languages", ARRAY, (STRING, ["en"])),
        pair("llama.attention.sliding_window", U32, 4096), pair("tests.half", F32, 0.5),
        pair("tests.long", STRING, "a" * 500), pair("tests.list", ARRAY, (U32, list(range(40)))),
    ])  # fmt: skip


def _parts(folder, *, lacking=False):
    """A model in one GGUF file, and the same in three."""
    folder.mkdir()
    write_model(folder / "whole.gguf")
    parts = write_model(folder / "m.gguf", parts=3)
    if lacking:
        parts[1].unlink()


def _sampled(folder):
    """GGUF files that say how to sample: as it may be, out of range, and what is not followed."""
    folder.mkdir()
    kinds = {float: F32, int: I32}
    for name, given in {
        "right": {"temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1},
        "wrong": {"temp": -1.0, "top_k": -1, "top_p": 2.0, "min_p": -0.5, "xtc_probability": 0.0},
        "short": {"penalty_repeat": 1.5, "penalty_last_n": 0},
        "more": {"penalty_repeat": 1.5, "penalty_last_n": 32, "mirostat": 2,
                 "xtc_probability": 0.5},
    }.items():  # fmt: skip
        write_model(folder / f"{name}.gguf", more=[
            pair(f"general.sampling.{key}", kinds[type(one)], one) for key, one in given.items()
        ])  # fmt: skip


def _odd(folder):
    """GGUF files with metadata that is no text, of an unknown kind; and an unknown pre-tokenizer.
    """
    folder.mkdir()
    (folder / "x.gguf").write_bytes(gguf([
        pair("general.architecture", STRING, "unheard_of"), pair("odd", STRING, b"\xff!"),
        pair("general.license", STRING, b"\xff!"),
        pair("general.languages", ARRAY, (STRING, [b"\xff", "de"])),
        pair("many", ARRAY, (U32, list(range(50)))), pair("few", ARRAY, (F32, [0.5, 1.5])),
    ], [tensor("w", (32,), 0, 0)], bytes(128)))  # fmt: skip
    (path,) = write_model(folder / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"smollm", b"newone"))


def _lone(folder):
    """A file alone, with names that would move a cursor or mean something to a shell."""
    folder.mkdir()
    tensors = {"layer.0.w[b]": np.zeros((3, 4), np.float32), "x\x1b[31m": np.zeros(5, np.float16)}
    metadata = {"note": "\x1b]0;title\x07[bold]x[/bold]\n"}
    save_file(tensors, folder / "m.safetensors", metadata)
    save_file({"a\x1b[31m\nb": np.full((2, 2), np.inf, np.float32)}, folder / "inf.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "inf.safetensors").read_bytes()[:-1])


def _nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = np.nan


def _nan_and_short(tensors):
    _nan(tensors)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:260].copy()


def _outlier(tensors):
    tensors["model.embed_tokens.weight"][10, 7] = 1e20


def _twins(tensors):
    """Half of the tokens have a twin with the same row of the head, and so the same logit."""
    table = tensors["model.embed_tokens.weight"]
    table[1:130:2] = table[0:130:2]


MODELS = {
    "tiny": _tiny,  # the package's own
    "tuned": partial(_tiny, flip=1),
    "results": partial(shutil.copytree, RESULTS),  # no model: what llama-bench wrote
    "mixture": _mixtral,
    "glm": write_mixture,  # a dense layer, then 8 experts in groups and a shared one; no weights
    "llama": _llama(),  # over bytes, with a chat template
    "eps": _llama(rms_norm_eps=0.5),
    "bare": _llama(without=("tokenizer.json", "tokenizer_config.json")),
    "plain": _llama(template=""),
    "twins": _llama(changed=_twins),
    "narrow": _llama(hidden_size=16),
    "nan": _llama(changed=_nan),
    "deep": _llama(num_hidden_layers=20, changed=_nan),
    "outlier": _llama(changed=_outlier),
    "large": _llama(changed=lambda tensors: tensors["model.norm.weight"].fill(1e6)),
    "headless": _llama(changed=lambda tensors: tensors.pop("model.norm.weight")),
    "claims": _llama(changed=_nan_and_short, beside={"config.json": {"vocab_size": 260}}),
    "misfit": _llama(beside={"config.json": {"intermediate_size": 40}}),
    "dynamic": _llama(
        max_position_embeddings=8, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "dbrx": _llama(model_type="dbrx"),
    "few": _llama(weights=False, vocab_size=100, eos_token_id=0, bos_token_id=0),  # of 261 tokens
    "digits": _llama(weights=False, beside={
        "generation_config.json": {"do_sample": True, "top_k": 10**400, "temperature": 10**400},
    }),
    "wordy": lambda folder: (
        (write_tiny(folder) / "chat_template.jinja").write_text("x" * 300_000)
    ),
    "odd": _odd,
    "mpt": _llama(model_type="mpt"),
    "layer_embeddings": _gemma4(hidden_size_per_layer_input=12, vocab_size_per_layer_input=261),
    "keys_as_values": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "shared_keys": _gemma4(num_kv_shared_layers=1),
    "windows": _gemma4(
        layer_types=["sliding_attention"] * 2 + ["full_attention"], final_logit_softcapping=30.0
    ),
    "granite": _llama(
        weights=False, model_type="granite", architectures=["GraniteForCausalLM"],
        embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
        attention_multiplier=0.125, torch_dtype="bfloat16",
    ),
    "gguf": _gguf,
    "sampled": _sampled,
    "parts": _parts,
    "lacking": partial(_parts, lacking=True),
    "linked": _linked,
    "damaged": partial(_linked, flip=1),
    "few_embeddings": _llama(weights=False, vocab_size=50),
    "frequencies": _llama(changed=lambda tensors: tensors.update({
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)
    })),
    "mamba": _llama(
        weights=False, architectures=["Mamba2ForCausalLM"], model_type="mamba2", num_heads=8,
        head_dim=8, n_groups=1, state_size=8,
    ),
    **{name: partial(write, config=config) for name, config in CONFIGS.items()},
    "lone": _lone,
    "heads": _llama(weights=False, num_attention_heads=32, num_key_value_heads=8, head_dim=4),
    "talker": _talker,
    "thinker": lambda folder: _talker(folder, THOUGHTS, "{# <think> </think> <tool_call> #}"),
    "hf_hub_cache": lambda folder: write_revision(folder, "org/name", FILES),
    "hf_hub_cache-commits": _commits,
    "hf_hub_cache-nan": _hub_of_nan,
}  # fmt: skip
