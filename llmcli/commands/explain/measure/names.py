"""Which numbers a model has: the axes of every name."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli import anatomy
from llmcli.anatomy import TensorSpec
from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.graph.spec import Call


@dataclass(frozen=True, kw_only=True)
class Axes:
    """One tensor: `letters` of its axes (`H`, `T`, `dh` …), without a batch, and their sizes."""

    name: str
    letters: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: str


def names(config: ModelConfig, tokens: int) -> dict[str, Axes]:
    """Every activation of a prompt of that many tokens, and every parameter."""
    call = Call(batch=1, tokens=tokens, past=0, phase="prefill")
    found = {
        spec.name: Axes(
            name=spec.name,
            letters=_letters(config, spec)[1:],
            sizes=spec.shape[1:],
            kind="activation",
        )
        for spec in anatomy.plan(config, call).tensors
    }
    for spec in anatomy.parameters(config):
        found[spec.name] = Axes(
            name=spec.name, letters=_letters(config, spec), sizes=spec.shape, kind="parameter"
        )
    return found


def _letters(config: ModelConfig, spec: TensorSpec) -> tuple[str, ...]:
    """Its axes; heads with keys and values of their own, and values as large as keys, are one kind.

    `dk` for `dh` where the heads' sizes are not the width's parts.
    """
    if spec.layer is None:
        return spec.axes
    documents = graph(config).documents(spec.layer)

    def called(letter: str) -> str:
        same = next((one for one in documents if documents[one] == documents.get(letter)), letter)
        return "dk" if documents.get(same) == "d_k" else same

    return tuple("·".join(map(called, axis.split("·"))) for axis in spec.axes)
