"""The derivation as text, at every width, with and without colour."""

from dataclasses import replace

from drawn import changes, shown

from llmcli.commands.explain.report import Check, Coordinate, Explanation, Letter, LocalCheck, Step
from llmcli.commands.explain.view import render_explanation
from llmcli.records.explanation import Fact, Sum, Term
from llmcli.records.text import Token


def step(**changes):
    return Step(
        **{
            "number": 1, "name": "blocks.0.attn.q", "index": (0, 1, 2), "symbol": "Q[0,1,2]",
            "formula": "Q = T¹ W_q + b_q", "shape": "h × n × d/h = 2 × 3 × 4",
            "where": (
                Coordinate(axis="head", at=0, token=None),
                Coordinate(axis="token", at=1, token="a\x1b[31m\n"),
            ),
            "source": "derived", "value": -0.25, "kernel": -0.25000003, "tolerance": 1e-6,
            **changes,
        }
    )  # fmt: skip


TERMS = tuple(
    Term(at=i, parts=(x, y), value=x * y)
    for i, (x, y) in enumerate([(0.5, -0.5), (0.001, 0.01), (-2.0, -1.5), (1.0, 0.25), (0.0, 1.0)])
)
DOT = step(
    sum=Sum(
        formula="T¹[1,i] · W_q[i,2]", over="i", columns=("T¹[1,i]", "W_q[i,2]", "product"),
        value=3.00001,
    ),
    terms=TERMS,
    after=(Fact(formula="Σ + b_q[2] = {} + {}", parts=(3.00001, -3.25001), value=-0.25),),
)  # fmt: skip


def report(*steps, **changes):
    return Explanation(
        **{
            "tokens": tokens("In", " the\t"), "letters": (Letter(letter="n", value=2),), "depth": 4,
            "dtype": "float32", "tensors": 3, "steps": steps, **changes,
        }
    )  # fmt: skip


def tokens(*texts):
    return tuple(Token(id=at, text=text) for at, text in enumerate(texts, 7))


LOCAL = LocalCheck(
    formulas=12, tensors=34, name="blocks.3.mlp_out", index=(0, 80), derived=69.25, kernel=69.5,
    tolerance=0.5,
)  # fmt: skip


def pattern(keys, asked):
    terms = tuple(
        Term(at=s, parts=(float(-s), 0.5**s, 0.5**s / 2), value=0.5**s, label=f"k{s}\x07")
        for s in range(keys)
    )
    return step(
        name="blocks.0.attn.pattern", index=(0, keys - 1, asked), symbol=f"A[0,{keys - 1},{asked}]",
        sum=Sum(formula="e^(S − max)", over="s", columns=("S", "e^(S − max)", "A"), value=2.0),
        terms=terms,
    )  # fmt: skip


ORIGINS = tuple(
    Term(at=i, parts=(), value=1.0 / (i + 1), label=f"blocks.{i}.mlp_out") for i in range(12)
)


def text(*steps, width=80, colour=None, every=False, full=False, title="m", **changed):
    """With `every` check."""
    view = render_explanation(report(*steps, **changed), title, checks=every, full=full)
    return shown(view, width=width, colour=colour)


def test_screens(golden):
    """A number is on the screen once; with `full` every term is."""
    two = (replace(DOT, children=(2,)), step(number=2, name="x", symbol="X[1,2]"))
    deep = step(number=2, name="x", source="kernel", recomputed="the kernel's q and k")
    tree = (
        replace(DOT, children=(2, 3)), step(number=2, symbol="X[1,2]", name="x", children=(3,)),
        step(number=3, symbol="Y[3]", name="y", index=(3,), source="kernel"),
    )  # fmt: skip
    wrong = replace(two[1], kernel=0.25)
    red = Check(words="A V = z", derived=1.0, kernel=2.0, tolerance=1e-6)
    origins = (
        step(origins=ORIGINS, children=(2,)), step(number=2, name="x", origins=ORIGINS[:11])
    )
    dot = text(DOT, width=200)

    def new(*steps, **changed):
        return changes(dot, text(*steps, width=200, **changed))

    def local(every=True, **changed):
        return new(DOT, every=every, local=replace(LOCAL, **changed))

    golden("explain", {
        "a dot product with its largest terms": text(DOT, title="m (float32 on cpu)"),
        "with every term": changes(text(DOT), text(DOT, full=True)),
        "and is derived with more depth": new(two[0], deep),
        "each formula holds for itself": local(),
        "of one formula": local(formulas=1, tensors=0, kernel=69.25),
        "one does not": local(tolerance=0.125),
        "which is said without all checks, too": local(every=False, tolerance=0.125),
        "of many keys the largest and the one asked for": text(pattern(30, 20)),
        "a tree is indented where it forks and says a number once": text(*tree),
        "what differs is marked; the number itself agrees": changes(dot, text(two[0], wrong)),
        "red": [line for line in text(wrong, colour="standard").split("\n") if "[1;31m" in line],
        "a check that fails": changes(dot, text(DOT, width=200, checks=(red,))),
        "a residual names its largest parts once on its way": text(*origins, width=200),
        "a number that has one name is named once":
            text(step(name="logits", symbol="logits[0,1,2]"), width=200).split("\n")[1],
    })  # fmt: skip
    assert text(pattern(30, 20), full=True).count("\\x07") == 30


def long_report():
    """More tokens than a line holds, steps that fork, and many keys and origins."""
    deep = [replace(DOT, number=at, name=f"n{at}", children=(at + 1, 99)) for at in range(1, 9)]
    deep += [replace(pattern(30, 20), number=9, origins=ORIGINS)]
    steps = [replace(s, children=tuple(c for c in s.children if c <= 9)) for s in deep]
    steps = [replace(s, children=(*s.children, 9)) if s.number < 8 else s for s in steps]
    return report(*steps, tokens=tokens(*(f" token{id}" for id in range(40))))
