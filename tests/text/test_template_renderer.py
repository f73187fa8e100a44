"""The process that renders chat templates: killed at its limits, never left behind."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from children import processes, runs, until
from children import run as run_child
from children import start as start_child
from fork_server import Forked, servers

import llmcli
from llmcli.errors import CheckpointError, LlmcliError
from llmcli.text import template_renderer
from llmcli.text.chat import ChatTemplate
from llmcli.text.template_renderer import (
    RENDERER,
    SERVER,
    RenderError,
    TemplateLimits,
    TemplateRenderer,
)

FOREVER = "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}"
LIMITS = TemplateLimits(seconds=0.2, memory=1 << 29, characters=1000)


def children(parent=None):
    """Process ids of the renderers of this process, or of `parent`; zombies too."""
    found = [one for one in processes() if one.parent == (parent or os.getpid())]
    names = (SERVER.name, "fork_server.py")
    ours = {one.pid for one in found if one.ended or any(name in one.words for name in names)}
    return ours - servers()


@pytest.fixture(scope="module", autouse=True)
def none_of_the_other_tests():
    """The process that renders for all other tests is not there meanwhile."""
    RENDERER.__exit__()
    yield
    RENDERER.__enter__()


@pytest.fixture(autouse=True)
def nothing_is_left(none_of_the_other_tests):
    yield
    assert children() == set()


@pytest.fixture
def begun(monkeypatch):
    """The processes begin as those of a user do, and are no forks."""
    monkeypatch.setattr(subprocess, "Popen", Forked.__base__)


def test_one_process_renders_many_until_it_fails_and_ends_with_its_user(begun):
    def render(number):
        message = {"role": "user", "content": str(number) * 9999}
        return ChatTemplate(f"{number}{{{{ messages[0].content }}}}").render([message])

    with RENDERER:
        first = children()
        assert len(first) == 1
        for number in range(3):
            assert ChatTemplate(f"{number}{{{{ messages }}}}").render([]) == f"{number}[]"
            assert children() == first
        with ThreadPoolExecutor(8) as pool:  # they take turns
            texts = list(pool.map(render, range(40)))
        assert texts == [f"{number}{str(number) * 9999}" for number in range(40)]
        assert children() == first
        with pytest.raises(CheckpointError, match="failed: no"):
            ChatTemplate("{{ raise_exception('no') }}").render([])
        assert ChatTemplate("x").render([]) == "x"
        second = children()
        assert len(second) == 1
        assert second != first
        os.kill(*second, signal.SIGKILL)  # as a system does that is short of memory
        until(lambda: not runs(*second))
        assert ChatTemplate("y").render([]) == "y"
    assert children() == set()
    assert ChatTemplate("x").render([]) == "x"  # outside it has one for itself
    assert children() == set()


def test_an_interrupted_rendering_does_not_go_on():
    """Else its text would be the next one's."""
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with TemplateRenderer() as renderer:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                renderer.render(FOREVER, {}, replace(LIMITS, seconds=5))
            assert renderer.render("next", {}, replace(LIMITS, seconds=2)) == "next"
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("text", [
    "\ud800", "\udcff\udc80", "\ud83d" + "\ude00", "🙂é", "\x00\x01\x1b\x7f\x85\u2028\u202e\ufeff",
    "\r\n \\n \\u0041 \"'</script>", "a" * 3_000_000, "🙂" * 300_000, "\x01" * 300_000,
], ids=range(9))  # fmt: skip
def test_text_survives_the_way_there_and_back(text):
    source = "{{ messages[0].content }}{{ bos_token }}"
    template = ChatTemplate(source, special_tokens={"bos_token": text[:9]})
    assert template.render([{"role": "user", "content": text}]) == text + text[:9]


def test_a_template_has_two_seconds_of_the_processor(monkeypatch):
    assert template_renderer.MAX_SECONDS == 2
    monkeypatch.setattr(template_renderer, "MAX_SECONDS", 0.3)
    with pytest.raises(CheckpointError, match=r"it takes more than 0\.3 seconds of processor time"):
        ChatTemplate(FOREVER).render([])


def test_a_process_that_gets_no_processor_time_is_not_waited_for_either(begun, monkeypatch):
    monkeypatch.setattr(template_renderer, "MAX_WAIT", 2)
    renderer = TemplateRenderer()
    with renderer:
        os.kill(*children(), signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RenderError, match=r"it takes more than 0\.4 seconds"):
            renderer.render("x" * 300_000, {}, LIMITS)  # more than a pipe holds
        assert time.monotonic() - begun > 0.3


