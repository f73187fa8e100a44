"""The topics of `llmcli help`: their names, and what each is about. The text is in `topics/`."""

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


TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        Topic(
            name="models",
            summary="Which models run, how to name one, where its files are.",
            spellings=("model", "catalog", "cache", "hub", "downloads"),
        ),
        Topic(
            name="sampling",
            summary="How tokens are chosen: options, defaults, seeds, near ties, drafts, chat.",
            spellings=("text", "seed", "seeds", "speculative", "decoding", "conversations"),
        ),
        Topic(
            name="shapes",
            summary="Shapes and names: axes, the name of every tensor, what others call it.",
            spellings=("names", "tensors", "axes", "tensor-names", "shapes-and-names"),
        ),
        Topic(
            name="attention",
            summary="Reading attention maps, head metrics, the logit lens and expert routing.",
            spellings=("reading-attention", "metrics", "heads", "heatmaps"),
        ),
        Topic(
            name="benchmarking",
            summary="Benchmarking well: what to measure, how, and how to compare.",
            spellings=("benchmarks", "benchmarking-well", "performance", "speed", "profiling"),
        ),
        Topic(
            name="formats",
            summary="File and weight formats, tokenizers, and the arithmetic each one runs in.",
            spellings=("format", "quantization", "gguf", "safetensors", "dtypes"),
        ),
        Topic(
            name="numbers",
            summary="Why the numbers can be trusted: checks, tolerances, reproducibility.",
            spellings=("accuracy", "precision", "checks", "reproducibility", "parity"),
        ),
        Topic(
            name="safety",
            summary="What is read of a checkpoint, what never runs, and the limits.",
            spellings=("security", "sandbox", "trust"),
        ),
        Topic(
            name="settings",
            summary="The configuration file, environment variables, output and exit codes.",
            spellings=("configuration", "config", "environment", "exit-codes", "json"),
        ),
    )
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
