"""The feed-forward part: `act(T⁴ W_up) W_down`, or gated, `(act(T⁴ W_gate) ∘ T⁴ W_up) W_down`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Activate, Gate, Op, Project
from llmcli.parts.mlp.config import MlpConfig

# gated: words of activations and of weights
_GATED = {
    "gate": "the gates before their activation function",
    "up": "the neurons that the gates multiply",
}
_WEIGHTS = {
    "gate": ("projection to the gates of the hidden layer", "bias of the gates"),
    "up": ("projection to the neurons of the hidden layer", "bias of the neurons"),
    "down": (
        "projection of the hidden layer back to the width",
        "bias of the feed-forward's output",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Role:
    """Names of a feed-forward: its neurons' `axis`, suffix of letters (`mark`), groups of `timing`.

    `known`: the whole part, which TransformerLens has too.
    """

    axis: str = "F"
    mark: str = ""
    groups: tuple[str, str, str] = ("ffn_up", "ffn_act", "ffn_down")
    noun: str = "the feed-forward"
    kind: str = "mlp"
    known: bool = True


_WHOLE = Role()


def mlp_graph(m: MlpConfig, site: Site, role: Role = _WHOLE) -> PartGraph:
    """Gated: `gate up act post`; plain: `pre post`. All `[B, T, F]`; `post` enters `W_down`."""
    p, mark, (group_up, group_act, group_down) = site.name, role.mark, role.groups

    def enter(part: str) -> Project:
        return Project(
            source=site.source, weight=f"{p}.W_{part}", bias=f"{p}.b_{part}" if m.bias else None,
            over="D", columns=role.axis, fused=f"{p}.gate_up" if m.gated else "",
        )  # fmt: skip

    def hidden(leaf: str, letter: str, op: Op, words: str, group: str, *theirs: str) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=("T", role.axis), op=op, words=words,
            group=group, layer=site.layer,
            theirs=tuple(f"mlp.{name}" for name in theirs) if role.known else (),
        )  # fmt: skip

    function, post = m.activation, "the hidden layer as it enters the last projection"
    if m.gated:
        # TransformerLens' names of the activation's input and the other factor differ
        nodes = [
            hidden("gate", f"G{mark}", enter("gate"), _GATED["gate"], group_up,
                   "gate.hook_out", "hook_pre"),
            hidden("up", f"U{mark}", enter("up"), _GATED["up"], group_up, "hook_pre_linear",
                   "in.hook_out"),
            hidden("act", f"Activation(G{mark})",
                   Activate(source=f"{p}.gate", function=function,
                            limit=None if m.clamp is None else m.clamp.limit),
                   "the gates after their activation function", group_act),
            hidden("post", f"L{mark}", Gate(act=f"{p}.act", up=f"{p}.up", clamp=m.clamp), post,
                   group_act,
                   "hook_post", "out.hook_in"),
        ]  # fmt: skip
    else:
        nodes = [
            hidden("pre", f"U{mark}", enter("up"), "the neurons before their activation function",
                   group_up, "hook_pre", "in.hook_out"),
            hidden("post", f"L{mark}", Activate(source=f"{p}.pre", function=function), post,
                   group_act,
                   "hook_post", "out.hook_in"),
        ]  # fmt: skip
    down = Project(
        source=f"{p}.post", weight=f"{p}.W_down", bias=f"{p}.b_down" if m.bias else None,
        over=role.axis, columns="D",
    )  # fmt: skip
    words, theirs = site.output(role.noun, "hook_mlp_out", "mlp.out.hook_out", "mlp.hook_out")
    nodes.append(Node(
        name=site.makes, letter=site.letter, axes=("T", "D"), op=down, words=words,
        group=group_down, layer=site.layer, wide=True, theirs=theirs if role.known else (),
    ))  # fmt: skip
    return PartGraph(
        nodes=tuple(nodes),
        parameters=tuple(_parameters(m, site, role)),
        sizes={role.axis: m.hidden},
        documents={
            role.axis: "4d" if role.known and m.hidden == 4 * site.width else f"F{mark}"
        },
        absent=tuple(_absent(m)),
        entering=("mlp.hook_in", "mlp.in.hook_in", *(("mlp.gate.hook_in",) if m.gated else ())),
        similar=(
            (r"(mlp|ffn)\.hidden", (f"{p}.post",)),
            (r"(gate|up)_proj", (rf"{p}.\1", rf"{p}.W_\1")),
            (r"down_proj", (site.makes, f"{p}.W_down")),
            (r"(gate|up|down)_proj\.weight", (rf"{p}.W_\1",)),
        ),
    )  # fmt: skip


def mlp_facts(m: MlpConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    details = () if m.clamp is None else (f"gates clamped at {m.clamp.limit:g}",)
    return {
        "hidden": m.hidden, "activation": m.activation, "gated": m.gated, "details": details,
    }  # fmt: skip


def _absent(m: MlpConfig) -> Iterator[Absent]:
    why = "its feed-forward is one network, no mixture of experts"
    yield Absent(names=r"moe\b", why=why)
    if m.gated:
        why = "its feed-forward is gated, the neurons are `mlp.gate`, `up`, `act` and `post`"
        yield Absent(names=r"mlp\.pre$", why=why)
    else:
        why = "its feed-forward has no gate, the neurons are `mlp.pre` and `mlp.post`"
        theirs = {"mlp.gate.hook_out": "mlp.gate", "mlp.hook_pre_linear": "mlp.up"}
        yield Absent(names=r"mlp\.(gate|up|act|W_gate|b_gate)$", why=why, theirs=theirs)
    theirs = {} if m.bias else {"mlp.b_in": "mlp.b_up", "mlp.b_out": "mlp.b_down"}
    yield Absent(names=r"mlp\.b_\w+$", why="it has no such bias", theirs=theirs)


def _parameters(m: MlpConfig, site: Site, role: Role) -> list[Parameter]:
    """`W_gate` (gated only) and `W_up` `[D, F]`, `W_down` `[F, D]`, and their biases."""
    p, found = site.name, []
    makes = {"gate": f"{p}.gate", "up": f"{p}.{'up' if m.gated else 'pre'}", "down": site.makes}
    others = {"up": "in", "down": "out"}  # TransformerLens' names
    for part in ("gate", "up", "down") if m.gated else ("up", "down"):
        axes = (role.axis, "D") if part == "down" else ("D", role.axis)
        for kind, said in zip("Wb" if m.bias else "W", _WEIGHTS[part], strict=False):
            fused = m.gated and part != "down"
            found.append(Parameter(
                name=f"{p}.{kind}_{part}", axes=axes if kind == "W" else axes[1:],
                makes=makes[part], words=said, kind=role.kind, letter=f"{kind}_{part}{role.mark}",
                layer=site.layer, turned=kind == "W",
                shares=f"{p}.{kind}_gate_up" if fused else None,
                theirs=(f"mlp.{kind}_{others[part]}",) if role.known and part in others else (),
            ))  # fmt: skip
    return found
