"""The table of a dump: at every width, with what is not finite, with names of every kind."""

from __future__ import annotations

import math

from drawn import shown

from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.commands.dump.view import render_dump
from llmcli.records.checks import ViewCheck

CHECK = ViewCheck(name="formulas", words="2 tensors follow", value=0.25, tolerance=1.0)


def tensor(name="blocks.29.attn.pattern", **changes):
    return DumpedTensor(
        **{
            "name": name, "kind": "activation", "axes": ("H", "T", "S"), "shape": (9, 12, 12),
            "dtype": "float32", "formula": "A = softmax(S)", "mean": 0.0833333,
            "std": 0.25, "min": 0.0, "max": 1.0, "norm": 12.5, "masked": 0, "nan": 0,
            "inf": 0, "first_bad": None, **changes,
        }
    )  # fmt: skip


def report(*tensors, **changes):
    return DumpReport(
        **{
            "dtype": "float32", "tokens": ((1, "In"), (2, " the"), (3, " end")),
            "prompt_tokens": 3, "tensors": tensors or (tensor(),), "checks": (CHECK,),
            "not_finite": "", **changes,
        }
    )  # fmt: skip


def dump(one, width=80, colour=None, **options):
    return shown(render_dump(one, "tiny (float32)", **options), width=width, colour=colour)


def test_screens(golden):
    """Of many layers some are on a screen, of each kind, and all that have faults."""

    def layers(count, leaf="resid_post"):
        return [tensor(f"blocks.{at}.{leaf}") for at in range(count)]

    def names(one, **options):
        rows = [line.split(" ")[0] for line in dump(one, **options).split("\n")]
        return [name for name in rows if name.startswith(("blocks.", "embed", "logits"))]

    many = report(tensor("embed"), *layers(30), tensor("logits"))
    mixed = report(*layers(9, "attn.z"), *layers(9, "mlp.post"), *layers(1, "ssm.x"))
    fault = tensor("blocks.4.attn.q", nan=1, first_bad=(0,))
    fault = report(*layers(4, "attn.q"), fault, *layers(30, "attn.k"), not_finite="x")
    one = report(tensor(mean=-8.5e-05, std=3.5, min=-7.25, max=8.125, norm=99.5))
    bad = tensor("blocks.0.mlp.post", nan=3, inf=1, first_bad=(0, 1, 2), mean=math.nan)
    bad = report(bad, tensor("embed"), not_finite="`blocks.0.mlp.post[0,1,2]` is nan")
    golden("dump", {
        "all there is to say in a wide terminal": dump(report(), 200),
        "the least important columns go first": [
            dump(report(), width).split("\n")[-3] for width in (82, 75, 66, 60, 50, 44, 36, 28)
        ],
        **{
            f"with all, what has no column is below its row, in {width} columns":
                dump(one, width, every=True)
            for width in (36, 60, 80)
        },
        "without, a line a tensor": dump(one, 36),
        "what is not finite is counted": dump(bad, 120),
        "and red": [line for line in dump(bad, 120, "standard").split("\n") if "[1;31m" in line],
        "of many layers some are shown": dump(many),
        "of layers that differ some of each": " ".join(names(mixed)),
        "and those with faults": " ".join(names(fault)),
        "masked scores are told": dump(report(tensor(masked=66), tensor("logits")), 120),
        "as one is": dump(report(tensor(masked=1)), 120).split("\n")[-1],
        "new tokens": dump(report(prompt_tokens=2), 120).split("\n")[1],
        "no tokens": dump(report(tokens=(), prompt_tokens=0, checks=()), 120),
        "control characters and markup are text": dump(report(tensor("a\x1b[2Jb[red]\x07")), 120),
    })  # fmt: skip
    assert names(many, every=True) == [one.name for one in many.tensors]
    assert "other layers" not in dump(many, every=True)
