"""The Llama that a checkpoint describes, of either format, for a family to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config.attention import AttentionConfig, RopeConfig
from llmcli.config.embedding import EmbeddingConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig, sequential
from llmcli.config.norm import NormConfig
from llmcli.errors import CheckpointError
from llmcli.families import mixture
from llmcli.families.read import gguf_windows, hf_slides, hf_window, hf_windows
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.values import ConfigReader

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

    Tensors = Mapping[str, TensorInfo]


class Draft:
    """The Llama that a config.json (`hf`) or GGUF metadata describes, for a family to change.

    `attention` and `ffn` are the parts of each layer, each with the norm `norm`, before it (`pre`)
    and after it (`post`). `parallel`: they read the same input, through one norm or two.
    `multiplier`: of what they add. `kind`: the model type, in GGUF the architecture. `values` reads
    the settings, `tensors` are those of a GGUF file. `others`: changes of the ModelConfig, `change`
    of a finished layer.
    """

    def __init__(
        self, model: ModelConfig, values: ConfigReader, kind: str, tensors: Tensors | None
    ) -> None:
        self.model, self.values, self.kind = model, values, kind
        self.hf, self.tensors = tensors is None, tensors or {}
        found = [layer.attention for layer in model.layers]
        self.attention: list[AttentionConfig] = [one for one in found if one is not None]
        self.ffn: list[Any] = [layer.parts[-1] for layer in model.layers]
        self.norm, self.pre, self.post = model.final_norm, True, False
        self.parallel: int = 0  # norms of parallel parts; 0: one part after the other
        self.multiplier = 1.0
        self.others: dict[str, Any] = {}
        self.change: Callable[[int, LayerConfig], LayerConfig] = lambda number, layer: layer
        self._parts: dict[int, tuple[object, ...]] = {}

    def layer(self, number: int, *parts: object) -> None:
        """Give a layer these parts, one after the other, instead of attention and feed-forward."""
        self._parts[number] = parts

    def set_attention(self, **changes: Any) -> None:
        """Change the attention of all layers, and its scores."""
        self.attention = [one.changed(**changes) for one in self.attention]

    def set_ffn(self, **changes: Any) -> None:
        """Change the feed-forward of all layers."""
        self.ffn = [replace(one, **changes) for one in self.ffn]

    def set_experts(
        self, count: str, *, mixes: Sequence[bool] | None = None, **reading: Any
    ) -> None:
        """Give layers of a config.json a mixture, as `mixture.read` reads it; `mixes`: which ones.

        `count`: the key of the number of experts.
        """
        experts = mixture.read(self.values, count, self.ffn[0].activation, **reading)
        given = zip(self.ffn, mixes or [True] * len(self.ffn), strict=True)
        self.ffn = [experts if mixed else mlp for mlp, mixed in given]

    def by_layer(self, **changes: Sequence[Any]) -> None:
        """Change the attention of each layer: one value per layer for each field."""
        rows = zip(*changes.values(), strict=True)
        self.attention = [
            one.changed(**dict(zip(changes, row, strict=True)))
            for one, row in zip(self.attention, rows, strict=True)
        ]

    def rotate_only(self, layers: Sequence[object]) -> None:
        """Remove RoPE from each layer whose value is false or None."""
        rows = zip(self.attention, layers, strict=True)
        self.by_layer(rope=[one.rope if rotated else None for one, rotated in rows])

    def learned_positions(self) -> None:
        """Add a learned embedding of each position."""
        self.others["embedding"] = EmbeddingConfig(positions=self.model.context)

    def layer_norms(self, *, bias: bool, weights: bool = True) -> None:
        """Normalize with LayerNorm."""
        self.norm = NormConfig(kind="layer", eps=self.norm.eps, bias=bias, weights=weights)

    def set_windows(
        self, usual: Sequence[bool], *, listed: bool = True, switched: bool = False
    ) -> None:
        """Give layers of a config.json the window `sliding_window`.

        `usual`: which layers have it, unless `layer_types` says so (if `listed`). `switched`: only
        with `use_sliding_window`. Raises CheckpointError for listed layers without a size.
        """
        values, slides, window = self.values, usual, None
        if not switched or values.flag("use_sliding_window", False):
            window = hf_window(values, 4096)
        if listed and values.has("layer_types"):
            slides = hf_slides(values, len(usual))
            if any(slides) and window is None:
                raise CheckpointError(
                    "`layer_types` has windows but `sliding_window` is not in use"
                )
        self.by_layer(window=[window if one else None for one in slides])

    def windows(
        self, period: int, hf_default: int | None = None, gguf_default: int | None = None
    ) -> list[int | None]:
        """The window of each layer; by default the last layer of each `period` has none.

        The defaults are the size where a file of the format gives none.
        """
        count = len(self.attention)
        if self.hf:
            return hf_windows(self.values, count, period=period, window=hf_default)
        return gguf_windows(self.values, count, period=period, window=gguf_default)

    def hf_rope_of_windows(self, theta: float) -> RopeConfig:
        """RoPE of layers with a window in config.json; `theta`: the default base."""
        own = ConfigReader(of_layer_type(self.values.all(), "sliding_attention", theta=theta))
        head_dim = self.attention[0].head_dim
        return rope_from_hf(own, head_dim=head_dim, context=self.model.context)

    def multiplier_of(
        self, hf: str, gguf: str, hf_default: float = 1.0, gguf_default: float = 1.0
    ) -> float:
        """A positive setting; in GGUF 0 is the default, as in llama.cpp."""
        if self.hf:
            return self.values.number(hf, hf_default)
        return self.values.number(gguf, gguf_default, above=False) or gguf_default

    def finished(self, family: str, model_type: str) -> ModelConfig:
        """The model with all changes."""
        usual = enumerate(zip(self.attention, self.ffn, strict=True))
        layers = (
            self.change(number, self._layer(*self._parts.get(number, parts)))
            for number, parts in usual
        )
        named = {"family": family, "model_type": model_type, **self.others}
        return replace(self.model, final_norm=self.norm, layers=tuple(layers), **named)

    def _layer(self, *parts: object) -> LayerConfig:
        if self.parallel:
            attention, ffn = parts
            second = Branch(part=ffn, pre_norm=self.norm)
            if self.parallel == 1:
                second = Branch(part=ffn, shares_norm=True)
            return LayerConfig(sublayers=((Branch(part=attention, pre_norm=self.norm), second),))
        before, after = self.norm if self.pre else None, self.norm if self.post else None
        return sequential(*parts, norm=before, after=after, multiplier=self.multiplier)
