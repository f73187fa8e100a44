"""What is emitted follows from its formulas: a part of it, some rows of it, token by token."""

import math

import pytest
import torch
from blocks import configure, ffn_of, norm_of
from decoder_parameters import parameters_of
from explain_models import IDS, NAMES, make
from small_models import random_model
from zoo import stretched

from llmcli.config.attention import DynamicScaling, LongRopeScaling
from llmcli.errors import NotFinite
from llmcli.inspect import formulas
from llmcli.inspect.formulas import formula_checks, formula_inputs, worst
from llmcli.inspect.kernel import Kernel, rules
from llmcli.records.document import ViewCheck
from llmcli.weights.dense import Dense

LONG = {
    "dynamic": stretched(DynamicScaling(factor=2.0, original=5)),
    "longrope": stretched(LongRopeScaling(
        short=(1.0,) * 4, long=(1.0, 1.5, 2.0, 4.0), original=6, attention_factor=1.0
    )),
}  # fmt: skip


def run(model, ids=IDS, logits="all"):
    seen = {}
    model.decoder(torch.tensor([ids]), tap=seen.__setitem__, logits=logits)
    return {name: tensor.clone() for name, tensor in seen.items()}


def step_by_step(model, ids, prompt):
    """The first tokens in one call, the others one by one, put together along the tokens."""
    pieces = {}
    state = model.decoder.new_state(1, len(ids))
    calls = [ids[:prompt], *([id] for id in ids[prompt:])]
    for call in calls:
        model.decoder(
            torch.tensor([call]), state, logits="last",
            tap=lambda name, tensor: pieces.setdefault(name, []).append(tensor),
        )  # fmt: skip
    return {name: torch.cat(parts, dim=-2) for name, parts in pieces.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_follows_from_what_the_kernel_wrote(name, dtype):
    model = make(name, dtype)
    found = formula_checks(model, IDS, run(model), rules(model.config))
    assert found.ok
    most = 0.84 if dtype == "bfloat16" else 0.7  # a number rounded correctly is off by up to 0.5
    assert 0 < found.value < most, "the kernel needs some of it, and not all"
    assert str(len(rules(model.config))) in found.words


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_is_red_when_one_of_its_numbers_is_off(name):
    model = make(name)
    good = run(model)
    for tensor in rules(model.config):
        if tensor not in good:
            continue
        broken = good[tensor].clone()
        at = (0, *((0,) if broken.ndim == 4 else ()), 3, -1 % broken.shape[-1])
        broken[at] += 1e-9 * broken.abs().max()
        found = formula_checks(model, IDS, good | {tensor: broken}, [tensor])
        assert not found.ok, tensor
        assert found.where == f"{tensor}[{','.join(map(str, at[1:]))}]"


@pytest.mark.parametrize("unwritten", ["scores", "pattern", "result"])
def test_what_was_written_by_hand_is_checked_and_not_computed_again(unwritten):
    model, name = make("window"), f"blocks.1.attn.{unwritten}"
    seen = run(model)
    tensor = torch.zeros(1, 4, len(IDS), 16 if unwritten == "result" else len(IDS))
    assert formula_checks(model, IDS, seen, [name]).ok
    assert not formula_checks(model, IDS, seen | {name: tensor.double()}, [name]).ok


def test_a_layer_alone_is_enough():
    model = make("llama", "float32")
    seen = run(model)
    wanted = [f"blocks.1.attn.{part}" for part in ("q", "k", "v", "q_rot", "k_rot", "pattern", "z")]
    needed = formula_inputs(model.config, wanted)
    assert needed == {"blocks.1.ln1.out", *wanted} - {"blocks.1.attn.pattern"}
    part = {name: seen[name] for name in needed}
    assert formula_checks(model, IDS, part, wanted) == formula_checks(model, IDS, seen, wanted)
    for name in needed:
        rest = {n: t for n, t in part.items() if n != name}
        with pytest.raises(ValueError, match=name):
            formula_checks(model, IDS, rest, wanted)


def test_a_result_needs_z_and_z_needs_queries_keys_and_values():
    config = make("gpt2").config
    assert formula_inputs(config, ["blocks.0.attn.result"]) == {"blocks.0.attn.z"}
    assert formula_inputs(config, ["blocks.0.attn.z", "head.W"]) == {
        f"blocks.0.attn.{part}" for part in "qkvz"
    }
    assert formula_inputs(config, ["embed"]) == {"embed"}


@pytest.mark.parametrize("wanted", [[], ["embed", "embed.W"], ["cache.0.k"]])
def test_a_name_without_a_formula_is_refused(wanted):
    model = make("gpt2")
    with pytest.raises(ValueError, match="no formula"):
        formula_checks(model, IDS, run(model), wanted)


@pytest.fixture
def sampled(monkeypatch):
    """Products of these small models are cheap: as if they were not."""
    monkeypatch.setattr(formulas, "CHEAP", 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 50])
