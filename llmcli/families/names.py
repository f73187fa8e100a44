"""Tensor names of a family as one table for both formats, and the rules that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcli.config import ModelConfig
from llmcli.families import mixture
from llmcli.families.read import hf_head
from llmcli.families.rope import GGUF_FACTORS, GGUF_LONGROPE
from llmcli.families.rules import (
    AddConstant,
    Drop,
    LaterRows,
    Op,
    Rename,
    Rows,
    Rule,
    Transpose,
    UnpairRows,
)
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

Row = tuple[str, str, str]  # our name, transformers', llama.cpp's

_OUTER = ("embed", "embed_norm", "pos_embed", "ln_final", "head")  # outside the blocks
_COMPUTED = "RoPE frequencies, which are computed"
_READ = "read into the configuration as the rotation's frequency factors"


@dataclass(frozen=True, kw_only=True)
class Names:
    """A table of tensor names: for each of ours, those of transformers and of llama.cpp.

    Names are without `.weight` and `.bias`: `attn.q` is `W_q` and `b_q`, `ln1` its `w` and `b`; `-`
    is none. `attn.q+attn.k+attn.v` are rows of one tensor, one part after another, or with `@head`
    for each head. A tensor without a parameter in the model is surplus.

    transformers' names begin with one of `prefixes` (a bare decoder's has none), in a block also
    with `layer`; `buffers` are names in a block that are dropped, and the reasons. `conv1d`: its
    matrices are `[in, out]`. `rotary`: files may have RoPE frequencies or their factors.
    `interleaved`: the files in which RoPE pairs adjacent query and key rows. For `gguf` the
    converter has reordered them, in layers without RoPE, too. `experts`: transformers' names of a
    mixture's block and of its gate, up and down. `predicts`: later layers are for multi-token
    prediction. `first_position`: the row of position 0 in the table of positions. `also`: other
    names in transformers, beside these.
    """

    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ("model.", "")
    layer: str = "layers.{layer}"
    buffers: tuple[tuple[str, str], ...] = (("self_attn.rotary_emb.inv_freq", _COMPUTED),)
    conv1d: bool = False
    rotary: bool = True
    interleaved: Literal["never", "gguf", "always"] = "never"
    experts: tuple[str, mixture.Leaves] | None = ("mlp", mixture.PROJECTIONS)
    predicts: bool = False
    first_position: int = 0
    also: Names | None = None

    def but(self, text: str = "", without: str = "", **changes: Any) -> Names:
        """The table with rows replaced or added by `text`, and without the rows of some names."""
        rows = _table(text)
        gone = {*(row[0] for row in rows), *without.split()}
        kept = (row for row in self.rows if row[0] not in gone)
        return replace(self, rows=(*rows, *kept), **changes)

    def hf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for transformers' names."""
        rules: list[Rule] = []
        for prefix in self.prefixes:
            layer = prefix + self.layer
            for ours, theirs, _ in self.rows:
                if theirs == "-":
                    continue
                if ours == "head":  # without a prefix
                    if prefix == self.prefixes[0]:
                        rules.append(hf_head(config, f"{theirs}.weight"))
                else:
                    source = f"{prefix if ours in _OUTER else f'{layer}.'}{theirs}"
                    own = self._row(config, ours, source, self.interleaved == "always")
                    rules += map(_transposed, own) if self.conv1d else own
            rules += [Drop(f"{layer}.{buffer}", reason) for buffer, reason in self.buffers]
            if self.rotary:
                rules.append(Drop(f"{prefix}rotary_emb.inv_freq", _COMPUTED))
            if self.predicts:
                later = f"{layer}.*".replace("{layer}", "{later}")
                rules.append(mixture.later_layers(later, config))
        experts = () if self.experts is None else mixture.rules_hf(config, *self.experts)
        also = () if self.also is None else self.also.hf(config)
        return (*rules, *experts, *also)

    def gguf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for llama.cpp's names; norms are stored with their offset."""
        rules: list[Rule] = []
        for ours, _, theirs in self.rows:
            if theirs != "-" and not (ours == "head" and config.head.tied):
                source = theirs if ours in _OUTER else f"blk.{{layer}}.{theirs}"
                offset, interleaved = config.final_norm.offset, self.interleaved != "never"
                rules += self._row(config, ours, source, interleaved, offset)
        if self.rotary:
            rules += [Drop(name, _READ) for name in (GGUF_FACTORS, *GGUF_LONGROPE)]
            rules.append(Drop("blk.{layer}.attn_rot_embd.weight", _COMPUTED))
        if self.predicts:
            rules.append(mixture.later_layers("blk.{later}.*", config))
        return (*rules, *mixture.rules_gguf(config))

    def _row(
        self, config: ModelConfig, ours: str, source: str, interleaved: bool, offset: float = 0.0
    ) -> Iterator[Rename]:
        """Rules of one row; GGUF norms have `offset` added."""
        parts, first = ours.removesuffix("@head").split("+"), 0
        gated = _first(config, gated=True) if ours == "attn.q" else None
        if gated is not None:  # the gate rows of each head follow its query rows
            size = gated.head_dim
            yield from _renames(source, "attn.q", Rows(0, size, gated.heads))
            gates = Rows(size, size + gated.value_dim, gated.heads)
            yield from _renames(source, "attn.gate", gates)
        elif ours in ("attn.q", "attn.k") and interleaved:
            yield from self._unpaired(config, source, ours)
        elif ours == "pos_embed" and (start := self.first_position):
            stop = start + (config.embedding.positions or 0)
            yield from _renames(source, ours, LaterRows(start, stop))
        elif len(parts) == 1:
            yield from _renames(source, ours, offset=offset)
        else:
            for part in parts:
                size, heads = _size(config, part)
                groups = heads if ours.endswith("@head") else 1
                rows = Rows(first, first + size // groups, groups)
                first = rows.stop
                yield from _renames(source, part, rows)

    def _unpaired(self, config: ModelConfig, source: str, part: str) -> Iterator[Rename]:
        """Rules for query or key rows of which adjacent ones are rotated together."""
        for index, layer in enumerate(config.layers):
            if (a := layer.attention) is None:
                continue
            dims = a.head_dim if self.interleaved == "gguf" else 0
            dims = a.rope.dims if a.rope is not None else dims
            heads = a.heads if part == "attn.q" else a.kv_heads
            for rule in _renames(source, part, UnpairRows(heads, dims)):
                own, target = (one.format(layer=index) for one in (rule.source, rule.target))
                yield Rename(own, target, *rule.ops)


def _renames(source: str, part: str, *ops: Op, offset: float = 0.0) -> Iterator[Rename]:
    """Rules for the weight and the bias of a part by our name; norms have `offset` added."""
    where, _, symbol = part.rpartition(".")
    norm = symbol.startswith("ln") or symbol.endswith("_norm")
    block = "" if part in _OUTER else "blocks.{layer}."
    for kind, letter in (("weight", "w"), ("bias", "b")):
        if norm:
            shift = (AddConstant(-offset),) if offset and letter == "w" else ()
            yield Rename(f"{source}.{kind}", f"{block}{part}.{letter}", *shift)
        elif where:
            name = f"{block}{where}.{letter if letter == 'b' else 'W'}_{symbol}"
            yield Rename(f"{source}.{kind}", name, *ops)
        elif kind == "weight":
            yield Rename(f"{source}.weight", f"{part}.W", *ops)


def _transposed(rule: Rename) -> Rename:
    """The rule with the matrix of a projection, if it fills one, stored `[in, out]`."""
    if ".W_" not in rule.target:
        return rule
    return Rename(rule.source, rule.target, Transpose(), *rule.ops)


def _table(text: str) -> tuple[Row, ...]:
    rows = (line.split() for line in text.strip().splitlines())
    return tuple((ours, hf, gguf) for ours, hf, gguf in rows)


def _first(config: ModelConfig, *, gated: bool) -> AttentionConfig | None:
    """The first attention, or the first gated one."""
    found = (layer.attention for layer in config.layers)
    return next((one for one in found if one is not None and (one.gated or not gated)), None)


def _size(config: ModelConfig, part: str) -> tuple[int, int]:
    """Output rows of a projection in the first layer, and heads."""
    if part.startswith("conv."):
        return config.width, 1
    if part.startswith("mlp."):
        mlp = config.layers[0].parts[-1]
        assert isinstance(mlp, MlpConfig)
        return mlp.hidden, 1
    a = _first(config, gated=False)
    assert a is not None
    heads = a.heads if part == "attn.q" else a.kv_heads
    return heads * (a.value_dim if part == "attn.v" else a.head_dim), a.heads


LLAMA = Names(interleaved="gguf", rows=_table("""
    embed        embed_tokens              token_embd
    ln_final     norm                      output_norm
    head         lm_head                   output
    ln1          input_layernorm           attn_norm
    ln2          post_attention_layernorm  ffn_norm
    attn.q       self_attn.q_proj          attn_q
    attn.k       self_attn.k_proj          attn_k
    attn.v       self_attn.v_proj          attn_v
    attn.o       self_attn.o_proj          attn_output
    attn.q_norm  self_attn.q_norm          attn_q_norm
    attn.k_norm  self_attn.k_norm          attn_k_norm
    mlp.gate     mlp.gate_proj             ffn_gate
    mlp.up       mlp.up_proj               ffn_up
    mlp.down     mlp.down_proj             ffn_down
"""))
QWEN = LLAMA.but(interleaved="never")
POST_NORM_2 = QWEN.but("ln2  post_attention_layernorm  post_attention_norm")
AFTER = """
    ln1_post     post_attention_layernorm    post_attention_norm
    ln2_post     post_feedforward_layernorm  post_ffw_norm
"""  # norms after the parts, and none before
