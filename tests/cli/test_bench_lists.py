"""The spelling of lists and ranges, and the configurations that come of them."""

import re
from dataclasses import fields

import pytest

from llmcli.cli.tree import root
from llmcli.commands.bench.measure.compare import COMPARED
from llmcli.commands.bench.report.plan import IGNORED, OurOptions, Plan, RunOptions, pairs
from llmcli.commands.bench.report.plan import TestOptions as Asked
from llmcli.commands.bench.report.row import KEYS
from llmcli.commands.bench.report.settings import SETTINGS, Settings, SweptOptions, numbers, words
from llmcli.errors import UsageError

NUMBERS = {
    "16": (16,), "16,32": (16, 32), "16 32,8": (16, 32, 8), "1-4": (1, 2, 3, 4),
    "1-9+2": (1, 3, 5, 7, 9), "1-10+4": (1, 5, 9), "1-8*2": (1, 2, 4, 8), "1-9*2": (1, 2, 4, 8),
    "128-512*2,64,1-2": (128, 256, 512, 64, 1, 2), "5-5": (5,), "0": (0,),
}  # fmt: skip


def plan(models=("m",), *, tests=None, swept=None, ours=None):
    return Plan.of(
        models, 2, Asked(**(tests or {})), SweptOptions(**(swept or {})), RunOptions(),
        OurOptions(**(ours or {})),
    )  # fmt: skip


def test_lists():
    """Of an option that was given several times, too."""
    for given, expected in NUMBERS.items():
        assert numbers("--n-prompt", given.split()) == expected
    assert pairs(()) == ()
    assert pairs(["512,128", "16,0"]) == ((512, 128), (16, 0))
    assert words("-m", ["a,b", "c"]) == ("a", "b", "c")
    assert Asked().models() == ()
    named = Asked(model=["a,b"], hf_repo=["org/x,org/y"], hf_file=["x.gguf"])
    assert named.models() == ("a", "b", "hf:org/x/x.gguf", "hf:org/y")


