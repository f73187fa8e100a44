"""Does rounding change the answers? 200 short questions, answered greedily by every engine.

    python tests/benchmarks/questions.py [--model smollm2] [--arithmetic float32 auto …] [--json]

Each question of `questions.txt` goes through the model's chat template once; all engines get the
same ids. Rows: llmcli in each arithmetic (a dtype, `auto` for products with the file's blocks, then
`:8` for activations of 8 bits and `/float32` for the cache), and llama.cpp on the same GGUF file
where llama-cpp-python is installed. An answer counts where one of the accepted words is in it.

The first arithmetic is the reference. Every engine also reads the reference's answers, one token a
step: how often its best token is another one, and KL(reference ‖ engine) and KL(llama.cpp ‖ engine)
in nats per token. An answer that the reference has and another engine lost is shown with the token
where they part, how far the reference's best two were apart there and, for llmcli, whether
`generate` marks that token as a near tie. Ctrl-C ends it with the questions so far.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from bench_tools import ROOT, arguments, environment, table
from torch import Tensor

sys.path.insert(0, str(ROOT))  # the working tree's llmcli

from llmcli.checkpoints import open_model
from llmcli.engine.session import Session
from llmcli.engine.ties import NearTies
from llmcli.errors import UsageError
from llmcli.loading.load import load_checkpoint
from llmcli.measure.llama_cpp import LlamaCpp
from llmcli.model import Model

QUESTIONS = Path(__file__).with_name("questions.txt")
LIMIT = 24  # tokens of an answer
LLAMA_CPP = "llama.cpp"
TIED = {None: "", True: " (marked as a near tie)", False: " (not marked as a near tie)"}


class Engine(Protocol):
    """One sequence at a time; both give the logits of the last token, `[V]`."""

    def start(self, ids: Sequence[int]) -> Tensor: ...

    def step(self, id: int) -> Tensor: ...


class Ours:
    """llmcli as `generate` runs it: one prefill, then one token a call."""

    def __init__(self, model: Model) -> None:
        self._decoder = model.decoder

    def start(self, ids: Sequence[int]) -> Tensor:
        self._session = Session(self._decoder, 1, len(ids) + LIMIT)
        return self._session.prefill([ids])[0]

    def step(self, id: int) -> Tensor:
        return self._session.extend([[id]])[0]


class Theirs:
    """llama.cpp on the file that `ours` was loaded from."""

    def __init__(self, ours: Model, threads: int) -> None:
        self._engine = LlamaCpp(ours, n_batch=512)
        self._engine.start(1024, threads, 512)

    def start(self, ids: Sequence[int]) -> Tensor:
        self._engine.rewind(0)
        self._engine.read(ids)
        return self._engine.logits()

    def step(self, id: int) -> Tensor:
        self._engine.step(id)
        return self._engine.logits()


@dataclass
class Row:
    """What one engine did, question by question."""

    answers: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)  # [tokens, V] along the reference


def greedy(engine: Engine, ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    """At most LIMIT tokens, an end token not among them."""
    found: list[int] = []
    logits_V = engine.start(ids)
    while len(found) < LIMIT:
        best = int(logits_V.argmax())
        if best in ends:
            break
        found.append(best)
        logits_V = engine.step(best)
    return found


def forced(engine: Engine, ids: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probabilities of the token after the prompt and after each token of `answer`."""
    rows = [engine.start(ids), *(engine.step(id) for id in answer)]
    return torch.stack(rows).double().log_softmax(-1)


