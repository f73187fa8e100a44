"""`llmcli generate`: prompts in, text out while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from llmcli.shell.batch import read_batch
from llmcli.shell.configuration import names_from_file
from llmcli.shell.encoding import ChatOptions, check_fits, encode, named
from llmcli.shell.options import OUTPUT, TOKEN_LIMIT, ModelOptions, OutputOptions, PromptOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.prompts import read_prompt, stop_texts
from llmcli.shell.running import DraftOptions, load_model
from llmcli.shell.sampling import SamplingOptions, resolve

EPILOG = """
Examples:

  llmcli generate "What is the capital of France?"
  llmcli generate "The capital of France is" --raw -n 8
  cat page.txt | llmcli generate "What is this text about?" --greedy
  llmcli generate "Why is the sky blue?" -m smollm2-1.7b --stats full
  llmcli generate -f talk.json "And why is it red at night?"

`llmcli models` lists the models that have a short name.
"""
TEXT = "Text"
Level = Literal["off", "short", "full"]


@dataclass(frozen=True, kw_only=True)
class GenerateOutputOptions(OutputOptions):
    """As everywhere, but `--json` and `--batch` together are JSON lines."""

    panel: ClassVar[str] = OUTPUT
    json: bool = opt(
        False, "--json", "One JSON document on stdout; with --batch one per prompt, one a line."
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How much is written, where it ends, and how it is shown."""

    panel: ClassVar[str] = TEXT
    max_tokens: int | None = opt(
        None,
        "-n --max-tokens N",
        "Maximum number of new tokens; -1: no limit. [default: the model's, else 256]",
        within=TOKEN_LIMIT,
    )
    stop: list[str] | None = opt(
        None, "--stop TEXT", "Stop before this text, which is not printed; repeatable."
    )
    ignore_eos: bool = opt(False, "--ignore-eos", "Continue past the model's end token.")
    num_samples: int = opt(
        1, "--num-samples N", "Number of texts per prompt.", at_least=1, at_most=1024
    )
    batch: str | None = opt(
        None,
        "--batch FILE.jsonl",
        "Many prompts, one per line: \"text\", {\"prompt\": \"text\"}, {\"ids\": [1, 2]} or "
        "{\"messages\": […]}. With --json one document per prompt, one a line.",
        excludes=("PROMPT", "--file", "--ids"),
    )
    logprobs: int | None = opt(
        None,
        "--logprobs K",
        "Colours by probability (before any filter), underlines near ties; in JSON also the K "
        "likeliest.",
        at_least=0,
        at_most=1000,
        panel=OUTPUT,
    )
    stats: Level | None = opt(
        None,
        "--stats off|short|full",
        "Speed, memory, settings, near ties on stderr. [default: short on a terminal, else off]",
        panel=OUTPUT,
    )
    stream_json: bool = opt(
        False, "--stream-json", "A JSON line for each token.", panel=OUTPUT, excludes=("--json",)
    )


def command(
    prompt: PromptOptions,
    sampling: SamplingOptions,
    text: GenerateOptions,
    chat: ChatOptions,
    model: ModelOptions,
    draft: DraftOptions,
    output: GenerateOutputOptions,
    ctx: Any,
) -> None:
    """Generate text with a model, token by token.

    The prompt is PROMPT, a file, a pipe, or several of them joined. Where the model has a chat
    template it answers; `--raw` continues the text as it stands. A .json file with `messages` is a
    conversation: its last message is answered, or continued where it is the assistant's.
    """
    from llmcli.commands.generate.measure import Run
    from llmcli.commands.generate.writers import DocumentWriter, TextWriter, TokenWriter

    out = Output("generate", output)
    stop = stop_texts(text.stop)
    chat.check()
    given = [read_prompt(prompt, out.note)] if text.batch is None else read_batch(text.batch)
    chat.check_conversations(given)
    seed, drawn = model.sampling_seed()
    with chat.renderer(given):
        loaded = load_model(model, out, text=any(not item.ids for item in given))
        resolved = resolve(
            loaded.model, sampling, seed, names_from_file(ctx), limited=text.max_tokens is not None
        )
        encoded = [encode(item, chat, loaded.model) for item in given]
    from llmcli.engine.stream import TextRequest  # torch, once the model is known to be supported

    if loaded.model.edits:
        from llmcli.inspect.edits import apply_edits

        apply_edits(loaded.model, [one.ids for one in encoded])
    room = check_fits(encoded, loaded.model.config, model.context_length)
    limit = text.max_tokens or resolved.limit or 256
    terminal = out.err.terminal and not (out.json or text.stream_json or out.quiet)
    level = text.stats or ("short" if terminal else "off")
    lines, logprobs = text.stream_json, text.logprobs
    request = TextRequest(
        prompts=[one.ids for one in encoded],
        sampling=resolved.values.engine(resolved.suppressed),
        limit=None if limit == TOKEN_LIMIT.or_else else limit,
        stop=stop or resolved.stop,
        ignore_eos=text.ignore_eos,
        logprobs=0 if lines and logprobs is None else logprobs,
        margins=out.json or lines or logprobs is not None or level == "full",
        samples=text.num_samples,
        capacity=room,
    )
    for note in resolved.notes:
        out.note(note)
    for which, item in named(encoded):
        left = room - len(item.ids) + 1  # the last new token is never read
        if request.limit is not None and left < request.limit:
            out.note(
                f"{which} leaves room for {left} of the {request.limit} new tokens in a context of "
                f"{room}: the text ends there"
            )
    if resolved.greedy and text.num_samples > 1:
        why = f"the temperature is 0 ({resolved.origins['temperature']})"
        out.note(f"`--num-samples {text.num_samples}` gives the same text every time: {why}")
    speculation = None
    if len(encoded) * text.num_samples == 1:
        speculation = draft.load(loaded.model, model, out)
    elif draft.draft is not None:
        out.note("`--draft` is for one text at a time: several are decoded side by side without it")
    writer = TokenWriter if lines else DocumentWriter if out.json else TextWriter
    writer(
        out=out, options=text, prompts=encoded, resolved=resolved, level=level, drawn=drawn,
        run=Run(loaded, request, speculation),
    ).write()