@pytest.mark.parametrize("name", ["window", "gpt2", "odd"])
def test_some_rows_are_compared_as_they_are_among_all(rows, name, sampled):
    model = make(name, "float32")
    seen = run(model)
    for tensor in rules(model.config):
        whole = formula_checks(model, IDS, seen, [tensor])
        some = formula_checks(model, IDS, seen, [tensor], rows=rows)
        assert some.ok
        if tensor in seen:  # what is not is computed again, in other roundings
            assert some.value <= whole.value + 1e-6
        if rows >= len(IDS):
            assert some == whole


def caught(model, name, row, **options):
    """Whether a number of that row is found, where it is off."""
    seen = run(model)
    seen[name][(0, *((0,) if seen[name].ndim == 4 else ()), row, -1)] += 1
    found = formula_checks(model, IDS, seen, [name], **options)
    at = f"{row},{seen[name].shape[-1] - 1}]"
    assert found.ok or found.where in (f"{name}[{at}", f"{name}[0,{at}")
    return not found.ok


PRODUCTS, OTHERS = ("attn.q", "attn.z", "attn_out", "mlp.up"), (
    "ln1.out", "attn.q_rot", "resid_mid", "mlp.act", "mlp.post",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cheap", "at_once", "rows", "seen"),
    [
        *((name, 1, formulas.AT_ONCE, 3, [0, 3, 6]) for name in PRODUCTS),
        *((name, 1, size, 1, range(7)) for name in OTHERS for size in (1, 1 << 7, 1 << 20)),
        ("attn.q", formulas.CHEAP, formulas.AT_ONCE, 1, range(7)),
    ],
)
def test_the_rows_that_are_seen(name, cheap, at_once, rows, seen, monkeypatch):
    """Of a product the first, the last and some between; all where it is cheap or no product."""
    monkeypatch.setattr(formulas, "CHEAP", cheap)
    monkeypatch.setattr(formulas, "AT_ONCE", at_once)
    model, name = make("llama", "float32"), f"blocks.1.{name}"
    assert [row for row in range(7) if caught(model, name, row, rows=rows)] == [*seen]
    found = formula_checks(model, IDS, run(model), [name], rows=rows)
    assert found.words.endswith(f"(products: {rows} or more of 7 rows)")


def times(name, by, rows=slice(None)):
    """Plants a factor of those rows of the weight of that name."""

    def change(block):
        linear = getattr(ffn_of(block) if name == "down" else block.mixers[0], name)
        linear.weight = Dense(linear.weight.dense().clone())
        linear.weight.tensor[rows] *= by

    return change


def scaled_scores(block):
    mixer = block.mixers[0]
    configure(mixer, scale=mixer.config.scores.scale * 1.01)


def norm_weight(block):
    norm = norm_of(block, 1)
    norm.w = norm.w * 1.02


# 16 bits show two hundredths: a number is rounded by at most a 256th, and what cancels in a sum is
# allowed no more
@pytest.mark.parametrize(
    ("breaks", "first", "dtype"),
    [
        (scaled_scores, "blocks.1.attn.scores", "float32"),
        (lambda block: configure(block.mixers[0], window=5), "blocks.1.attn.scores", "float32"),
        (lambda block: configure(norm_of(block, 2), eps=1e-2), "blocks.1.ln2.scale", "float32"),
        (times("out", 1.001), "blocks.1.attn.result", "float32"),
        (lambda block: setattr(ffn_of(block), "act", torch.nn.functional.gelu),
         "blocks.1.mlp.act", "float32"),
        *(
            (breaks, first, dtype)
            for dtype in ("bfloat16", "float16")
            for breaks, first in (
                (times("qkv", 1.02), "blocks.1.attn.q"), (times("qkv", 1.02, 2), "blocks.1.attn.q"),
                (times("out", 1.02), "blocks.1.attn_out"),
                (times("down", 1.02), "blocks.1.mlp_out"),
                (norm_weight, "blocks.1.ln1.out"),
            )
        ),
    ],
)  # fmt: skip
def test_a_fault_of_the_model_is_found_where_it_is_made(breaks, first, dtype):
    model = make("window", dtype)
    assert formula_checks(model, IDS, run(model), rules(model.config)).ok
    breaks(model.decoder.blocks[1])
    seen = run(model)
    for names, rows in ((rules(model.config), None), (rules(model.config), 3)):
        if dtype != "float32":
            names, rows = seen, None
        found = formula_checks(model, IDS, seen, names, rows=rows)
        assert not found.ok
        assert found.where.startswith(f"{first}[")


def test_a_gpu_may_round_parts_of_a_sum_to_16_bits(monkeypatch):
    """As `NARROW_ROUNDINGS_GPU` says, which no machine here could measure."""
    model = make("window", "bfloat16")
    seen = run(model)
    on_cpu = formula_checks(model, IDS, seen, ["blocks.1.mlp.gate"])
    monkeypatch.setattr(Kernel, "device", lambda self, name: torch.device("cuda"))
    assert formula_checks(model, IDS, seen, ["blocks.1.mlp.gate"]).value < on_cpu.value / 4


