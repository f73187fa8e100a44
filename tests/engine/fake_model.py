"""A model without a network: its logits are a function of the whole sequence of ids.

It keeps what it was given per sequence, so that a mixed-up row, a wrong length, padding taken
for a token or a cache that is too small changes the text or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
from zoo import llama

from llmcli.config.embedding import EmbeddingConfig
from llmcli.text.spelling import Spelling, byte_letters
from llmcli.text.tokenizer import Tokenizer

LETTERS = {byte: letter for letter, byte in byte_letters().items()}
EOS = 256
EXTRA = ["<eos>", "<other>", "th", "the", "ü€", "\n\n"]  # ids 256 …
VOCAB = 256 + len(EXTRA)

Scores = Callable[[tuple[int, ...]], torch.Tensor]


def hashed(ids: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits that any change of the history changes."""
    seed = 0
    for id in ids:
        seed = (seed * 1000003 + id + 1) % (1 << 62)
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3
    scores[EOS] += 3  # an end now and then
    return scores


def script(*steps: int | Sequence[float]) -> Scores:
    """Logits of output position i, whatever the ids: a token id to be taken, or all logits."""

    def scores(ids: tuple[int, ...]) -> torch.Tensor:
        step = steps[min(len(ids) - 1, len(steps) - 1)]
        if isinstance(step, int):
            return torch.full((VOCAB,), -5.0).index_fill_(0, torch.tensor([step]), 5.0)
        return torch.tensor(step)

    return scores


class FakeState:
    lengths_B = None

    def __init__(self, rows: list[tuple[int, ...]], capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def select(self, rows: Sequence[int]) -> FakeState:
        return FakeState([self.rows[row] for row in rows], self.capacity)


class FakeDecoder:
    device = torch.device("cpu")
    devices = (device,)
    blocks = (None, None)
    readers = len(blocks)

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.calls: list[tuple[int, ...]] = []  # the shapes of ids
        self.capacities: list[tuple[int, int]] = []

    def state_bytes(self, batch: int, capacity: int, device: torch.device) -> int:
        return 8 * batch * capacity

    def new_state(self, batch: int, capacity: int) -> FakeState:
        self.capacities.append((batch, capacity))
        return FakeState([()] * batch, capacity)

    def needs_reprefill(self, state: FakeState, totals: Sequence[int]) -> bool:
        return False

    @torch.inference_mode()
    def __call__(
        self,
        ids: torch.Tensor,
        state: FakeState,
        *,
        lengths: Sequence[int] | None = None,
        logits: str,
        until: int | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        assert settings.keys() <= {"totals", "tap", "edits", "verify", "clock"}
        assert logits == "last"
        assert until in (None, len(self.blocks) - 1)
        batch, width = ids.shape
        assert batch == len(state.rows)
        self.calls.append((batch, width))
        lengths = [width] * batch if lengths is None else lengths
        assert max(lengths) == width
        new = [tuple(row[:n]) for row, n in zip(ids.tolist(), lengths, strict=True)]
        state.rows = [old + more for old, more in zip(state.rows, new, strict=True)]
        assert max(map(len, state.rows)) <= state.capacity
        rows = [
            self.scores(row) if n else torch.full((VOCAB,), float("nan"))  # nothing new: garbage
            for row, n in zip(state.rows, lengths, strict=True)
        ]
        if until is not None:  # a stream, which nobody may take for logits
            return torch.full((batch, width, 3), float("nan"))
        return torch.stack(rows)[:, None]


def tokenizer() -> Tokenizer:
    """Byte-level ids 0 … 255 for the bytes, two special tokens, four longer ones."""
    spelled = ["".join(LETTERS[b] for b in text.encode()) for text in EXTRA[2:]]
    return Tokenizer(
        name="bytes", backend=tokenizers.Tokenizer(tokenizers.models.BPE()),
        strings=[*(LETTERS[byte] for byte in range(256)), *EXTRA[:2], *spelled],
        spelling=Spelling(byte_level=True), silent=frozenset(),
        special_ids=frozenset({256, 257}), bos_id=None, eos_ids=frozenset({EOS}), prefix=(),
    )  # fmt: skip


def fake_model(
    scores: Scores = hashed, *, context: int = 4096, positions: int | None = None, text: bool = True
) -> Any:
    return SimpleNamespace(
        config=llama(
            vocab=VOCAB, width=1, context=context, embedding=EmbeddingConfig(positions=positions)
        ),
        decoder=FakeDecoder(scores),
        tokenizer=tokenizer() if text else None,
        eos_ids=frozenset({EOS}),
        device=torch.device("cpu"),
    )
