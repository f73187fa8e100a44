"""What a family is, and how one is found for a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.rules import Rule
from llmcli.families.values import shortened

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint, TensorInfo

Kind = Literal["safetensors", "gguf"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Pure translation: a checkpoint's configuration and names → ours. Knows nothing of torch.

    `hf_types` are `model_type`s of config.json, `gguf_archs` are `general.architecture`s.
    `from_hf` and `from_gguf` raise CheckpointError and UnsupportedModel.
    """

    name: str
    hf_types: tuple[str, ...]
    gguf_archs: tuple[str, ...]
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    from_gguf: Callable[[Mapping[str, Any], Mapping[str, TensorInfo]], ModelConfig]
    rules_hf: Callable[[ModelConfig], tuple[Rule, ...]]
    rules_gguf: Callable[[ModelConfig], tuple[Rule, ...]]

    def types(self, kind: Kind) -> tuple[str, ...]:
        """The names under which checkpoints of that kind call this family."""
        return self.hf_types if kind == "safetensors" else self.gguf_archs


def find(model_type: str, kind: Kind) -> Family:
    """The family of a `model_type` (or GGUF architecture).

    Raises UnsupportedModel with close matches, and the list of what is supported as its hint.
    """
    known = {name: family for family in families() for name in family.types(kind)}
    if model_type in known:
        return known[model_type]
    close = difflib.get_close_matches(model_type[:64], known, n=2)
    meant = f"; did you mean {' or '.join(f'`{name}`' for name in close)}" if close else ""
    raise UnsupportedModel(
        f"models of type `{shortened(model_type)}` are not supported{meant}",
        hint=f"supported types: {', '.join(sorted(known))}",
    )


def families() -> tuple[Family, ...]:
    """Every family, in the order in which they are listed to people."""
    from llmcli.families.gpt2 import GPT2  # here: a family's file imports this one
    from llmcli.families.llama import LLAMA, QWEN

    return (GPT2, LLAMA, QWEN)


def translate(checkpoint: Checkpoint) -> tuple[ModelConfig, tuple[Rule, ...]]:
    """The model that a checkpoint describes, and the rules that fill it from its tensors.

    Raises CheckpointError where the configuration is missing, contradicts itself or asks for
    the impossible, UnsupportedModel where it is of a kind that we do not have.
    """
    if checkpoint.config is None:
        raise CheckpointError(
            f"`{checkpoint.name}` has no configuration",
            hint="put the model's config.json beside the weights",
        )
    family = find(checkpoint.model_type, checkpoint.kind)
    if checkpoint.kind == "gguf":
        config = family.from_gguf(checkpoint.config, checkpoint.tensors)
        return config, family.rules_gguf(config)
    _refuse_quantized(checkpoint.config)
    config = family.from_hf(checkpoint.config)
    return config, family.rules_hf(config)


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    """Packed weights under the plain names would otherwise be read as what they are not."""
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if not value:
            continue
        method = value.get("quant_method", "unknown") if isinstance(value, Mapping) else "unknown"
        raise UnsupportedModel(
            f"weights quantized with `{shortened(method)}` are not supported",
            hint="use the unquantized checkpoint or a GGUF file of the same model",
        )
