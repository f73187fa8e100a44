"""Chat templates: the Jinja program that a checkpoint brings to write down a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.text.template_renderer import RENDERER, RenderError, TemplateLimits

MAX_SOURCE = 1 << 18  # characters; the longest known templates have some 30,000
_HINT = "go without it: `generate` has `--raw` for that, the other commands need no `--chat`"


class ChatTemplate:
    """A checkpoint's chat template with its special tokens (`bos_token` and so on, as text)."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model was trained to read it.

        `messages` have `role` and `content`; `add_generation_prompt` ends the text where the
        assistant's answer begins. The template sees these, the special tokens and the `variables`
        (JSON values, `enable_thinking` …), nothing else.
        Raises `CheckpointError` where the template is no valid Jinja, refuses the messages,
        leaves the sandbox, or passes one of the limits (`llmcli.text.template_renderer`).
        """
        given = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
        }
        content = sum(len(str(message.get("content", ""))) for message in messages)
        return self._asked({**(variables or {}), **given}, content)

    def variables(self) -> frozenset[str]:
        """The names that the template looks up and that `render` has no value for of its own.

        Raises `CheckpointError` where the template is no valid Jinja, or passes a limit.
        """
        own = {"messages", "tools", "documents", "add_generation_prompt", *self.special_tokens}
        return frozenset(self._asked(None, 0).split()) - own

    def _asked(self, variables: Mapping[str, Any] | None, content: int) -> str:
        if len(self.source) > MAX_SOURCE:  # not before it is used: raw text needs no template
            raise CheckpointError(
                f"the chat template has {len(self.source)} characters, more than {MAX_SOURCE}",
                hint=_HINT,
            )
        try:
            return RENDERER.render(self.source, variables, TemplateLimits.of(content))
        except RenderError as error:
            reason = shown(str(error), 200)
            raise CheckpointError(f"the chat template failed: {reason}", hint=_HINT) from error
