"""Golden screens: what every command shows at 40, 80 and 120 columns.

`pytest tests/screens --update-screens` writes them anew: read the difference before it goes in.
What is measured (times, rates, bytes held) is replaced, and the machine is one that was made up;
the rest is to the letter, in float64, so that no processor's rounding is in it.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import os
import pty
import re
import shutil
import struct
import sys
import termios
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.cells import cell_len

sys.path.append(str(Path(__file__).parents[1] / "render"))
from timing_reports import timing_report

from llmcli import OPENMP_SPIN
from llmcli.checkpoints import locate
from llmcli.cli.app import main
from llmcli.commands.timing.report import Stage
from llmcli.reports.environment import Environment
from llmcli.reports.machine_load import MachineLoad

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (40, 80, 120)
# what the machine is said to be; which kernels computed is shown for what was measured alone
MACHINE = {
    "python": "3.11.7", "platform": "Linux-6.1.0-x86_64-with-glibc2.36", "cores": 2,
    "processor": "Processor of 2 Cores @ 2.50GHz", "features": ("avx2", "fma", "avx512f"),
    "memory_bytes": 24 * 2**30, "gpus": (), "driver": None, "torch": "2.12.0+cpu", "cuda": None,
    "threads": 2, "kernel_level": "avx2",
}  # fmt: skip
TEXT = "The cat sat on the mat because the cat was tired."
HOME = Path("/tmp/llmcli-screens")
TINY = ("-m", str(HOME / "tiny"))
PLAIN = (*TINY, "--dtype", "float32")  # `auto` is another dtype on another processor
EXACT = (*TINY, "--dtype", "float64")


@dataclass(frozen=True)
class Screen:
    """`argv`, and whether its numbers are measured ones, which are replaced."""

    argv: tuple[str, ...]
    measured: bool = False
    variants: bool = False  # also coloured, with NO_COLOR, on a dumb terminal, and in a pipe
    wide: bool = False  # a table that others parse is as wide as it is
    flowing: bool = False  # its numbers have all digits, by which its lines end here or there


SCREENS = {
    "root": Screen(("--help",), wide=True),  # its examples are not broken
    "generate": Screen(
        ("generate", "Once upon a time", *EXACT, "--greedy", "-n", "12", "--stats", "full"), True
    ),
    "generate-logprobs": Screen(
        ("generate", "Once upon a time", *EXACT, "--greedy", "-n", "6", "--logprobs", "3"), True
    ),
    "chat": Screen(("chat", *EXACT, "--prompt", "Tell me a story.", "--greedy", "-n", "8"), True),
    "timing": Screen(("timing", TEXT, *PLAIN, "-n", "2", "--threads", "2"), True, True),
    "bench": Screen(("bench", *PLAIN, "-p", "16", "-n", "4", "-r", "2"), True, wide=True),
    "ladder": Screen(("ladder", "In", "-n", "1", *EXACT), True),
    "explain": Screen(
        ("explain", "blocks.1.attn.pattern[0,3,1]", TEXT, *EXACT), True, True, flowing=True
    ),
    "load": Screen(("load", *PLAIN), True),
    "info": Screen(("info", *PLAIN), True, True),
    "info-families": Screen(("info", "--families")),
    "shapes": Screen(("shapes", *PLAIN), variants=True),
    "shapes-names": Screen(("shapes", "--names", *PLAIN)),
    "attention": Screen(("attention", TEXT, *EXACT), variants=True),
    "attention-head": Screen(("attention", TEXT, "--layer", "1", "--head", "0", *EXACT)),
    "attention-pairs": Screen(("attention", TEXT, "--top-pairs", "8", *EXACT)),
    "attention-metric": Screen(("attention", "--synthetic", "16", "--map", "induction", *EXACT)),
    "experts": Screen(("experts", TEXT, "-m", "MIXTURE", "--random-weights", "--dtype", "float64")),
    "lens": Screen(("lens", TEXT, *EXACT)),
    "dump": Screen(("dump", TEXT, "--name", "blocks.*.resid_post", *EXACT)),
    "score": Screen(("score", TEXT, *EXACT)),
    "tokens": Screen(("tokens", TEXT, *TINY)),
    "models": Screen(("models",)),
    "env": Screen(("env",), True),
    "error": Screen(("generate", "x", "-m", "nothing.gguf")),
    "usage": Screen(("attention", "--laier", "3")),
}


def once(monkeypatch, target):
    """What a function returns first, it returns every time: one screen is shown in several ways."""
    module, _, name = target.rpartition(".")
    function, found = getattr(importlib.import_module(module), name), []

    def first(*args, **options):
        if not found:
            found.append(function(*args, **options))
        return found[0]

    monkeypatch.setattr(target, first)


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Nothing of this machine's caches and settings, a pager that is none, and times that stand.

    Paths are broken across lines, so that these have one length on all machines.
    """
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    shutil.copytree(locate("tiny"), HOME / "tiny")
    for name in (
        "NO_COLOR", "FORCE_COLOR", "LLMCLI_MODEL", "COLUMNS", "LINES", "COLORTERM",
        "OMP_NUM_THREADS", "LLMCLI_KERNELS", "LLMCLI_CACHE", "HF_ENDPOINT",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("HF_HUB_CACHE", "hf_hub_cache"), ("HF_HOME", "hf_home")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(HOME / folder))
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(HOME / name.lower()))
    monkeypatch.setenv("HOME", str(HOME))
    monkeypatch.setenv("LLMCLI_PAGER", "")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", OPENMP_SPIN["GOMP_SPINCOUNT"])
    monkeypatch.setattr(  # a time's width decides which columns there is room for
        "llmcli.commands.bench.view.table._ns", lambda ns: "" if ns is None else "1.23 ms"
    )
    # whether a busy machine was slower while its ceilings were measured
    monkeypatch.setattr("llmcli.commands.bench.view.table.beyond", lambda names: "")
    monkeypatch.setattr(
        "llmcli.commands.timing.measure.report.measure_timing", lambda *_, **__: timing_report()
    )
    monkeypatch.setattr(
        "llmcli.observe.busy.Busy.load",
        lambda self, threads: MachineLoad(
            seconds=1.0, processors=2, threads=threads, others=0.0, stolen=0.0, load_average=None
        ),
    )
    monkeypatch.setattr(
        "llmcli.observe.environment.Environment", lambda **of: Environment(**of | MACHINE)
    )
    monkeypatch.setattr("llmcli.commands.env.command.processors", lambda: MACHINE["cores"])
    for name in ("observe.ceilings.measure_ceilings", "commands.ladder.command._measured"):
        once(monkeypatch, f"llmcli.{name}")
    # `--threads` is shown; beside another worker a second thread would only wait for the first
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    begun = [Stage(name=name, seconds=1.5) for name in ("import torch", "tokenize")]
    monkeypatch.setattr("llmcli.commands.timing.command._stages", lambda loaded: begun)
    order = []  # stages of loading are listed by their times

    def add(self, name, seconds, nbytes=0):
        order.append(name)
        self.seconds[name] = 0.9 / (1 + list(dict.fromkeys(order)).index(name))
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    monkeypatch.setattr("llmcli.model.Stages.add", add)
    yield
    shutil.rmtree(HOME, ignore_errors=True)


