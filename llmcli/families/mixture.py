"""Settings of mixtures of experts."""

from __future__ import annotations

from typing import Any

from llmcli.config.experts import ExpertsConfig, RoutingConfig, Scores, SharedConfig
from llmcli.config.mlp import Activation
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.values import LIMITS, ConfigReader, require_divisible, shortened

# `expert_gating_func` of llama.cpp (`llama_expert_gating_func_type`); 0: not set
_GATING: dict[int, Scores] = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen"}
# implied by the architecture in llama.cpp's converters: whether weights are renormalized
_OTHERS = ("qwen2moe", "olmoe", "glm4moe", "deepseek2", "gpt-oss", "granitehybrid", "llama4")
_RENORMALIZED = (
    *("llama", "qwen3moe", "gemma4", "lfm2moe", "qwen3next", "qwen35moe", "nemotron_h_moe"),
)
# … and the scores that choose experts, unless a softmax over all
_SCORES: dict[str, Scores] = {
    **dict.fromkeys(("glm4moe", "lfm2moe", "nemotron_h_moe", "llama4"), "sigmoid"),
    **dict.fromkeys(("gpt-oss", "granitehybrid"), "softmax of the chosen"),
}
_LEAST = {"lfm2moe": 1e-6}  # lower bound added to the sum of weights
_SHARES = ("qwen2moe", "qwen3next", "qwen35moe")  # with a gated shared expert
GGUF_ARCHS = (*_RENORMALIZED, *_OTHERS)


def from_gguf(
    values: ConfigReader, arch: str, hidden: int, function: Activation, *, correction: bool
) -> ExpertsConfig:
    """Read the mixture from GGUF metadata; `hidden`: default width of an expert.

    Raises CheckpointError and UnsupportedModel.
    """
    count = values.integer("expert_count", most=LIMITS["heads"])
    number = values.integer("expert_gating_func", 0, least=0, most=255)
    if number and number not in _GATING:
        raise UnsupportedModel(f"`expert_gating_func` = `{shortened(number)}` is not supported")
    # files older than this key: with a correction bias they are like DeepSeek-V3
    usual_scores: Scores = "sigmoid" if arch == "deepseek2" and correction else "softmax"
    scores = _GATING.get(number, _SCORES.get(arch, usual_scores))
    chosen = values.integer("expert_used_count", most=count)
    usual = hidden // chosen if arch.startswith("qwen") else hidden
    own = values.integer("expert_feed_forward_length", usual, most=LIMITS["hidden"])
    shared, key = None, "expert_shared_feed_forward_length"
    if arch in _SHARES:
        length = values.integer(key, hidden, most=LIMITS["hidden"])
        shared = SharedConfig(hidden=length, weighed=True)
    elif length := values.integer(key, 0, least=0, most=LIMITS["hidden"]):
        shared = SharedConfig(hidden=length)
    elif times := values.integer("expert_shared_count", 0, least=0, most=LIMITS["heads"]):
        shared = SharedConfig(hidden=times * own)
    groups = values.integer("expert_group_count", 1, most=count)
    routing = RoutingConfig(
        chosen=chosen,
        scores=scores,
        renormalized=values.flag("expert_weights_norm", arch in _RENORMALIZED),
        least=_LEAST.get(arch, RoutingConfig.least),
        scale=values.number("expert_weights_scale", 1.0),
        correction=correction,
        groups=groups,
        kept_groups=values.integer("expert_group_used_count", groups, most=groups),
        group_best=1 if arch == "deepseek2" and scores == "softmax" else 2,
    )
    return _mixture(count, own, function, shared, routing)


def read(
    values: ConfigReader,
    count: str,
    function: Activation,
    *,
    hidden: str = "moe_intermediate_size",
    chosen: str = "num_experts_per_tok",
    shared: SharedConfig | None = None,
    **routing: Any,
) -> ExpertsConfig:
    """Read a mixture of a config.json; `routing`: fields of `RoutingConfig`.

    `count`, `hidden` and `chosen` are the keys of the number of experts, their width, and the
    number that a token chooses. Raises CheckpointError.
    """
    experts = values.integer(count, most=LIMITS["heads"])
    width = values.integer(hidden, most=LIMITS["hidden"])
    found = values.integer(chosen, most=experts)
    return _mixture(experts, width, function, shared, RoutingConfig(chosen=found, **routing))


def read_deepseek(
    values: ConfigReader, function: Activation, *, second: bool = False
) -> ExpertsConfig:
    """Read a mixture in the format of DeepSeek-V3, or (`second`) of V2.

    `n_shared_experts` is the shared expert's width in those of an expert. Raises CheckpointError
    and UnsupportedModel.
    """
    count = values.integer("n_routed_experts", most=LIMITS["heads"])
    hidden = values.integer("moe_intermediate_size", most=LIMITS["hidden"])
    grouped = True
    if second:
        method = values.text("topk_method", "greedy")
        grouped = method == "group_limited_greedy"
        if not grouped and method != "greedy":
            raise UnsupportedModel(f"`topk_method` = `{shortened(method)}` is not supported")
        if values.flag("mlp_bias", False):
            raise UnsupportedModel("`mlp_bias` = `true` is not supported beside experts")
    shared = values.integer("n_shared_experts", most=LIMITS["heads"])
    groups = values.integer("n_group", 1, most=count) if grouped else 1
    routing: dict[str, Any] = {"scores": "softmax", "group_best": 1, "renormalized": False}
    if not second:  # transformers never renormalizes in V2
        renormalized = values.flag("norm_topk_prob", True)
        routing = {"scores": "sigmoid", "correction": True, "renormalized": renormalized}
    return read(
        values,
        "n_routed_experts",
        function,
        shared=SharedConfig(hidden=shared * hidden),
        scale=values.number("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=values.integer("topk_group", 1, most=groups) if grouped else 1,
        **routing,
    )


def _mixture(
    experts: int, hidden: int, function: Activation, shared: SharedConfig | None, r: RoutingConfig
) -> ExpertsConfig:
    """The mixture; raises CheckpointError if groups do not divide experts or leave too few."""
    each = require_divisible("the number of experts", experts, "the number of groups", r.groups)
    if r.groups > 1 and (each < r.group_best or r.kept_groups * each < r.chosen):
        size = "one expert" if each == 1 else f"{each} experts"
        raise CheckpointError(
            f"{r.kept_groups} of {r.groups} groups of {size} leave no {r.chosen} to choose"
        )
    return ExpertsConfig(
        experts=experts, hidden=hidden, activation=function, shared=shared, routing=r
    )
