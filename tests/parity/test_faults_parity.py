"""Faults in how a family reads its checkpoints: each parts us from transformers.

From "what must be right" of families: a wrong value of a block, of the ends, of a rotation, or
rows of a tensor in another order. What a decoder computes wrongly is in `test_family_faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from parity_models import prompt
from parity_reference import reference_logprobs
from parity_types import Checkpoints, References

from llmcli.checkpoints import open_checkpoint
from llmcli.config import Branch, ModelConfig
from llmcli.errors import WeightMismatch
from llmcli.families import (
    CollectRows,
    Multiply,
    Op,
    PerExpert,
    Rename,
    Rows,
    Rule,
    Transpose,
    UnpairRows,
    translate,
)
from llmcli.loading.load import load_checkpoint
from llmcli.parts.attention.config import (
    AttentionConfig,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

PLAIN_NORM = NormConfig(kind="rms", eps=2.0**-17)
Change = Callable[[ModelConfig], ModelConfig]
RuleChange = Callable[[Rule], Rule]


def attending(**changes: Any) -> Change:
    """Other attention in every layer: values, or functions of the layer's own attention."""
    return attending_by(lambda number: changes)


def attending_by(changes: Callable[[int], dict[str, Any]]) -> Change:
    """The same by the layer's number."""

    def change(model: ModelConfig) -> ModelConfig:
        layers = []
        for number, layer in enumerate(model.layers):
            attention = layer.attention
            if attention is None:
                layers.append(layer)
                continue
            found = {
                key: one(attention) if callable(one) else one
                for key, one in changes(number).items()
            }
            layers.append(layer.with_attention(replace(attention, **found)))
        return replace(model, layers=tuple(layers))

    return change


def latent(**changes: Any) -> Change:
    """Other latent attention in every layer: values, or functions of the layer's own."""

    def other(part: object) -> object:
        if not isinstance(part, LatentConfig):
            return part
        found = {key: one(part) if callable(one) else one for key, one in changes.items()}
        return replace(part, **found)

    def change(model: ModelConfig) -> ModelConfig:
        layers = (
            replace(layer, sublayers=tuple(
                tuple(replace(branch, part=other(branch.part)) for branch in branches)
                for branches in layer.sublayers
            ))
            for layer in model.layers
        )  # fmt: skip
        return replace(model, layers=tuple(layers))

    return change


def recurring(**changes: Any) -> Change:
    """Other gated DeltaNet in every layer that has it: values, or functions of the layer's own."""

    def other(branch: Branch) -> Branch:
        if not isinstance(branch.part, DeltaConfig):
            return branch
        delta = branch.part
        found = {key: one(delta) if callable(one) else one for key, one in changes.items()}
        return replace(branch, part=replace(delta, **found))

    def change(model: ModelConfig) -> ModelConfig:
        layers = (
            replace(layer, sublayers=tuple(tuple(map(other, one)) for one in layer.sublayers))
            for layer in model.layers
        )
        return replace(model, layers=tuple(layers))

    return change


def own_eps(model: ModelConfig) -> ModelConfig:
    """The eps of all norms is `rms_norm_eps`."""
    return latent(norm=model.final_norm)(model)


def truncated(attention: AttentionConfig) -> RopeConfig:
    """With a ramp between whole numbers."""
    assert attention.rope is not None
    assert isinstance(attention.rope.scaling, YarnScaling)
    return replace(attention.rope, scaling=replace(attention.rope.scaling, truncate=True))


def plain_tables(part: LatentConfig) -> RopeConfig:
    """No factor on cos and sin."""
    assert isinstance(part.rope.scaling, YarnScaling)
    return replace(part.rope, scaling=replace(part.rope.scaling, attention_factor=1.0))


def branching(**changes: Any) -> Change:
    """Other norms or multipliers around every part."""

    def change(model: ModelConfig) -> ModelConfig:
        layers = (
            replace(layer, sublayers=tuple(
                tuple(replace(branch, **changes) for branch in branches)
                for branches in layer.sublayers
            ))
            for layer in model.layers
        )  # fmt: skip
        return replace(model, layers=tuple(layers))

    return change


def fed_by(found: str | object) -> Change:
    """Another function in every feed-forward, or another one in its place."""

    def other(branch: Branch) -> Branch:
        if not isinstance(branch.part, MlpConfig):
            return branch
        changed = replace(branch.part, activation=found) if isinstance(found, str) else found
        return replace(branch, part=changed)

    def change(model: ModelConfig) -> ModelConfig:
        layers = (
            replace(layer, sublayers=tuple(tuple(map(other, one)) for one in layer.sublayers))
            for layer in model.layers
        )
        return replace(model, layers=tuple(layers))

    return change


