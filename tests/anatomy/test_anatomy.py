"""The specs themselves: names, axes, formulas, bytes, and the count of visible pairs."""

import sys
from dataclasses import replace

import children
import pytest
from anatomy_configs import GPT, QWEN, models
from hypothesis import given, settings

from llmcli.anatomy import parameters, plan, states
from llmcli.graph.ops import visible_pairs
from llmcli.graph.spec import Call
from llmcli.observe.rules import rules


def axes_and_shapes(specs):
    return {spec.name: (" ".join(spec.axes), spec.shape) for spec in specs}


def call(config, **given):
    given = {"batch": 2, "tokens": 5, "past": 0, "phase": "prefill"} | given
    logits = given.pop("logits", "all")
    return {spec.name: spec for spec in plan(config, Call(**given), logits=logits).written}


def test_parameters_with_biases_norms_and_their_own_head():
    assert axes_and_shapes(parameters(QWEN)) == {
        "embed.W": ("V D", (50, 12)),
        "blocks.0.ln1.w": ("D", (12,)),
        "blocks.0.attn.W_q": ("D H·dh", (12, 24)),
        "blocks.0.attn.b_q": ("H·dh", (24,)),
        "blocks.0.attn.W_k": ("D Hk·dh", (12, 8)),
        "blocks.0.attn.b_k": ("Hk·dh", (8,)),
        "blocks.0.attn.W_v": ("D Hk·dv", (12, 6)),
        "blocks.0.attn.b_v": ("Hk·dv", (6,)),
        "blocks.0.attn.q_norm.w": ("dh", (4,)),
        "blocks.0.attn.k_norm.w": ("dh", (4,)),
        "blocks.0.attn.W_o": ("H·dv D", (18, 12)),
        "blocks.0.ln2.w": ("D", (12,)),
        "blocks.0.mlp.W_gate": ("D F", (12, 20)),
        "blocks.0.mlp.W_up": ("D F", (12, 20)),
        "blocks.0.mlp.W_down": ("F D", (20, 12)),
        "ln_final.w": ("D", (12,)),
        "head.W": ("D V", (12, 50)),
    }


def test_formulas_follow_one_another():
    """Every letter on a right side is a parameter or was on a left side before.

    Those of a model with LayerNorm, learned positions and a tied head: transcripts/shapes-names.txt
    """
    formulas = {name: spec.formula for name, spec in call(QWEN).items()}
    assert formulas["embed"] == "E = W_E[id]"
    assert formulas["blocks.0.resid_pre"] == "X = E"
    assert formulas["blocks.0.ln1.scale"] == "s = √(mean(X²) + ε)"
    assert formulas["blocks.0.ln1.out"] == "T¹ = RMSNorm(X) = X / s · w"
    assert formulas["blocks.0.attn.q"] == "Q = T¹ W_q + b_q"
    assert formulas["blocks.0.attn.q_norm"] == "Q_norm = RMSNorm(Q) = Q / s · w"
    assert formulas["blocks.0.attn.q_rot"] == "Q_rot = R(position) Q_norm"
    assert formulas["blocks.0.attn.z"] == "C = A V"
    assert formulas["blocks.0.attn_out"] == "T² = C W_o"
    assert formulas["blocks.0.resid_mid"] == "T³ = T² + X"
    assert formulas["blocks.0.ln2.scale"] == "s = √(mean((T³)²) + ε)"
    assert formulas["blocks.0.ln2.out"] == "T⁴ = RMSNorm(T³) = T³ / s · w"
    assert formulas["blocks.0.mlp.act"] == "Activation(G) = SiLU(G)"
    assert formulas["blocks.0.mlp.post"] == "L = Activation(G) ∘ U"
    assert formulas["blocks.0.mlp_out"] == "T⁵ = L W_down"
    assert formulas["blocks.0.resid_post"] == "H = T⁵ + T³"
    assert formulas["logits_raw"] == "logits = H′ W_head"
    weights = {spec.name: spec.formula for spec in parameters(QWEN)}
    assert weights["blocks.0.ln2.w"] == formulas["blocks.0.ln2.out"]
    assert weights["blocks.0.attn.b_k"] == formulas["blocks.0.attn.k"]
    assert weights["blocks.0.mlp.W_down"] == formulas["blocks.0.mlp_out"]


