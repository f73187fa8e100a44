"""Of every op of the zoo: one number, its steps and its bound are those of the whole tensor."""

import math
import random
import re

import pytest
import torch
from covers import KINDS
from decoder_parameters import packed_model
from explain_models import firsts, make
from needs import needs_kernels
from small_models import ids, random_model
from unfused import emitted
from zoo import MODELS

from llmcli.evaluate.numbers import ACTIVATIONS, EXACT, Number
from llmcli.evaluate.rule import concatenated, exact
from llmcli.inspect.kernel import Kernel, rules
from llmcli.ops.activations import activation

TOKENS = 11
SYMBOLS = {
    "π": "math.pi", "√2": "math.sqrt(2)", "√(": "math.sqrt(", "e^": "math.e**", "^": "**",
    "²": "**2", "³": "**3", "·": "*", "−": "-", "±": "", "erf(": "math.erf(", "tanh(": "math.tanh(",
    "ln(": "math.log(", "cos ": "math.cos", "sin ": "math.sin",
}  # fmt: skip


def clip(x, low, high=None):
    return min(max(x, -low if high is None else low), low if high is None else high)


def computed(words):
    """What is printed, as Python computes it."""
    for theirs, ours in SYMBOLS.items():
        words = words.replace(theirs, ours)
    return eval(words, {"math": math, "max": max, "min": min, "clip": clip})


def check_line(fact, known):
    """With its numbers; in words, with the numbers that the words stand for."""
    *names, shown = fact.formula.split(" = ")
    if fact.parts:
        for part in fact.parts:
            shown = shown.replace("{}", f"({part!r})", 1)
    elif names[:1] == ["max"] or "stretched" in shown or not (names or shown[:3] in ("cos", "sin")):
        return False  # no arithmetic
    else:
        place = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        shown = re.sub(place, lambda found: f"({known[found[0]]!r})", shown)
    assert math.isclose(computed(shown), fact.value, rel_tol=1e-12, abs_tol=1e-15), fact
    return True


def check_steps(rule, own, element):
    """Every line and the sum give their values, and the last of them the number's."""
    known = {rule.cell(name, *at): float(own[name][at]) for name, at in element.follow}
    lines = 0
    for fact in (*element.before, *element.after):
        lines += check_line(fact, known)
        known[fact.formula.split(" = ")[0]] = fact.value
    if element.sum is not None:
        terms = math.fsum(term.value for term in element.terms)
        assert math.isclose(terms, element.sum.value, rel_tol=1e-12, abs_tol=1e-15)
        if element.sum.columns[-1] == "product":
            assert all(math.prod(term.parts) == term.value for term in element.terms)
        lines += 1
    values = [element.sum.value] if element.sum is not None else []
    values += [fact.value for fact in element.after if not fact.formula.startswith("e^g,")]
    assert values[-1:] in ([element.value], []), "the last line gives the number"
    return lines


def check_columns(rule, own, element):
    """A column with the symbol of a tensor has its numbers, `64+i` the i-th from 64 on."""
    fields = vars(rule.op)
    for part in fields.keys() & {"of", "cut"}:
        fields = fields | vars(fields[part])
    tensors = {*own.graph.nodes, *own.graph.parameters, "head.W"}
    named = {rule.letter_of(name): name for name in tensors & set(map(str, fields.values()))}
    for number, column in enumerate(element.sum.columns):
        letter, _, places = column.removesuffix("]").rpartition("[")
        if letter not in named or not column.endswith("]"):
            continue
        weight = named[letter] not in own.graph
        tensor = exact(own.weight(named[letter])) if weight else own[named[letter]]
        places = [re.fullmatch(r"(\d*)\+?([a-z]?)", place).groups() for place in places.split(",")]
        tensor = tensor if len(places) == tensor.ndim else concatenated(tensor)
        for term in element.terms:
            at = tuple(int(first or 0) + term.at * bool(i) for first, i in places)
            assert term.parts[number] == pytest.approx(float(tensor[at]), rel=1e-12), column
        yield letter


def one_call(model):
    """What a call computes, as the rules read it."""
    prompt = ids(1, TOKENS)[0].tolist()
    seen = emitted(model, prompt)
    return Kernel(model, rules(model.config), prompt, [""] * TOKENS, emitted=seen)


def drawn(shape, seed):
    """The first, the last and two other numbers."""
    draw = random.Random(seed)
    ends = {tuple(0 for _ in shape), tuple(size - 1 for size in shape)}
    return sorted(ends | {tuple(draw.randrange(size) for size in shape) for _ in range(2)})


def check_bound(rule, own, index, magnitudes):
    """Of one number and of all of them it is the same, and none is negative."""
    assert magnitudes.ge(0).all()
    assert math.isclose(rule.bound(own, index), float(magnitudes[index]), rel_tol=1e-9), index


OF_KINDS = list(firsts({name: MODELS[name] for name in KINDS}))


@pytest.mark.parametrize(("name", "tensors"), OF_KINDS, ids=KINDS)
def test_the_steps_that_are_shown_multiply_out_to_the_number(name, tensors):
    own = one_call(random_model(MODELS[name]))
    lines, columns = 0, set()
    for tensor in tensors:
        rule = own.rules[tensor]
        whole = rule.tensor(own)
        magnitudes = rule.magnitudes(own).expand_as(whole)
        for index in drawn(whole.shape, tensor):
            element = rule.element(own, index)
            lines += check_steps(rule, own, element)
            columns |= set(check_columns(rule, own, element) if element.sum else ())
            check_bound(rule, own, index, magnitudes)
            near = 1e-13 * max(1, float(magnitudes[index]))
            assert element.value == pytest.approx(float(whole[index]), rel=1e-12, abs=near), tensor
    if name == KINDS[0]:
        assert lines > 100
        assert columns >= {"W_head", "H′"}


PACKED = [pytest.param(packed_model, name, marks=needs_kernels) for name in ("llama", "gpt2")]


# the test above checks the operations of the other models
@pytest.mark.parametrize(("of", "name"), [(make, "odd"), *PACKED])
def test_a_number_alone_and_all_of_them_are_allowed_the_same(of, name):
    own = one_call(of(name))
    for tensor, rule in own.rules.items():
        magnitudes = rule.magnitudes(own)
        shape = torch.broadcast_shapes(magnitudes.shape, own.kernel(tensor).shape)
        for index in drawn(shape, tensor):
            check_bound(rule, own, index, magnitudes.expand(shape))


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_an_activation_is_within_its_bound(function):
    """Also far from 0, where e^−x overflows."""
    x = torch.cat([torch.linspace(-120, 120, 24_001), -torch.logspace(-9, 4, 1301)])
    made = ACTIVATIONS[function](Number(x=x.double(), off=EXACT))
    assert made.off.isfinite().all()
    off = (activation(function)(x) - made.x).abs()
    assert off.le(torch.finfo(torch.float32).eps * made.off).all()