def test_nothing_of_jinja_is_used_but_what_it_documents():
    """https://jinja.palletsprojects.com/en/stable: api, sandbox, extensions."""
    public = {
        "jinja2": {"Environment", "Template", "TemplateError", "nodes"},
        "jinja2.exceptions": {"SecurityError"}, "jinja2.ext": {"Extension"},
        "jinja2.meta": {"find_undeclared_variables"}, "jinja2.parser": {"Parser"},
        "jinja2.sandbox": {"ImmutableSandboxedEnvironment"},
    }  # fmt: skip
    package = Path(llmcli.__file__).parent
    sources = {file: file.read_text("utf-8") for file in package.rglob("*.py")}
    found = [node for source in sources.values() if "jinja2" in source
             for node in ast.walk(ast.parse(source))]  # fmt: skip
    for node in found:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jinja2"):
            assert {name.name for name in node.names} <= public[node.module]
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("jinja2") for name in node.names)
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or node.value
            # what Python mangles: `self.__attrs` of `Namespace`, `_TemplateReference__context` …
            assert not re.fullmatch(r"_[A-Za-z]+__\w+", str(name)), name


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS may not enforce it")
def test_memory_is_bounded():
    renderer, limits = TemplateRenderer(), replace(LIMITS, seconds=20)  # fresh pages take time
    with pytest.raises(RenderError, match="it needs more than 512 MiB of memory"):
        renderer.render("{{ ('x' * 2 ** 29) | length }}", {}, limits)
    assert renderer.render("{{ ('x' * 2 ** 28) | length }}", {}, limits) == str(2**28)


ANSWERS = {
    "not JSON": ("print('{')", RenderError, "not valid"),
    "another type": ("print('[\"text\"]')", RenderError, "not valid"),
    "a text that is none": ("print('{\"text\": 1}')", RenderError, "not valid"),
    "a text that is too long": ("print('{\"text\": \"' + 'x' * 1001 + '\"}')", RenderError, "not"),
    "not UTF-8": ("sys.stdout.buffer.write(b'\"\\xff\"\\n')", RenderError, "not valid"),
    "nested": ("print('[' * 9000)", RenderError, "not valid"),
    "no end": ("while True: sys.stdout.write('x' * 9999)", RenderError, "answers with too much"),
    "silence": ("sys.stdin.read()", RenderError, "it takes more than"),
    "a closed pipe": ("os.close(1); time.sleep(99)", RenderError, "gives no answer"),
    "a signal": ("os.kill(os.getpid(), 11)", RenderError, "ended with signal 11"),
    "an exit": ("sys.exit(3)", LlmcliError, "ended with exit code 3"),
    "a missing package": ("import no_such_package", LlmcliError, "ended with exit code 1"),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("read", [True, False], ids=["request read", "not read"])
def test_an_answer_is_not_trusted(name, read, tmp_path, monkeypatch):
    wait = 2 if name == "silence" else 20
    monkeypatch.setattr(template_renderer, "MAX_WAIT", wait)
    code, error, words = ANSWERS[name]
    server = tmp_path / SERVER.name
    server.write_text(
        f"import os, sys, time\n{'sys.stdin.readline()' if read else ''}\n{code}\n"
        "sys.stdout.flush()\ntime.sleep(99)\n"
    )
    with pytest.raises(error, match=words):
        TemplateRenderer(server).render("x" * (9 if read else 300_000), {}, LIMITS)


def test_a_process_that_cannot_be_started(begun, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LlmcliError, match="cannot be started: no such file or directory"):
        ChatTemplate("x").render([])


OPEN_FILES = """
import os, resource
from llmcli.checkpoints.files import read_json
from llmcli.errors import LlmcliError
from llmcli.text.chat import ChatTemplate
import llmcli.text.template_renderer
from pathlib import Path
top = os.dup(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, top + 1))
for ask in (lambda: ChatTemplate('x').render([]), lambda: read_json(Path('/dev/null'))):
    try: ask()
    except LlmcliError as error: print(error.message, error.hint)
"""


def program(folder, source, *arguments):
    """The command of a program that a test has."""
    (folder / "program.py").write_text(source)
    return [sys.executable, str(folder / "program.py"), *arguments]


def test_open_files_are_not_laid_to_the_template(tmp_path):
    """A process that may open no more than it has."""
    run = run_child(program(tmp_path, OPEN_FILES), capture_output=True, text=True)
    assert run.stdout.count("too many open files") == 2, run.stderr
    assert run.stdout.count("ulimit -n") == 2


PARENT = """
import sys, time
from llmcli.text import template_renderer
from llmcli.text.chat import ChatTemplate

template_renderer.MAX_SECONDS = 1.5
with template_renderer.RENDERER:
    print("ready", flush=True)
    if sys.argv[1:]:
        ChatTemplate(sys.argv[1]).render([])
    time.sleep(60)
"""


@pytest.mark.parametrize("template", [[], [FOREVER]], ids=["idle", "computing"])
def test_the_process_ends_when_its_parent_is_killed(tmp_path, template):
    parent = start_child(program(tmp_path, PARENT, *template), stdout=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"ready\n"
        # a program that has just begun has no command line in /proc yet
        (child,) = until(lambda: children(parent.pid))
    finally:
        parent.kill()
    assert parent.wait() == -signal.SIGKILL
    assert parent.stdout.read() == b""
    assert runs(child) or not template  # so it did not hold the pipe open
    until(lambda: not runs(child))
