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
from llmcli.kernels.triton import attention, experts, heads, packed, products, routing, sampling

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32), "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
SHARED = {"sm_75": 64, "sm_80": 99, "sm_90": 227, "gfx942": 64}  # KiB; sm_80 as sm_86 and sm_89
USAGE = [
    Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage",
]  # fmt: skip
# what launches find to be divisible by 16, beside addresses: rows of most models and blocks
ALIGNED = {f"{x}_{axis}" for x in "kv" for axis in "bhs"} | {"columns", "outputs", "w_row"}
NUMBERS = dict.fromkeys(
    (
        "scale", "cap", "eps", "offset", "post_eps", "post_offset", "factor", "least", "limit",
        "plus", "beta", "v_eps", "v_offset",
    ),
    "fp32",
)
FLOATS = {
    "sums", "most", "weight", "sinks", "norm_w", "norm_b", "post_w", "post_b", "residual", "b",
    "q_w", "k_w", "v_w", "cos", "sin", "logits", "y", "rest", "correction", "factors", "stream",
}  # fmt: skip
PLAIN = {"x", "q", "k", "v", "bias", "out", "kept_x", "gate"}
SIZES = {"ROWS": products.ROWS, "COLUMNS": products.COLUMNS}
ROW = {
    "WEIGHTS": True, "BIAS": True, "WIDE": 4096, "POST_WIDE": 4096, "POST_WEIGHTS": True, **SIZES,
}  # fmt: skip
NO_POST = {"POST": 0, "POST_SHIFT": False}
PLAINLY = {"ACT": -1, "GATED": False, "CLAMPED": False}
ADDED = {"KIND": 1, "SHIFT": False, "ADDS": True, "KEEPS": False, **PLAINLY, **ROW}
GATED = {
    "KIND": 2, "SHIFT": True, "ADDS": False, "KEEPS": True, "GATED": True, "CLAMPED": True,
    **NO_POST, **ROW,
}  # fmt: skip
KERNELS = [
    *(
        (attention.split_kernel, {
            "G": group, "D": size, "E": values, "SPLIT": 256, "CAPPED": size == 128,
            "CHUNKS": size == 64,
        })
        for group, size, values in (
            (4, 64, 64), (4, 128, 128), (4, 256, 256), (40, 256, 256), (32, 512, 512),
            (40, 288, 256), (16, 576, 512), (128, 576, 512),
        )
    ),
    (attention.join_kernel, {"G": 4, "E": 128, "VALUES": 128, "SPLITS": 32, "SUNK": True}),
    *(
        (experts.expert_kernel, {"BIAS": True, "ROW": True, "WEIGHED": True, **how, **SIZES})
        for how in (PLAINLY, {"ACT": 0, "GATED": True, "CLAMPED": True})
    ),
    (experts.sum_kernel, {
        "CHOSEN": 8, "WEIGHED": True, "ADDS": True, "GATED": True, "ONTO": True, "COLUMNS": 512,
    }),
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
        (heads.heads_kernel, {
            "H": 32, "K": 8, "V": 8 * (size < 256), "D": size, "E": size, "R": rotated,
            "KIND": kind, "WEIGHTS": kind > 0, "JOINED": size == 128, "V_KIND": kind,
            "V_WEIGHTS": kind == 2,
            "GROWS": kind == 1, "SIZE": size,
        })
        for size, rotated, kind in ((128, 128, 0), (128, 64, 1), (256, 0, 2), (512, 128, 1))
    ),
    *(
        (packed.packed_kernel, {"BIAS": True, "ROUTED": routed, "ROW": routed,
                                **packed.constants(name)})
        for name in packed.PACKED for routed in (False, True)
    ),
    *(
        (kernel, {"PROMPT": counts, "OUTPUT": counts, "BLOCK": sampling.BLOCK})
        for kernel in (sampling.best_kernel, sampling.score_kernel) for counts in (False, True)
    ),
    (sampling.weight_kernel, {"BLOCK": sampling.BLOCK}),
    *(
        (sampling.pick_kernel, {"ORDERED": ordered, "N": 128, "BLOCK": sampling.BLOCK})
        for ordered in (False, True)
    ),
    *(
        (routing.route_kernel, {
            "SCORES": scores, "BY_LOGITS": False, "RENORMALIZED": True, "CORRECTED": True,
            "FACTORS": True, "COUNT": groups, "KEPT": 4, "BEST": 2, "K": 22, "E": 512,
            "EXPERTS": 512, "P": 32,
        })
        for scores, groups in ((0, 1), (1, 8), (2, 1))
    ),
    (sampling.draw_kernel, {"COUNT": 4096, "K": 64, "DRAWS": True}),
]  # fmt: skip

SAMPLING = sampling.score_kernel, sampling.weight_kernel, sampling.pick_kernel


def type_of(kernel, constants, name, narrow):
    if kernel in SAMPLING and name in ("scores", "ordered", "sums"):
        return "*fp64" if name == "sums" else "*fp32"
    if name in FLOATS or (name == "out" and constants.get("ADDS")):
        return "*fp32"
    if name == "x" and (constants.get("KIND")):
        return "*fp32"
    if name == "done":
        return "*i32"
    if name in ("starts", "expert", "row", "prompt", "output", "keys", "ids", "chosen", "order"):
        return "*i64"
    if name in ("numbers", "u", "scores", "parts", "bests"):
        return "*fp64"
    if name == "w":
        return "*u8" if kernel is packed.packed_kernel else narrow
    return narrow if name in PLAIN else NUMBERS.get(name, "i32")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", range(len(KERNELS)))
@pytest.mark.parametrize("narrow", ["*bf16", "*fp32", "*fp32 with *bf16"])
def test_it_compiles(number, target, narrow, tmp_path):
    """And fits shared memory; on Hopper at most two numbers leave registers."""
    kernel, constants = KERNELS[number]
    narrow, _, cache = narrow.partition(" with ")
    warps = 1 if kernel is routing.route_kernel else 4
    if kernel in (*SAMPLING, sampling.best_kernel, sampling.draw_kernel):
        warps = sampling.WARPS
    if kernel is attention.split_kernel:
        if constants["D"] > 256 and (narrow != "*bf16" or target == "sm_75"):
            pytest.skip("of 16 bits only, and with more memory")
        sizes = attention.block_sizes(
            *(constants[name] for name in "GDE"), 2 if narrow == "*bf16" else 4,
            most=64 if target == "sm_90" else 16, same=constants["D"] > constants["E"],
        )
        warps, constants = sizes.pop("num_warps"), {**constants, **sizes}
    elif cache or target == "sm_75":
        pytest.skip("of one dtype only, and of little memory")
    signature = {
        name: "constexpr" if name in constants
        else cache if cache and name in "kv"
        else type_of(kernel, constants, name, narrow)
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }  # fmt: skip
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=TARGETS[target], options={"num_warps": warps})
    assert made.asm["cubin" if target.startswith("sm") else "hsaco"]
    assert made.metadata.shared <= SHARED[target] << 10
    if target == "sm_90":
        (tmp_path / "cubin").write_bytes(made.asm["cubin"])
        usage = check_output([*USAGE, tmp_path / "cubin"], text=True)
        assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8, usage
    if target == "sm_90" and kernel is packed.packed_kernel:  # in aligned words, not in bytes
        assert not re.search(r"ld\.global\S*b8", made.asm["ptx"])
        assert ("!tt.ptr<i32>" in made.asm["ttir"]) == (constants["BYTES"] % 4 == 0)