def accepted(answer: str, words: Sequence[str]) -> bool:
    """Whether one of the words is there as a whole word, whatever its case."""
    return any(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", answer, re.I) for w in words)


def kl(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Mean KL(reference ‖ other) in nats per token."""
    pairs = zip(reference, other, strict=True)
    parts = [(r.double().exp() * (r.double() - o.double())).sum(-1) for r, o in pairs]
    return float(torch.cat(parts).mean())


def losses(
    reference: Row, other: Row, questions: Sequence[str], model: Model, ties: NearTies | None
) -> list[dict[str, Any]]:
    """What the reference answers and the other does not, with the token where they part.

    `ties`: those of the other engine's model, None where it is not ours.
    """
    found = []
    for n, question in enumerate(questions[: len(reference.right)]):
        if not reference.right[n] or other.right[n]:
            continue
        ours, theirs = reference.ids[n], other.ids[n]
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        best = reference.logprobs[n][at].topk(2)
        found.append({
            "question": question,
            "reference": reference.answers[n],
            "answer": other.answers[n],
            "token": at,
            "best_two": [model.token_text(int(id)) for id in best.indices],
            "margin": float(best.values[0] - best.values[1]),
            "tied": None if ties is None else near_tie(ties, other.logprobs[n][at]),
        })  # fmt: skip
    return found


def near_tie(ties: NearTies, logprobs_V: Tensor) -> bool:
    """Whether `generate` marks a greedy choice from these scores.

    Log-probabilities in place of logits: their difference is the same, and the bound's share that
    grows with the logits themselves is small and of the same size.
    """
    best = logprobs_V.topk(2)
    bound = ties.bound(best.indices[None], best.values[None], torch.ones(1, 2))
    return bool(best.values[0] - best.values[1] <= bound[0])


def main() -> None:
    threads = torch.get_num_threads()
    parser = arguments(__doc__.splitlines()[0], model="smollm2", threads=threads)
    usual = ["float32", "auto", "auto:8", "bfloat16"]
    parser.add_argument("--arithmetic", nargs="+", default=usual)
    parser.add_argument("--questions", type=int, help="only the first N")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    lines = [line for line in QUESTIONS.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" = ", 1) for line in lines[: options.questions]]
    questions = [question for question, _ in pairs]

    models = [loaded(options.model, arithmetic) for arithmetic in options.arithmetic]
    first = models[0]
    assert first.tokenizer is not None
    prompts = [
        first.tokenizer.encode_chat([{"role": "user", "content": question}])
        for question in questions
    ]
    engines: dict[str, Engine] = {
        dtype: Ours(model) for dtype, model in zip(options.arithmetic, models, strict=True)
    }
    try:
        engines[LLAMA_CPP] = Theirs(first, options.threads)
    except UsageError as error:
        print(error, file=sys.stderr)

    rows = {name: Row() for name in engines}
    try:
        for n, (ids, (_, words)) in enumerate(zip(prompts, pairs, strict=True)):
            answers = {name: greedy(engine, ids, first.eos_ids) for name, engine in engines.items()}
            reference = answers[options.arithmetic[0]]
            logprobs = {name: forced(engine, ids, reference) for name, engine in engines.items()}
            for name, row in rows.items():
                answer = first.tokenizer.decode(answers[name]).strip()
                row.ids.append(answers[name])
                row.answers.append(answer)
                row.right.append(accepted(answer, words.split("|")))
                row.logprobs.append(logprobs[name].float())
            if (n + 1) % 10 == 0:
                print(f"{n + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: of the questions so far", file=sys.stderr)

    reference_row, peer = rows[options.arithmetic[0]], rows.get(LLAMA_CPP)
    tokens = sum(map(len, reference_row.logprobs))
    ties = {d: NearTies(model) for d, model in zip(options.arithmetic, models, strict=True)}
    best = torch.cat([part.argmax(-1) for part in reference_row.logprobs])
    document: dict[str, Any] = {
        "model": first.name, "questions": len(reference_row.right), "tokens": tokens,
        "reference": options.arithmetic[0], "environment": environment(options.threads), "rows": {},
    }  # fmt: skip
    for name, row in rows.items():
        other = torch.cat([part.argmax(-1) for part in row.logprobs])
        document["rows"][name] = {
            "right": sum(row.right),
            "answers_that_differ": sum(
                a != b for a, b in zip(row.ids, reference_row.ids, strict=True)
            ),
            "tokens_that_differ": int((best != other).sum()),
            "kl_reference": kl(reference_row.logprobs, row.logprobs),
            "kl_llama_cpp": None if peer is None else kl(peer.logprobs, row.logprobs),
            "lost": losses(reference_row, row, questions, first, ties.get(name)),
            "gained": sum(b and not a for a, b in zip(reference_row.right, row.right, strict=True)),
        }
    if options.json:
        print(json.dumps(document, ensure_ascii=False, indent=1))
        return
    print(show(document))


def loaded(spec: str, arithmetic: str) -> Model:
    """`auto:8/float32`: the dtype, the activations' bits and the cache's dtype."""
    rest, _, cache = arithmetic.partition("/")
    dtype, _, bits = rest.partition(":")
    return load_checkpoint(
        open_model(spec), device="cpu", dtype=dtype, activations=bits or "auto",
        cache=cache or "auto",
    )  # fmt: skip


def show(document: dict[str, Any]) -> str:
    head = ["", "right", "lost", "gained", "other answers", "other tokens", "KL to reference",
            "KL to llama.cpp"]  # fmt: skip
    body = [
        [name, f"{row['right']} of {document['questions']}", str(len(row["lost"])),
         str(row["gained"]), str(row["answers_that_differ"]),
         f"{row['tokens_that_differ']} of {document['tokens']}", f"{row['kl_reference']:.2e}",
         "–" if row["kl_llama_cpp"] is None else f"{row['kl_llama_cpp']:.2e}"]
        for name, row in document["rows"].items()
    ]  # fmt: skip
    lines = [table(f"{document['model']}, reference {document['reference']}", [head, *body])]
    for name, row in document["rows"].items():
        for lost in row["lost"]:
            a, b = lost["best_two"]
            lines.append(
                f"{name} lost {lost['question']!r}: {lost['answer']!r}, not "
                f"{lost['reference']!r}; they part at token {lost['token']}, where {a!r} and "
                f"{b!r} are {lost['margin']:.3f} nats apart{TIED[lost['tied']]}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
