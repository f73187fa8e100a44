"""The options of llama-bench that change nothing here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from llmcli.commands.bench.options import Texts, option

UNUSED = "Accepted without effect"


@dataclass(frozen=True, kw_only=True)
class UnusedOptions:
    """llama-bench's options that change nothing here; those in its fields are kept for them."""

    cpu_mask: Annotated[
        Texts, option(UNUSED, "-C", "--cpu-mask", metavar="HEX", help="Cores. [default: 0x0]")
    ] = None
    cpu_strict: Annotated[
        Texts, option(UNUSED, "--cpu-strict", metavar="0|1", help="Strict placement.")
    ] = None
    poll: Annotated[
        Texts, option(UNUSED, "--poll", metavar="0...100", help="Polling. [default: 50]")
    ] = None
    n_cpu_moe: Annotated[
        Texts, option(UNUSED, "-ncmoe", "--n-cpu-moe", metavar="N", help="Experts on the CPU.")
    ] = None
    split_mode: Annotated[
        Texts,
        option(UNUSED, "-sm", "--split-mode", metavar="none|layer|row", help="Several GPUs."),
    ] = None
    main_gpu: Annotated[
        Texts, option(UNUSED, "-mg", "--main-gpu", metavar="I", help="The first GPU.")
    ] = None
    tensor_split: Annotated[
        Texts, option(UNUSED, "-ts", "--tensor-split", metavar="A/B", help="Share of each GPU.")
    ] = None
    override_tensor: Annotated[
        Texts,
        option(
            UNUSED, "-ot", "--override-tensor", metavar="NAME=TYPE;…", help="Places of tensors."
        ),
    ] = None
    mmap: Annotated[
        Texts, option(UNUSED, "-mmp", "--mmap", metavar="0|1", help="Memory mapping.")
    ] = None
    load_mode: Annotated[
        Texts, option(UNUSED, "-lm", "--load-mode", metavar="MODE", help="How files are read.")
    ] = None
    direct_io: Annotated[
        Texts, option(UNUSED, "-dio", "--direct-io", metavar="0|1", help="Reading past caches.")
    ] = None
    no_op_offload: Annotated[
        Texts, option(UNUSED, "-nopo", "--no-op-offload", metavar="0|1", help="Host operations.")
    ] = None
    no_host: Annotated[
        Texts, option(UNUSED, "--no-host", metavar="0|1", help="No host buffers.")
    ] = None
    fit_target: Annotated[
        Texts, option(UNUSED, "-fitt", "--fit-target", metavar="MIB", help="Margin on the GPU.")
    ] = None
    fit_ctx: Annotated[
        Texts, option(UNUSED, "-fitc", "--fit-ctx", metavar="N", help="Least context with it.")
    ] = None
    rpc: Annotated[
        str | None, option(UNUSED, "-rpc", "--rpc", metavar="SERVERS", help="Remote devices.")
    ] = None
    numa: Annotated[str | None, option(UNUSED, "--numa", metavar="MODE", help="Memory nodes.")] = (
        None
    )
    prio: Annotated[
        str | None, option(UNUSED, "--prio", metavar="-1|0|1|2|3", help="Priority.")
    ] = None


def unused_names(unused: UnusedOptions) -> list[str]:
    """Those that were given, as they are spelled out."""
    return ["--" + name.replace("_", "-") for name, given in vars(unused).items() if given]
