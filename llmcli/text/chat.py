"""Chat templates: a checkpoint's Jinja program that formats a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.text.template_renderer import RENDERER, RenderError, TemplateLimits

MAX_SOURCE = 1 << 18  # characters; the longest known templates have some 30,000
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of messages
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' mark, known to some templates
WITHOUT = "`llmcli generate --raw` goes without it, and so do other commands without `--chat`"
_FAILED = "the chat template failed: "
_ANSWERED = "end the conversation with a message of the user"
NO_SYSTEM = "leave out `--system`, in a chat `/system none`, and say it in the first message"


class ChatTemplate:
    """A checkpoint's chat template with its special tokens (`bos_token` and so on, as text)."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation in the model's training format, exactly as transformers does.

        `messages` have `role`, `content` and other keys of templates: `reasoning_content`,
        `tool_calls` … `add_generation_prompt` ends the text with the start of the assistant's
        answer, `continue_final_message` with the last message, so that the model continues it. The
        template only sees these, the special tokens, and `variables` (JSON values,
        `enable_thinking` …, which take precedence). Raises `CheckpointError` if the template is
        invalid Jinja, refuses the messages, leaves the sandbox, or exceeds a limit
        (`llmcli.text.template_renderer`), and for a last message to continue that has no text.
        """
        seen = [_seen(message) for message in messages]
        if continue_final_message:
            if not isinstance(last := seen[-1].get("content"), str):
                raise CheckpointError(
                    "the last message has no text that the model could continue", hint=_ANSWERED
                )
            seen[-1]["content"] = last + _CONTINUED
        if self._wants_parts:
            seen = [_in_parts(message) for message in seen]
        given = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **(variables or {}),
            "messages": seen,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        content = sum(len(str(message.get("content", ""))) for message in messages)
        try:
            text = self._asked(given, content)
        except CheckpointError as error:
            if len(seen) > 1 and seen[0].get("role") == "system":
                with suppress(CheckpointError):
                    self._asked({**given, "messages": seen[1:]}, content)
                    reason = error.message.removeprefix(_FAILED)
                    refused = f"the chat template takes no system message: {reason}"
                    error = CheckpointError(refused, hint=NO_SYSTEM)
            raise error from error.__cause__
        return _cut(text, messages[-1]["content"]) if continue_final_message else text

    def own_system(self, variables: Mapping[str, Any] | None = None) -> str:
        """The template's default system message; empty if there is none.

        Found by comparison with a given system message: empty also for a template that refuses
        system messages, or writes additional text for one.
        """
        user, marker = {"role": "user", "content": "a message"}, "a system message to look for"
        try:
            bare = self.render([user], variables=variables)
            system = {"role": "system", "content": marker}
            before, _, behind = self.render([system, user], variables=variables).partition(marker)
        except CheckpointError:
            return ""
        found = bare.removeprefix(before).removesuffix(behind)
        return found.strip() if before + found + behind == bare else ""

    def variables(self) -> frozenset[str]:
        """Names that the template looks up beyond those that `render` sets itself.

        Raises `CheckpointError` if the template is invalid Jinja or exceeds a limit.
        """
        return self._looked_up - {"messages", "add_generation_prompt", *self.special_tokens}

    @cached_property
    def _looked_up(self) -> frozenset[str]:
        """All names that the template looks up: finding them takes as long as compiling it."""
        return frozenset(self._asked(None, 0).split())

    def _asked(self, variables: Mapping[str, Any] | None, content: int) -> str:
        if len(self.source) > MAX_SOURCE:  # checked on use only
            raise CheckpointError(
                f"the chat template has {len(self.source)} characters, more than {MAX_SOURCE}",
                hint=WITHOUT,
            )
        try:
            return RENDERER.render(self.source, variables, TemplateLimits.of(content))
        except RenderError as error:
            reason = shown(str(error), 200)
            raise CheckpointError(f"{_FAILED}{reason}", hint=WITHOUT) from error

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template only reads contents given as lists of parts, and drops strings.

        Image templates do so: characters of a string have no `type`.
        """
        if "'text'" not in self.source and '"text"' not in self.source:
            return False
        said = {"role": "user", "content": "a text to look for"}
        for message in (said, _in_parts(said)):
            with suppress(CheckpointError):
                given = {**self.special_tokens, "messages": [message]}
                if said["content"] in self._asked(given, 0):
                    return message is not said
        return False


def _seen(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for templates, with its reasoning under all names that they read."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _cut(text: str, content: str) -> str:
    """The text before the mark at the end of the last message, which ends in `content`."""
    at = text.rfind(_CONTINUED.rstrip())
    if at < 0 or content.strip() not in text[:at]:
        raise CheckpointError(
            "the chat template does not write the last message as it stands: the model cannot "
            "continue it",
            hint=_ANSWERED,
        )
    trimmed = not text.startswith(_CONTINUED, at)
    return text[:at].rstrip() if trimmed else text[:at]
