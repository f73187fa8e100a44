"""The specs themselves: names, axes, formulas, bytes, and the count of visible pairs."""

import subprocess
import sys
from dataclasses import replace

import pytest
from anatomy_configs import GPT, QWEN

from llmcli.anatomy import activations, parameters, states
from llmcli.anatomy.attention import visible_pairs


def axes_and_shapes(specs):
    return {spec.name: (" ".join(spec.axes), spec.shape) for spec in specs}


def call(config, **given):
    given = {"batch": 2, "tokens": 5, "past": 0, "phase": "prefill"} | given
    return {spec.name: spec for spec in activations(config, **given)}


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


def test_parameters_of_a_model_with_learned_positions_and_a_tied_head():
    names = [spec.name for spec in parameters(GPT)]
    assert names == [
        *("embed.W", "pos_embed.W", "blocks.0.ln1.w", "blocks.0.ln1.b"),
        *("blocks.0.attn.W_q", "blocks.0.attn.b_q", "blocks.0.attn.W_k", "blocks.0.attn.b_k"),
        *("blocks.0.attn.W_v", "blocks.0.attn.b_v", "blocks.0.attn.W_o", "blocks.0.attn.b_o"),
        *("blocks.0.ln2.w", "blocks.0.ln2.b", "blocks.0.mlp.W_up", "blocks.0.mlp.b_up"),
        *("blocks.0.mlp.W_down", "blocks.0.mlp.b_down", "ln_final.w", "ln_final.b"),
    ]


def test_formulas_follow_one_another():
    """Every letter on a right side is a parameter or was on a left side before."""
    formulas = {name: spec.formula for name, spec in call(QWEN).items()}
    assert formulas["embed"] == "E = W[ids]"
    assert formulas["blocks.0.resid_pre"] == "R = E"
    assert formulas["blocks.0.ln1.scale"] == "s = √(mean(R²) + ε)"
    assert formulas["blocks.0.ln1.out"] == "X = R / s ∘ w"
    assert formulas["blocks.0.attn.q"] == "Q = X W_q + b_q"
    assert formulas["blocks.0.attn.q_norm"] == "Q' = Q / s ∘ w"
    assert formulas["blocks.0.attn.q_rot"] == "Q_rot = R(positions) Q'"
    assert formulas["blocks.0.attn.z"] == "Z = softmax(scale · Q_rot K_rotᵀ + mask) V"
    assert formulas["blocks.0.attn_out"] == "A = Z W_o"
    assert formulas["blocks.0.resid_mid"] == "R' = R + A"
    assert formulas["blocks.0.ln2.out"] == "X' = R' / s ∘ w"
    assert formulas["blocks.0.mlp.act"] == "G' = silu(G)"
    assert formulas["blocks.0.mlp.post"] == "M = G' ∘ U"
    assert formulas["blocks.0.mlp_out"] == "Y = M W_down"
    assert formulas["blocks.0.resid_post"] == "R'' = R' + Y"
    assert formulas["logits_raw"] == "logits = X W"


def test_formulas_of_layer_norm_learned_positions_and_a_plain_mlp():
    formulas = {name: spec.formula for name, spec in call(GPT).items()}
    assert formulas["blocks.0.resid_pre"] == "R = E + P"
    assert formulas["blocks.0.ln1.scale"] == "s = √(mean((R − mean(R))²) + ε)"
    assert formulas["blocks.0.ln1.out"] == "X = (R − mean(R)) / s ∘ w + b"
    assert formulas["blocks.0.attn.z"] == "Z = softmax(scale · Q Kᵀ + mask) V"
    assert formulas["blocks.0.attn_out"] == "A = Z W_o + b_o"
    assert formulas["blocks.0.mlp.pre"] == "G = X' W_up + b_up"
    assert formulas["blocks.0.mlp.post"] == "M = gelu_tanh(G)"
    assert formulas["logits_raw"] == "logits = X W_Eᵀ"
    without_rope = replace(QWEN.layers[0].mixer, rope=None)
    config = replace(QWEN, layers=(replace(QWEN.layers[0], mixer=without_rope),))
    assert "Q' K'ᵀ" in call(config)["blocks.0.attn.z"].formula


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
    assert specs["blocks.0.attn.q"].bytes == 2 * 6 * 5 * 4 * 2
    assert specs["blocks.0.ln1.scale"].bytes == 2 * 5 * 4  # at least float32
    assert specs["logits"].dtype == "float32"
    assert specs["logits_raw"].dtype == "bfloat16"
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
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
