"""Tensor names of a family as one table for both formats, and the rules that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from llmcli.config.attention import AttentionConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.config.ssm import SsmConfig
from llmcli.families.rope import GGUF_FACTORS, GGUF_LONGROPE
from llmcli.families.rules import (
    NOWHERE,
    AddConstant,
    CollectRows,
    Drop,
    LaterRows,
    LogNeg,
    Multiply,
    Op,
    PerExpert,
    Ranges,
    Rename,
    Reshape,
    Rows,
    Rule,
    Transpose,
    UnpairRows,
)

T = TypeVar("T")
Row = tuple[str, str, str]  # our name, transformers', llama.cpp's
Interleaved = Literal["never", "gguf", "always"]
_OPERATIONS = ("shape", "log", "turned", "by_head", "by_width")  # on a stored tensor

_OUTER = (  # outside the blocks
    *("embed", "embed_norm", "embed_proj", "pos_embed", "ln_final", "head_proj", "head"),
    *("ple.embed.W", "ple.W_proj", "ple.proj_norm.w"),
)
_COMPUTED = "RoPE frequencies, which are computed"
_READ = "read into the configuration as the rotation's frequency factors"
_KEPT = ("attn.W_k", "attn.W_v", "attn.b_k", "attn.b_v", "attn.k_norm.w")
_SHARED_KV = "its layer reads the keys and values of another"
MTP = "multi-token prediction, which the next token does not need"
_MIXERS = {AttentionConfig: "attn", LatentConfig: "attn", DeltaConfig: "linattn"}
_MIXERS |= {SsmConfig: "ssm", ShortConvConfig: "conv"}
_KINDS = {**_MIXERS, MlpConfig: "mlp", ExpertsConfig: "moe"}


@dataclass(frozen=True, kw_only=True)
class Names:
    """A table of tensor names: for each of ours, those of transformers and of llama.cpp.

    Names are without `.weight` and `.bias`: `attn.q` is `W_q` and `b_q`, `ln1` its `w` and `b`;
    after `=` all names of a row are complete. `-`, or a missing last name, is none. Several rows
    may name the same parameter, the usual one first. `attn.q+attn.k+attn.v` are rows of one tensor,
    one part after another: with `@head` for each head, with `@row` by turns. `{expert}`, `{head}`:
    one tensor for each. `|` before operations on the stored tensor: `shape` (the file has the
    numbers in another one), `log` (it has `−exp(x)`), `turned` (each expert's matrix is `[in,
    out]`), `by_head` (each head's is), `by_width` (divided by √D). A tensor without a parameter in
    the model is surplus.

    transformers' names begin with one of `prefixes` (a bare decoder's has none), in a block also
    with `layer`; `buffers` are names in a block that are dropped, and the reasons. `conv1d`: its
    matrices are `[in, out]`. `rotary`: files may have RoPE frequencies or their factors.
    `interleaved`: the files in which RoPE pairs adjacent query and key rows. For `gguf` the
    converter has reordered them, in layers without RoPE, too. `experts`: rows of transformers'
    names in a mixture. `predicts`: `mtp` and later layers are for multi-token prediction.
    `first_position`: the row of position 0 in the table of positions. `also`: other names in
    transformers, beside these.
    """

    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ("model.", "")
    layer: str = "layers.{layer}"
    buffers: tuple[tuple[str, str], ...] = (("self_attn.rotary_emb.inv_freq", _COMPUTED),)
    conv1d: bool = False
    rotary: bool = True
    interleaved: Interleaved = "never"
    experts: tuple[Row, ...] = ()
    predicts: bool = False
    first_position: int = 0
    also: Names | None = None

    def but(self, text: str) -> Names:
        """The table changed by lines of `text`: rows, which replace their namesakes, and fields.

        A field is `word: value`, of those above as their types say, but: `prefixes` are words (`-`:
        the empty one), `experts` those of the function (`-`: no rows), `buffers` names and their
        reason (`-`: none), `also` a table of `TABLES`. `without`: names whose rows go. `mixer`: the
        rows of Mamba-2 in a module with this prefix. Raises ValueError for a line that is neither,
        and for what is unknown in one.
        """
        gone, changes, buffers = list[str](), dict[str, Any](), list[tuple[str, str]]()
        rows = list[Row]()
        for line in text.splitlines():
            word, colon, value = line.strip().partition(": ")
            match word:
                case "without":
                    named = [name for name, _, _ in self.rows]
                    gone += [known(name, named, "row of the table") for name in value.split()]
                case "mixer":
                    rows += _table(MIXER.replace("mixer.", value))
                case "prefixes":
                    changes[word] = tuple("" if one == "-" else one for one in value.split())
                case "experts":
                    changes[word] = () if value == "-" else experts(*value.split())
                case "buffers":
                    those, _, reason = value.partition(": ")
                    buffers += [(name, reason) for name in those.split() if name != "-"]
                    changes[word] = tuple(buffers)
                case "also":
                    changes[word] = table(value)
                case "layer":
                    changes[word] = value
                case "interleaved":
                    changes[word] = known(value, get_args(Interleaved), f"value of `{word}`")
                case "conv1d" | "rotary" | "predicts":
                    changes[word] = known(value, ("true", "false"), f"value of `{word}`") == "true"
                case "first_position":
                    changes[word] = int(value)
                case _ if colon:
                    raise ValueError(f"`{word}` is no field of a table of names")
                case _:
                    rows += _table(line)
        gone += [name for name, _, _ in rows]
        kept = (row for row in self.rows if row[0] not in gone)
        return replace(self, rows=(*rows, *kept), **changes)

    def hf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for transformers' names."""
        rules: list[Rule] = []
        model, rows = _Parts(config), (*self.rows, *self.experts)
        named = [(ours, theirs) for ours, theirs, _ in rows if theirs != "-"]
        for head in (theirs for ours, theirs in named if ours == "head"):  # without a prefix
            tied = Drop(f"{head}.weight", "tied: the head is `embed.W`")
            rules.append(tied if config.head.tied else Rename(f"{head}.weight", "head.W"))
        for prefix in self.prefixes:
            layer = prefix + self.layer
            for ours, theirs in named:
                if ours != "head":
                    source = f"{prefix if _is_outer(ours) else f'{layer}.'}{theirs}"
                    own = self._row(model, ours, source, self.interleaved == "always")
                    rules += map(_transposed, own) if self.conv1d else own
            rules += [Drop(f"{layer}.{buffer}", reason) for buffer, reason in self.buffers]
            if self.rotary:
                rules.append(Drop(f"{prefix}rotary_emb.inv_freq", _COMPUTED))
            if self.predicts:
                later = f"{layer}.*".replace("{layer}", "{later}")
                rules += [_later_layers(later, config), Drop(f"{prefix}mtp.*", MTP)]
        also = () if self.also is None else self.also.hf(config)
        return (*_without_shared_kv(rules, config), *also)

    def gguf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for llama.cpp's names; norms are stored with their offset."""
        rules: list[Rule] = []
        model = _Parts(config)
        offset, interleaved = config.final_norm.offset, self.interleaved != "never"
        for ours, _, theirs in (*self.rows, *_GGUF_EXPERTS):
            if theirs != "-" and not (ours == "head" and config.head.tied):
                source = theirs if _is_outer(ours) else f"blk.{{layer}}.{theirs}"
                rules += self._row(model, ours, source, interleaved, offset)
        if self.rotary:
            rules += [Drop(name, _READ) for name in (GGUF_FACTORS, *GGUF_LONGROPE)]
            rules.append(Drop("blk.{layer}.attn_rot_embd.weight", _COMPUTED))
        if self.predicts:
            rules.append(_later_layers("blk.{later}.*", config))
        return tuple(_without_shared_kv(rules, config))

    def _row(
        self, model: _Parts, ours: str, source: str, interleaved: bool, offset: float = 0.0
    ) -> Iterator[Rename]:
        """Rules of one row; GGUF norms have `offset` added."""
        names, _, by = ours.removeprefix("=").partition("@")
        parts, first = names.split("+"), 0
        source, *words = source.split("|")
        for name in parts:
            kind = name.partition(".")[0]
            part = model.first.get(kind)
            if part is None and kind in _KINDS.values():
                return
            within = model.within(kind)
            if "{head}" in source and part is not None:
                within["head"] = range(part.heads if name == "attn.q_norm" else part.kv_heads)
            ops = [_operation(word, part, name, model.width) for word in words]
            if name == "pos_embed" and (start := self.first_position):
                ops.append(LaterRows(start, start + (model.config.embedding.positions or 0)))
            if len(parts) > 1:
                size, heads = _size(part, name, model.width)
                groups = {"": 1, "head": heads, "row": size}[by]
                rows = Rows(first, first + size // groups, groups)
                first = rows.stop
                ops.append(PerExpert(rows) if _is_stacked(name) else rows)
            if ours.startswith("="):
                index = "[{expert}]" * ("{expert}" in source)
                yield Rename(source, f"{_where(name)}{name}{index}", *ops, within=within)
            elif name.startswith("ln") and model.config.post_norm:
                yield from _norm_after(model.config, source, name)
            elif name in ("attn.q", "attn.k") and interleaved:
                yield from self._unpaired(model.config, source, name, ops)
            elif name == "attn.q" and isinstance(part, AttentionConfig) and part.gated:
                # the gate rows of each head follow its query rows
                q, both = part.head_dim, part.head_dim + part.value_dim
                for own, start, stop in (("q", 0, q), ("gate", q, both)):
                    taken = Rows(start, stop, part.heads)
                    yield from _renames(source, f"attn.{own}", *ops, taken, within=within)
            else:
                ops += _reordered(part, name, by)
                yield from _renames(source, name, *ops, offset=offset, within=within)

    def _unpaired(
        self, config: ModelConfig, source: str, part: str, ops: Sequence[Op]
    ) -> Iterator[Rename]:
        """Rules for query or key rows of which adjacent ones are rotated together."""
        for index, layer in enumerate(config.layers):
            if (a := layer.attention) is None:
                continue
            dims = a.head_dim if self.interleaved == "gguf" else 0
            dims = a.rope.dims if a.rope is not None else dims
            heads = a.heads if part == "attn.q" else a.kv_heads
            for rule in _renames(source, part, *ops, UnpairRows(heads, dims)):
                own, target = (one.format(layer=index) for one in (rule.source, rule.target))
                yield Rename(own, target, *rule.ops)


class _Parts:
    """A model's parts by the first word of their names: the first one, and the layers with it."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.width = config, config.width
        self.first: dict[str, Any] = {}
        self._layers: dict[str, list[int]] = {}
        for index, layer in enumerate(config.layers):
            for part in layer.parts:
                if (kind := _KINDS.get(type(part))) is not None:
                    self.first.setdefault(kind, part)
                    self._layers.setdefault(kind, []).append(index)

    def within(self, kind: str) -> dict[str, Sequence[int]]:
        """The ranges of a rule; mixers of several kinds may use the same names."""
        found: dict[str, Sequence[int]] = {}
        if kind in _MIXERS.values() and len(self._layers[kind]) < len(self.config.layers):
            found["layer"] = self._layers[kind]
        if kind == "moe":
            found["expert"] = range(self.first[kind].experts)
        return found


def _renames(
    source: str, part: str, *ops: Op, offset: float = 0.0, within: Ranges = NOWHERE
) -> Iterator[Rename]:
    """Rules for the weight and the bias of a part by our name; norms have `offset` added."""
    where, _, symbol = part.rpartition(".")
    norm = symbol.startswith("ln") or symbol.endswith("norm")
    block, each = _where(part), "{expert}" in source
    for kind, letter in (("weight", "w"), ("bias", "b")):
        if norm:
            shift = (AddConstant(-offset),) if offset and letter == "w" else ()
            name = f"{block}{part}.{letter}" + "[{head}]" * ("{head}" in source)
            yield Rename(f"{source}.{kind}", name, *shift, within=within)
        elif where and not (each and letter == "b"):
            name = f"{block}{where}.{letter if letter == 'b' else 'W'}_{symbol}"
            name += "[{expert}]" * each
            yield Rename(f"{source}.{kind}", name, *ops, within=within)
        elif kind == "weight":
            yield Rename(f"{source}.weight", f"{part}.W", *ops)


def _norm_after(config: ModelConfig, source: str, name: str) -> Iterator[Rename]:
    """Rules for a norm of a post-norm block: here it is in the next sublayer, see `LayerConfig`."""
    if name == "ln1":
        yield from _renames(source, "ln2")
    for after in range(1, len(config.layers) + 1) if name == "ln2" else ():
        for rule in _renames(source, "ln1" if after < len(config.layers) else "ln_final"):
            layer = rule.source.format(layer=after - 1)
            yield Rename(layer, rule.target.format(layer=after))


def _is_outer(ours: str) -> bool:
    return ours.removeprefix("=") in _OUTER


def _where(name: str) -> str:
    return "" if _is_outer(name) else "blocks.{layer}."


def _is_stacked(name: str) -> bool:
    """Whether the parameter has a matrix or vector for each expert."""
    return name.startswith("moe.") and not name.startswith("moe.shared.")


def _operation(word: str, part: Any, name: str, width: int) -> Op:
    """The operation on a stored tensor that a word of the table means."""
    match word:
        case "shape":
            return Reshape(_shape(part, name, width))
        case "log":
            return LogNeg()
        case "by_width":
            return Multiply(width**-0.5)
        case "turned":
            return PerExpert(Transpose())
        case _:  # "by_head"
            return PerExpert(Transpose(), of="head")


def _shape(part: Any, name: str, width: int) -> tuple[int, ...]:
    """The shape of a parameter that files may store in another one."""
    match part, name.partition(".")[2]:
        case ExpertsConfig(), _:
            return (1, width)
        case LatentConfig(), _:
            return (_size(part, name, width)[0], part.rank)
        case ShortConvConfig(), _:
            return (width, part.length)
        case SsmConfig() | DeltaConfig(), "w":
            return (part.channels, part.length)
        case SsmConfig(), "norm.w":
            return (part.inner,)
        case _:
            return (part.heads,)


def _size(part: Any, name: str, width: int) -> tuple[int, int]:
    """Output rows of a projection, and heads."""
    leaf = name.rpartition(".")[2].removeprefix("W_").removeprefix("b_")
    match part:
        case AttentionConfig():
            q = part.head_dim + part.value_dim * part.gated
            k, v = part.kv_heads * part.head_dim, part.kv_heads * part.value_dim
            return {"q": part.heads * q, "k": k, "v": v}[leaf], part.heads
        case LatentConfig():
            r = part.rope.dims
            if leaf in ("kv_latent", "k_pe"):
                return {"kv_latent": part.rank, "k_pe": r}[leaf], 1
            each = {"q": part.content, "q_pe": r, "k": part.content, "v": part.value_dim}[leaf]
            return part.heads * each, part.heads
        case DeltaConfig():
            sizes = {"in": part.channels, "gate": part.heads * part.value_dim}
            return sizes.get(leaf, part.heads), part.key_heads
        case SsmConfig():
            return {"gate": part.inner, "in": part.channels, "dt": part.heads}[leaf], part.heads
        case ShortConvConfig():
            return width, 1
        case ExpertsConfig(shared=shared) if shared is not None and ".shared." in name:
            return shared.hidden, 1
        case _:
            return part.hidden, 1


def _reordered(part: Any, name: str, by: str) -> tuple[Op, ...]:
    """The operation on rows that a file stores in another order than ours."""
    if isinstance(part, LatentConfig) and name.endswith("_pe"):  # RoPE pairs are adjacent rows
        return (UnpairRows(_size(part, name, 0)[1], part.rope.dims),)
    if isinstance(part, DeltaConfig) and name == "linattn.in" and by == "head":
        values = part.heads // part.key_heads * part.value_dim
        return (CollectRows(part.key_heads, (part.key_dim, part.key_dim, values)),)
    return ()


def _without_shared_kv(rules: Iterable[Rule], config: ModelConfig) -> Iterator[Rule]:
    """Keep rules for keys and values only in layers that compute them; drop the others' tensors."""
    found = [layer.attention for layer in config.layers]
    shared = [i for i, a in enumerate(found) if a is not None and a.kv.layer is not None]
    own = [i for i in range(len(found)) if i not in shared]
    for rule in rules:
        if shared and isinstance(rule, Rename) and rule.target.endswith(_KEPT):
            yield Rename(rule.source, rule.target, *rule.ops, within={"layer": own})
            yield Drop(rule.source, _SHARED_KV, within={"layer": shared})
        else:
            yield rule


def _later_layers(pattern: str, config: ModelConfig) -> Drop:
    """Drop layers after the last one; `pattern` has `{later}` for their number."""
    count = len(config.layers)
    return Drop(pattern, MTP, {"later": range(count, count + 16)})


def _transposed(rule: Rename) -> Rename:
    """The rule with the matrix of a projection, if it fills one, stored `[in, out]`."""
    if ".W_" not in rule.target:
        return rule
    return Rename(rule.source, rule.target, Transpose(), *rule.ops, within=rule.within)


def _table(text: str) -> tuple[Row, ...]:
    return tuple(_parsed(line) for line in text.splitlines() if line.strip())


def _parsed(line: str) -> Row:
    names = line.split()
    if not 2 <= len(names) <= 3:
        raise ValueError(f"`{' '.join(names)}` is no row of names: ours and one for each format")
    for name in names[1:]:
        for word in name.split("|")[1:]:
            known(word, _OPERATIONS, "operation on a tensor")
    ours, hf, gguf = (*names, "-")[:3]
    return ours, hf, gguf


def known(one: T, those: Collection[T], what: str) -> T:
    """`one`, if it is one of `those`; otherwise raises ValueError: it is no `what`."""
    if one not in those:
        raise ValueError(f"`{one}` is no {what}: {', '.join(map(str, those))}")
    return one


def table(name: str) -> Names:
    """The table of that name; raises ValueError if there is none."""
    return TABLES[known(name, TABLES, "table of names")]


def experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Rows of a mixture: one tensor for each expert, as published, or all experts in one.

    `block` and its leaves are the published names; transformers 5 fuses gate and up, mostly in
    `mlp`.
    """
    leaves = {"gate": gate, "up": up, "down": down}
    rows = [f"moe.{ours} {block}.experts.{{expert}}.{name}" for ours, name in leaves.items()]
    for one in dict.fromkeys((block, "mlp")):
        rows.append(f"=moe.W_gate+moe.W_up {one}.experts.gate_up_proj")
        rows += [f"=moe.W_down {one}.experts.down_proj", f"moe.router {one}.gate"]
    rows += ["=moe.b_choice mlp.gate.e_score_correction_bias", "moe.shared mlp.shared_expert_gate"]
    for shared in ("shared_expert", "shared_experts"):
        rows += [f"moe.shared.{leaf} mlp.{shared}.{leaf}_proj" for leaf in leaves]
    return _table("\n".join(rows))


_GGUF_EXPERTS = _table("""
    moe.router       -  ffn_gate_inp
    =moe.b_choice    -  exp_probs_b.bias
    moe.shared       -  ffn_gate_inp_shexp|shape
    moe.gate         -  ffn_gate_exps
    moe.up           -  ffn_up_exps
    moe.down         -  ffn_down_exps
    moe.gate+moe.up  -  ffn_gate_up_exps
    moe.shared.gate  -  ffn_gate_shexp
    moe.shared.up    -  ffn_up_shexp
    moe.shared.down  -  ffn_down_shexp
""")
MIXER = """
    ssm.gate+ssm.in+ssm.dt  mixer.in_proj              ssm_in
    ssm.out                 mixer.out_proj             ssm_out
    =ssm.w                  mixer.conv1d.weight|shape  ssm_conv1d.weight|shape
    =ssm.b                  mixer.conv1d.bias          ssm_conv1d.bias
    =ssm.norm.w             mixer.norm.weight          ssm_norm.weight|shape
    =ssm.A_log              mixer.A_log                ssm_a|shape|log
    =ssm.dt_bias            mixer.dt_bias              ssm_dt.bias
    =ssm.D                  mixer.D                    ssm_d|shape
"""
MLP = experts("mlp", "gate_proj", "up_proj", "down_proj")
LLAMA = Names(interleaved="gguf", experts=MLP, rows=_table("""
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
QWEN = LLAMA.but("interleaved: never")
POST_NORM_2 = QWEN.but("ln2  post_attention_layernorm  post_attention_norm")
TABLES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "post_norm_2": POST_NORM_2,
    "none": Names(rows=()),
}