@pytest.mark.parametrize(
    ("change", "formula"),
    [
        ({"rope": None}, "Q_norm K_normᵀ · 0.3 + M"),
        ({"rope": None, "qk_norm": None, "scale": 0.5}, "Q Kᵀ / √d_k + M"),
        ({"heads": 3, "kv_heads": 3, "scale": 0.5}, "Q_rot K_rotᵀ / √(d/h) + M"),
    ],
)
def test_the_formula_of_the_scores_says_what_enters_them(change, formula):
    mixer = replace(QWEN.layers[0].attention, **{"scale": 0.3} | change)
    config = replace(QWEN, layers=(QWEN.layers[0].with_attention(mixer),))
    given = {"batch": 1, "tokens": 3, "past": 0, "phase": "prefill"}
    derived = {spec.name: spec.formula for spec in plan(config, Call(**given)).derived}
    assert derived["blocks.0.attn.scores"] == f"S = {formula}"
    assert derived["blocks.0.attn.pattern"] == "A = softmax(S)"


@settings(max_examples=40, deadline=None)
@given(models())
def test_formulas_are_those_that_explain_derives_with(config):
    """Two views never write one tensor in two ways."""
    specs = plan(config, Call(batch=1, tokens=3, past=0, phase="prefill", dtype="float32")).tensors
    derived = {name: rule.formula for name, rule in rules(config).items()}
    assert [spec.name for spec in specs] == list(derived)
    for spec in specs:
        said = derived[spec.name].removesuffix(", H of the last block")
        if spec.name.endswith(".pattern"):  # explain goes on to say what S is
            said = said.partition(" = softmax(Q")[0]
        if spec.name != "logits":  # which explain derives in one with `logits_raw`
            assert spec.formula == said


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_visible_pairs_against_the_mask_itself(window):
    for past in (0, 1, 2, 5, 8):
        for tokens in (1, 2, 5, 9):
            cells = sum(
                key <= query and (window is None or key > query - window)
                for query in range(past, past + tokens)
                for key in range(past + tokens)
            )
            assert visible_pairs(tokens, past, window) == cells


def test_scores_count_as_a_rectangle_and_say_what_the_mask_hides():
    z = call(QWEN, batch=1, tokens=4, past=3)["blocks.0.attn.z"]
    per_pair = 2 * 6 * (4 + 3)  # heads, then q·k and pattern·v
    assert z.flops == per_pair * 4 * 7
    assert z.flops - z.masked_flops == per_pair * (4 + 5 + 6 + 7)
    one = call(QWEN, batch=1, tokens=1, past=3, phase="decode")["blocks.0.attn.z"]
    assert one.masked_flops == 0


def test_bytes_follow_the_dtype_and_are_unknown_without_one():
    specs = call(QWEN, dtype="bfloat16")
    assert specs["blocks.0.attn.q_rot"].bytes == 2 * 6 * 5 * 4 * 2
    assert specs["blocks.0.ln1.scale"].bytes == 2 * 5 * 4  # at least float32
    assert {name for name, spec in specs.items() if spec.dtype == "float32"} == {
        "embed", "ln_final.scale", "logits_raw", "logits",
        *(f"blocks.0.{name}" for name in (
            "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post",  # the stream
            "ln1.scale", "ln2.scale", "attn.q", "attn.k",  # the last two are normalized
        )),
    }  # fmt: skip
    assert call(QWEN, dtype="float64")["blocks.0.ln1.scale"].dtype == "float64"
    assert call(QWEN)["logits"].bytes is None
    keys, values = states(QWEN, batch=2, capacity=10, dtype="float16")
    assert (keys.axes, keys.shape, keys.bytes) == (("B", "Hk", "S", "dh"), (2, 2, 10, 4), 320)
    assert (values.axes, values.shape, values.bytes) == (("B", "Hk", "S", "dv"), (2, 2, 10, 3), 240)
    assert "rotated" in keys.formula
    assert "rotated" not in states(GPT, batch=1, capacity=1)[0].formula


def test_last_logits_narrow_only_the_end():
    everything, last = call(QWEN), call(QWEN, logits="last")
    assert last["ln_final.out"].shape == (2, 1, 12)
    assert last["logits"].shape == (2, 1, 50)
    assert last["logits_raw"].flops * 5 == everything["logits_raw"].flops
    assert last["blocks.0.resid_post"] == everything["blocks.0.resid_post"]


def test_anatomy_and_families_import_no_torch():
    code = "import sys, llmcli.anatomy, llmcli.families as f; f.families()\n"
    code += "sys.exit('torch' in sys.modules)"
    assert children.run([sys.executable, "-c", code], check=False).returncode == 0
