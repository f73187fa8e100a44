"""A chat template without an end: exit code 4, and Ctrl-C ends the program before."""

import json
import os
import shutil
import signal
import time

import children
import programs
import pytest
from covers import in_turn

from llmcli.text.template_renderer import SERVER

ENDLESS = [
    "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "{{ ('a' * 8000000) | wordwrap }}",
]
COMMANDS = [("tokens", "--chat"), ("generate", "--random-weights", "-n", "1")]


def with_template(tiny, folder, source):
    folder = shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(source)
    return str(folder)


@pytest.mark.parametrize(("source", "command"), in_turn(ENDLESS, COMMANDS))
def test_a_template_without_an_end_is_an_error(cli, tiny, tmp_path, monkeypatch, command, source):
    monkeypatch.setattr("llmcli.text.template_renderer.MAX_SECONDS", 0.2)
    result = cli(*command, "-m", with_template(tiny, tmp_path / "m", source), "hi", "--json")
    assert result.code == 4
    words = "the chat template failed: it takes more than 0.2 seconds of processor time"
    assert json.loads(result.out)["error"]["message"] == words
    error, hint = result.err.splitlines()[-2:]
    assert error == f"error: {words}"
    assert hint.startswith("hint: `llmcli generate --raw` goes without it")


def rendering(parent):
    """The process id of the parent's renderer once it has computed for a while, else None."""
    for one in children.processes():
        if one.parent == parent and SERVER.name in one.words and one.seconds >= 0.2:
            return one.pid
    return None


@pytest.mark.parametrize(
    ("command", "number", "group"),
    in_turn(COMMANDS, [signal.SIGINT, signal.SIGTERM], [False, True]),
)
def test_a_signal_ends_a_program_whose_template_does_not(
    tiny, tmp_path, command, number, group
):
    prompt = tmp_path / "prompt"
    prompt.write_text("a" * 20_000_000)  # gives the template 22 seconds
    folder = with_template(tiny, tmp_path / "m", ENDLESS[0])
    program = programs.start(*command, "-m", folder, "-f", prompt)
    try:
        end = time.monotonic() + 60
        while (child := rendering(program.pid)) is None and time.monotonic() < end:
            assert program.poll() is None, program.stderr.read()
            time.sleep(0.1)
        assert child is not None
        (os.killpg if group else os.kill)(program.pid, number)
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    assert (program.returncode, out, err) == (128 + number, b"", b"")
    assert child not in [one.pid for one in children.processes()]  # it was killed before
