"""Reads the prompt from the argument, a file, a pipe, or token ids."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from shlex import quote
from textwrap import shorten
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO

from llmcli.errors import CheckpointError, UsageError
from llmcli.records.document import APART, OPTIONAL
from llmcli.shell.documents import MOST, decoded, parse, read_text
from llmcli.shell.exits import tell
from llmcli.shell.options import GivenPromptOptions, PromptOptions

if TYPE_CHECKING:
    from llmcli.shell.conversations import Conversation
    from llmcli.text import Tokenizer

BUILTIN = "In the beginning"
# tokens come back in it, so that induction and duplicate-token heads have something to do
LOOKED_AT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, "
    "and void; and darkness was upon the face of the deep."
)
GO_WITHOUT = "; `--no-stdin` does not read it"
PATIENCE = 2.0  # seconds until a note says that stdin is still open
NOTHING_HINT = 'give a text ("…"), `-f FILE`, {} or token ids with `--ids 1,2,3`'


@dataclass(frozen=True)
class Prompt:
    """A text, token ids or a conversation; `encode` adds the ids, and the text of given ids.

    `chat`: the chat template was applied. `messages`: those of a conversation, whose last one is
    `text`.
    """

    text: str | None
    ids: tuple[int, ...] = ()
    where: str = field(default="", metadata=APART)  # its file, or its line of a batch
    conversation: Conversation | None = field(default=None, metadata=APART)
    chat: bool = False
    messages: tuple[Mapping[str, Any], ...] | None = field(default=None, metadata=OPTIONAL)


def read_prompt(options: GivenPromptOptions, note: Callable[[str], None]) -> Prompt:
    """Reads the prompt that the options name. Raises UsageError if there is none.

    `note` receives a line if the argument was probably meant as the name of a model or a file.

    A pipe or redirected file comes first, then `--file`, then the argument, joined by
    newlines; an empty one does not count. If the file is a conversation, the rest is the user's
    next message. `--ids` excludes the others. Only `PromptOptions` read a pipe without a `-`.
    """
    if options.ids is not None:
        return Prompt(None, parse_ids(options.ids))
    _note_other_meaning(options.prompt, note)
    conversation = _conversation(options.file)
    file = options.file if conversation is None else None
    pipe = isinstance(options, PromptOptions) and not options.no_stdin
    text = joined_text(options.prompt, file, pipe=pipe)
    if conversation is not None:
        conversation = conversation.then(text) if text else conversation
        return Prompt(conversation.last, where=f"`{options.file}`", conversation=conversation)
    if not text:
        stdin = "a pipe," if isinstance(options, PromptOptions) else "`-` for stdin,"
        raise UsageError("there is no prompt, or it is empty", hint=NOTHING_HINT.format(stdin))
    return Prompt(text)


def joined_text(prompt: str | None, file: str | None, *, pipe: bool) -> str:
    """Joins a pipe (read without a `-` if `pipe`), the file and the argument."""
    asked = "-" in (prompt, file)
    parts = []
    if asked or (pipe and stdin_is_given(sys.stdin)):
        parts.append(read_stdin(sys.stdin, "" if asked else GO_WITHOUT))
    if file not in (None, "-"):
        parts.append(read_text(str(file)))
    if prompt not in (None, "-"):
        parts.append(text_argument(str(prompt), "PROMPT"))
    return "\n".join(part for part in parts if part)


def _conversation(path: str | None) -> Conversation | None:
    """The conversation in a file whose name ends in .json; None for any other text."""
    if path is None or not path.lower().endswith(".json"):
        return None
    from llmcli.shell.conversations import is_conversation, read_conversation

    text, where = read_text(path), f"`{path}`"
    try:
        value = parse(text, where)
    except UsageError as error:
        if '"messages"' in text:
            tell(f"note: {error.message}; it is read as text")
        return None
    return read_conversation(value, where) if is_conversation(value) else None


def prompt_or_default(
    options: GivenPromptOptions, note: Callable[[str], None], builtin: str = LOOKED_AT
) -> Prompt:
    """The prompt, or `builtin` if none was given, which a note then says."""
    if (options.ids, options.prompt, options.file) != (None, None, None):
        return read_prompt(options, note)
    unread = ""
    if stdin_is_given(sys.stdin):
        if not isinstance(options, PromptOptions):
            unread = "; stdin was not read: give `-` for it"
        elif not options.no_stdin and (text := read_stdin(sys.stdin, GO_WITHOUT)):
            return Prompt(text)
    begin = shorten(builtin, 30, placeholder=" …")
    note(f"no prompt was given: `{begin}` is used{unread}")
    return Prompt(builtin)


def _note_other_meaning(text: str | None, note: Callable[[str], None]) -> None:
    """Notes that a text which is the name of a model, or of a file, is used as the prompt."""
    from llmcli.checkpoints.catalog import CATALOG

    if text in CATALOG:
        note(f"using `{text}` as the prompt; for the model, use `-m {text}`")
    elif text and text != "-" and os.path.isfile(text):
        note(f"using `{text}` as the prompt; to read the file, use `-f {quote(text)}`")


def parse_ids(text: str) -> tuple[int, ...]:
    """`1,2,3` or `1 2 3`; raises UsageError for anything that is not a list of token ids."""
    items = [item for item in re.split(r"[,\s]+", text.strip()) if item]
    for item in items:
        if not re.fullmatch(r"\d{1,9}", item, re.ASCII):
            raise UsageError(
                f"`--ids` takes numbers such as 1,2,3, not `{item}`",
                hint='`llmcli tokens "…"` shows the ids of a text',
            )
    if not items:
        raise UsageError("`--ids` has no token id in it", hint="for example `--ids 1,2,3`")
    return tuple(int(item) for item in items)


def check_ids(ids: tuple[int, ...], vocabulary: int, where: str = "") -> None:
    """Raises UsageError for an id outside the vocabulary; `where`: the place it was read from."""
    for token in ids:
        if token >= vocabulary:
            raise UsageError(
                f"{where and where + ': '}token id `{token}` is outside the vocabulary of "
                f"{vocabulary} tokens",
                hint=f"ids go from 0 to {vocabulary - 1}",
            )


def need_tokenizer(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """The tokenizer, or CheckpointError for a checkpoint that has none."""
    if tokenizer is None:
        raise CheckpointError(
            f"`{name}` has no tokenizer, so it cannot be given text",
            hint="give token ids with `--ids 1,2,3`",
        )
    return tokenizer


def stdin_is_given(stream: TextIO | None) -> bool:
    """Whether stdin is a pipe or a redirected file: only those are read without being asked.

    A terminal, a device, a socket (an editor's or a server's) or a closed stdin is not.
    """
    if stream is None:
        return False
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin(stream: TextIO | None, unasked: str = "") -> str:
    """All of stdin as text, less one trailing newline; `unasked` as in `stdin_bytes`.

    Raises UsageError where it is closed, not UTF-8, or more than 64 MiB.
    """
    if stream is None:
        raise UsageError(
            "stdin is closed, so `-` cannot be read", hint='give a text ("…") or `-f FILE`'
        )
    if stream.isatty():
        tell("note: reading the prompt from the terminal: end it with Ctrl-D")
        return decoded(stream.buffer.read(MOST + 1), "stdin")
    return decoded(stdin_bytes(stream, MOST, unasked), "stdin")


def stdin_bytes(stream: TextIO, most: int, unasked: str = "") -> bytes:
    """Reads at most `most` bytes of a pipe or file, and one more if it has more.

    If it is still open after two seconds, a note on stderr says so, and how to go without it
    (`unasked`).
    """
    note = f"note: waiting for the end of stdin, which is still open{unasked}"
    timer = Timer(PATIENCE, tell, [note])
    timer.daemon = True
    with suppress(RuntimeError):  # no more threads may be started
        timer.start()
    try:
        return stream.buffer.read(most + 1)
    finally:
        timer.cancel()


def text_argument(text: str, name: str) -> str:
    """A text of the command line; raises UsageError where it is not UTF-8.

    Python decodes bytes that are invalid in the locale's encoding to lone surrogates: UTF-8 in the
    locale C, and other encodings anywhere.
    """
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        hint = "put it into a file, convert that, and give `-f FILE`"
        if name != "PROMPT":
            hint = "give it in UTF-8, which `iconv -t utf-8` writes"
        raise UsageError(f"{name} is not UTF-8 text", hint=hint) from error


def stop_texts(given: Sequence[str] | None) -> tuple[str, ...]:
    """The texts of `--stop`. Raises UsageError for an empty one, and one that is not UTF-8."""
    if "" in (given or ()):
        raise UsageError("`--stop` needs a text that is not empty")
    return tuple(text_argument(each, "`--stop`") for each in given or ())
