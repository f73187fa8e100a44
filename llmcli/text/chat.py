"""Chat templates: the Jinja program that a checkpoint brings to write down a conversation.

A template is a program from a stranger. It runs in Jinja's immutable sandbox, sees nothing but
the messages and the special tokens, and has bounds (`llmcli.text.meter`) on its source, its
output, every string and list that an operator, a method, a filter or a slice makes, all of these
together (about a gigabyte at worst), the items of its ranges, and its time: 2 seconds, and one more
for every million characters of the messages.

What is compared or hashed has the bound of a string, written out. Parsing and compiling a source
of the permitted size takes a few seconds at worst and is not in the template's time; nor can a
single operation of Python on values of the permitted size be interrupted (up to about a second).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.text.meter import CURRENT, Meter

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SOURCE = 1 << 18  # characters; the longest known templates have some 30,000
_HINT = "go without it: `generate` has `--raw` for that, the other commands need no `--chat`"


class ChatTemplate:
    """A checkpoint's chat template with its special tokens (`bos_token` and so on, as text)."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model was trained to read it.

        `messages` have `role` and `content`; `add_generation_prompt` ends the text where the
        assistant's answer begins. Raises `CheckpointError` where the template is no valid
        Jinja, refuses the messages, leaves the sandbox, or passes one of the bounds.
        """
        if len(self.source) > MAX_SOURCE:  # not before it is used: raw text needs no template
            raise CheckpointError(
                f"the chat template has {len(self.source)} characters, more than {MAX_SOURCE}",
                hint=_HINT,
            )
        content = sum(len(str(m.get("content", ""))) for m in messages)
        chunks: list[str] = []
        size = 0
        before = CURRENT.set(Meter(content))
        try:
            template = _compile(self.source)
            meter = Meter(content)  # compiling is not what a template's time is for
            CURRENT.set(meter)
            for chunk in template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            ):
                size += len(chunk)
                if size > meter.limit:
                    raise OverflowError(f"it writes more than {meter.limit} characters")
                meter.tick()
                chunks.append(chunk)
        except Exception as error:  # a template can raise anything that Python can
            reason = shown(" ".join((str(error) or type(error).__name__).split()), 200)
            raise CheckpointError(f"the chat template failed: {reason}", hint=_HINT) from error
        finally:
            CURRENT.reset(before)
        return "".join(chunks)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    from llmcli.text.sandbox import environment  # here: it imports jinja2

    return environment().from_string(source)