def routed(**changes: Any) -> Change:
    """Other routing in every mixture."""
    return mixing(lambda experts: {"routing": replace(experts.routing, **changes)})


def mixing(changes: Callable[[ExpertsConfig], dict[str, Any]]) -> Change:
    """Other mixtures."""

    def other(branch: Branch) -> Branch:
        if isinstance(branch.part, ExpertsConfig):
            return replace(branch, part=replace(branch.part, **changes(branch.part)))
        return branch

    def change(model: ModelConfig) -> ModelConfig:
        layers = (
            replace(layer, sublayers=tuple(tuple(map(other, one)) for one in layer.sublayers))
            for layer in model.layers
        )
        return replace(model, layers=tuple(layers))

    return change


def unweighed(experts: ExpertsConfig) -> dict[str, Any]:
    """All of the shared expert is added."""
    assert experts.shared is not None
    return {"shared": replace(experts.shared, weighed=False)}


def before_ple(model: ModelConfig) -> ModelConfig:
    """The last sublayer of every block with a norm before it, that of the one before."""
    layers = []
    for layer in model.layers:
        *rest, (last,) = layer.sublayers
        norm = rest[-1][0].pre_norm
        layers.append(replace(layer, sublayers=(*rest, (replace(last, pre_norm=norm),))))
    return replace(model, layers=tuple(layers))


def in_sequence(model: ModelConfig) -> ModelConfig:
    """Parts one after the other, each with its norm."""
    layers = tuple(
        replace(layer, sublayers=tuple((branch,) for one in layer.sublayers for branch in one))
        for layer in model.layers
    )
    return replace(model, layers=layers)


def rope(model: ModelConfig) -> RopeConfig:
    """The first that there is."""
    ropes = [layer.attention.rope for layer in model.layers if layer.attention is not None]
    return next(one for one in ropes if one is not None)


def rotating(**changes: Any) -> Change:
    """Other rotary settings where there are any."""

    def other(attention: AttentionConfig) -> RopeConfig | None:
        return None if attention.rope is None else replace(attention.rope, **changes)

    return attending(rope=other)


def everywhere(model: ModelConfig) -> ModelConfig:
    """Rotary positions in all layers, those without included."""
    return attending(rope=rope(model))(model)


def wider(attention: AttentionConfig) -> int | None:
    """A window that does not count the query's own key."""
    return None if attention.window is None else attention.window + 1


def norm_of(offset: float) -> Change:
    """Final norms that multiply by `offset` + w."""
    return lambda model: replace(model, final_norm=replace(model.final_norm, offset=offset))


def head(**changes: Any) -> Change:
    return lambda model: replace(model, head=replace(model.head, **changes))


def per_layer(**changes: Any) -> Change:
    def change(model: ModelConfig) -> ModelConfig:
        assert model.embedding.per_layer is not None
        return embedding(per_layer=replace(model.embedding.per_layer, **changes))(model)

    return change


def embedding(**changes: Any) -> Change:
    return lambda model: replace(model, embedding=replace(model.embedding, **changes))


def paired(rule: Rule) -> Rule:
    """Neighbouring rows stay where they are."""
    if isinstance(rule, Rename) and any(isinstance(op, UnpairRows) for op in rule.ops):
        kept = [op for op in rule.ops if not isinstance(op, UnpairRows)]
        return Rename(rule.source, rule.target, *kept, within=rule.within)
    return rule


def swapped(one: str, other: str) -> RuleChange:
    """Rows of one parameter where those of another belong."""

    def change(rule: Rule) -> Rule:
        if isinstance(rule, Rename) and rule.target.endswith((one, other)):
            ours, theirs = (one, other) if rule.target.endswith(one) else (other, one)
            target = rule.target.removesuffix(ours) + theirs
            return Rename(rule.source, target, *rule.ops, within=rule.within)
        return rule

    return change


def one_after_the_other(rule: Rule) -> Rule:
    """The rows of all queries, then of all keys, then of all values."""
    if not isinstance(rule, Rename):
        return rule
    ops = [
        Rows(op.start * op.groups, op.stop * op.groups) if isinstance(op, Rows) else op
        for op in rule.ops
    ]
    return Rename(rule.source, rule.target, *ops, within=rule.within)


