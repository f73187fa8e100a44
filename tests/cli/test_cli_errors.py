"""Wrong command lines: one line, a hint, an exit code, and the same as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest
from cli_tiny import write_tiny

from llmcli.cli import exits
from llmcli.commands.bench.measure.slot import failure, hint_for
from llmcli.errors import (
    CheckpointError,
    NetworkError,
    UnsupportedModel,
    UsageError,
    WeightMismatch,
)


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["generat"], "there is no command `generat`", "did you mean `llmcli generate`?"),
        (["tok"], "there is no command `tok`", "did you mean `llmcli tokens`?"),
        (["xyzzy"], "there is no command `xyzzy`", "the commands are generate, "),
        (["-m", "x", "generate"], "there is no option `-m`", "options follow the command"),
        (["generate", "--temprature", "1"], "no option `--temprature`", "mean `--temperature`?"),
        (["generate", "-Z"], "there is no option `-Z`", "see `llmcli generate --help`"),
        (["generate", "x", "-n"], "`-n` takes a value", "see `llmcli generate --help`"),
        (["score", "x", "--versus"], "`--versus` takes a value", "see `llmcli score --help`"),
        (["help", "samplin"], "no topic or command `samplin`", "mean `llmcli help sampling`?"),
        (["--json"], "there is no option `--json`", "options follow the command"),
        (["--versoin"], "there is no option `--versoin`", "did you mean `--version`?"),
        (["generate", "-temp", "3"], "there is no option `-temp`", "mean `--temperature`?"),
        (["generate", "-s", "3"], "there is no option `-s`", "it is `--seed` here"),
        (["lens", "-s", "3"], "there is no option `-s`", "it is `--seed` here"),
        (["generate", "-ngl", "99"], "there is no option `-ngl`", "`--device cuda`"),
        (["generate", "-i"], "there is no option `-i`", "run `llmcli chat`"),
        (["generate", "-cnv"], "there is no option `-cnv`", "run `llmcli chat`"),
        (["generate", "--n-predict", "3"], "no option `--n-predict`", "it is `--max-tokens`"),
        (["chat", "--max-new-tokens", "3"], "`--max-new-tokens`", "it is `--max-tokens` here"),
        (["tokens", "--max-new-tokens", "3"], "`--max-new-tokens`", "see `llmcli tokens --help`"),
        (["generate", "--ctx-size", "3"], "no option `--ctx-size`", "it is `--context-length`"),
        (["chat", "-p", "hi"], "takes a number, not `hi`", 'with `llmcli chat --prompt "TEXT"`'),
        (["generate", "-seed", "3", "x"], "there is no option `-seed`", "mean `--seed`?"),
        (["generate", "-model", "x"], "there is no option `-model`", "did you mean `--model`?"),
        (["generate", "--top_kk", "3"], "no option `--top_kk`", "did you mean `--top-k` or"),
        (["generate", "-p", "hi"], "takes a number, not `hi`", 'argument: `llmcli generate "T'),
        (["generate", "--prompt", "hi"], "no option `--prompt`", 'argument: `llmcli generate "T'),
        (["generate", "a", "b c"], "`b c` is one argument too many", "in quotes"),
        (
            ["chat", "hello", "there"], "`hello there` is one argument too many",
            'send it with `llmcli chat --prompt "hello there"`, or start with just `llmcli chat`;',
        ),
        (["info", "smollm2"], "`smollm2` is one argument too many", "write `-m smollm2`; see"),
        (["shapes", "a", "org/name"], "one argument too many", "write `-m org/name`; see"),
        (["info", "./x.gguf"], "one argument too many", "write `-m ./x.gguf`; see"),
        (["info", "words"], "one argument too many", "hint: see `llmcli info --help`"),
        (["generate", "x", "-n", "abc"], "`--max-tokens` takes a whole number, not `abc`", None),
        (["generate", "x", "-n", "0"], "`--max-tokens` must be at least 1 or -1, not `0`",
         "see `llmcli generate --help`"),
        (["generate", "x", "--seed", "-1"], "between 0 and 9223372036854775807, not `-1`", "see"),
        (["generate", "x", "-n", "-2"], "`--max-tokens` must be at least 1 or -1, not `-2`", None),
        (["generate", "x", "--temp", "-1"], "`--temperature` must be at least 0", None),
        (["generate", "x", "--top_k", "-1"], "`--top-k` must be at least 0", None),
        (["generate", "x", "-t", "-1"], "`--temperature` must be at least 0, not `-1`", None),
        (["generate", "x", "-t", "nan"], "`--temperature` must be at least 0, not `nan`", None),
        (["generate", "x", "-t", "8"], "`-t 8` is a temperature", "`--threads 8`"),
        (["generate", "x", "-t4"], "`-t 4` is a temperature", "`--temperature 4` insists"),
        (["chat", "--prompt", "x", "-t", "2.5"], "`-t 2.5` is a temperature",
         "hint: `--temperature 2.5` insists"),
        (["generate", "x", "-t", "warm"], "`--temperature` takes a number, not `warm`", None),
        (["generate", "x", "-p", "0"], "must be greater than 0 and at most 1, not `0`", None),
        (["generate", "x", "-p", "1.5"], "must be greater than 0 and at most 1, not `1.5`", None),
        (["generate", "x", "--min-p", "2"], "`--min-p` must be between 0 and 1", None),
        (["generate", "x", "-k", "-1"], "`--top-k` must be at least 0", None),
        (["generate", "x", "--repetition-penalty", "0"], "must be greater than 0", None),
        (["generate", "x", "--seed", "-3"], "`--seed` must be between", None),
        (["generate", "x", "--dtype", "float23"], "no choice `float23`", "did you mean `float32`?"),
        (
            ["generate", "x", "-m", "tiny", "--quantize", "int4", "--dtype", "float32"],
            "`--quantize int4` and `--dtype float32` contradict each other", "one of them",
        ),
        (["generate", "x", "--greedy", "-t", "1"], "exclude each other", None),
        (["generate", "x", "--chat", "--raw"], "`--chat` and `--raw` exclude each other", None),
        (["generate", "x", "--system", "s", "--raw"], "`--system` needs the chat", None),
        (["generate", "x", "--json", "--stream-json"], "exclude each other", None),
        (["generate", "x", "--stop", ""], "`--stop` needs a text that is not empty", None),
        (["generate", "x", "--ids", "1"], "`--ids` goes without PROMPT", None),
        (["generate", "--ids", "1,x"], "`--ids` takes numbers such as 1,2,3, not `x`", None),
        (["generate", "--ids", ","], "`--ids` has no token id in it", None),
        (["generate", "--ids", "1", "--chat"], "`--ids` is always raw", None),
        (["generate"], "there is no prompt", "`--ids 1,2,3`"),
        (["generate", ""], "there is no prompt, or it is empty", None),
        (["generate", "-f", "/no/such/file"], "cannot read `/no/such/file`: no such file", None),
        (["generate", "--batch", "/no/such/file"], "cannot read `/no/such/file`", None),
        (["generate", "x", "--batch", "y"], "leave out PROMPT", None),
        (["generate", "--batch", "y", "--ids", "1"], "leave out --ids", None),
        pytest.param(  # tiny has no chat template
            ["tokens", "x", "--chat", "--no-special"], "made of special tokens", None,
            marks=pytest.mark.real,
        ),
        (["tokens", "-", "--no-stdin"], "`-` and `--no-stdin` exclude each other", None),
        (["score", "x", "--stride", "0"], "`--stride` must be at least 1", None),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_and_exit_2(cli, argv, message, hint):
    result = cli(*argv)
    lines = result.err.splitlines()
    assert result.code == 2
    assert bool(result.out) == ("--json" in argv)
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")
    assert hint is None or hint in lines[1]


def test_json_errors_are_a_document_and_a_line(cli):
    result = cli("generate", "x", "-n", "abc", "--json")
    error = result.json()
    assert error["schema"] == "llmcli.error/1"
    assert error["error"]["code"] == result.code == 2
    assert error["error"]["kind"] == "usage"
    assert "whole number" in error["error"]["message"]
    assert set(error["error"]) == {"code", "kind", "message", "hint"}
    assert result.err.startswith("error: ")


def test_json_behind_the_double_dash_is_text(cli):
    assert cli("score", "-n", "--", "--json").out == ""


def raising(exception):
    def action(argv):
        raise exception

    return action


@pytest.mark.parametrize(
    ("exception", "code", "kind"),
    [
        (CheckpointError("broken"), 4, "checkpoint"),
        (UnsupportedModel("new"), 4, "unsupported"),
        (WeightMismatch(missing=["head.W"]), 4, "weight_mismatch"),
        (UsageError("wrong"), 2, "usage"),
        (NetworkError("no net"), 6, "network"),
        (MemoryError(), 5, "out_of_memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 5, "out_of_memory"),
        (ImportError("x.so: cannot apply additional memory protection after relocation: "
                     "Cannot allocate memory"), 5, "out_of_memory"),
        (ImportError("x.so: cannot allocate memory in static TLS block"), 1, "error"),
        (ImportError("cannot import name `x`"), 1, "error"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), 5, "out_of_memory"),
        (OSError(28, "No space left on device"), 1, "write_failed"),
        (ZeroDivisionError("division by zero"), 1, "error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (exits.Terminated(), 143, "interrupted"),
    ],
)  # fmt: skip
def test_every_exception_has_an_exit_code_and_the_users_ones_a_hint(capsys, exception, code, kind):
    assert exits.run(raising(exception), ["x", "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["kind"]) == (code, kind)
    assert error["hint"] or kind == "interrupted"


def test_memory_that_is_not_there_is_said_once():
    assert exits.as_error(MemoryError()).message == "out of memory"
    assert exits.as_error(MemoryError("so much")).message == "out of memory: so much"


def test_torch_out_of_memory_is_recognized_without_importing_it():
    like_torch = type("OutOfMemoryError", (RuntimeError,), {})
    assert exits.as_error(like_torch("CUDA out of memory. Tried …")).code == 5


@pytest.mark.parametrize(
    ("exception", "cause", "hint"),
    [
        (OSError(24, "Too many open files"), "too many open files", "ulimit -n"),
        (OSError(23, "Too many open files in system"), "too many open files", "ulimit -n"),
        (RuntimeError("Failed to initialize cpuinfo!"), "`/proc/cpuinfo`", "mount /proc"),
    ],
)
def test_what_the_system_lacks_is_no_internal_error(capsys, exception, cause, hint):
    assert exits.run(raising(exception), ["x"]) == 1
    error, told = capsys.readouterr().err.splitlines()
    assert cause in error
    assert "internal error" not in error
    assert hint in told
    assert cause in failure(exception)[2]
    assert hint in hint_for(exception)


def test_an_internal_error_names_itself_and_the_way_to_the_traceback(capsys):
    assert exits.run(raising(KeyError("lost")), ["x"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: internal error: KeyError: 'lost'",
        "hint: run it again with --debug for the traceback",
    ]


def test_debug_prints_the_traceback(capsys):
    assert exits.run(raising(KeyError("lost")), ["x", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_interruptions_say_nothing_on_stderr(capsys):
    assert exits.run(raising(KeyboardInterrupt()), ["x"]) == 130
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_an_exception_made_of_an_interruption_is_one(capsys):
    """An import that Ctrl-C cuts short raises whatever the library makes of it."""

    def action(argv):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        except KeyboardInterrupt:
            raise SystemError("initialization failed") from None

    assert exits.run(action, ["x"]) == 130
    assert capsys.readouterr().err == ""


def test_messages_cannot_send_terminal_codes(capsys):
    exits.run(raising(CheckpointError("tensor `\x1b]0;evil\x07\nhint: no`")), ["x"])
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "error: tensor `\\x1b]0;evil\\x07\\nhint: no`"
    assert len(shown) == 2


def test_an_interruption_that_got_lost_is_raised_again(capsys):
    """Raised in a callback of the import system, the exception is printed and ignored."""
    seen = []

    def action(argv):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        except KeyboardInterrupt:
            seen.append("lost")
        exits.SIGNALS.check()
        seen.append("went on")

    assert exits.run(action, ["x"]) == 130
    assert seen == ["lost"]


def test_a_second_signal_right_after_the_first_is_the_same_one():
    def action(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass
        except KeyboardInterrupt as first:
            os.kill(os.getpid(), signal.SIGTERM)
            raise exits.Stopped(first, told=True) from first

    assert exits.run(action, ["x", "--json"]) == 143


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_ends_a_run_is_not_lost_behind_ctrl_c(second):
    """A conversation forgets Ctrl-C; SIGTERM right after it ends the run all the same."""

    def action(argv):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), second)
                for _ in range(1000):
                    pass
        exits.SIGNALS.forget()

    assert exits.run(action, ["x"]) == (0 if second == signal.SIGINT else 143)


def test_what_is_written_whole_is_not_cut_by_ctrl_c():
    done = []

    def action(argv):
        with exits.SIGNALS.held():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            done.append("whole")
        done.append("went on")

    assert exits.run(action, ["x"]) == 130
    assert done == ["whole"]


def test_a_tokenizer_with_more_ids_than_the_model(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", vocab_size=100, eos_token_id=0, bos_token_id=0)
    for command in ("generate", "score"):
        result = cli(command, "日本", "-m", str(folder), "--random-weights")
        assert result.code == 4
        assert "the model has 100 embeddings" in result.err
        assert cli(command, "--ids", "100,1", "-m", str(folder), "--random-weights").code == 2


@pytest.mark.parametrize("option", ["-k", "-n", "--seed", "--context-length"])
@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_numbers_of_many_digits(cli, option, digits):
    result = cli("generate", "hi", option, "9" * digits)
    assert result.code == 2
    assert result.err.startswith("error: ")


def test_many_digits_in_the_models_own_settings(cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    many = "9" * 400
    text = f'{{"do_sample": true, "top_k": {many}, "temperature": {many}}}'
    (folder / "generation_config.json").write_text(text)
    result = cli("generate", "hi", "-m", str(folder), "--random-weights", "-n", "1")
    assert result.code in (0, 4)
    assert "internal" not in result.err