def on_terminal(argv, columns, monkeypatch):
    """What `main(argv)` writes to a terminal of 24 lines, and to stderr, which is a pipe."""
    controller, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    attributes = termios.tcgetattr(inner)
    attributes[1] &= ~termios.OPOST  # a newline stays one character
    termios.tcsetattr(inner, termios.TCSANOW, attributes)
    pieces = []

    def read():
        while True:
            try:
                if not (piece := os.read(controller, 65536)):
                    return
            except OSError:  # the other end was closed
                return
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    err = io.StringIO()
    with os.fdopen(inner, "w", encoding="utf-8") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main(list(argv))
    reader.join(30)
    os.close(controller)
    return code, b"".join(pieces).decode(), err.getvalue()


def in_a_pipe(argv, capfd):
    capfd.readouterr()
    code = main(list(argv))
    captured = capfd.readouterr()
    return code, captured.out, captured.err


MEASURED = re.compile(
    r"\b(\d[\d,.]*)([  ]?)([kMGTP]?i?(?=B|FLOP)|[µnm]?(?=s)|)(B/s|FLOP/s|FLOP|B|s|tok/s)\b"
)


def settle(text, *, measured, tmp):
    """`text` without what differs from run to run and from machine to machine."""
    text = text.replace(str(tmp), "~")
    if measured:
        text = MEASURED.sub(lambda found: f"#{found[2]}{found[4]}", text)
        text = re.sub(r"(?m)^build: .*$", "build: BUILD", text)
        text = re.sub(r"\d[\d,.]*(e[-+−]\d+)?( [kMGTP]\b)?", "#", text)
        text = re.sub(r"[█▉▊▋▌▍▎▏▁▂▃▄▅▆▇─━╸╺]+", "▄", text)
        text = re.sub(r" {2,}", " ", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def mixture(folder):
    """The configuration of a small mixture beside `tiny`'s tokenizer."""
    import json

    source = locate("tiny")
    for file in source.iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copy(file, folder)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32,
        "vocab_size": vocabulary, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return f"./{folder.name}"


def sections(name, monkeypatch, capfd, tmp_path):
    """(title, text) of each way in which a screen is shown."""
    screen = SCREENS[name]
    folder = tmp_path / "mixture"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)  # a path of another length would break lines elsewhere
    argv = [mixture(folder) if word == "MIXTURE" else word for word in screen.argv]

    def settled(shown):
        code, out, err = shown
        text = settle(out, measured=screen.measured, tmp=tmp_path)
        if screen.flowing:
            text = textwrap.fill(" ".join(text.replace(" · ", " ").split()), 100) + "\n"
        notes = settle(err, measured=True, tmp=tmp_path)
        return text + (f"--- stderr\n{notes}" if notes else "") + f"--- exit {code}\n"

    for columns in WIDTHS:
        code, out, err = on_terminal(argv, columns, monkeypatch)
        wide = [line for line in plain(out).splitlines() if cell_len(line) > columns]
        wide = [line for line in wide if not line.startswith("llmcli ")]  # to be copied whole
        assert not wide or screen.wide, f"wider than {columns} columns: {wide[0]}"
        yield f"{columns} columns", settled((code, plain(out), err))
    if not screen.variants:
        return
    coloured = settled(on_terminal(argv, 80, monkeypatch))
    yield "coloured", coloured.replace("\x1b", "␛")
    for title, variable, value in (("NO_COLOR", "NO_COLOR", "1"), ("dumb", "TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            shown = on_terminal(argv, 80, monkeypatch)
        assert "\x1b[3" not in shown[1]
        yield title, settled(shown)
    shown = in_a_pipe(argv, capfd)
    assert "\x1b" not in shown[1]
    yield "piped", settled(shown)


@pytest.mark.parametrize("name", SCREENS)
def test_screen(name, monkeypatch, capfd, tmp_path, request):
    found = "".join(
        f"=== {title}\n{text}" for title, text in sections(name, monkeypatch, capfd, tmp_path)
    )
    file = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-screens"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def test_no_screen_is_left_over():
    assert sorted(file.stem for file in GOLDEN.glob("*.txt")) == sorted(SCREENS)


def test_what_differs_from_run_to_run_is_replaced(tmp_path):
    text = f"read 12.3 GB/s in {tmp_path}/x, 1,024 tokens, 1.1e−17   ███\n"
    assert settle(text, measured=True, tmp=tmp_path) == "read # B/s in ~/x, # tokens, # ▄\n"
    assert settle("a 1.5\n", measured=False, tmp=tmp_path) == "a 1.5\n"
