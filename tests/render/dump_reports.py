"""A dump with known numbers, for the tests of what fits."""

from llmcli.commands.dump.report import DumpedTensor, DumpReport


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
            "dtype": "float32", "tokens": (), "prompt_tokens": 0, "tensors": tensors, "checks": (),
            "not_finite": None, **changes,
        }
    )  # fmt: skip
