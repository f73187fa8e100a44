"""What is printed with an index is the number that stands there in the model, and words compute."""

import math
import re

import pytest
import torch
from covers import few
from decoder_parameters import parameters_of
from explain_models import IDS, NAMES, emitted, explained, make

from llmcli.commands.explain.options import names
from llmcli.inspect.kernel import rules

CELL = re.compile(r"(Activation\(G\)|[A-Za-z′¹²³⁴⁵_]+)\[([^\]]+)\]")


def block_of(name):
    return re.match(r"blocks\.\d+\.", name)[0] if name.startswith("blocks.") else ""


def looked_up(step, letter, model, seen):
    """The tensor that a letter means in the formula of a step; parameters in formula order."""
    config, block, own = model.config, block_of(step.name), step.name.rpartition(".")[0]
    slots = {name: slot.double() for name, slot in parameters_of(model.decoder).items()}
    if letter in ("w", "b") and own:
        return slots[f"{own}.{letter}"] if f"{own}.{letter}" in slots else slots["head.b"]
    if letter in ("w", "b"):
        return slots["head.b"]
    if letter == "W_head":
        return (slots["head.W"] if "head.W" in slots else slots["embed.W"]).t()
    if letter in ("W_E", "W_P"):
        return slots["embed.W" if letter == "W_E" else "pos_embed.W"]
    if letter.startswith(("W_", "b_")):
        part = "mlp" if letter[2:] in ("up", "down", "gate") else "attn"
        slot = slots[f"{block}{part}.{letter}"]
        return slot.t() if slot.ndim == 2 else slot
    if letter == "X" and not block:
        return seen["embed"]
    inside = rules(config)
    named = [name for name in inside if inside[name].letter == letter and name in seen]
    if block and letter in ("T⁵", "T³") and step.name.endswith("resid_pre"):
        block = f"blocks.{int(block.split('.')[1]) - 1}."
    if letter in ("T⁵", "T³", "T²", "T¹", "T⁴", "X") or block:
        named = [name for name in named if name.startswith(block)] or named
    return seen[named[-1] if letter == "H" and not block else named[0]]


def at(tensor, index, running):
    """The number at `3,s,i`; `64+i` is the i-th from 64 on."""
    place = []
    for item in index.split(","):
        first, _, letter = item.rpartition("+")
        place.append(int(first or 0) + running if letter.isalpha() else int(item))
    return float(tensor[tuple(place)] if len(place) <= tensor.ndim else tensor[tuple(place[1:])])


def column_numbers(step, model, seen):
    """For every column of a sum that is a cell, what it is printed as and what it has to be."""
    for number, column in enumerate(step.sum.columns):
        found = CELL.fullmatch(column)
        if found is None:
            continue
        tensor = looked_up(step, found[1], model, seen)
        if found[1] == "C" and step.name.endswith("attn_out"):
            tensor = torch.cat(list(tensor), -1)  # the heads side by side
        for term in step.terms:
            yield column, term.parts[number], at(tensor, found[2], term.at)


@pytest.mark.parametrize("name", few(NAMES[::-1], 2))
def test_every_column_of_a_sum_is_the_tensor_that_it_names(name):
    model = make(name)
    seen = emitted(model)
    checked = set()
    for axes in names(model.config, len(IDS)).values():
        if axes.kind != "activation":
            continue
        for index in {tuple(size - 1 for size in axes.shape), tuple(s // 2 for s in axes.shape)}:
            step = explained(model, axes.name, index, 1).steps[0]
            for column, shown, theirs in column_numbers(step, model, seen) if step.sum else ():
                assert math.isclose(shown, theirs, rel_tol=1e-8, abs_tol=1e-10), (column, step.name)
                checked.add(CELL.fullmatch(column)[1])
    assert {"T¹", "W_q", "C", "W_o", "A", "V", "L", "W_down", "H′", "W_head"} <= checked


def test_an_output_head_of_its_own_is_turned():
    loaded = make("odd")
    slot = parameters_of(loaded.decoder)["head.W"]
    assert explained(loaded, "head.W", (2, 37)).value == slot[37, 2].item() != slot[2, 7].item()


def test_what_a_mixture_may_be_off():
    """The check of a pattern through z allows what a formula after q, k and v allows."""
    broken = make("gpt2")
    good = explained(broken, "blocks.0.attn.pattern", (1, 4, 2), 1).checks[0]
    assert good.ok
    v = emitted(broken)["blocks.0.attn.v"][1, :5].abs().max().item()
    assert good.tolerance < 250 * torch.finfo(torch.float64).eps * v
