"""`llmcli chat`: a conversation with a model, in a terminal, a pipe or one turn at a time."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.commands.chat.screen import ReasoningMode
from llmcli.errors import CheckpointError, UsageError
from llmcli.shell.configuration import names_from_file
from llmcli.shell.encoding import SYSTEM, VARIABLE, check_name, template_variables
from llmcli.shell.exits import Stopped
from llmcli.shell.options import OUTPUT, PROMPT, TOKEN_LIMIT, ModelOptions, OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.prompts import joined_text, stop_texts, text_argument
from llmcli.shell.running import DraftOptions, load_model
from llmcli.shell.sampling import SamplingOptions, resolve
from llmcli.shell.streams import KEYS

if TYPE_CHECKING:
    from llmcli.commands.chat.chat import Chat


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The message, the instructions of the model, and where the conversation is kept."""

    panel: ClassVar[str] = OUTPUT
    prompt: str | None = opt(
        None,
        "--prompt TEXT",
        "One message, in which @PATH is a file's text; the command ends after its answer.",
        panel=PROMPT,
    )
    file: str | None = opt(
        None,
        "-f --file PATH",
        "Put the text of a file before the message.",
        panel=PROMPT,
        once=True,
    )
    no_stdin: bool = opt(
        False,
        "--no-stdin",
        "Never read a pipe on stdin.",
        panel=PROMPT,
        excludes=("--prompt=-", "--file=-"),
    )
    system: str | None = opt(None, "--system TEXT", SYSTEM, panel=PROMPT)
    variable: list[str] | None = opt(None, "--set NAME=VALUE", VARIABLE, panel=PROMPT)
    max_tokens: int | None = opt(
        None,
        "-n --max-tokens N",
        "Maximum number of tokens of an answer; -1: no limit. [default: the model's, else 2048]",
        within=TOKEN_LIMIT,
    )
    stop: list[str] | None = opt(
        None, "--stop TEXT", "Stop an answer before this text; repeatable."
    )
    load: str | None = opt(None, "--load FILE", "Continue a saved conversation, with its settings.")
    save: str | None = opt(
        None, "--save FILE", "Write the conversation to this file after every change."
    )
    stats: bool = opt(False, "--stats", "Tokens and speed of every answer on stderr.")
    reasoning: ReasoningMode | None = opt(
        None,
        "--reasoning show|fold|hide",
        "Show reasoning dimmed, fold it to one line, or hide it. [default: show on a terminal, "
        "else hide]",
    )
    plain: bool = opt(False, "--plain", "Print answers as written, without Markdown.")


def command(
    options: ChatOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    draft: DraftOptions,
    output: OutputOptions,
    ctx: Any,
) -> None:
    """A conversation with a model, turn by turn, through its own chat template.

    `/help` lists the commands of the chat. Each turn computes only what is new, and answers keep
    the token ids that the model wrote. A pipe, --prompt and -f are one message; --json gives one
    line per answer.
    """
    from llmcli.commands.chat.slash import converse
    from llmcli.commands.chat.typed import with_files
    from llmcli.shell.conversations import check_replaceable, real_path, state_of
    from llmcli.text.template_renderer import RENDERER

    out = Output("chat", output)
    variables = template_variables(options.variable)
    stop = stop_texts(options.stop)
    seen = {}
    if options.save is not None:
        check_replaceable(options.save)
        seen = {real_path(options.save): state_of(options.save)}
    prompt = options.prompt
    if prompt not in (None, "-"):
        prompt = with_files(text_argument(prompt, "`--prompt`"), out.note)
    message = joined_text(prompt, options.file, pipe=not options.no_stdin)
    if not message and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError(
            "there is no message: stdin is empty and not a terminal",
            hint="give `--prompt TEXT`, a pipe, or run it in a terminal",
        )
    with RENDERER, KEYS.silent():
        chat = _chat(options, sampling, model, out, stop, variables, names_from_file(ctx))
        chat.seen = seen | chat.seen
        chat.conversation.speculation = draft.load(chat.conversation.model, model, out)
        if message:
            if not chat.say(message):
                reported = chat.turn is not None and chat.turn.generated > 0
                raise Stopped(KeyboardInterrupt(), reported=reported)
            return
        converse(chat)


def _chat(
    options: ChatOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    out: Output,
    stop: tuple[str, ...],
    variables: dict[str, Any],
    from_file: Collection[str],
) -> Chat:
    from llmcli.commands.chat.chat import Chat

    loaded = load_model(model, out, text=True).model
    from llmcli.engine.conversation import Conversation
    from llmcli.shell.conversations import ChatSettings

    seed, drawn = model.sampling_seed()
    limited = options.max_tokens is not None
    resolved = resolve(loaded, sampling, seed, from_file, limited=limited)
    for note in resolved.notes:
        out.note(note)
    if loaded.edits:
        from llmcli.inspect.edits import apply_edits

        apply_edits(loaded, [])
    given = {"seed": not drawn, "max_tokens": options.max_tokens, "stop": options.stop}
    chosen = {name for name, value in given.items() if value and name not in from_file}
    chosen |= {name for name, origin in resolved.origins.items() if origin == "flag"}
    # the configuration file is for many models: its variables are no choice for this conversation
    named = {} if "variable" in from_file else variables
    room = loaded.config.room(model.context_length)
    conversation = Conversation(loaded, room=room, variables=variables)
    if model.context_length is not None:
        conversation.say("")
        needed = 0
        with suppress(CheckpointError):  # of an empty message
            needed = room + conversation.missing(1)
        conversation.undo()
        if needed > room:
            raise UsageError(
                f"`--context-length {room}` has no room for a message: the chat template "
                f"writes {needed} tokens around it",
                hint=f"such as `--context-length {needed + 256}`",
            )
    known = conversation.template_variables() if named else ()
    for name in named:
        check_name(name, known, loaded.name, option="--set")
    chat = Chat(
        conversation=conversation,
        settings=ChatSettings(
            **vars(resolved.values),
            max_tokens=options.max_tokens or resolved.limit or 2048,
            stop=stop or resolved.stop,
        ),
        out=out,
        file=options.save,
        stats=options.stats,
        chosen=chosen,
        variables=dict(named),
        reasoning=options.reasoning,
        plain=options.plain,
        suppressed=resolved.suppressed,
    )
    if options.load is not None:
        chat.load(options.load)
    if options.system is not None:
        chat.conversation.set_system(text_argument(options.system, "`--system`"))
    return chat
