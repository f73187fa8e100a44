"""`--draft`: speculative decoding with a draft model or n-grams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcli.shell.options import MODEL, ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.running import load_model

if TYPE_CHECKING:
    from llmcli.engine.speculation import Speculation
    from llmcli.model import Model

NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Speculative decoding: whether tokens are drafted, and by which model."""

    panel: ClassVar[str] = MODEL
    draft: str | None = opt(
        None, "--draft", "MODEL|ngram",
        "Speculative decoding: a smaller model of the same vocabulary, or what followed the same "
        "tokens before, proposes tokens. The text stays the same: bit by bit with packed weights "
        "on a CPU, elsewhere within rounding.",
    )  # fmt: skip

    def load(self, model: Model, options: ModelOptions, out: Output) -> Speculation | None:
        """Loads the draft, None without `--draft`.

        Raises the errors of `load_model`, and UsageError for another vocabulary.
        """
        if self.draft is None:
            return None
        from llmcli.engine.drafts import ModelDraft, NgramDraft
        from llmcli.engine.speculation import Speculation

        if self.draft == NGRAM:
            return Speculation(NgramDraft())
        small = load_model(
            replace(options, model=self.draft, revision=None, context_length=None), out, text=True
        )
        return Speculation(ModelDraft(small.model, model))
