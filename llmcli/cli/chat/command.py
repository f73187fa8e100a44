"""`llmcli chat`: a conversation with a model, in a terminal, a pipe or one turn at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcli.cli.chat.commands import COMMANDS, Exit, dispatch, stats_line
from llmcli.cli.chat.talk import Settings, Talk, tell_error
from llmcli.cli.exits import SIGNALS, Stopped
from llmcli.cli.files import check_target
from llmcli.cli.options import OUTPUT, PROMPT, ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.params import Range
from llmcli.cli.prompts import read_stdin, read_text, stdin_is_given, text_argument
from llmcli.cli.running import load_model
from llmcli.cli.sampling import SamplingOptions, resolve
from llmcli.cli.template import System, Variables, template_variables
from llmcli.errors import LlmcliError, UsageError


@dataclass(frozen=True, kw_only=True)
class TalkOptions:
    """What is said, to which instructions, and where the conversation is kept."""

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="TEXT", rich_help_panel=PROMPT,
            help="One message; the command ends after its answer.",
        ),
    ] = None  # fmt: skip
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", metavar="PATH", rich_help_panel=PROMPT,
            help="Put the text of a file before the message.",
        ),
    ] = None  # fmt: skip
    no_stdin: Annotated[
        bool,
        typer.Option("--no-stdin", rich_help_panel=PROMPT, help="Never read a pipe on stdin."),
    ] = False
    system: System = None
    variable: Variables = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--max-tokens", metavar="N", rich_help_panel=OUTPUT,
            help="Most new tokens of an answer. [default: 2048]",
        ),
        Range(1),
    ] = None  # fmt: skip
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", rich_help_panel=OUTPUT,
            help="End an answer before this text; repeatable.",
        ),
    ] = None  # fmt: skip
    load: Annotated[
        str | None,
        typer.Option(
            "--load", metavar="FILE", rich_help_panel=OUTPUT,
            help="Go on with a conversation that was saved, with its settings.",
        ),
    ] = None  # fmt: skip
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="FILE", rich_help_panel=OUTPUT,
            help="Write the conversation to this file after every answer.",
        ),
    ] = None  # fmt: skip
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", rich_help_panel=OUTPUT, help="Tokens and speed of every answer on stderr."
        ),
    ] = False


def command(
    options: TalkOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """A conversation with a model, turn by turn, through its own chat template.

    `/help` lists what else can be said. Of every turn only what is new is computed, and answers
    keep the ids that the model wrote. A pipe, --prompt and -f are one message; --json gives a line
    for each answer.
    """
    from llmcli.text.template_renderer import RENDERER

    out = Output("chat", output)
    sampling.check()
    variables = template_variables(options.variable)
    if "" in (options.stop or ()):
        raise UsageError("`--stop` takes a text that is not empty")
    if options.save is not None:
        check_target(options.save)
    message = _message(options)
    if message is None and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError(
            "there is nothing to say: stdin is no terminal, and empty",
            hint="give `--prompt TEXT`, a pipe, or run it in a terminal",
        )
    with RENDERER:
        talk = _talk(options, sampling, model, out, variables)
        if message is not None:
            whole = talk.say(message)
            _tell_stats(talk)
            if not whole:
                told = talk.turn is not None and talk.turn.generated > 0
                raise Stopped(KeyboardInterrupt(), told=told)
            return
        _converse(talk)


def _message(options: TalkOptions) -> str | None:
    """A pipe, `--file` and `--prompt`, joined by newlines; None where there is none of them."""
    parts = []
    if not options.no_stdin and stdin_is_given(sys.stdin):
        parts.append(read_stdin(sys.stdin))
    if options.file is not None:
        parts.append(read_text(options.file))
    if options.prompt is not None:
        parts.append(text_argument(options.prompt, "`--prompt`"))
    return "\n".join(part for part in parts if part) or None


def _talk(
    options: TalkOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    out: Output,
    variables: dict[str, Any],
) -> Talk:
    from llmcli.checkpoints.catalog import CATALOG

    loaded = load_model(model, out, text=True).model
    from llmcli.generation.conversation import Conversation

    entry = CATALOG.get(loaded.name)
    resolved = resolve(
        sampling, loaded.checkpoint.generation_config, None if entry is None else entry.sampling
    )
    for note in resolved.notes:
        out.note(note)
    seed, drawn = model.sampling_seed()
    room = model.context_length or loaded.config.context
    if (positions := loaded.config.embedding.positions) is not None:
        room = min(room, positions)
    chosen = {name: "flag" for name, origin in resolved.origins.items() if origin == "flag"}
    chosen |= {} if drawn else {"seed": "flag"}
    chosen |= {} if options.max_tokens is None else {"max_tokens": "flag"}
    talk = Talk(
        conversation=Conversation(loaded, room=room, variables=variables),
        settings=Settings(
            sampling=dict(resolved.values), seed=seed, max_tokens=options.max_tokens or 2048,
            stop=tuple(options.stop or ()),
        ),
        out=out, file=options.save, stats=options.stats, chosen=chosen,
    )  # fmt: skip
    if options.load is not None:
        talk.load(options.load)
    if options.system is not None:
        talk.conversation.set_system(text_argument(options.system, "`--system`"))
    return talk


def _tell_stats(talk: Talk) -> None:
    if talk.stats and not talk.out.json:
        talk.out.aside(stats_line(talk))


def _converse(talk: Talk) -> None:
    """Line after line of a terminal, until `/exit` or Ctrl-D."""
    name = talk.conversation.model.name
    if not talk.out.quiet:
        talk.out.aside(f"{name} · /help lists the commands, Ctrl-D ends")
    lines = _lines()
    draft = ""
    while (line := lines.send(draft)) is not None:
        draft = ""
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                draft = dispatch(talk, line.strip()) or ""
                if line.strip() not in ("/regen",):
                    continue
            else:
                talk.say(line)
        except Exit:
            return
        except LlmcliError as error:
            tell_error(error)
            continue
        except KeyboardInterrupt:
            SIGNALS.forget()
            continue
        _tell_stats(talk)


def _lines() -> Any:
    """A generator of what is typed: sent a draft, it yields the next message; None at the end."""
    lines = _typed()
    next(lines)
    return lines


def _typed() -> Iterator[Any]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk: it is not kept
                super().store_string(string)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    path = history_path()
    session: Any = PromptSession(
        "> ",
        history=InMemoryHistory() if path is None else History(str(path)),
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        prompt_continuation="  ",
        output=create_output(None if sys.stdout.isatty() else sys.stderr),
    )
    draft = yield
    while True:
        try:
            draft = yield session.prompt(default=draft or "")
        except KeyboardInterrupt:
            SIGNALS.forget()
            draft = ""
        except EOFError:
            yield None


def history_path() -> Path | None:
    """$XDG_STATE_HOME/llmcli/chat_history, made where it is not there; None where it cannot be."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path("~/.local/state").expanduser()
    path = folder / "llmcli" / "chat_history"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return path
    return None
