"""`llmcli help`: commands and topics; a topic; the help of a command.

The texts of the topics are in `assets/topics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from llmcli.cli.group import sections, width
from llmcli.errors import UsageError
from llmcli.records.numbers import did_you_mean
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output, make_console
from llmcli.shell.params import arg, opt

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """
Examples:

  llmcli help
  llmcli help sampling
  llmcli help models pull
  llmcli help attention | less
"""
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"[-*+#]+\s|[|>]|\d+[.)]\s")
WIDEST = 100  # columns of a paragraph


@dataclass(frozen=True)
class Topic:
    """One topic: its name, a line on what it is about, and other spellings of the name."""

    name: str
    summary: str
    spellings: str

    def text(self) -> str:
        """The Markdown file of the topic, in which a line `<!-- table: NAME -->` is a table."""
        place = files("llmcli") / "assets" / "topics" / f"{self.name}.md"
        return place.read_text(encoding="utf-8")


_ALL = (
    Topic("models", "Which models run, how to name one, where its files are.",
          "model catalog cache hub downloads"),
    Topic("sampling", "How tokens are chosen: options, defaults, seeds, near ties, drafts, chat.",
          "text seed seeds speculative decoding conversations"),
    Topic("shapes", "Shapes and names: axes, the name of every tensor, what others call it.",
          "names tensors axes tensor-names shapes-and-names"),
    Topic("attention", "Reading attention maps, head metrics, the logit lens and expert routing.",
          "reading-attention metrics heads heatmaps"),
    Topic("interventions", "Changing what a model computes: edits of activations.",
          "edit edits intervene steering ablation"),
    Topic("benchmarking", "Benchmarking well: what to measure, how, and how to compare.",
          "benchmarks benchmarking-well performance speed profiling"),
    Topic("formats", "File and weight formats, tokenizers, and the arithmetic each one runs in.",
          "format quantization gguf safetensors dtypes"),
    Topic("numbers", "Why the numbers can be trusted: checks, tolerances, reproducibility.",
          "accuracy precision checks reproducibility parity"),
    Topic("safety", "What is read of a checkpoint, what never runs, and the limits.",
          "security sandbox trust"),
    Topic("settings", "The configuration file, environment variables, output and exit codes.",
          "configuration config environment exit-codes json completion"),
)  # fmt: skip
TOPICS = {topic.name: topic for topic in _ALL}
SPELLINGS = {word: topic for topic in _ALL for word in (topic.name, *topic.spellings.split())}


def topic_of(words: Iterable[str]) -> Topic | None:
    """The topic of that name or spelling (`reading attention`, `Names`); None for no topic."""
    return SPELLINGS.get("-".join(words).lower().replace("_", "-").replace(" ", "-").strip("-"))


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """The topic or command to explain."""

    subject: list[str] | None = arg(
        None, "[TOPIC|COMMAND]", "A topic, or a command. [default: all are listed]"
    )
    no_pager: bool = opt(False, "--no-pager", "Show a long text without a pager.")


def command(requested: HelpOptions) -> None:
    """Explains a topic, or lists the options of a command.

    `help COMMAND` is `COMMAND --help`. A topic with the name of a command (models, shapes,
    attention) is about its subject, and refers to its `--help`.
    """
    words = requested.subject or []
    out = Output("help", OutputOptions())
    if not words:
        rows = [(topic.name, topic.summary) for topic in TOPICS.values()]
        topics = "\n".join(sections({"Topics (`llmcli help TOPIC`)": rows}))
        out.print(f"{_help_of([])}\n\n{topics}\n", paged=not requested.no_pager)
    elif topic := topic_of(words):
        out.print(_explained(topic, out), paged=not requested.no_pager)
    else:
        out.print(f"{_help_of(words)}\n", paged=not requested.no_pager)


def _explained(topic: Topic, out: Output) -> str:
    """A topic, with its tables, as wide as the terminal."""
    text = topic.text()
    if "<!-- table: " in text:
        from llmcli.cli.vocabulary import filled

        text = filled(text)
    screen = out.out
    console = make_console(screen)
    console.width = screen.width if screen.terminal else width()
    return drawn(text, console)


def _help_of(words: Sequence[str]) -> str:
    """What `llmcli WORDS --help` prints. Raises UsageError for what is no command."""
    from llmcli.cli.tree import root  # which names this module

    top: Any = root()
    context = top.make_context("llmcli", [], resilient_parsing=True)
    if not words:
        return str(top.get_help(context))
    name = " ".join(words)
    if name not in top.entries and name not in top.nested:
        raise _unknown(name, [*top.entries, *top.nested])
    found = top.get_command(context, name)
    inner = found.make_context(name, [], parent=context, resilient_parsing=True)
    return str(found.get_help(inner))


def _unknown(name: str, commands: Sequence[str]) -> UsageError:
    """For what is neither a topic nor a command."""
    close = get_close_matches(name.lower(), [*SPELLINGS, *commands], 1)
    meant = [f"llmcli help {SPELLINGS[one].name if one in SPELLINGS else one}" for one in close]
    otherwise = f"the topics are {', '.join(TOPICS)}; `llmcli help` lists the commands, too"
    hint = did_you_mean(meant, otherwise)
    return UsageError(f"unknown topic or command `{name}`", hint=hint)


def drawn(text: str, console: Console) -> str:
    """The Markdown `text`: paragraphs wrapped, tables drawn, code indented, no comments.

    The lines of a paragraph are joined first: in the file they are wrapped for its readers.
    """
    colour, out, at = not console.no_color, list[str](), 0
    text = _COMMENT.sub("", text)
    console.width = min(console.width, WIDEST)
    for fence in _FENCE.finditer(text):
        out += _prose(text[at : fence.start()], console), *_code(fence, colour=colour)
        at = fence.end()
    out.append(_prose(text[at:], console))
    return re.sub(r"\n{3,}", "\n\n", "".join(out)).strip("\n") + "\n"


def _prose(text: str, console: Console) -> str:
    from llmcli.ui.markdown import MarkdownStream

    stream = MarkdownStream(console)
    shown = stream.push("\n".join(_joined(text))) + stream.finish() + "\n"
    # without colours a cell keeps its markers, this one, too
    return shown.replace(r"\|", "|")


def _joined(text: str) -> Iterator[str]:
    """Lines, those of a paragraph or of an item of a list as one."""
    line = ""
    for own in [*text.split("\n"), ""]:
        bare = own.strip()
        if bare and line and not line.startswith(("#", "|")) and not _ITEM.match(bare):
            line += f" {bare}"
            continue
        if line:
            yield line
        line = own.rstrip()
        if not bare:
            yield ""
    if line:
        yield line


def _code(fence: re.Match[str], *, colour: bool) -> Iterator[str]:
    from llmcli.ui.markdown import Code

    code = Code(fence[1] if colour else "")
    yield "\n"
    for line in fence[2].splitlines():
        yield f"    {code.line(line)}\n" if line else "\n"
    yield "\n"