@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("kind", ["window", "gpt2", "odd", *LONG])
def test_tokens_from_the_cache(kind, rows, prompt):
    long = kind in LONG
    broken = random_model(LONG[kind], torch.float32) if long else make(kind, "float32")
    seen = step_by_step(broken, IDS, prompt)
    names = rules(broken.config)
    assert seen["logits"].shape[1] == len(IDS) - prompt + 1
    assert formula_checks(broken, IDS, seen, names, rows=rows, prompt_tokens=prompt).ok
    if long and prompt > 1:  # as one call, all would be turned as the last one is
        assert not formula_checks(broken, IDS, seen, names, rows=rows).ok
    last = f"blocks.{len(broken.config.layers) - 1}.attn_out"
    seen[last][0, -1, 0] += 1
    found = formula_checks(broken, IDS, seen, names, rows=rows, prompt_tokens=prompt)
    assert found.where == f"{last}[{len(IDS) - 1},0]"


@pytest.mark.parametrize("prompt", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_is_allowed_the_roundings_of_its_mean(dtype, prompt):
    """One huge number: a norm that is given a single row loses digits of the small ones."""
    model = make("llama", dtype)
    parameters_of(model.decoder)["embed.W"][5, 3] = 5000.0
    ids = (9, 5, 5)
    seen = step_by_step(model, ids, prompt)
    assert formula_checks(model, ids, seen, rules(model.config), prompt_tokens=prompt).ok


def test_the_logits_of_the_last_token_alone():
    model = make("biases and relu", "float32")
    seen = run(model, logits="last")
    assert seen["logits"].shape[1] == 1
    found = formula_checks(model, IDS, seen, ["ln_final.scale", "ln_final.out", "logits"], rows=4)
    assert found.ok
    seen["logits"][0, 0, 7] += 1
    found = formula_checks(model, IDS, seen, ["logits"])
    assert (found.ok, found.where) == (False, "logits[6,7]")


def test_a_number_that_is_none_is_no_difference_but_an_error():
    model = make("gpt2")
    seen = run(model)
    seen["blocks.0.mlp.post"][0, 2, 3] = math.nan
    with pytest.raises(NotFinite, match=r"mlp\.post\[2,3\]"):
        formula_checks(model, IDS, seen, ["blocks.0.mlp.post"])


def test_the_worst_of_several_is_the_first_that_fails():
    def check(value):
        return ViewCheck(name="formulas", words="", value=value, tolerance=1.0)

    assert worst([check(0.1), check(0.9), check(0.2)]).value == 0.9
    assert worst([check(0.1), check(2.0), check(9.0)]).value == 2.0
    assert math.isnan(worst([check(0.9), check(math.nan), check(2.0)]).value)


def test_memory_is_linear_in_the_prompt(monkeypatch, sampled):
    """Of queries and keys there are never more float64 pairs than rows times keys."""
    model = make("llama", "float32")
    ids = [3 + i % 40 for i in range(300)]
    seen = run(model, ids, logits="last")
    largest = []
    exponential = torch.exp

    def watched(tensor):
        largest.append(tensor.numel())
        return exponential(tensor)

    monkeypatch.setattr(torch, "exp", watched)
    wanted = ["blocks.0.attn.pattern", "blocks.0.attn.z"]
    assert formula_checks(model, ids, seen, wanted, rows=4).ok
    assert largest
    assert max(largest) == 4 * 4 * 300


def test_weights_too_small_for_float16_are_no_fault():
    """200 equal keys far below the first: each weight is rounded the same way, and coarsely."""
    model = make("llama", "float16")
    mixer = model.config.layers[0].attention
    tokens, size = 200, mixer.head_dim
    q = torch.zeros(1, mixer.heads, tokens, size, dtype=torch.float16)
    k = torch.zeros(1, mixer.kv_heads, tokens, size, dtype=torch.float16)
    q[..., 0], k[..., 0] = 4.0, -2.0
    # e^-13 is 38 times the least number of float16, which is then off by up to 1.3 %
    k[:, :, 0, 0] = 13.0112 / mixer.scores.scale / 4 - 2
    v = torch.ones(1, mixer.kv_heads, tokens, size, dtype=torch.float16)
    v[:, :, 0] = 1e-4
    group = mixer.heads // mixer.kv_heads
    z = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True,
        scale=mixer.scores.scale,
    )  # fmt: skip
    prefix = "blocks.0.attn"
    seen = {f"{prefix}.q_rot": q, f"{prefix}.k_rot": k, f"{prefix}.v": v, f"{prefix}.z": z}
    found = formula_checks(model, [5] * tokens, seen, [f"{prefix}.z"])
    assert found.ok
    seen[f"{prefix}.z"] = z * 1.1
    assert not formula_checks(model, [5] * tokens, seen, [f"{prefix}.z"]).ok
