"""A small model of every family, and the documents' formula for what one call of it computes."""

from dataclasses import dataclass, replace

from zoo import TYPES, ZOO, Variant, variant

from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.model import ModelConfig
from llmcli.config.ssm import SsmConfig

# the first of every type, one of them under a narrow window: those with attention in all layers
EVERY = {one.model_type: one for one in reversed(ZOO)} | {
    "mistral": Variant("mistral", "mistral", {"sliding_window": 7, "head_dim": 10}),
    "qwen2": variant("qwen2-tied"),
    "qwen3": variant("qwen3-tied-bf16"),
}


def _alike(config: ModelConfig) -> bool:
    """Whether one formula is that of every layer, and of a fused kernel: of plain scores."""
    attentions = [layer.attention for layer in config.layers]
    if None in attentions or _mixes(config):
        return False
    same = {(attentions[0].scores.window, None, ())}
    return {(one.scores.window, one.scores.cap, one.scores.slopes) for one in attentions} == same


def _mixes(config: ModelConfig, kind: type = ExpertsConfig) -> bool:
    return any(isinstance(part, kind) for layer in config.layers for part in layer.parts)


MIXTURES = {name: one for name, one in EVERY.items() if _mixes(one.config())}
# those whose products PyTorch counts: a recurrence is computed in chunks, and not counted so
COUNTED = {
    name: one
    for name, one in MIXTURES.items()
    if not _mixes(one.config(), DeltaConfig) and not _mixes(one.config(), SsmConfig)
}
FAMILIES = {name: one for name, one in EVERY.items() if _alike(one.config())}


def family(name: str) -> ModelConfig:
    """Our configuration of what a config.json of that family says."""
    return FAMILIES[name].config()


def without_window(config: ModelConfig) -> ModelConfig:
    """The same model, every query seeing all keys before it."""
    return replace(
        config,
        layers=tuple(
            x if x.attention is None else x.with_attention(x.attention.changed(window=None))
            for x in config.layers
        ),
    )


@dataclass(frozen=True)
class Hand:
    """Letters as the documents have them, read from config.json and not from our configuration."""

    D: int
    H: int
    Hk: int
    dh: int
    F: int
    V: int
    L: int
    W: int | None
    gated: bool

    def flops(self, batch: int, tokens: int, past: int, heads: int) -> tuple[int, int]:
        """Causal and full square, 2 a multiply-add; `heads`: positions that have logits."""
        visible = [past + i + 1 for i in range(tokens)]
        if self.W is not None:
            visible = [min(n, self.W) for n in visible]
        square = tokens * (past + tokens)
        weights = tokens * self.D * (self.H + 2 * self.Hk) * self.dh
        weights += tokens * self.H * self.dh * self.D
        weights += (3 if self.gated else 2) * tokens * self.D * self.F
        causal, full = (2 * self.H * self.dh * pairs for pairs in (sum(visible), square))
        head = heads * self.D * self.V
        return tuple(2 * batch * (self.L * (weights + pairs) + head) for pairs in (causal, full))


def by_hand(name: str) -> Hand:
    """The sizes of that family."""
    raw = FAMILIES[name].settings
    if name == "gpt2":
        width, heads = raw["n_embd"], raw["n_head"]
        return Hand(
            D=width, H=heads, Hk=heads, dh=width // heads, F=4 * width, V=raw["vocab_size"],
            L=raw["n_layer"], W=None, gated=False,
        )  # fmt: skip
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    return Hand(
        D=width, H=heads, Hk=raw.get("num_key_value_heads", heads),
        dh=raw.get("head_dim", width // heads), F=raw.get("intermediate_size") or raw["ffn_dim"],
        V=raw["vocab_size"], L=raw["num_hidden_layers"],
        W=raw.get("sliding_window"), gated="mlp.gate" in TYPES[FAMILIES[name].model_type].modules,
    )  # fmt: skip
