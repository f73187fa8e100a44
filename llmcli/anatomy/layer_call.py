"""What one forward call of one layer computes, reads and writes beside parameters. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmcli.anatomy.attention import entering
from llmcli.anatomy.model import activations
from llmcli.anatomy.places import Place, place_of
from llmcli.anatomy.spec import DTYPE_BYTES, Call, Logits, TensorSpec
from llmcli.config import AttentionConfig, ModelConfig
from llmcli.reports.work import PartWork

_PRODUCTS = ("qkv", "out", "ffn_up", "ffn_down", "head")  # one product with weights each
# what an activation is computed from; those that are not there are not read
_READS = {
    "attn.q": ("ln1.out",),
    "attn_out": ("attn.z",),
    "resid_mid": ("attn_out", "resid_pre"),
    "mlp.gate": ("ln2.out",),
    "mlp.pre": ("ln2.out",),
    "mlp.act": ("mlp.gate",),
    "mlp.post": ("mlp.pre", "mlp.act", "mlp.up"),
    "mlp_out": ("mlp.post",),
    "resid_post": ("mlp_out", "resid_mid"),
    "logits_raw": ("ln_final.out",),
    "logits": ("logits_raw",),
}


@dataclass(frozen=True)
class LayerCall:
    """One call of a model with one layer, all but its parameters."""

    config: ModelConfig
    call: Call
    logits: Logits

    def works(self) -> Iterator[tuple[Place, PartWork]]:
        """What each activation takes; several may be of one part."""
        call = self.call
        specs = activations(
            self.config, batch=call.batch, tokens=call.tokens, past=call.past,
            phase=call.phase, logits=self.logits, dtype=call.dtype,
        )  # fmt: skip
        there = {spec.name: spec for spec in specs}
        for spec in specs:
            place = place_of(spec.name)
            if spec.name.endswith(".scale") or place[0] == "gaps":
                continue
            yield (
                place,
                PartWork(
                    flops=spec.flops - spec.masked_flops,
                    flops_full=spec.flops,
                    activations=self._moved(spec, there),
                ),
            )
            if spec.name.endswith("attn.z"):
                yield place, self._cached()
        rows = call.batch * call.tokens
        last = call.batch * (1 if self.logits == "last" else call.tokens)
        for part in _PRODUCTS[: -1 if self.logits == "none" else None]:
            single = (last if part == "head" else rows) == 1
            place = (part, None if part == "head" else 0)
            yield place, PartWork(gemv=int(single), gemm=int(not single))

    def _cached(self) -> PartWork:
        """Keys and values that some new token sees, and the new ones put beside them."""
        mixer, call = self.config.layers[0].mixer, self.call
        per_key = call.batch * mixer.kv_heads * (mixer.head_dim + mixer.value_dim) * self._size
        return PartWork(
            cache=per_key * keys_read(mixer, call), activations=2 * per_key * call.tokens
        )

    def _moved(self, spec: TensorSpec, there: Mapping[str, TensorSpec]) -> int:
        """Bytes that are read to compute an activation, and written."""
        name = spec.name.removeprefix("blocks.0.")
        if name == "embed":  # ids, and the rows where the head counts the whole table
            rows = spec.count * self._size if self.config.head.tied else 0
            return _bytes(spec) + rows + 8 * self.call.batch * self.call.tokens
        if name == "pos_embed":  # looked up once for all sequences
            return _bytes(spec) // self.call.batch
        if name == "resid_pre":
            if "pos_embed" not in there:
                return 0  # the embedding itself
            return 2 * _bytes(spec) + _bytes(there["pos_embed"]) // self.call.batch
        written = 0 if spec.shares == "logits_raw" else _bytes(spec)
        return written + self._read(name, spec, there)

    def _read(self, name: str, spec: TensorSpec, there: Mapping[str, TensorSpec]) -> int:
        """Bytes of the activations that one is computed from."""
        if name in ("attn.k", "attn.v", "mlp.up") or spec.shares == "logits_raw":
            return 0  # of the same product as the one before, or a view
        if name in ("attn.q_rot", "attn.k_rot"):
            return _bytes(spec) + (self._rotation() if name == "attn.q_rot" else 0)
        if name == "attn.z":
            return _bytes(there[entering("blocks.0.attn", there)[0]])
        if name not in _READS:  # norms: as many numbers as they write
            return spec.count * DTYPE_BYTES[str(self.call.wide_dtype)]
        operands = (there.get(f"blocks.0.{read}", there.get(read)) for read in _READS[name])
        return sum(_bytes(operand) for operand in operands if operand is not None)

    def _rotation(self) -> int:
        """cos and sin of the new positions."""
        rope = self.config.layers[0].mixer.rope
        assert rope is not None
        return 2 * self.call.tokens * rope.dims * max(self._size, 4)

    @property
    def _size(self) -> int:
        return DTYPE_BYTES[str(self.call.dtype)]


def keys_read(mixer: AttentionConfig, call: Call) -> int:
    """How many keys of each sequence at least one new token sees: all, or the last ones."""
    if mixer.window is None:
        return call.keys
    return min(call.keys, call.tokens + mixer.window - 1)


def _bytes(spec: TensorSpec) -> int:
    assert spec.bytes is not None
    return spec.bytes
