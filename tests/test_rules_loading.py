"""What the rules of coming families need, on files of their layouts through the loading path.

The families here exist in these tests only: Llama's configuration under another name, and rules
for files that hold the same weights in other shapes. So every parameter, and every logit, must be
what the plain file of the same weights gives.
"""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decoder_parameters import parameters_of
from linear_family import Given
from live_tensors import Live
from planned import wrongly_filled
from safetensors.torch import save_file
from tiny_checkpoints import LLAMA, in_chunks, llama_tensors, loaded, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.commands.load.measure.run import check_files, measure_load
from llmcli.commands.shapes.measure import stored_check, stored_tensors
from llmcli.errors import CheckpointError, WeightMismatch
from llmcli.families import families
from llmcli.families.dense import llamas as FAMILY
from llmcli.families.rules import (
    AddConstant,
    CollectRows,
    Load,
    LogNeg,
    PerExpert,
    Rename,
    Reshape,
    Rows,
    Transpose,
    plan,
)
from llmcli.loading import filling
from llmcli.loading.weights import check_fit, load_weights
from llmcli.measure.machine import cpu
from llmcli.prepare.prepared import prepare
from llmcli.records.work import LoadTimings
from llmcli.weights.dense import Dense

H, B = "model.layers.{layer}", "blocks.{layer}"
MLP = f"{H}.mlp"


@pytest.fixture
def family(monkeypatch):
    """Registers a family whose files have what `rules` say in place of the tensors they replace."""

    def register(*rules):
        filled = {rule.target.partition("[")[0] for rule in rules if isinstance(rule, Rename)}
        usual = [
            rule for rule in FAMILY.rules_hf(FAMILY.from_hf(LLAMA))
            if not (isinstance(rule, Rename) and rule.target in filled)
        ]  # fmt: skip

        def translated(settings):
            config = FAMILY.from_hf({**settings, "model_type": "llama"})
            return replace(config, family="other", model_type="other")

        other = Given(
            name="other", words="a test", build=translated, hf_types=("other",), gguf_archs=(),
            prepare=lambda config: (*rules, *usual),
        )  # fmt: skip
        known = families()
        monkeypatch.setattr("llmcli.families.family.families", lambda: (*known, other))

    return register


def write(folder, tensors, **config):
    return write_llama(folder, {k: t.contiguous() for k, t in tensors.items()},
                       model_type="other", **config)  # fmt: skip


load = partial(loaded, dtype="float32")


def fused(name, parts, make):
    """The tensors of a plain file with those of each layer made into one."""
    tensors = llama_tensors()
    for i in range(2):
        weights = [tensors.pop(f"model.layers.{i}.{part}.weight") for part in parts]
        tensors[f"model.layers.{i}.{name}.weight"] = make(*weights)
    return tensors


def changed(name, make):
    tensors = llama_tensors()
    for key in tensors:
        if key.endswith(name):
            tensors[key] = make(tensors[key])
    return tensors


GATE_UP = ["mlp.gate_proj", "mlp.up_proj"]


def renames(**targets):
    """Rules by parameters: what fills each, and the operations on it."""
    return [
        Rename(f"{H}.{source}.weight", f"{B}.{name.replace('__', '.')}", *operations)
        for name, (source, *operations) in targets.items()
    ]