def halved(rule: Rule) -> Rule:
    """The first half of every expert's rows, and the second one."""
    if not (isinstance(rule, Rename) and rule.target.endswith(("W_gate", "W_up"))):
        return rule
    ops = [
        PerExpert(Rows(op.op.start * op.op.groups, op.op.stop * op.op.groups))
        if isinstance(op, PerExpert) and isinstance(op.op, Rows) else op
        for op in rule.ops
    ]
    return Rename(rule.source, rule.target, *ops, within=rule.within)


def of_other_experts(rule: Rule) -> Rule:
    """The biases of experts in another order."""
    if isinstance(rule, Rename) and rule.target.endswith("b_down"):
        mixed = CollectRows(3, (1, 1))
        return Rename(rule.source, rule.target, mixed, *rule.ops, within=rule.within)
    return rule


# what is wrong: the variant, and the change of its configuration
VALUES: dict[str, tuple[str, Change]] = {
    "olmo2: norms of every head and not of all": ("olmo2", attending(qk_norm_wide=False)),
    "olmo3: a window without the query's own key": ("olmo3", attending(window=wider)),
    "phi3: a whole head rotated": ("phi3-partial", rotating(dims=8)),
    "gpt_neox: parts one after the other": ("gpt_neox", in_sequence),
    "gpt_neox: a whole head rotated": ("gpt_neox", rotating(dims=8)),
    "granite: scores scaled by the size of a head": (
        "granite", attending(scale=lambda one: one.head_dim**-0.5)
    ),
    "granite: parts not multiplied": ("granite", branching(multiplier=1.0)),
    "granite: logits multiplied and not divided": (
        "granite", lambda model: head(scale=1 / model.head.scale)(model)
    ),
    "smollm3: every layer rotated": ("smollm3", everywhere),
    "cohere2: every layer rotated": ("cohere2", everywhere),
    "glm: the whole head rotated": ("glm", rotating(dims=8)),
    "glm4: no norms after the parts": ("glm4", branching(post_norm=None)),
    "exaone4: every layer rotated": ("exaone4", everywhere),
    "starcoder2: another GELU": ("starcoder2", fed_by("silu")),
    "ministral3: queries that do not grow": ("ministral3", attending(growth=None)),
    "deepseek: latents normalized with the model's own eps": ("deepseek_v3", own_eps),
    "deepseek: scores without the square of mscale": (
        "deepseek_v3-yarn", latent(scale=lambda one: one.head_dim**-0.5)
    ),
    "deepseek: cos and sin without the ratio": ("deepseek_v3-mscale", latent(rope=plain_tables)),
    "deepseek: scaled by the size of the content": (
        "deepseek_v2", latent(scale=lambda one: one.content**-0.5)
    ),
}  # fmt: skip
EXPERTS: dict[str, tuple[str, Change]] = {
    "mixtral: not renormalized": ("mixtral", routed(renormalized=False)),
    "mixtral: one expert less": ("mixtral", routed(chosen=1)),
    "qwen2_moe: renormalized": ("qwen2_moe", routed(renormalized=True)),
    "qwen3_moe: not renormalized": ("qwen3_moe", routed(renormalized=False)),
    "olmoe: softmax of the chosen": ("olmoe", routed(scores="softmax of the chosen")),
    "olmoe: norms of every head and not of all": ("olmoe", attending(qk_norm_wide=False)),
    "lfm2_moe: softmax and no sigmoid": ("lfm2_moe", routed(scores="softmax")),
    "lfm2_moe: no correction of the choice": ("lfm2_moe", routed(correction=False)),
    "lfm2_moe: not renormalized": ("lfm2_moe", routed(renormalized=False)),
    "glm4_moe: softmax and no sigmoid": ("glm4_moe", routed(scores="softmax")),
    "glm4_moe: not scaled": ("glm4_moe", routed(scale=1.0)),
    "glm4_moe: all groups": ("glm4_moe", routed(groups=1, kept_groups=1)),
    "glm4_moe: a group more": ("glm4_moe", routed(kept_groups=3)),
    "glm4_moe: the whole head rotated": ("glm4_moe", rotating(dims=8)),
    "deepseek_v2: the two largest of a group": ("deepseek_v2-experts", routed(group_best=2)),
    "deepseek_v2: renormalized": ("deepseek_v2-experts", routed(renormalized=True)),
    "deepseek_v2: not scaled": ("deepseek_v2-experts", routed(scale=1.0)),
    "deepseek_v2: all groups": ("deepseek_v2-experts", routed(groups=1, kept_groups=1)),
    "deepseek_v2: groups where there are none": (
        "deepseek_v2-greedy", routed(groups=4, kept_groups=2)
    ),
    "deepseek_v3: the largest of a group": ("deepseek_v3-experts", routed(group_best=1)),
    "deepseek_v3: not renormalized": ("deepseek_v3-experts", routed(renormalized=False)),
    "deepseek_v3: not scaled": ("deepseek_v3-experts", routed(scale=1.0)),
    "glm4_moe_lite: softmax and no sigmoid": ("glm4_moe_lite-experts", routed(scores="softmax")),
    "gpt_oss: a softmax of all experts": ("gpt_oss", routed(scores="softmax")),
    "gpt_oss: one expert more": ("gpt_oss", routed(chosen=3)),
    "gpt_oss: another limit": ("gpt_oss-clamped", mixing(
        lambda experts: {"clamp": replace(experts.clamp, limit=7.0)}
    )),
    "gpt_oss: neurons without the 1": ("gpt_oss", mixing(
        lambda experts: {"clamp": replace(experts.clamp, offset=0.0)}
    )),
    "gpt_oss: gates and neurons not clamped": ("gpt_oss-clamped", mixing(
        lambda experts: {"clamp": replace(experts.clamp, limit=1e9)}
    )),
    "gpt_oss: windows in the other layers": ("gpt_oss", attending_by(
        lambda number: {"window": None if number % 2 == 0 else 19}
    )),
    "gpt_oss: a window without the query's own key": ("gpt_oss", attending(window=wider)),
    "gpt_oss: a truncated yarn": ("gpt_oss", attending(rope=truncated)),
}  # fmt: skip
# refused, for a tensor then has no use
UNUSED: dict[str, tuple[str, Change]] = {
    "glm4_moe: no correction": ("glm4_moe", routed(correction=False)),
    "glm4_moe: no shared expert": ("glm4_moe", mixing(lambda experts: {"shared": None})),
    "deepseek_v2: no shared expert": (
        "deepseek_v2-experts", mixing(lambda experts: {"shared": None})
    ),
    "deepseek_v3: no correction": ("deepseek_v3-experts", routed(correction=False)),
    "gpt_oss: experts without biases": ("gpt_oss", mixing(lambda experts: {"bias": False})),
    "gpt_oss: a router without a bias": ("gpt_oss", routed(bias=False)),
    "gpt_oss: no sinks": ("gpt_oss", attending(sinks=False)),
    "qwen2_moe: all of the shared expert": ("qwen2_moe", mixing(unweighed)),
}
# the same of its rules
ROWS: dict[str, tuple[str, RuleChange]] = {
    "phi3: gate and up swapped": ("phi3", swapped("W_gate", "W_up")),
    "gpt_neox: fused rows not head by head": ("gpt_neox", one_after_the_other),
    "cohere2: neighbours not rotated together": ("cohere2", paired),
    "glm: neighbours not rotated together": ("glm", paired),
    "mixtral: gate and up swapped": ("mixtral", swapped("W_gate[{expert}]", "W_up[{expert}]")),
    "qwen2_moe: gate and up swapped in one tensor": (
        "qwen2_moe-windows", swapped("moe.W_gate", "moe.W_up")
    ),
    "gpt_oss: gate and up swapped": ("gpt_oss", swapped("moe.W_gate", "moe.W_up")),
    "gpt_oss: gate and up one after the other": ("gpt_oss", halved),
    "gpt_oss: biases of other experts": ("gpt_oss", of_other_experts),
    "deepseek_v2: neighbours not rotated together": ("deepseek_v2", paired),
    "deepseek_v3: neighbours not rotated together": ("deepseek_v3", paired),
    "deepseek: rows not head by head": ("deepseek_v3", one_after_the_other),
    "deepseek: keys and values swapped": ("deepseek_v2-lite", swapped("W_k", "W_v")),
}
GEMMA: dict[str, tuple[str, Change]] = {
    "norms multiply by w": ("gemma", norm_of(0.0)),
    "embeddings not scaled": ("gemma", embedding(scale=1.0)),
    "the exact GELU": ("gemma", fed_by("gelu")),
    "scores scaled by the size of a head": (
        "gemma2", attending(scale=lambda one: one.head_dim**-0.5)
    ),
    "scores not capped": ("gemma2", attending(cap=None)),
    "logits not capped": ("gemma2", head(cap=None)),
    "no norms after the parts": ("gemma2", branching(post_norm=None)),
    "windows in the other layers": (
        "gemma2", attending_by(lambda number: {"window": None if number % 2 == 0 else 22})
    ),
    "a window without the query's own key": ("gemma3", attending(window=wider)),
    "one base for all layers": ("gemma3", everywhere),
}  # fmt: skip
GEMMA4: dict[str, tuple[str, Change]] = {
    "scores scaled by the size of a head": (
        "gemma4", attending(scale=lambda one: one.head_dim**-0.5)
    ),
    "values not normalized": ("gemma4", attending(kv=lambda one: replace(one.kv, norm=None))),
    "values normalized with weights": (
        "gemma4", attending(kv=lambda one: replace(one.kv, norm=one.qk_norm))
    ),
    "keys of the first layer of their kind": (
        "gemma4", attending(kv=lambda one: replace(
            one.kv, layer=0 if one.kv.layer == 2 else one.kv.layer
        ))
    ),
    "exponents by the rotated numbers alone": ("gemma4", rotating(scaling=None, dims=4)),
    "whole heads rotated": ("gemma4", rotating(scaling=None)),
    "more pairs rotated": ("gemma4-keys-as-values", rotating(scaling=ProportionalScaling(pairs=4))),
    "values projected where they are keys": (
        "gemma4-keys-as-values", attending(kv=lambda one: replace(one.kv, equal=False))
    ),
    "embeddings for each layer not scaled": ("gemma4", per_layer(scale=1.0)),
    "their projection not divided by the root of the width": (
        "gemma4", lambda model: per_layer(norm=model.final_norm)(model)
    ),
    "blocks not scaled": ("gemma4", lambda model: replace(
        model, layers=tuple(replace(layer, scaled=False) for layer in model.layers)
    )),
    "feed-forwards of one width": ("gemma4", lambda model: fed_by(model.layers[0].parts[1])(model)),
    "a norm before a layer's embedding": ("gemma4", before_ple),
    "logits not capped": ("gemma4", head(cap=None)),
    "a window without the query's own key": ("gemma4", attending(window=wider)),
    "a router that reads what the experts read": ("gemma4-experts", routed(norm=None)),
    "a router's norm centred on 1": (
        "gemma4-experts", mixing(lambda one: {"routing": replace(
            one.routing, norm=replace(one.routing.norm, offset=1.0)
        )})
    ),
    "weights not renormalized": ("gemma4-experts", routed(renormalized=False)),
    "no factors of the experts": ("gemma4-experts", routed(factors=False)),
    "sigmoids for scores": ("gemma4-experts-all", routed(scores="sigmoid")),
    "one expert less": ("gemma4-experts-all", routed(chosen=2)),
    "no norm of the sum": ("gemma4-experts", lambda model: replace(
        model, layers=tuple(replace(layer, sum_norm=None) for layer in model.layers)
    )),
    "experts behind the feed-forward": ("gemma4-experts", in_sequence),
    "no norms after the parts": ("gemma4-experts", branching(post_norm=None)),
}  # fmt: skip


