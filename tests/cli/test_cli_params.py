"""Options from dataclasses, and what their texts become."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from llmcli.cli.group import build
from llmcli.errors import UsageError
from llmcli.shell.params import Conversion, Range, arg, flatten, opt


@dataclass(frozen=True, kw_only=True)
class Numbers:
    count: int | None = opt(None, "-c --count N", "Count.", at_least=1, at_most=9)
    ratio: float = opt(0.5, "--ratio X", "Ratio.", above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class Named:
    most_words: int = opt(
        5, "-w --most-words N", "Words.", within=Range(1, or_else=-1), aliases=("--words",)
    )


@dataclass(frozen=True, kw_only=True)
class Words:
    word: str | None = arg(None, "WORD", "Word.")
    kind: Literal["red", "blue"] = opt("red", "--kind KIND", "Kind.")
    also: list[str] | None = opt(None, "--also TEXT", "More.")
    loud: bool = opt(False, "--loud", "Loud.")


def called(argv):
    seen = {}

    def function(words: Words, numbers: Numbers) -> None:
        """A command."""
        seen.update(words=words, numbers=numbers)

    command = build("try", function)
    with command.make_context("try", argv) as context:
        command.invoke(context)
    return seen


def test_dataclasses_are_filled_from_the_command_line():
    assert called([]) == {"words": Words(), "numbers": Numbers()}
    assert called(["--loud", "--", "--kind"])["words"] == Words(word="--kind", loud=True)
    seen = called(["hey", "-c", "3", "--ratio=.25", "--kind", "blue", "--also", "x", "--also", "y"])
    assert seen["words"] == Words(word="hey", kind="blue", also=["x", "y"])
    assert seen["numbers"] == Numbers(count=3, ratio=0.25)
    assert [one.type for one in fields(Numbers)] == ["int | None", "float"]  # as they were


@pytest.mark.parametrize("typed", ["-c 0", "-c 10", "-c 1.5", "--ratio 0", "--ratio 1.01"])
def test_what_is_refused(typed):
    with pytest.raises(UsageError, match=r"--count|--ratio"):
        called(typed.split())


@dataclass(frozen=True, kw_only=True)
class Ruled:
    width: str | None = arg(None, "WIDTH", "Width.")
    high: bool = opt(False, "-H --high", "High.", needs=("--low", "-w"), excludes=("--flat",))
    low: bool = opt(False, "--low", "Low.")
    flat: bool = opt(False, "--flat", "Flat.", excludes=("WIDTH", "--words=7", "--deep!=0"))
    deep: int = opt(1, "--deep N", "Deep.")
    words: int = opt(5, "-w --words N", "Words.")


@pytest.mark.parametrize(("argv", "message"), [
    (["--high"], "`--high` needs `--low` or `-w`"),
    (["--high", "-w", "5"], "`--high` needs `--low` or `-w`"),  # the default
    (["--high", "-w", "6"], ""),
    (["-H", "--low", "--flat"], "`--high` and `--flat` exclude each other"),
    (["wide", "--flat"], "`--flat` and `WIDTH` exclude each other"),
    (["wide", "--high", "--low"], ""),
    (["--flat", "-w", "7"], "`--flat` and `--words 7` exclude each other"),
    (["--flat", "--deep", "2"], "`--flat` and `--deep 2` exclude each other"),
    (["--flat", "-w", "6", "--deep", "0"], ""),
])  # fmt: skip
def test_what_an_option_needs_and_excludes(argv, message):
    def function(ruled: Ruled) -> None:
        """A command."""

    command = build("try", function)
    with command.make_context("try", argv) as context:
        if not message:
            return command.invoke(context)
        with pytest.raises(UsageError) as refused:
            command.invoke(context)
    assert refused.value.message == message


@pytest.mark.parametrize("name", ["-w", "--most-words", "--most_words", "--words"])
def test_an_option_has_names_that_no_help_lists(name):
    seen = {}

    def function(named: Named) -> None:
        """A command."""
        seen.update(named=named)

    command = build("try", function)
    with command.make_context("try", [name, "-1"]) as context:
        text = command.get_help(context)
        assert "-w, --most-words N  Words." in text
        assert "--words" not in text.replace("--most-words", "")
        assert "_" not in text
        command.invoke(context)
    assert seen["named"] == Named(most_words=-1)


@pytest.mark.parametrize(("typed", "dtype"), [
    ("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("BF16", "bfloat16"),
    ("f32", "float32"), ("fp32", "float32"), ("fp64", "float64"), ("float16", "float16"),
])  # fmt: skip
def test_dtypes_have_the_names_that_other_programs_give_them(typed, dtype):
    conversion = Conversion(str, choices=("auto", "float64", "float32", "bfloat16", "float16"))
    assert conversion("--dtype", typed) == dtype
    with pytest.raises(UsageError, match="`--dtype` has no choice `fp8`"):
        conversion("--dtype", "fp8")


def test_a_context_length_may_be_in_k():
    conversion = Conversion(int, range=Range(1, k=True))
    assert [conversion("-c", text) for text in ("8k", "8K", "128k", "8192", "1M")] == [
        8192, 8192, 131072, 8192, 1048576
    ]  # fmt: skip
    for text in ("8g", "1.5k", "k", "0k", "-8k", "8kk", "8 k"):
        with pytest.raises(UsageError, match=f"`-c` .*`{text}`$"):
            conversion("-c", text)
    with pytest.raises(UsageError, match="`-n` takes a whole number, not `8k`"):
        Conversion(int, range=Range(1))("-n", "8k")


def test_one_name_twice_is_a_mistake_in_the_program():
    def function(one: Numbers, count: int = 1) -> None:
        """Never called."""

    with pytest.raises(ValueError, match="two options are called 'count'"):
        flatten(function)


def test_ranges_describe_themselves():
    assert str(Range(0)) == "at least 0"
    assert str(Range(0, above=True)) == "greater than 0"
    assert str(Range(0, 1)) == "between 0 and 1"
    assert str(Range(1, or_else=-1)) == "at least 1 or -1"
    assert [n for n in range(-3, 3) if n in Range(1, or_else=-1)] == [-1, 1, 2]
    assert float("nan") not in Range(0)
    assert float("inf") not in Range(0)
