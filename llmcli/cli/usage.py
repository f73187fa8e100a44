"""What typer says of a command line that is wrong, in our words and with what was meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmcli.errors import LlmcliError, UsageError
from llmcli.shell.params import WORDS, unknown_option


def usage_error(exception: Any) -> UsageError:
    """typer's message in our style: lower case, backticks, a suggestion as the hint."""
    context = getattr(exception, "ctx", None)
    path = context.command_path if context is not None else "llmcli"
    hint = f"see `{path} --help`"
    option = getattr(exception, "option_name", None)
    message = exception.format_message().rstrip(".")
    if option is not None and context is not None:
        if type(exception).__name__ == "NoSuchOption":
            if len(option) == 2:  # the parser names `-s` of a word `-seed`
                words = context.meta.get(WORDS, ())
                option = next((word for word in words if word.startswith(option)), option)
            return unknown_option(option, context)
        if message.endswith("requires an argument"):
            message = f"`{option}` takes a value"
    extra = re.fullmatch(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", message, re.DOTALL)
    if extra:
        split = "" if context is None else _split_index(context)
        if split:
            from llmcli.anatomy.indexed import split_by_the_shell

            return split_by_the_shell(split)
        message = f"unexpected argument `{extra[1]}`"
        hint = f"{_instead(extra[1].split(), context)}see `{path} --help`"
    message = re.sub(r"'([^']*)'", r"`\1`", message)
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _instead(words: list[str], context: Any) -> str:
    """What may have been meant by words that a command has no place for."""
    parameters = () if context is None else context.command.params
    takes_model = context is None or any(parameter.name == "model" for parameter in parameters)
    model = next(filter(names_a_model, words), None) if takes_model else None
    if model is not None:
        return f"for that model write `-m {model}`; "
    text = next((parameter for parameter in parameters if parameter.name == "prompt"), None)
    if text is not None and text.param_type_name == "option":
        said = " ".join(words).replace('"', "'")
        path = context.command_path
        return f"send it with `{path} --prompt \"{said}\"`, or start with just `{path}`; "
    return "put a text of several words in quotes; " if text is not None else ""


def names_a_model(word: str) -> bool:
    """Whether the word is a catalog name, or looks like a path to weights or a hub id."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.checkpoints.names import parse

    try:
        found = parse(word)
    except LlmcliError:
        return False
    if isinstance(found, str):
        return found in CATALOG or (Path(found) / "config.json").is_file()
    return True


def _split_index(context: Any) -> str:
    """`logits[-1,`, the part of a NAME[INDEX] that the shell has split, empty where it has not."""
    if not any("[INDEX]" in str(parameter.metavar) for parameter in context.command.params):
        return ""
    return next((w for w in context.meta[WORDS] if re.search(r"\[[^\]]*$", w)), "")
