"""The last chunk of a long prompt, read as `generate` reads it, against the formulas.

An observer sees a prompt in one call, so that it holds one layer at a time; `generate` reads it in
chunks, each of which sees the keys of those before it in the cache. That path is proven here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.graph import graph
from llmcli.engine.session import Session
from llmcli.errors import OutOfMemory
from llmcli.explain.formulas import formula_checks, worst
from llmcli.explain.kernel import layer_of
from llmcli.model import Model
from llmcli.reports.checks import ViewCheck
from llmcli.reports.progress import Progress

ROWS = 64  # queries of a layer that are compared


def chunk_checks(
    model: Model, ids: Sequence[int], progress: Progress | None = None
) -> tuple[ViewCheck, ...]:
    """One check for a prompt of more than one chunk, else none.

    Queries and keys of the last chunk have to be rotated by their own positions, its keys and
    values to be what the cache holds for it, and its attention what the formula makes of its
    queries and of all keys and values in the cache. Reads the prompt once more; none, too, where
    its cache does not fit, for `generate` cannot read it then. Raises NotFinite for a NaN.
    """
    begin = (len(ids) - 1) // PROMPT_CHUNK * PROMPT_CHUNK
    if begin == 0:
        return ()
    try:
        devices.require_memory(model.decoder.state_bytes(1, len(ids)), model.device, "", "")
    except OutOfMemory:
        return ()
    session = Session(model.decoder, 1, len(ids))
    seen: dict[str, Tensor] = {}
    found: list[ViewCheck] = []

    def tap(name: str, tensor: Tensor) -> None:
        layer = layer_of(name)
        if layer is None or ".attn." not in name or session.lengths[0] < begin:
            return
        seen[name] = tensor
        prefix = f"blocks.{layer}.attn"
        if name != f"{prefix}.z":
            return
        query, key = graph(model.config).entering(layer)
        parts = ((key, "k"), (f"{prefix}.v", "v"))
        cache = session.state.layers[layer].tensors()
        held = {source: cache[part][:, :, : len(ids)] for source, part in parts}
        for source, whole in held.items():
            same = torch.equal(whole[:, :, begin:], seen[source])
            found.append(_check(0.0 if same else float("inf"), source))
        turned = [one for one in (query, key) if one.endswith("_rot")]
        for emitted, names in ((seen, turned), (seen | held, [name])):
            if names:
                found.append(formula_checks(model, ids, emitted, names, rows=ROWS))
        seen.clear()

    def heard(done: int, total: int) -> None:
        if progress is not None:
            progress("reading the prompt in chunks", done, total)

    session.prefill([ids], chunk=PROMPT_CHUNK, tap=tap, on_prefill=heard)
    most = worst(found)
    return (_check(most.value, most.where),)


def _check(value: float, where: str) -> ViewCheck:
    words = (
        "the last chunk of the prompt, read as `generate` reads it, is what the formulas make of it"
    )
    return ViewCheck(name="chunks", words=words, value=value, tolerance=1.0, where=where)
