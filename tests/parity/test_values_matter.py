"""No value of a configuration and no operation of a rule is without effect on what is computed.

Each is changed alone: the model then computes something else, or is refused. That what a family
makes of its files is what transformers makes of them, `test_a_whole_prompt` shows; that a value or
an order of rows that is read wrongly would be seen there, is shown here.
"""

import dataclasses
import math
import re
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from covers import COVER, few
from decoder_parameters import parameters_of
from parity_gguf import write_gguf
from parity_models import build, prompt
from zoo import TYPES, ZOO, variant

from llmcli.checkpoints import open_checkpoint
from llmcli.config.attention import QueryGrowth, RopeConfig
from llmcli.config.norm import NormConfig
from llmcli.decoder.decoder import Decoder
from llmcli.families.rules import Rename, Rows, plan
from llmcli.graph.plan import stored_shapes
from llmcli.graph.precision import Precision
from llmcli.loading.load import check_loadable, configured
from llmcli.loading.weights import load_weights
from llmcli.prepare.prepared import Prepared, prepare

SHORT, LONG = 20, 150  # tokens; the second is beyond windows and original lengths
WORDS = {
    "kind": ("rms", "layer"), "scores": ("softmax", "sigmoid", "softmax of the chosen"),
    "activation": ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"),
}  # fmt: skip
NORM = NormConfig(kind="rms", eps=0.1)
INSTEAD_OF_NONE = {
    "window": 19, "cap": 0.5, "clip": 0.5, "rope": RopeConfig(theta=1e4, dims=4), "layer": 0,
    "growth": QueryGrowth(beta=0.5, original=16),
    **dict.fromkeys(("pre_norm", "post_norm", "qk_norm", "norm", "sum_norm"), NORM),
}  # fmt: skip
# what is for people to read, lengths, and sizes of what has a tensor
NOT_CHANGED = {
    "family", "model_type", "bos", "eos", "context", "vocab", "width", "positions", "layers",
    "heads", "kv_heads", "head_dim", "value_dim", "hidden", "experts", "rank", "query_rank",
    "content", "size", "key_heads", "key_dim", "state",
}  # fmt: skip
ROUNDED = "EmbeddingConfig.rounded_scale"  # in 16 bits, which no comparison here is in
# of one type alone: what counts only beside another value, or at some lengths, is not always seen
CONDITIONAL = (
    ROUNDED, "Branch.shares_norm", "LayerConfig.sum_norm", "LayerConfig.normed_residual",
    "ExpertGroups.", "RoutingConfig.least", "RoutingConfig.renormalized False",
    "RoutingConfig.scores", "RoutingConfig.by_logits", "YarnScaling.", "LinearScaling.",
    "LongRopeScaling.", "RopeConfig.scaling",
)  # fmt: skip
ALIKE = "ssm.b_dt, ssm.dt_bias"  # two biases that are added
# of a GGUF file: shapes that are the same already, heads that are equal to the embedding; and where
# nothing is rotated any order of the rows of queries and keys is as good
EQUAL, UNROTATED = ("Reshape", "embed.W, head.W"), ("granitemoehybrid", "nemotron_h")


def parts(of):
    """The configurations within one, itself first."""
    if isinstance(of, tuple):
        for one in of:
            yield from parts(one)
    elif is_dataclass(of):
        yield of
        for field in dataclasses.fields(of):
            yield from parts(getattr(of, field.name))


def others(name, value):
    """What a value of that name could be instead."""
    match value:
        case bool():
            return [not value]
        case str():
            return [word for word in WORDS[name] if word != value]
        case int():
            return [value + 1, value - 1, 2 * value]
        case float():
            return [0.05] if math.isinf(value) else [1.5 * value + 0.01, value / 4]
        case None:
            return [INSTEAD_OF_NONE[name]] if name in INSTEAD_OF_NONE else []
        case (float(), *_):
            return [tuple(1.5 * one for one in value)]
    return [None] if is_dataclass(value) else []


def changed(of, kind, name, value, other):
    """That configuration with another value in each part of that kind that has this one."""
    if isinstance(of, tuple):
        return tuple(changed(one, kind, name, value, other) for one in of)
    if not is_dataclass(of):
        return of
    found = {
        field.name: changed(getattr(of, field.name), kind, name, value, other)
        for field in dataclasses.fields(of)
    }
    if type(of) is kind and getattr(of, name) == value:
        found[name] = other
    return type(of)(**found)


def other_values(checkpoint, right):
    """What is changed, and what makes a decoder with that change and the weights of `right()`.

    `AttentionConfig.window None`: with a window instead; `MlpConfig.activation not relu`: this
    one instead of its own; `AttentionConfig.scale`: another.
    """
    config = configured(prepare(checkpoint))

    def made(*change):
        weights = parameters_of(right())
        other = Decoder(changed(config, *change), Precision.of("float64"), device="cpu")
        for name, tensor in parameters_of(other).items():
            assert tensor.shape == weights[name].shape
            tensor.copy_(weights[name])
        return other

    for part in parts(config):
        for field in dataclasses.fields(part):
            if field.name in NOT_CHANGED:
                continue
            if field.name == "offset" and isinstance(part, NormConfig) and not part.weights:
                continue  # of a norm's weights
            value, name = getattr(part, field.name), f"{type(part).__name__}.{field.name}"
            told = f" {value}" if value is None or isinstance(value, bool) else ""
            for other in others(field.name, value):
                told = f" not {other}" if isinstance(value, str) else told
                yield name + told, partial(made, type(part), field.name, value, other)