# what is written for each setting, its values, and what it refuses
TYPES = ("q8_0,auto", ("q8_0", "auto"), "f15", "has no choice `f15`")
FLAG = ("0,1", (False, True), "yes", "has no choice `yes`")
COUNT = ("64,32", (64, 32), "0,64", "must be at least 1, not `0`")
GIVEN = {
    "n_gpu_layers": ("-1,0", (-1, 0), "-2", "must be at least -1, not `-2`"),
    "device": (
        "auto,none,cpu,CUDA0,cuda,cuda:1,Metal,MTL0,meta,CUDA0/CUDA1",
        ("auto", "cpu", "cpu", "cuda:0", "cuda", "cuda:1", "mps", "mps", "meta", "cuda0/cuda1"),
        "cpu,", "has an empty value",
    ),
    "dtype": ("auto,float64", ("auto", "float64"), "f16", "has no choice `f16`"),
    "activations": ("8,16", ("8", "16"), "4", "has no choice `4`"),
    "embeddings": FLAG, "no_kv_offload": FLAG,
    "n_batch": COUNT, "n_ubatch": COUNT, "type_k": TYPES, "type_v": TYPES,
    "flash_attn": (
        "1,on,true,0,off,auto,-1", ("on", "on", "on", "off", "off", "auto", "auto"),
        "x", "has no choice `x`",
    ),
    "n_threads": ("1-4*2", (1, 2, 4), "5000", "must be at most 4096, not `5000`"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_from_its_option_to_its_column(name):
    """Option, sweep, default, field of a row, reader: all from the one declaration."""
    setting = SETTINGS[name]
    text, values, wrong, message = GIVEN[name]
    command = root().get_command(None, "bench")
    for option in setting.spelled.split()[:-1]:
        given = command.make_context("bench", [option, text]).params
        assert given[setting.name] == [text], option
    found = plan(swept={setting.name: [text]})
    assert tuple(getattr(one, name) for one in found.configurations) == values
    assert {getattr(one, name) for one in plan().configurations} == {getattr(found.default, name)}
    assert setting.column in KEYS
    assert setting.column in COMPARED
    with pytest.raises(UsageError) as caught:
        plan(swept={setting.name: [wrong]})
    assert caught.value.message.startswith(f"`{setting.option}` ")
    assert caught.value.message.endswith(message)


def test_every_setting_is_declared():
    assert list(SETTINGS) == [one.name for one in fields(Settings)][1:] != []
    assert set(GIVEN) == set(SETTINGS)


def test_tests_are_counted_before_they_are_made():
    """And ranges before they are lists."""
    for tests, count in (
        ({"n_gen": ["0"]}, "1,000,000 tests"),
        ({"n_prompt": ["0-9999"], "n_gen": ["1-9999"], "n_depth": ["1-9999"],
          "n_pg": ["4,4", "0,0"]}, "199,970,001,000,000 tests"),
        ({"n_gen": ["1-999999999"]}, "more than 10,000 values"),
        ({"n_gen": ["1-" + "9" * 5000]}, "must be at most 2147483647"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=count):
            plan(tests=tests, swept={"threads": ["1-1000"], "batch_size": ["1-1000"]})


def test_what_is_run_where_nothing_is_asked_for():
    found = plan()
    assert found.configurations == (found.default,)
    assert [test.name for test in found.tests] == ["pp512", "tg128"]
    assert found.default.n_threads == 2
    assert (found.default.n_batch, found.default.n_ubatch) == (2048, 512)


def test_beside_llama_cpp_there_are_its_activations_too():
    """But where they are named, or the peer has those of the model."""

    def bits(swept=None, **ours):
        found = plan(swept=swept, ours=ours)
        assert found.like_for_like == (swept is None and ours == {"against": "llama.cpp"})
        return [one.activations for one in found.configurations]

    assert bits() == bits(against="transformers") == ["auto"]
    assert bits(against="llama.cpp") == ["auto", "8"]
    assert bits({"activations": ["16"]}, against="llama.cpp") == ["16"]
    assert bits({"activations": ["8,16"]}) == ["8", "16"]


def test_the_order_of_tests_and_configurations():
    """Tests are in the order of llama-bench; models vary outermost, threads innermost."""
    asked = {"n_prompt": ["8,16"], "n_gen": ["4"], "n_pg": ["8,4"], "n_depth": ["0", "32"]}
    assert [test.name for test in plan(tests=asked).tests] == [
        "pp8", "pp16", "tg4", "pp8+tg4",
        "pp8 @ d32", "pp16 @ d32", "tg4 @ d32", "pp8+tg4 @ d32",
    ]  # fmt: skip
    assert [test.name for test in plan(tests={"n_prompt": ["0"]}).tests] == ["tg128"]
    found = plan(models=("a", "b"), swept={"threads": ["1-2"], "batch_size": ["64,32"]})
    assert [(s.model, s.n_batch, s.n_threads) for s in found.configurations] == [
        ("a", 64, 1), ("a", 64, 2), ("a", 32, 1), ("a", 32, 2),
        ("b", 64, 1), ("b", 64, 2), ("b", 32, 1), ("b", 32, 2),
    ]  # fmt: skip


def test_what_has_no_effect_takes_a_value_and_changes_nothing():
    """By each of its names, which are listed nowhere."""
    command = root().get_command(None, "bench")
    plain = command.make_context("bench", ["-p", "8"])
    words = re.split(r"[\s,]+", command.get_help(plain))
    for name in IGNORED.split():
        context = command.make_context("bench", [name, "x,1", "-p", "8", name, "0"])
        assert context.params.pop("ignored") == ["x,1", "0"], name
        assert context.params == {k: v for k, v in plain.params.items() if k != "ignored"}, name
        assert name not in words
