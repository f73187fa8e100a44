"""The topics of `llmcli help`: names, and what each is about. The texts are in `help/topics`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One topic: its name, a line on what it is about, and other spellings of the name."""

    name: str
    summary: str
    spellings: tuple[str, ...] = ()

    def text(self) -> str:
        """The Markdown file of the topic, in which a line `<!-- table: NAME -->` is a table."""
        place = files("llmcli.cli.help") / "topics" / f"{self.name}.md"
        return place.read_text(encoding="utf-8")


# what each is about, and other spellings of its name
_ABOUT = {
    "models": (
        "Which models run, how to name one, where its files are.",
        "model catalog cache hub downloads",
    ),
    "sampling": (
        "How tokens are chosen: options, defaults, seeds, near ties, drafts, chat.",
        "text seed seeds speculative decoding conversations",
    ),
    "shapes": (
        "Shapes and names: axes, the name of every tensor, what others call it.",
        "names tensors axes tensor-names shapes-and-names",
    ),
    "attention": (
        "Reading attention maps, head metrics, the logit lens and expert routing.",
        "reading-attention metrics heads heatmaps",
    ),
    "benchmarking": (
        "Benchmarking well: what to measure, how, and how to compare.",
        "benchmarks benchmarking-well performance speed profiling",
    ),
    "formats": (
        "File and weight formats, tokenizers, and the arithmetic each one runs in.",
        "format quantization gguf safetensors dtypes",
    ),
    "numbers": (
        "Why the numbers can be trusted: checks, tolerances, reproducibility.",
        "accuracy precision checks reproducibility parity",
    ),
    "safety": (
        "What is read of a checkpoint, what never runs, and the limits.",
        "security sandbox trust",
    ),
    "settings": (
        "The configuration file, environment variables, output and exit codes.",
        "configuration config environment exit-codes json",
    ),
}
TOPICS = {
    name: Topic(name=name, summary=summary, spellings=tuple(spellings.split()))
    for name, (summary, spellings) in _ABOUT.items()
}


def topic_of(words: Iterable[str]) -> Topic | None:
    """The topic of that name or spelling (`reading attention`, `Names`); None for no topic."""
    name = "-".join(words).lower().replace("_", "-").replace(" ", "-").strip("-")
    for topic in TOPICS.values():
        if name == topic.name or name in topic.spellings:
            return topic
    return None


def spellings() -> tuple[str, ...]:
    """Everything that names a topic."""
    return tuple(name for one in TOPICS.values() for name in (one.name, *one.spellings))