def without_operation(*kinds: type) -> RuleChange:
    """Rules that lack such operations."""

    def change(rule: Rule) -> Rule:
        if isinstance(rule, Rename) and any(isinstance(op, kinds) for op in rule.ops):
            kept = [op for op in rule.ops if not isinstance(op, kinds)]
            return Rename(rule.source, rule.target, *kept, within=rule.within)
        return rule

    return change


def ending(end: str, *ops: Op) -> RuleChange:
    """Further operations on parameters whose names end so."""

    def change(rule: Rule) -> Rule:
        if isinstance(rule, Rename) and rule.target.endswith(end):
            return Rename(rule.source, rule.target, *rule.ops, *ops, within=rule.within)
        return rule

    return change


def gates_first(rule: Rule) -> Rule:
    """The rows of gates before those of queries, in each head."""
    return swapped("attn.W_q", "attn.W_gate")(rule)


def gates_behind_all_queries(rule: Rule) -> Rule:
    """The rows of all queries, then of all gates."""
    if isinstance(rule, Rename) and rule.target.endswith(("attn.W_q", "attn.W_gate")):
        return one_after_the_other(rule)
    return rule


QWEN_NEXT: dict[str, tuple[str, Change]] = {
    "norms multiply by w": ("qwen3_5", branching(pre_norm=PLAIN_NORM)),
    "the last norm multiplies by w": ("qwen3_next", norm_of(0.0)),
    "queries and keys normalized with w": ("qwen3_5", attending(qk_norm=PLAIN_NORM)),
    "outputs normalized with 1 + w": (
        "qwen3_5", recurring(norm=lambda delta: replace(delta.norm, offset=1.0))
    ),
    "another eps of queries and keys": ("qwen3_5", recurring(eps=1e-3)),
    "the norms' eps of queries and keys": (
        "qwen3_next", recurring(eps=lambda delta: delta.norm.eps)
    ),
    "value heads paired with key heads in turns": ("qwen3_5", recurring(tiled=True)),
    "whole heads rotated": ("qwen3_next", rotating(dims=16)),
    "another part of heads rotated": ("qwen3_5", rotating(dims=8)),
    "not renormalized": ("qwen3_5_moe", routed(renormalized=False)),
    "renormalized where it is not to be": ("qwen3_next-mixed", routed(renormalized=True)),
    "one expert less": ("qwen3_next", routed(chosen=1)),
    "sigmoids for scores": ("qwen3_5_moe", routed(scores="sigmoid")),
}  # fmt: skip
QWEN_NEXT_ROWS: dict[str, tuple[str, RuleChange]] = {
    "rows not by key head": ("qwen3_next", one_after_the_other),
    "parts of key heads not put together": ("qwen3_next", without_operation(CollectRows)),
    "gates before queries": ("qwen3_5", gates_first),
    "gates behind all queries": ("qwen3_next", gates_behind_all_queries),
    "what is written and what is forgotten swapped": ("qwen3_5", swapped("W_beta", "W_decay")),
    "the same of one key head": ("qwen3_next", swapped("W_beta", "W_decay")),
    "filters with their tokens in another order": (
        "qwen3_5", ending("linattn.w", Transpose(), UnpairRows(1, 4), Transpose())
    ),
    "filters of other channels": ("qwen3_next", ending("linattn.w", CollectRows(2, (28, 28)))),
    "decays that grow": ("qwen3_5", ending("A_log", Multiply(-1.0))),
    "no bias of steps": ("qwen3_next", ending("dt_bias", Multiply(0.0))),
    "gate and up of the shared expert swapped": (
        "qwen3_5_moe", swapped("shared.W_gate", "shared.W_up")
    ),
}  # fmt: skip
Translated = tuple[ModelConfig, tuple[Rule, ...]]


