"""Triton's kernels are compiled for cards that are not there. Run by `test_triton`."""

import re
from pathlib import Path
from subprocess import check_output

import pytest
import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmcli.config.mlp import ACTIVATIONS
from llmcli.kernels.triton import attention, heads, packed, products, sampling

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
USAGE = [
    Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage",
]  # fmt: skip
NUMBERS = dict.fromkeys(
    ("scale", "cap", "eps", "offset", "post_eps", "post_offset", "factor"), "fp32"
)
FLOATS = {
    "sums", "most", "weight", "sinks", "norm_w", "norm_b", "post_w", "post_b", "residual", "b",
    "q_w", "k_w", "cos", "sin", "logits",
}  # fmt: skip
PLAIN = {"x", "q", "k", "v", "bias", "out"}
ROW = {
    "WEIGHTS": True, "BIAS": True, "ROWS": products.ROWS, "COLUMNS": products.COLUMNS,
    "WIDE": 4096, "POST_WIDE": 4096, "POST_WEIGHTS": True,
}  # fmt: skip
NO_POST = {"POST": 0, "POST_SHIFT": False}
ADDED = {"KIND": 1, "SHIFT": False, "ADDS": True, "GATED": False, "ACT": -1, **ROW}
GATED = {"KIND": 2, "SHIFT": True, "ADDS": False, "GATED": True, **NO_POST, **ROW}
KERNELS = [
    *(
        (attention.split_kernel, {
            "G": 4, "D": size, "E": size, "SIZE": size, "VALUES": size, "GROUP": 16, "SPLIT": 256,
            "KEYS": attention.keys_of(size, itemsize), "CAPPED": size == 128,
            "CHUNKS": size == 64,
        })
        for size in (64, 128, 256) for itemsize in (2, 4)
    ),
    (attention.join_kernel, {"G": 4, "E": 128, "VALUES": 128, "SPLITS": 16, "SUNK": True}),
    (products.row_kernel, {**ADDED, **NO_POST}),
    *(
        (products.row_kernel, {**ADDED, "POST": kind, "POST_SHIFT": kind == 2}) for kind in (1, 2)
    ),
    *(
        (products.norm_kernel, {"KIND": kind, "WEIGHTS": True, "SHIFT": kind == 2, "COLUMNS": 4096})
        for kind in (1, 2)
    ),
    *((products.row_kernel, {**GATED, "ACT": act}) for act in range(len(ACTIVATIONS))),
    *(
        (heads.heads_kernel, {"H": 32, "K": 8, "D": size, "E": size, "R": rotated, "NORM": norm,
                              "WEIGHTS": norm, "SIZE": size})
        for size, rotated, norm in ((128, 128, False), (128, 64, True), (256, 0, True))
    ),
    *(
        (packed.packed_kernel, {"BIAS": True, "ROUTED": routed, "ROW": routed,
                                **packed.constants(name)})
        for name in packed.PACKED for routed in (False, True)
    ),
    *(
        (sampling.best_kernel, {"PROMPT": counts, "OUTPUT": counts, "BLOCK": sampling.BLOCK})
        for counts in (False, True)
    ),
    (sampling.draw_kernel, {"COUNT": 4096, "K": 64, "DRAWS": True}),
]  # fmt: skip


def type_of(kernel, constants, name, narrow):
    if name in FLOATS or (name == "out" and constants.get("ADDS")):
        return "*fp32"
    if name == "x" and (constants.get("KIND") or constants.get("NORM")):
        return "*fp32"
    if name == "done":
        return "*i32"
    if name in ("starts", "expert", "row", "prompt", "output", "keys", "ids"):
        return "*i64"
    if name in ("numbers", "u", "scores"):
        return "*fp64"
    if name == "w":
        return "*u8" if kernel is packed.packed_kernel else narrow
    return narrow if name in PLAIN else NUMBERS.get(name, "i32")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", range(len(KERNELS)))
@pytest.mark.parametrize("narrow", ["*bf16", "*fp32"])
def test_it_compiles(number, target, narrow, tmp_path):
    """And registers suffice for sampling on a new card."""
    kernel, constants = KERNELS[number]
    samples = kernel in (sampling.best_kernel, sampling.draw_kernel)
    itemsize = {"*bf16": 2, "*fp32": 4}[narrow]
    if kernel is attention.split_kernel:
        size = constants["SIZE"]
        if constants["KEYS"] != attention.keys_of(size, itemsize):
            pytest.skip("of numbers of another size")
    signature = {
        name: "constexpr" if name in constants else type_of(kernel, constants, name, narrow)
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    warps = {"num_warps": sampling.WARPS if samples else 4}
    made = compile(source, target=TARGETS[target], options=warps)
    assert made.asm["cubin" if target.startswith("sm") else "hsaco"]
    assert made.metadata.shared <= (96 << 10 if target.startswith("sm") else 64 << 10)
    if target == "sm_90" and samples:
        (tmp_path / "cubin").write_bytes(made.asm["cubin"])
        told = check_output([*USAGE, tmp_path / "cubin"], text=True)
        assert re.findall(r"STACK:(\d+)", told) == ["0"], told
