"""The derivation as text, at every width, with and without colour."""

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.explain.report import Check, Coordinate, Explanation, Letter, Local, Step
from llmcli.commands.explain.view import number, render_explanation
from llmcli.reports.explanation import Fact, Sum, Term


def shown(renderable, width=80, colour=False):
    console = Console(
        file=io.StringIO(), width=width, color_system="standard" if colour else None,
        force_terminal=colour, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def step(**changes):
    return Step(
        **{
            "number": 1, "name": "blocks.0.attn.q", "index": (0, 1, 2), "symbol": "Q[0,1,2]",
            "formula": "Q = T¹ W_q + b_q", "shape": "h × n × d/h = 2 × 3 × 4",
            "where": (
                Coordinate(axis="head", at=0, token=None),
                Coordinate(axis="token", at=1, token="a\x1b[31m\n"),
            ),
            "source": "derived", "value": -0.25, "kernel": -0.25000003, "difference": 3e-8,
            "tolerance": 1e-6, "ok": True, **changes,
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
    root = steps[0]
    return Explanation(
        **{
            "name": root.name, "index": root.index, "tokens": ((7, "In"), (9, " the\t")),
            "letters": (Letter(letter="n", value=2),), "depth": 4,
            "dtype": "float32", "value": root.value, "kernel": root.kernel,
            "difference": root.difference, "tolerance": root.tolerance,
            "ok": all(step.ok for step in steps), "tensors": 3, "checks": (), "local": None,
            "steps": steps, **changes,
        }
    )  # fmt: skip


def test_a_dot_product_with_its_largest_terms():
    assert shown(render_explanation(report(DOT), "m (float32 on cpu)")).splitlines() == [
        "m (float32 on cpu)",
        "Q[0,1,2] = blocks.0.attn.q[0,1,2]:  derived −0.25  kernel −0.25000003",
        "difference 3e−08  (allowed 1e−06)  ✓",
        '0 "In" · 1 " the\\t"',
        "",
        "  1 Q[0,1,2] = −0.25",
        '    blocks.0.attn.q[0,1,2] · head 0 · token 1 "a\\x1b[31m\\n"',
        "    Q = T¹ W_q + b_q   h × n × d/h = 2 × 3 × 4",
        "    Σ over i of T¹[1,i] · W_q[i,2]   largest of 5 at i = 2, 0, 3",
        "    Σ = (−2)·(−1.5) + 0.5·(−0.5) + 1·0.25 + … 2 more (1e−05) = 3.00001",
        "    Σ + b_q[2] = 3.00001 + (−3.25001) = −0.25",
        "    kernel −0.25000003 · difference 3e−08 · ✓",
        "",
        "n = 2 tokens (N)",
        "3 tensors derived in float64, 4 formulas back",
        "further back: the kernel's numbers (--depth all derives them)",
        "✓ 1 check · --checks",
    ]


def extent(*steps, **changes):
    lines = shown(render_explanation(report(*steps, **changes), "m"), 300).splitlines()
    return next(line for line in lines if "derived in float64" in line)


CHECK = Check(words="C = A V", derived=1.0, kernel=1.0, difference=0.0, tolerance=1e-6, ok=True)


def test_what_was_derived_and_what_of_it_is_shown():
    two = (replace(DOT, children=(2,)), step(number=2, name="x"))
    assert extent(*two, depth=1, tensors=1) == (
        "1 tensor derived in float64, 1 formula back · further back: the kernel's numbers "
        "(--depth all derives them) · shown: the largest terms"
    )
    assert extent(*two, depth=None) == (
        "3 tensors derived in float64, down to the embedding rows and the weights · "
        "shown: the largest terms"
    )
    masked = step(value=float("-inf"), kernel=float("-inf"), difference=0.0)
    assert extent(masked, checks=(CHECK,), tensors=5) == (
        "5 tensors derived in float64, 4 formulas back · further back: the kernel's numbers "
        "(--depth all derives them) · a masked score needs no inputs, its check does"
    )


def test_what_the_kernel_never_writes_is_said_to_be_recomputed():
    cell = step(name="blocks.0.attn.pattern", symbol="A[0,1,2]", recomputed="the kernel's q and k")
    one = render_explanation(report(cell, checks=(CHECK,)), "m", checks=True)
    lines = shown(one, 300).splitlines()
    assert "    recomputed from the kernel's q and k: −0.25000003 · difference 3e−08 · ✓" in lines
    assert lines[1] == (
        "A[0,1,2] = blocks.0.attn.pattern[0,1,2]:   derived −0.25   recomputed −0.25000003   "
        "difference 3e−08   (allowed 1e−06)  ✓"
    )
    assert lines[-1] == "✓ C = A V · exactly"
    deep = step(number=2, name="x", source="kernel", recomputed="the kernel's q and k")
    text = shown(render_explanation(report(replace(DOT, children=(2,)), deep), "m"))
    assert "recomputed from the kernel's q and k: a larger --depth derives it, too" in text


LOCAL = Local(
    formulas=12, tensors=34, name="blocks.3.mlp_out", index=(0, 80), derived=69.25, kernel=69.5,
    difference=0.25, tolerance=0.5, ok=True,
)  # fmt: skip


def test_whether_each_formula_holds_for_itself():
    def told(*, checks=True, **changes):
        found = report(DOT, local=replace(LOCAL, **changes), ok=changes.get("ok", True))
        return shown(render_explanation(found, "m", checks=checks), 300)

    assert (
        "✓ each of the 12 formulas shown, and every number of 34 tensors, holds on the kernel's "
        "own inputs · 0.25 of 0.5 allowed"
    ) in told()
    assert "\n✓ the formula shown holds on the kernel's own inputs · exactly" in told(
        formulas=1, tensors=0, difference=0.0
    )
    for checks in (True, False):
        assert (
            "✗ check failed: the formula of blocks.3.mlp_out holds on the kernel's own inputs · "
            "0.25 of 0.12 allowed · worst at blocks.3.mlp_out[0,80]"
        ) in told(ok=False, tolerance=0.125, checks=checks)
    assert told(checks=False).splitlines()[-1] == "✓ 2 checks · --checks"


def test_full_writes_every_term():
    lines = shown(render_explanation(report(DOT), "m", full=True)).splitlines()
    at = lines.index("    i   T¹[1,i]   W_q[i,2]   product")
    assert [line.split() for line in lines[at + 2 : at + 8]] == [
        ["0", "0.5", "−0.5", "−0.25"], ["1", "0.001", "0.01", "1e−05"], ["2", "−2", "−1.5", "3"],
        ["3", "1", "0.25", "0.25"], ["4", "0", "1", "0"], ["Σ", "=", "3.00001"],
    ]  # fmt: skip


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


def test_a_softmax_lists_the_keys_with_their_tokens():
    lines = shown(render_explanation(report(pattern(3, 1)), "m")).splitlines()
    at = next(at for at, line in enumerate(lines) if line.split()[:1] == ["0"] and "k0" in line)
    assert lines[at].split() == ["0", '"k0\\x07"', "0", "1", "0.5"]
    assert lines[at - 3] == "    Σ over s of e^(S − max)   3 keys"
    assert lines[at + 2].split() == ["2", '"k2\\x07"', "−2", "0.25", "0.125"]


def test_of_many_keys_the_largest_and_the_one_asked_for():
    lines = shown(render_explanation(report(pattern(30, 20)), "m")).splitlines()
    rows = [line.split()[0] for line in lines if "\\x07" in line]
    assert rows == [str(at) for at in (*range(8), 20)]
    assert "    … 21 more, together −0.00390625: --full has them all" not in lines
    assert any(line.startswith("    … 21 more, together") for line in lines)
    full = shown(render_explanation(report(pattern(30, 20)), "m", full=True))
    assert full.count("\\x07") == 30


TREE = report(
    replace(DOT, children=(2, 3)), step(number=2, symbol="X[1,2]", name="x", children=(3,)),
    step(number=3, symbol="Y[3]", name="y", index=(3,), source="kernel"),
)  # fmt: skip


def test_a_tree_is_indented_where_it_forks_and_says_a_number_once():
    lines = shown(render_explanation(TREE, "m")).splitlines()
    heads = [line for line in lines if " = −0.25" in line and "Σ" not in line]
    assert heads == [
        "  1 Q[0,1,2] = −0.25",
        "    2 X[1,2] = −0.25",
        "    3 Y[3] = −0.25",
        "      Y[3] = −0.25   see step 3",
    ]
    at = lines.index(heads[2])
    assert lines[at + 2] == "      the kernel's own: a larger --depth derives it, too"


def test_what_differs_is_marked():
    wrong = step(number=2, name="x", symbol="X[1,2]", difference=0.5, ok=False)
    check = Check(
        words="A V = z", derived=1.0, kernel=2.0, difference=1.0, tolerance=1e-6, ok=False
    )
    text = shown(render_explanation(report(replace(DOT, children=(2,)), wrong), "m"))
    assert "difference 0.5 · allowed 1e−06 · ✗" in text
    assert text.splitlines()[2].endswith("✓"), "the number itself agrees"
    failed = "✗ check failed: every derived number is the kernel's · 0.5 of 1e-06 allowed"
    assert f"{failed} · worst at X[1,2]" in " ".join(text.split())
    text = shown(render_explanation(report(DOT, checks=(check,)), "m"))
    assert "✗ check failed: A V = z · 1 of 1e-06 allowed" in text
    coloured = shown(render_explanation(report(wrong), "m"), colour=True)
    assert "\x1b[1;31m" in coloured


ORIGINS = tuple(
    Term(at=i, parts=(), value=1.0 / (i + 1), label=f"blocks.{i}.mlp_out") for i in range(12)
)


def test_a_residual_names_its_largest_parts_once_on_its_way():
    steps = (step(origins=ORIGINS, children=(2,)), step(number=2, name="x", origins=ORIGINS[:11]))
    text = shown(render_explanation(report(*steps), "m"), 200)
    assert "made of 12 parts (the kernel's):" in text
    assert "blocks.0.mlp_out 1 · blocks.1.mlp_out 0.5" in text
    assert "· 4 more " in text
    assert "11 parts" not in text


def test_a_weight_is_no_derivation():
    leaf = step(source="weights", formula="W_q was learned", note="from `x\x1b`")
    text = shown(render_explanation(report(leaf, depth=None, tensors=0), "m"))
    assert "from `x\\x1b`" in text
    assert text.splitlines()[1] == "Q[0,1,2] = blocks.0.attn.q[0,1,2] = −0.25"
    assert "kernel" not in text
    assert "check" not in text


def test_a_number_that_has_one_name_is_named_once():
    same = step(name="logits", symbol="logits[0,1,2]")
    assert "\nlogits[0,1,2]:   derived" in shown(render_explanation(report(same), "m"), 200)


def test_letters_have_the_other_documents_names():
    letters = tuple(Letter(letter=a, value=b) for a, b in (("n", 1), ("d", 8), ("F", 32)))
    text = shown(render_explanation(report(DOT, letters=letters), "m"), 200)
    assert "n = 1 token (N) · d = 8 width (d_model, hidden_dim) · F = 4d = 32 neurons" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("full", [False, True])
def test_every_line_fits(width, full):
    deep = [replace(DOT, number=at, name=f"n{at}", children=(at + 1, 99)) for at in range(1, 9)]
    deep += [replace(pattern(30, 20), number=9, origins=ORIGINS)]
    steps = [replace(s, children=tuple(c for c in s.children if c <= 9)) for s in deep]
    steps = [replace(s, children=(*s.children, 9)) if s.number < 8 else s for s in steps]
    many = tuple((id, f" token{id}") for id in range(40))
    text = shown(render_explanation(report(*steps, tokens=many), "m", full=full), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "… 24 more" in text
    bare = shown(render_explanation(report(*steps, tokens=many), "m", full=full), width, True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", bare)
    assert [line.rstrip() for line in plain.splitlines()] == text.splitlines()


def test_numbers():
    assert number(-1234.5678) == "−1234.57"
    assert number(-0.0) == "0"
    assert number(1.25e-9) == "1.25e−09"
    assert number(float("-inf")) == "−∞"
    assert number(1 / 3, 17) == "0.33333333333333331"