GATE_UP_OF = "mlp.gate_up"
# the tensors of a file, the rules for it, and what the ledger says of them; queries, keys and
# values in one, and tiled heads, are in the files of real families (tests/parity)
LAYOUTS = {
    "gate and up in turns": (
        fused(GATE_UP_OF, GATE_UP, lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1)),
        renames(
            mlp__W_gate=(GATE_UP_OF, Rows(0, 1, groups=48)),
            mlp__W_up=(GATE_UP_OF, Rows(1, 2, groups=48)),
        ),
        ("rows 1:2 of each of 48 groups",),
    ),
    "norms with the one in them": (
        changed("layernorm.weight", lambda w: w + 1),
        renames(
            ln1__w=("input_layernorm", AddConstant(-1.0)),
            ln2__w=("post_attention_layernorm", AddConstant(-1.0)),
        ),
        ("− 1",),
    ),
    "logarithms, transposed": (
        changed("up_proj.weight", lambda w: -w.exp().t()),
        renames(mlp__W_up=("mlp.up_proj", LogNeg(), Transpose())),
        ("log(−x)", "transposed"),
    ),
    "logarithms of some rows": (
        fused(GATE_UP_OF, GATE_UP, lambda gate, up: -torch.cat([gate, up]).exp()),
        renames(
            mlp__W_gate=(GATE_UP_OF, Rows(0, 48), LogNeg()),
            mlp__W_up=(GATE_UP_OF, LogNeg(), Rows(48, 96)),
        ),
        ("log(−x)", "rows 48:96"),
    ),
    "an axis of one": (
        changed("down_proj.weight", lambda w: w[:, None]),
        renames(mlp__W_down=("mlp.down_proj", Reshape((32, 48)))),
        ("reshaped to [32, 48]",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nbytes", [4 << 20, 300])
def test_other_layouts_of_the_same_weights(tmp_path, monkeypatch, family, layout, nbytes):
    tensors, rules, words = LAYOUTS[layout]
    in_chunks(monkeypatch, nbytes)
    plain = load(write_llama(tmp_path / "plain"))
    family(*rules)
    model = load(write(tmp_path / "other", tensors))
    for name, slot in parameters_of(plain.decoder).items():
        torch.testing.assert_close(parameters_of(model.decoder)[name], slot, rtol=0, atol=1e-6)
    ids = torch.arange(7)[None]
    torch.testing.assert_close(model.decoder(ids), plain.decoder(ids), rtol=0, atol=1e-4)
    told = {word for entry in model.ledger.entries for word in entry.operations}
    assert set(words) <= told
    assert {entry.source for entry in model.ledger.entries} == set(model.checkpoint.tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_values_are_computed_before_they_are_rounded(tmp_path, family, dtype):
    """`1 + w` in bfloat16 keeps two digits of a small w: the one goes while they are all there."""
    tensors = changed("layernorm.weight", lambda w: 1 + w / 1000)
    family(*LAYOUTS["norms with the one in them"][1])
    slot = parameters_of(load(write(tmp_path, tensors), dtype=dtype).decoder)["blocks.1.ln1.w"]
    stored = tensors["model.layers.1.input_layernorm.weight"]
    wide = stored.double() if dtype == "float64" else stored
    assert torch.equal(slot, (wide - 1).to(slot.dtype))


@pytest.mark.parametrize("bad", [0.0, 1.0, float("nan")])
def test_a_logarithm_of_what_has_none_is_refused(tmp_path, family, bad):
    tensors, rules, _ = LAYOUTS["logarithms of some rows"]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.layers.1.mlp.gate_up.weight"][95, 31] = bad
    family(*rules)
    with pytest.raises(CheckpointError, match=r"`model\.layers\.1\.mlp.gate_up.weight` should be"):
        load(write(tmp_path, tensors))


def test_a_fused_tensor_with_rows_of_no_use_is_refused(tmp_path, family):
    tensors, rules, _ = LAYOUTS["gate and up in turns"]
    name = "model.layers.1.mlp.gate_up.weight"
    family(*rules)
    for rows, says in ((144, "only 3072 numbers are used"), (95, "should be")):
        with pytest.raises(CheckpointError, match=says):
            load(write(tmp_path, tensors | {name: torch.ones(rows, 32)}))


# A parameter whose items along the first axis are tensors of their own. The rows of the plain
# model's matrix stand for experts here: it has 48 of them, and two layers.
ITEM = f"{MLP}.experts.{{expert}}.up.weight"
ITEMS = [Rename(ITEM, f"{B}.mlp.W_up[{{expert}}]", within={"expert": range(48)})]


def with_items():
    tensors = llama_tensors()
    for i in range(2):
        rows = tensors.pop(f"model.layers.{i}.mlp.up_proj.weight")
        tensors |= {
            f"model.layers.{i}.mlp.experts.{e}.up.weight": row.clone() for e, row in enumerate(rows)
        }
    return tensors


def test_each_placeholder_has_its_own_range_and_the_ledger_folds_them(tmp_path, family):
    plain = load(write_llama(tmp_path / "plain"))
    family(*ITEMS)
    checkpoint = open_checkpoint(write(tmp_path, with_items()))
    model, report = measure_load(
        checkpoint, LoadTimings(), device="cpu", dtype="float32", quantize="auto"
    )
    slots = parameters_of(model.decoder)
    assert all(torch.equal(slots[k], v) for k, v in parameters_of(plain.decoder).items())
    assert len(model.ledger.entries) == len(model.checkpoint.tensors)
    entry = next(e for e in model.ledger.entries if e.parameter == "blocks.1.mlp.W_up[47]")
    assert entry.source == "model.layers.1.mlp.experts.47.up.weight"
    assert (entry.filled, entry.bytes) == ((32,), 128)
    for found in (report, check_files(checkpoint, LoadTimings())):
        assert found.ok, found.checks
        row = next(row for row in found.rows if "experts" in row.source)
        assert row.parameter == "blocks.{0-1}.mlp.W_up[{0-47}]"
        assert row.source == "model.layers.{0-1}.mlp.experts.{0-47}.up.weight"
        assert (row.tensors, row.bytes) == (96, 2 * 48 * 32 * 4)
        assert row.numbers.count == 2 * 48 * 32
    one_other = with_items()
    one_other["model.layers.1.mlp.experts.7.up.weight"] = torch.ones(32, dtype=torch.bfloat16)
    rows = check_files(open_checkpoint(write(tmp_path, one_other)), LoadTimings()).rows
    assert sorted(row.parameter for row in rows if "experts" in row.source) == [
        "blocks.0.mlp.W_up[{0-47}]", "blocks.1.mlp.W_up[7]", "blocks.1.mlp.W_up[{0-6,8-47}]",
    ]  # fmt: skip


ITEM_OF = "model.layers.{}.mlp.experts.{}.up.weight"


@pytest.mark.parametrize(("change", "says"), [
    ({(1, 5): None}, r"no tensor for `blocks\.1\.mlp\.W_up\[5\]` \(the first would be "
     r"`model\.layers\.1\.mlp\.experts\.5\.up\.weight`\)"),
    ({(0, e): None for e in range(48)}, r"no tensor for `blocks\.0\.mlp\.W_up` \(the first would "
     r"be `model\.layers\.0\.mlp\.experts\.0\.up\.weight`\)"),
    ({(0, 3): torch.ones(31)},
     r"`blocks\.0\.mlp\.W_up\[3\]` from `.*` should be \[32\] but is \[31\]"),
    ({(0, 3): torch.ones(1, 32)}, r"but is \[1, 32\]"),
])  # fmt: skip
def test_experts_that_do_not_fit(tmp_path, family, change, says):
    family(*ITEMS)
    tensors = with_items() | {ITEM_OF.format(*at): tensor for at, tensor in change.items()}
    with pytest.raises(WeightMismatch, match=says) as caught:
        load(write(tmp_path, {name: t for name, t in tensors.items() if t is not None}))
    assert caught.value.code == 4
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "place", [(0, 48), (2, 3), (0, "03"), (0, "9" * 400), (0, "{}"), (0, "{expert}")]
)
def test_what_is_no_expert_of_the_model_is_surplus(tmp_path, family, place):
    family(*ITEMS)
    name = ITEM_OF.format(*place)
    model = load(write(tmp_path, with_items() | {name: torch.ones(32)}))
    assert model.ledger.surplus == (name,)
    tensors = with_items() | {name: torch.ones(32)}
    del tensors["model.layers.1.mlp.experts.5.up.weight"]  # then it may be the reason: it is told
    with pytest.raises(WeightMismatch, match=r"no tensor for .*; no parameter for") as caught:
        load(write(tmp_path, tensors))
    assert len(caught.value.message) < 700


def test_an_expert_that_is_there_twice(tmp_path, family):
    bare = Rename(ITEM.removeprefix("model."), ITEMS[0].target, within=ITEMS[0].within)
    whole = Rename(f"{MLP}.up_proj.weight", f"{B}.mlp.W_up")
    family(*ITEMS, bare, whole)
    again = with_items() | {"layers.1.mlp.experts.9.up.weight": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"are both `blocks\.1\.mlp\.W_up\[9\]`"):
        load(write(tmp_path / "a", again))
    both = with_items() | {"model.layers.1.mlp.up_proj.weight": torch.ones(48, 32)}
    with pytest.raises(CheckpointError, match=r"are both `blocks\.1\.mlp\.W_up`"):
        load(write(tmp_path / "b", both))


def test_an_expert_beyond_the_parameters_own_is_surplus(tmp_path, family):
    """Where the rules allow more experts than the parameter has."""
    family(Rename(ITEM, ITEMS[0].target, within={"expert": range(64)}))
    tensors = with_items() | {"model.layers.0.mlp.experts.50.up.weight": torch.ones(32)}
    surplus = load(write(tmp_path, tensors)).ledger.surplus
    assert surplus == ("model.layers.0.mlp.experts.50.up.weight",)


def test_a_tensor_of_a_part_that_the_model_has_not_is_surplus_in_every_view(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    plain = load(write_llama(tmp_path / "plain")).decoder
    prompt = torch.arange(6)[None]
    tensors = llama_tensors() | {name: torch.ones(32)}
    model = load(write_llama(tmp_path, tensors))
    assert model.ledger.surplus == (name,)
    assert torch.equal(model.decoder(prompt), plain(prompt))
    checkpoint = open_checkpoint(tmp_path)
    report = check_files(checkpoint, LoadTimings())
    assert (report.ok, report.fault) == (True, None)
    info = measure_info(checkpoint, [cpu()])
    assert info.surplus == (name,)
    stored = stored_check(prepare(checkpoint))
    assert all(check.ok for check in (*info.checks, *stored))
    assert "and 1 surplus tensor" in stored[0].words


def test_experts_are_as_well_in_the_views_of_headers(tmp_path, family):
    family(*ITEMS)
    checkpoint = open_checkpoint(write(tmp_path, with_items()))
    assert all(check.ok for check in measure_info(checkpoint, [cpu()]).checks)
    prepared = prepare(checkpoint)
    assert stored_check(prepared)[0].ok
    stored = stored_tensors(prepared)
    up = stored["blocks.1.mlp.W_up"]
    assert up.source == "model.layers.1.mlp.experts.{0-47}.up.weight"
    assert up.stored_bytes == 48 * 32 * 4
    model = load(checkpoint.path)
    assert wrongly_filled(model.ledger, stored) == []
    gone = {k: t for k, t in with_items().items() if "1.mlp.experts.7." not in k}
    lacking = open_checkpoint(write(tmp_path, gone))
    names = next(c for c in measure_info(lacking, [cpu()]).checks if c.name == "stored_names")
    for found in (names, stored_check(prepare(lacking))[0]):
        assert (found.value, found.where) == (1.0, "blocks.1.mlp.W_up[7]")


# Stacks of matrices, `[experts, rows, columns]`, and the parameters that they fill.
E, D, F = 5, 6, 8


def fill(folder, rules, **shapes):
    """What the rules make of a folder's tensors: planned, validated and filled as by `load`."""
    checkpoint = open_checkpoint(folder)
    config = FAMILY.from_hf(LLAMA)
    todo = plan(checkpoint.tensors, rules, config)
    check_fit(todo, checkpoint.tensors, shapes)
    slots = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    decoder = SimpleNamespace(
        weight_names=tuple(slots), weight=lambda name: Dense(slots[name]),
        devices=(torch.device("cpu"),),
    )  # fmt: skip
    return slots, load_weights(decoder, checkpoint, todo)


def save(folder, **tensors):
    folder.mkdir(exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return folder


GATE, UP = torch.randn(2, E, F, D).unbind()
BIAS = torch.randn(E, 2 * F)
RIGHT = {"gate": GATE, "up": UP, "b_gate": BIAS[:, ::2], "b_up": BIAS[:, 1::2]}
IN_TURNS = torch.stack([GATE, UP], 2).flatten(1, 2)
OF_GATE, OF_UP = (PerExpert(Rows(which, which + 1, groups=F)) for which in (0, 1))
# tensors and rules
STACKS = {
    "one after the other": (
        {"w": torch.cat([GATE, UP], 1)},
        [Rename("w", "gate", PerExpert(Rows(0, F))), Rename("w", "up", PerExpert(Rows(F, 2 * F)))],
    ),
    "in turns": ({"w": IN_TURNS}, [Rename("w", "gate", OF_GATE), Rename("w", "up", OF_UP)]),
    "experts of both": (
        {"w": torch.cat([GATE, UP])},
        [Rename("w", "gate", Rows(0, E)), Rename("w", "up", Rows(E, 2 * E))],
    ),
    "transposed, with biases: gpt-oss in bfloat16": (
        {"w": IN_TURNS.mT, "b": BIAS},
        [
            Rename("w", "gate", PerExpert(Transpose()), OF_GATE),
            Rename("w", "up", PerExpert(Transpose()), OF_UP),
            Rename("b", "b_gate", OF_GATE), Rename("b", "b_up", OF_UP),
        ],
    ),
    "matrices of their own": (
        {f"x.{e}.up": UP[e] for e in range(E)},
        [Rename("x.{expert}.up", "up[{expert}]", within={"expert": range(E)})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("nbytes", [4 << 20, 70, 1])
def test_a_stack_of_matrices(tmp_path, monkeypatch, stack, nbytes):
    tensors, rules = STACKS[stack]
    in_chunks(monkeypatch, nbytes)
    words = {rule.target.partition("[")[0]: tuple(map(str, rule.ops)) for rule in rules}
    slots, ledger = fill(
        save(tmp_path, **tensors), rules, **{name: RIGHT[name].shape for name in words}
    )
    for name in words:
        assert torch.equal(slots[name], RIGHT[name])
    for entry in ledger.entries:
        assert entry.operations == words[entry.parameter.partition("[")[0]]
    assert sum(one.bytes for one in ledger.entries) == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("op", [PerExpert(Rows(0, 512)), PerExpert(Transpose())])
def test_no_second_copy_of_a_stack(tmp_path, op):
    """Of a stack of 32 MiB no more is read or made at a time than a chunk, or one expert."""
    stored = torch.randn(16, 1024, 512)
    if isinstance(op.op, Transpose):
        stored = stored.mT
    right = stored.mT if isinstance(op.op, Transpose) else stored[:, :512]
    slot, stages = torch.empty(right.shape), LoadTimings()
    checkpoint = open_checkpoint(save(tmp_path, w=stored))
    with Live() as live:
        filling.fill(Dense(slot), checkpoint, Load("w", "w", (op,)), stages)
    assert torch.equal(slot, right)
    assert live.most <= slot.nbytes + (8 << 20), live.most - slot.nbytes
    assert stages.nbytes["read"] == right.nbytes  # the rows between those that are used are not


@pytest.mark.parametrize(("shape", "op", "found"), [
    ((E, 2 * F), PerExpert(Rows(0, F)), [5, 8]),  # a matrix of biases
    ((E + 1, 2 * F, D), PerExpert(Rows(0, F)), [6, 8, 6]),
    ((E, 2 * F, D + 1), PerExpert(Rows(0, F)), [5, 8, 7]),
    ((E, F - 1, D), PerExpert(Rows(0, F)), [5, 7, 6]),
    ((E, 2 * F * D), PerExpert(Transpose()), [5, 96]),
    ((2 * F,), PerExpert(Rows(0, F)), [16]),
    ((E, 2 * F + 1, D), PerExpert(Rows(0, 1, groups=F)), [5, 17, 6]),
    ((1, E, F, D), CollectRows(1, (1,)), [1, 5, 8, 6]),
    ((E, F, D), CollectRows(2, (2, 1)), [5, 8, 6]), ((E, F, D + 1), Reshape((E, F, D)), [5, 8, 7]),
])  # fmt: skip
def test_a_stack_of_the_wrong_shape(tmp_path, shape, op, found):
    says = re.escape(f"`up` from `w` should be [5, 8, 6] but is {found}")
    with pytest.raises(WeightMismatch, match=says):
        fill(save(tmp_path, w=torch.ones(shape)), [Rename("w", "up", op)], up=(E, F, D))
