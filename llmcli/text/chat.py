"""Chat templates: the Jinja program that a checkpoint brings to write down a conversation.

A template is a program from a stranger. It runs in Jinja's immutable sandbox, sees nothing but
the messages and the special tokens, and its source, its strings and its output are bounded.
The environment is transformers' (utils/chat_template_utils.py): the same template gives the
same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SOURCE = 1 << 20  # characters; the longest known templates have some 30,000
MAX_OUTPUT = 1 << 24  # characters beyond what the messages themselves bring
_HINT = "use `--raw`, which continues the text as it stands"


class ChatTemplate:
    """A checkpoint's chat template with its special tokens (`bos_token` and so on, as text)."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"the chat template has {len(source)} characters, more than {MAX_SOURCE}",
                hint=_HINT,
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model was trained to read it.

        `messages` have `role` and `content`; `add_generation_prompt` ends the text where the
        assistant's answer begins. Raises `CheckpointError` where the template is no valid
        Jinja, refuses the messages, leaves the sandbox, or writes without end.
        """
        limit = MAX_OUTPUT + 8 * sum(len(str(m.get("content", ""))) for m in messages)
        chunks: list[str] = []
        size = 0
        try:
            for chunk in _compile(self.source).generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            ):
                size += len(chunk)
                if size > limit:
                    raise OverflowError(f"it writes more than {limit} characters")
                chunks.append(chunk)
        except Exception as error:  # a template can raise anything that Python can
            reason = shown(" ".join((str(error) or type(error).__name__).split()), 200)
            raise CheckpointError(f"the chat template failed: {reason}", hint=_HINT) from error
        return "".join(chunks)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """Parse a template in transformers' environment. Imports jinja2 (0.07 s) on first use."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, with a bound on the strings, lists and powers that `*` makes."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
                raise OverflowError("a power that is too large")
            for item, count in ((left, right), (right, left)):
                if isinstance(item, (str, list, tuple)) and isinstance(count, int):
                    _bounded(len(item) * count)
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is only text."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> str:
        raise TemplateError(message)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter: the model reads it as it stands."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _bounded(size: int) -> None:
    if size > MAX_OUTPUT:
        raise OverflowError(f"a string of {size} characters")
