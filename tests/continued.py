"""`engine.stream` for tests: the request's fields as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmcli.engine.output import Token
from llmcli.engine.sampling import Sampling
from llmcli.engine.speculation import Speculation
from llmcli.engine.stream import TextRequest
from llmcli.engine.stream import stream as stream_request


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
    on_reread: Callable[[int], None] | None = None,
    speculation: Speculation | None = None,
    **fields: Any,
) -> Iterator[Token]:
    """Tokens behind the prompts; `fields` are those of `TextRequest`."""
    request = TextRequest(prompts=prompts, sampling=sampling, **fields)
    return stream_request(
        model, request, on_prefill=on_prefill, on_reread=on_reread, speculation=speculation
    )