@pytest.fixture
def parts(
    checkpoints: Checkpoints, references: References, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[ModelConfig, tuple[Rule, ...]], Translated]], float]:
    """By how much a variant so translated differs; infinitely where it is refused."""

    def found(
        variant: str, changed: Callable[[ModelConfig, tuple[Rule, ...]], Translated]
    ) -> float:
        ids = prompt(tokens=80)
        right = reference_logprobs(references(variant, "float64"), ids)
        monkeypatch.setattr("llmcli.loading.load.translate", lambda one: changed(*translate(one)))
        checkpoint = open_checkpoint(checkpoints(variant))
        try:
            decoder = load_checkpoint(checkpoint, device="cpu", dtype="float64").decoder
        except WeightMismatch:
            return math.inf
        return float((decoder(ids).log_softmax(-1) - right).abs().max())

    return found


ALL = VALUES | EXPERTS | UNUSED | {
    f"{kind}: {name}": case
    for kind, cases in (("gemma", GEMMA), ("gemma4", GEMMA4), ("qwen_next", QWEN_NEXT))
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_a_wrong_value_shows(name: str, parts: Any) -> None:
    variant, change = ALL[name]

    def wrong(config: ModelConfig, rules: tuple[Rule, ...]) -> Translated:
        assert change(config) != config
        return change(config), rules

    assert parts(variant, lambda *sound: sound) < 1e-9
    if name.endswith("experts behind the feed-forward"):  # in one block their axes differ
        with pytest.raises(ValueError, match="`F` is"):
            parts(variant, wrong)
        return
    assert parts(variant, wrong) > 1e-6


ALL_ROWS = ROWS | {f"qwen_next: {name}": case for name, case in QWEN_NEXT_ROWS.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL_ROWS)
def test_rows_in_another_order_show(name: str, parts: Any) -> None:
    variant, change = ALL_ROWS[name]
    assert parts(variant, lambda *sound: (sound[0], tuple(map(change, sound[1])))) > 1e-6


def test_every_group_has_eight() -> None:
    assert min(len(VALUES), len(GEMMA), len(GEMMA4), len(EXPERTS), len(QWEN_NEXT)) >= 8
