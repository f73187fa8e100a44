"""Triton's kernels are compiled for cards that are not there. Run by `test_triton`."""

import re
from pathlib import Path
from subprocess import check_output

import pytest
import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmcli.config.mlp import CARD_ACTIVATIONS
from llmcli.kernels.triton import attention, packed, products

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
USAGE = [
    Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage",
]  # fmt: skip
# what launches find to be divisible by 16, beside addresses: rows of most models and blocks
ALIGNED = {f"{x}_{axis}" for x in "kv" for axis in "bhs"} | {"columns", "outputs", "w_row"}
# their registers do not suffice for all shapes
SPILLING = {attention.split_kernel, attention.join_kernel}
NUMBERS = {"scale": "fp32", "cap": "fp32", "eps": "fp32", "offset": "fp32"}
FLOATS = {"sums", "most", "weight", "sinks", "norm_w", "norm_b", "residual", "b"}
PLAIN = {"x", "q", "k", "v", "bias", "out"}
ROWS = {"ROWS": products.ROWS, "COLUMNS": products.COLUMNS}
ROW = {"WEIGHTS": True, "BIAS": True, **ROWS}
ADDED = {"KIND": 1, "SHIFT": False, "ADDS": True, "GATED": False, "ACT": -1, **ROW}
GATED = {"KIND": 2, "SHIFT": True, "ADDS": False, "GATED": True, **ROW}
KERNELS = [
    *(
        (attention.split_kernel, {
            "G": group, "D": size, "E": size, "SIZE": size, "VALUES": size, "SPLIT": 256,
            "GROUP": max(16, triton.next_power_of_2(group)), "CAPPED": size == 128,
            "CHUNKS": size == 64,
        })
        for group, size in ((4, 64), (4, 128), (4, 256), (40, 128))
    ),
    *(
        (attention.join_kernel, {"G": 4, "E": 128, "VALUES": 128, "SPLITS": splits, "SUNK": True})
        for splits in (16, 512)  # 4k and 131k slots
    ),
    (products.row_kernel, ADDED),
    *(
        (products.norm_kernel, {"KIND": kind, "WEIGHTS": True, "SHIFT": kind == 2, "COLUMNS": 1024})
        for kind in (1, 2)
    ),
    *((products.row_kernel, {**GATED, "ACT": act}) for act in range(len(CARD_ACTIVATIONS))),
    *(
        (packed.packed_kernel, {"BIAS": True, "ROUTED": routed, "ROW": routed,
                                **packed.constants(name)})
        for name in packed.PACKED for routed in (False, True)
    ),
]  # fmt: skip


def type_of(kernel, name, narrow):
    if name in FLOATS:
        return "*fp32"
    if name in ("starts", "expert", "row"):
        return "*i64"
    if name == "w":
        return "*u8" if kernel is packed.packed_kernel else narrow
    return narrow if name in PLAIN else NUMBERS.get(name, "i32")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", range(len(KERNELS)))
@pytest.mark.parametrize("narrow", ["*bf16", "*fp32", "*fp32 with *bf16"])
def test_it_compiles(number, target, narrow, tmp_path):
    """For queries of another dtype than the cache, too. At most two numbers leave registers."""
    kernel, constants = KERNELS[number]
    narrow, _, cache = narrow.partition(" with ")
    if kernel is attention.split_kernel:
        itemsize = {"*bf16": 2, "*fp32": 4}[cache or narrow]
        constants = {**constants, "KEYS": attention.keys_of(constants["SIZE"], itemsize)}
    elif cache:
        pytest.skip("of one dtype only")
    signature = {
        name: "constexpr" if name in constants
        else cache if cache and name in "kv"
        else type_of(kernel, name, narrow)
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }  # fmt: skip
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=TARGETS[target])
    assert made.asm["cubin" if target.startswith("sm") else "hsaco"]
    assert made.metadata.shared <= {"sm_80": 160, "sm_90": 227}.get(target, 64) << 10
    if target == "sm_90" and kernel not in SPILLING:
        (tmp_path / "cubin").write_bytes(made.asm["cubin"])
        told = check_output([*USAGE, tmp_path / "cubin"], text=True)
        assert int(re.search(r"STACK:(\d+)", told)[1]) <= 8, told
    if target == "sm_90" and kernel is packed.packed_kernel:  # in aligned words, not in bytes
        assert not re.search(r"ld\.global\S*b8", made.asm["ptx"])
        assert ("!tt.ptr<i32>" in made.asm["ttir"]) == (constants["BYTES"] % 4 == 0)
