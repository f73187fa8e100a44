"""What `info` says that a run needs, beside what the process held: each in a process of its own.

    python tests/benchmarks/memory_estimate.py [--contexts 64,512] [--batches 1] [--json]

SmolLM2, the small model of the package, and one of Qwen2.5-0.5B's shape with random weights (it
has no tokenizer). A prompt that fills the context but for eight tokens is read and continued; of
a batch the first sequence ends before the others, so that their caches are copied. Measured is
the most that was resident from opening the checkpoint on, above what Python with PyTorch and our
modules held. Ends with 1 where an estimate is more than 5 % away.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

from bench_tools import arguments, environment, run_python, table

TOLERANCE = 0.05
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "num_hidden_layers": 24, "vocab_size": 151936, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip

CODE = """
import json, torch
torch.set_num_threads({threads})
from llmcli.checkpoints import open_model
from llmcli.engine.stream import TextRequest, stream
from llmcli.engine.sampling import Sampling
from llmcli.loading.load import load_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.measure.machine import cpu
from llmcli.measure.peaks import Peak, resident_bytes

context, batch, new = {context}, {batch}, 8
base = resident_bytes()
peaks = []
with Peak() as load:
    checkpoint = open_model({spec!r}, offline=True)
    seed = None if checkpoint.tensors else 0
    model = load_checkpoint(checkpoint, device="cpu", dtype={dtype!r}, random_weights=seed)
lengths = [context - 2 if batch > 1 and not row else context - new for row in range(batch)]
prompts = [[(7 * i + row) % 1000 + 5 for i in range(length)] for row, length in enumerate(lengths)]
request = TextRequest(
    prompts=prompts, sampling=Sampling(temperature=0), limit=new, ignore_eos=True, capacity=context
)
tokens = stream(model, request)
with Peak() as prefill:
    next(tokens)
with Peak() as decode:
    for token in tokens:
        pass
peaks = [peak.resident - base for peak in (load, prefill, decode)]
report = measure_info(checkpoint, [cpu()], dtype={dtype!r}, batch=batch, context=context)
need = report.memory[0].need
found = {{"base": base, "peaks": peaks, "need": vars(need), "total": need.needed_bytes}}
print(json.dumps(found))
"""


def measure(spec: str, dtype: str, context: int, batch: int, threads: int) -> dict[str, object]:
    """One run in a fresh process: bytes as `info` says them and as they were."""
    code = CODE.format(spec=spec, dtype=dtype, context=context, batch=batch, threads=threads)
    found = json.loads(run_python(code, threads=threads).stdout)
    measured = max(found["peaks"])
    return found | {
        "model": Path(spec).name, "dtype": dtype, "context": context, "batch": batch,
        "measured": measured, "ratio": found["total"] / measured,
    }  # fmt: skip


def main() -> int:
    options = arguments(
        __doc__.splitlines()[0], contexts="64,512,2048", batches="1,4",
        dtypes="auto,float32,bfloat16", models="smollm2,tiny,half", threads=2,
    ).parse_args()  # fmt: skip
    results = []
    with tempfile.TemporaryDirectory() as folder:
        half = Path(folder) / "half"
        half.mkdir()
        (half / "config.json").write_text(json.dumps(SHAPE))
        chosen = (options.models, options.dtypes, options.contexts, options.batches)
        for model, dtype, *numbers in product(*(text.split(",") for text in chosen)):
            context, batch = map(int, numbers)
            if model == "tiny" and context > 512:
                continue  # it was trained for 512 tokens
            spec = str(half) if model == "half" else model
            results.append(measure(spec, dtype, context, batch, options.threads))
    off = [one for one in results if abs(one["ratio"] - 1) > TOLERANCE]
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "runs": results}, indent=1))
    else:
        show(results, options.threads)
    return 1 if off else 0


def show(results: list[dict[str, object]], threads: int) -> None:
    """The table, MiB."""
    head = ["model", "dtype", "context", "batch"]
    rows = [[*head, "info", "load", "prompt", "decode", "most", "ratio"]]
    for one in results:
        sizes = [one["total"], *one["peaks"], one["measured"]]
        off = "" if abs(one["ratio"] - 1) <= TOLERANCE else " ✗"
        mebibytes = [f"{size / 2**20:.1f}" for size in sizes]
        rows.append([*(str(one[name]) for name in head), *mebibytes, f"{one['ratio']:.2f}{off}"])
    print(table(f"MiB above PyTorch itself, {threads} threads", rows))
    print(", ".join(f"{name} {value}" for name, value in environment(threads).items()))


if __name__ == "__main__":
    sys.exit(main())