def other_rules(checkpoint, right):
    """The same of rules, by which the checkpoint is read again.

    `UnpairRows`: without it; `groups`: rows of all groups in one; `mlp.W_gate, mlp.W_up`: exchanged
    in every layer.
    """
    prepared = prepare(checkpoint)
    config, rules = configured(prepared), prepared.rules

    def made(change):
        found = []
        for rule in rules:
            if isinstance(rule, Rename):
                target, ops = change(rule)
                rule = Rename(rule.source, target, *ops, within=rule.within)
            found.append(rule)
        return read(checkpoint, config, found)

    def without(kind, rule):
        return rule.target, (op for op in rule.ops if not isinstance(op, kind))

    def in_one_group(rule):
        return rule.target, (
            Rows(op.start * op.groups, op.stop * op.groups) if isinstance(op, Rows) else op
            for op in rule.ops
        )

    def exchanged(both, rule):
        (one, other), (block, name) = both, in_its_block(rule.target)
        name, item, rest = name.partition("[")
        return block + {one: other, other: one}.get(name, name) + item + rest, rule.ops

    used = [op for load in plan(checkpoint.tensors, rules, config).loads for op in load.ops]
    for kind in {type(op) for op in used}:
        yield kind.__name__, partial(made, partial(without, kind))
    if any(isinstance(op, Rows) and op.groups > 1 for op in used):
        yield "groups", partial(made, in_one_group)
    alike = {}
    for whole, shape in stored_shapes(config).items():
        block, name = in_its_block(whole)
        alike.setdefault((block, shape), []).append(name)
    for names in alike.values():
        for both in pairwise(names):
            yield ", ".join(both), partial(made, partial(exchanged, both))


def in_its_block(name):
    """`blocks.3.` or `blocks.{layer}.`, and what a parameter is called there."""
    block = re.match(r"(blocks\.[^.]+\.)?", name)[0]
    return block, name.removeprefix(block)


def read(checkpoint, config, rules):
    decoder = Decoder(config, Precision.of("float64"), device="cpu")
    prepared = Prepared(checkpoint=checkpoint, config=config, rules=rules)
    check_loadable(prepared)
    load_weights(decoder, checkpoint, prepared.plan)
    return decoder


def logprobs(decoder, tokens):
    return decoder(prompt(tokens=tokens)).log_softmax(-1)


def unseen(paths, changes, but=()):
    """The changes that are seen in none of these folders or files; without those in `but`."""
    seen, tried, computed = set[str](), set[str](), set[str]()
    for checkpoint in map(open_checkpoint, paths):
        prepared = prepare(checkpoint)
        right = cache(partial(read, checkpoint, configured(prepared), prepared.rules))
        expected = cache(lambda tokens, right=right: logprobs(right(), tokens))
        for name, wrong in changes(checkpoint, right):
            if name in seen or name.startswith(but):
                continue
            tried.add(name)
            right()  # nor is it the unchanged one that is refused
            try:
                other = wrong()
                off = (logprobs(other, n) - expected(n) for n in (SHORT, LONG))
                found = any(one.abs().nan_to_num(torch.inf).max() > 1e-6 for one in off)
                computed.add(name)
            except Exception:  # refused, by whoever sees it first
                found = True
            if found:
                seen.add(name)
    assert len(computed) > len(tried) / 4
    return tried - seen


# first those in which lengths and limits count, and small ones
NAMES = ("rope-longrope", "gpt_oss-clamped", "ministral3-betas", *reversed(COVER))
BY_TYPE = {kind: [one.name for one in ZOO if one.model_type == kind] for kind in TYPES}
SETS = [pytest.param(NAMES, id="cover")] + [
    pytest.param(names, id=kind, marks=pytest.mark.exhaustive) for kind, names in BY_TYPE.items()
]


@pytest.mark.parametrize("names", SETS)
def test_every_value_is_seen(names, checkpoints):
    # the choice by logits only counts where their sigmoids are rounded to 1
    whole = ROUNDED, "Branch.shares_norm False", "RoutingConfig.by_logits True"
    but = whole if names is NAMES else CONDITIONAL
    assert unseen(map(checkpoints, names), other_values, but) == set()


@pytest.mark.parametrize("names", SETS)
def test_every_operation_and_every_name_is_seen(names, checkpoints):
    assert unseen(map(checkpoints, names), other_rules, (ALIKE,)) == set()


IN_GGUF = ["granite", "qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "gemma2-gguf"]
IN_GGUF += [one.name for one in ZOO if one.gguf and one.typical and one.name not in IN_GGUF]


@pytest.mark.parametrize("name", few(IN_GGUF, 6))
@torch.no_grad()
def test_every_operation_and_every_name_of_a_gguf_file_is_seen(name, tmp_path):
    write_gguf(build(variant(name), seed=3), tmp_path / "model.gguf", "F32")
    but = (ALIKE, *EQUAL, *["UnpairRows"] * name.startswith(UNROTATED))
    assert unseen([tmp_path / "model.gguf"], other_rules, but) == set()
