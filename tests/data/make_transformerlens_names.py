"""Writes transformerlens_names.json: what every hook of TransformerLens holds, in our names.

TransformerLens runs a tiny checkpoint of every family; each of its hooks is compared with every
activation of ours by the numbers alone, so that what is written does not know our table of aliases.
Of several that are equal all are written, and of the blocks the last one. Needs transformer-lens
(it was made with 4.3.0) and PYTHONPATH=.:tests:tests/parity.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformer_lens.model_bridge.sources.transformers.source as source
from parity_models import prompt, write
from parity_reference import load_reference
from torch import Tensor
from zoo import variant

from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint
from llmcli.model import Model

FAMILIES = ("gpt2", "llama-gqa3", "mistral", "qwen2", "qwen3")
HERE = Path(__file__).parent


def ours(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """Every activation by its name, with those that are derived."""
    seen: dict[str, Tensor] = {}
    model.decoder(ids, tap=seen.__setitem__)
    for i, block in enumerate(model.decoder.blocks):
        name = f"blocks.{i}.attn"
        last = next(end for end in ("_rot", "_norm", "") if f"{name}.q{end}" in seen)
        q, k, z = seen[f"{name}.q{last}"], seen[f"{name}.k{last}"], seen[f"{name}.z"]
        seen[f"{name}.scores"] = block.mixers[0].score_rows(q, k, 0)
        seen[f"{name}.pattern"] = block.mixers[0].attention_rows(q, k, 0)
        w_o = model.decoder.weight(f"{name}.W_o").dense().T.unflatten(0, (z.shape[1], -1))
        seen[f"{name}.result"] = torch.einsum("bhte,hed->bhtd", z, w_o)
    return seen


def equal(theirs: Tensor, mine: Tensor) -> bool:
    """Whether both hold the same numbers, with the heads before, after or beside the tokens."""
    layouts = [mine, mine.transpose(1, 2)] if mine.ndim == 4 else [mine]
    layouts += [layout.flatten(2) for layout in layouts[1:]]
    return any(
        theirs.shape == layout.shape and torch.allclose(theirs, layout, rtol=1e-4, atol=1e-5)
        for layout in layouts
    )


def hooks(path: Path, ids: Tensor) -> dict[str, Tensor]:
    """What every hook of TransformerLens holds, by all names that it has for it."""
    reference = load_reference(path, torch.float32)
    source.configure_tokenizer = lambda tokenizer, _: tokenizer  # ids are given, no text is read
    bridge = source.boot(str(path), hf_model=reference, tokenizer=object(), device="cpu")
    bridge.enable_compatibility_mode(no_processing=True)
    found = dict(bridge.run_with_cache(ids)[1].items())
    bridge.set_use_attn_result(True)  # the heads' results, in place of their sum
    return dict(bridge.run_with_cache(ids)[1].items()) | found


def main() -> None:
    """Writes the file."""
    ids = prompt(batch=1, tokens=12)
    found: dict[str, dict[str, str]] = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = write(variant(name), Path(folder))
            model = load_checkpoint(open_checkpoint(path), device="cpu", dtype="float32")
            activations = ours(model, ids)
            theirs = hooks(path, ids)
        found[name] = {
            hook: " ".join(mine for mine, tensor in activations.items() if equal(value, tensor))
            for hook, value in theirs.items()
            if not hook.startswith("blocks.0.")
        }
    text = json.dumps({"transformer_lens": "4.3.0", "hooks": found}, indent=1)
    (HERE / "transformerlens_names.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
