"""Faults in how Mamba-2 and its hybrids are read and computed: each parts us from transformers.

From "what must be right" of families: values of a configuration, rows of tensors, what a GGUF file
holds, and steps of the mixer, which are planted as edits of what it emits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder_parameters import parameters_of
from parity_models import prompt
from parity_reference import reference_logprobs
from parity_types import Models, References
from test_faults_parity import (
    Change,
    RuleChange,
    Translated,
    branching,
    embedding,
    fed_by,
    head,
    mixing,
    parts,  # noqa: F401
    routed,
    swapped,
)
from test_gguf_parity import compare
from torch import Tensor
from zoo import variant

from llmcli.config import LayerConfig, ModelConfig
from llmcli.families import LogNeg, Op, Rename, Rows, Rule, UnpairRows, translate
from llmcli.nn.decoder import Decoder
from llmcli.nn.step import Edit
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.ssm.config import SsmConfig


def changed(kind: type, **changes: Any) -> Change:
    """Other parts of that kind: values, or functions of the part's own."""

    def other(part: object) -> object:
        if not isinstance(part, kind):
            return part
        found = {key: one(part) if callable(one) else one for key, one in changes.items()}
        return replace(part, **found)  # type: ignore[type-var]

    def block(layer: LayerConfig) -> LayerConfig:
        return replace(layer, sublayers=tuple(
            tuple(replace(branch, part=other(branch.part)) for branch in branches)
            for branches in layer.sublayers
        ))  # fmt: skip

    return lambda model: replace(model, layers=tuple(map(block, model.layers)))


def ssm(**changes: Any) -> Change:
    return changed(SsmConfig, **changes)


def attention(**changes: Any) -> Change:
    return changed(AttentionConfig, **changes)


def moved(leaf: str, by: Callable[[Rows], Rows]) -> RuleChange:
    """Other rows of a fused tensor for one of its parameters."""

    def change(rule: Rule) -> Rule:
        if not (isinstance(rule, Rename) and rule.target.endswith(leaf)):
            return rule
        ops = [by(op) if isinstance(op, Rows) else op for op in rule.ops]
        return Rename(rule.source, rule.target, *ops, within=rule.within)

    return change


def without(kind: type[Op]) -> RuleChange:
    """Rules that lack an operation."""

    def change(rule: Rule) -> Rule:
        if not isinstance(rule, Rename):
            return rule
        ops = [op for op in rule.ops if not isinstance(op, kind)]
        return Rename(rule.source, rule.target, *ops, within=rule.within)

    return change


