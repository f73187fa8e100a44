"""Random small models of every variant that the parts have."""

from hypothesis import strategies as st

from llmcli.config import (
    AttentionConfig,
    EmbeddingConfig,
    HeadConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)

sizes = st.integers(1, 9)
flags = st.booleans()


@st.composite
def norms(draw):
    kind = draw(st.sampled_from(["rms", "layer"]))
    return NormConfig(kind=kind, eps=1e-5, bias=kind == "layer" and draw(flags))


@st.composite
def attentions(draw):
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(sizes)
    rope = None
    if head_dim >= 2 and draw(flags):
        rope = RopeConfig(theta=100.0, dims=2 * draw(st.integers(1, head_dim // 2)))
    return AttentionConfig(
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(sizes),
        scale=0.5,
        rope=rope,
        qk_norm=draw(st.none() | st.just(NormConfig(kind="rms", eps=1e-6))),
        window=draw(st.none() | st.integers(1, 6)),
        qkv_bias=draw(flags),
        out_bias=draw(flags),
    )


@st.composite
def layers(draw):
    mlp = MlpConfig(
        hidden=draw(sizes),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"])),
        gated=draw(flags),
        bias=draw(flags),
    )
    return LayerConfig(mixer=draw(attentions()), ffn=mlp, ln1=draw(norms()), ln2=draw(norms()))


@st.composite
def models(draw):
    """Layers may differ from one another in everything but the width."""
    return ModelConfig(
        family="any",
        model_type="any",
        vocab=draw(st.integers(1, 20)),
        width=draw(sizes),
        context=64,
        layers=tuple(draw(st.lists(layers(), min_size=1, max_size=3))),
        embedding=EmbeddingConfig(positions=draw(st.none() | st.just(64))),
        final_norm=draw(norms()),
        head=HeadConfig(tied=draw(flags), bias=draw(flags)),
    )