ROPE = RopeConfig(theta=10_000.0, dims=8)
# what is wrong: the variant, and the change of its configuration
VALUES: dict[str, tuple[str, Change]] = {
    "mamba2: dt not clamped": ("mamba2-one-group-bias-tied", ssm(least=0.0, most=math.inf)),
    "mamba2: dt not clamped above": ("mamba2-one-group-bias-tied", ssm(most=math.inf)),
    "mamba2: another eps of the gated norm": (
        "mamba2", ssm(norm=lambda one: replace(one.norm, eps=1e-3))
    ),
    "nemotron_h: dt without its floor": ("nemotron_h-all-kinds", ssm(least=0.0)),
    "nemotron_h: ReLU not squared": ("nemotron_h-dense", fed_by("relu")),
    "nemotron_h: ReLU of experts not squared": ("nemotron_h", mixing(
        lambda experts: {"activation": "relu"}
    )),
    "nemotron_h: rotated attention": ("nemotron_h", attention(rope=ROPE)),
    "nemotron_h: scores scaled by the width": (
        "nemotron_h", attention(scale=lambda one: (48 / one.heads) ** -0.5)
    ),
    "nemotron_h: softmax and no sigmoid": ("nemotron_h", routed(scores="softmax")),
    "nemotron_h: not renormalized": ("nemotron_h", routed(renormalized=False)),
    "nemotron_h: renormalized": ("nemotron_h-all-kinds", routed(renormalized=True)),
    "nemotron_h: not scaled": ("nemotron_h", routed(scale=1.0)),
    "nemotron_h: all groups": ("nemotron_h", routed(groups=1, kept_groups=1)),
    "nemotron_h: the largest of a group": ("nemotron_h", routed(group_best=1)),
    "granite: parts not multiplied": ("granitemoehybrid", branching(multiplier=1.0)),
    "granite: embeddings not multiplied": ("granitemoehybrid", embedding(scale=1.0)),
    "granite: logits not divided": ("granitemoehybrid", head(scale=1.0)),
    "granite: scores scaled by the size of a head": (
        "granitemoehybrid", attention(scale=lambda one: one.head_dim**-0.5)
    ),
    "granite: rotated without being told": ("granitemoehybrid", attention(rope=ROPE)),
    "granite: not rotated": ("granitemoehybrid-rope-bias", attention(rope=None)),
    "granite: a softmax of all experts": ("granitemoehybrid", routed(scores="softmax")),
    "granite: one expert less": ("granitemoehybrid", routed(chosen=1)),
    "granite: no shared expert": ("granitemoehybrid", mixing(lambda experts: {"shared": None})),
    "granite: dt not clamped": ("granitemoehybrid-rope-bias", ssm(least=0.0, most=math.inf)),
}  # fmt: skip
# the same of its rules
ROWS: dict[str, tuple[str, RuleChange]] = {
    "mamba2: gates from the rows of values": (
        "mamba2", moved("W_gate", lambda rows: Rows(rows.stop, 2 * rows.stop))
    ),
    "mamba2: dt before x": ("mamba2", moved(
        "W_dt", lambda rows: Rows(rows.start - 6, rows.stop - 6)
    )),
    "mamba2: D and the bias of dt swapped": ("mamba2", swapped("ssm.D", "ssm.dt_bias")),
    "mamba2: D and A swapped": ("mamba2", swapped("ssm.D", "ssm.A_log")),
    "granite: gate and up of the shared expert swapped": (
        "granitemoehybrid", swapped("shared.W_gate", "shared.W_up")
    ),
    "granite: gate and up of experts swapped": (
        "granitemoehybrid", swapped("moe.W_gate", "moe.W_up")
    ),
    "granite: gate and up of the only one swapped": (
        "granitemoehybrid-dense", swapped("mlp.W_gate", "mlp.W_up")
    ),
}  # fmt: skip
GGUF: dict[str, tuple[str, RuleChange]] = {
    "mamba2: A without the logarithm": ("mamba2", without(LogNeg)),
    "granite: A without the logarithm": ("granitemoehybrid", without(LogNeg)),
    "nemotron_h: A without the logarithm": ("nemotron_h", without(LogNeg)),
    "granite: neighbours not rotated together": ("granitemoehybrid-attention", without(UnpairRows)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_value_shows(name: str, parts: Any) -> None:  # noqa: F811
    of, change = VALUES[name]

    def wrong(config: ModelConfig, rules: tuple[Rule, ...]) -> Translated:
        assert change(config) != config
        return change(config), rules

    assert parts(of, lambda *sound: sound) < 1e-9
    assert parts(of, wrong) > 1e-6


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_another_order_show(name: str, parts: Any) -> None:  # noqa: F811
    of, change = ROWS[name]
    assert parts(of, lambda *sound: (sound[0], tuple(map(change, sound[1])))) > 1e-6


@pytest.mark.parametrize("name", GGUF)
def test_a_file_read_otherwise_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, change = GGUF[name]

    def wrong(checkpoint: Any) -> Translated:
        config, rules = translate(checkpoint)
        return config, tuple(map(change, rules))

    monkeypatch.setattr("llmcli.loading.load.translate", wrong)
    assert compare(tmp_path, variant(of), "F32") > 1e-6


Seen = Mapping[str, Tensor]  # what a mixer has emitted so far, by the ends of the names


def normed_before_the_gate(seen: Seen, mixer: SsmConfig) -> Tensor:
    return _normed(seen["skip"], mixer.groups, mixer.norm.eps) * seen["w"] * seen["gate_act"]


def normed_as_one_group(seen: Seen, mixer: SsmConfig) -> Tensor:
    return _normed(seen["gated"], 1, mixer.norm.eps) * seen["w"]


def _normed(x_BHTe: Tensor, groups: int, eps: float) -> Tensor:
    """Of all heads of a group together."""
    grouped = x_BHTe.unflatten(1, (groups, -1))
    return (grouped * (grouped.square().mean((2, 4), keepdim=True) + eps).rsqrt()).flatten(1, 2)


def part_of_act(at: int) -> Callable[[Seen, SsmConfig], Tensor]:
    """B (0) or C (1) as the convolution gives them."""

    def found(seen: Seen, mixer: SsmConfig) -> Tensor:
        shared = mixer.groups * mixer.state
        both = seen["act"][..., mixer.inner :].split(shared, -1)
        return both[at].unflatten(-1, (mixer.groups, -1)).transpose(1, 2)

    return found


def filtered_backwards(seen: Seen, mixer: SsmConfig) -> Tensor:
    """The oldest token with the weight of the newest one."""
    padded = F.pad(seen["in"].mT, (mixer.length - 1, 0))
    filters = seen["filter"].flip(-1).unsqueeze(1)
    return F.conv1d(padded, filters, seen["bias"], groups=mixer.channels).mT


# what is wrong: the activation of a mixer, and what it is then, of what was emitted before it
STEPS: dict[str, tuple[str, Callable[[Seen, SsmConfig], Tensor]]] = {
    "the gate behind the norm": ("out", normed_before_the_gate),
    "one norm for all groups": ("out", normed_as_one_group),
    "no skip": ("skip", lambda seen, _: seen["z"]),
    "dt without softplus": ("dt", lambda seen, _: (seen["dt_in"] + seen["dt_bias"]).clamp(0)),
    "dt without its bias": ("dt", lambda seen, _: F.softplus(seen["dt_in"])),
    "A without its exponential": ("log_decay", lambda seen, _: -seen["A_log"].abs() * seen["dt"]),
    "A of another sign": ("log_decay", lambda seen, _: -(-seen["A_log"]).exp() * seen["dt"]),
    "decays without dt": ("log_decay", lambda seen, _: (
        -seen["A_log"].exp() * torch.ones_like(seen["dt"])
    )),
    "C for B": ("B", part_of_act(1)),
    "B for C": ("C", part_of_act(0)),
    "the other group": ("B", lambda seen, mixer: part_of_act(0)(seen, mixer).flip(1)),
    "a filter backwards": ("conv", filtered_backwards),
    "no SiLU behind the convolution": ("act", lambda seen, _: seen["conv"]),
    "a gate without SiLU": ("gate_act", lambda seen, _: seen["gate"]),
    "a gate of σ alone": ("gate_act", lambda seen, _: seen["gate"].sigmoid()),
}  # fmt: skip


def mixers(decoder: Decoder) -> Iterator[tuple[str, SsmConfig]]:
    for number, layer in enumerate(decoder.config.layers):
        for part in layer.parts:
            if isinstance(part, SsmConfig):
                yield f"blocks.{number}.ssm", part


@pytest.mark.parametrize("leaf", dict.fromkeys(leaf for leaf, _ in STEPS.values()))
@pytest.mark.parametrize("kind", ["mamba2", "granitemoehybrid", "nemotron_h"])
def test_what_was_computed_put_back_changes_nothing(
    kind: str, leaf: str, models: Models
) -> None:
    decoder, ids = models(kind, "float64").decoder, prompt(tokens=80)
    edits = [Edit(name=f"{name}.{leaf}", fn=lambda x: x) for name, _ in mixers(decoder)]
    assert torch.equal(decoder(ids), decoder(ids, edits=edits))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["mamba2", "granitemoehybrid", "nemotron_h"])
def test_a_wrong_step_of_a_mixer_shows(
    kind: str, name: str, models: Models, references: References
) -> None:
    decoder, ids = models(kind, "float64").decoder, prompt(tokens=80)
    right = reference_logprobs(references(kind, "float64"), ids)
    leaf, made = STEPS[name]
    seen: dict[str, dict[str, Tensor]] = {}
    edits = []
    for part, mixer in mixers(decoder):
        own = seen[part] = {
            key: parameters_of(decoder)[f"{part}.{parameter}"]
            for key, parameter in (("A_log", "A_log"), ("dt_bias", "dt_bias"), ("filter", "w"),
                                   ("bias", "b"), ("w", "norm.w"))
        }  # fmt: skip
        own["w"] = own["w"].view(mixer.heads, 1, -1)

        def wrong(x: Tensor, own: Any = own, mixer: SsmConfig = mixer) -> Tensor:
            found = made(own, mixer)
            assert found.shape == x.shape
            assert not torch.equal(found, x)
            return found

        edits.append(Edit(name=f"{part}.{leaf}", fn=wrong))

    def tap(key: str, value: Tensor) -> None:
        part, _, end = key.rpartition(".")
        if part in seen:
            seen[part][end] = value

    assert (decoder(ids).log_softmax(-1) - right).abs().max() < 1e-9
    found = decoder(ids, tap=tap, edits=edits).log_softmax(-1)
    assert (found - right).abs().nan_to_num(math.inf).max() > 1e-4


def test_every_kind_has_eight() -> None:
    assert len(STEPS) >= 8
    for family in ("nemotron_h", "granite"):
        cases = [name for name in (*VALUES, *ROWS, *GGUF) if name.startswith(family)]
        assert len(cases) >= 8
