"""Trains `tiny`, the small GPT-2 that ships with llmcli, and writes everything beside this file.

The text is the King James Bible, whose copyright has expired, from Debian's `bible-kjv-text`;
`bible`, from the package `bible-kjv`, writes it out, one verse a line (`Ge1:1 In the beginning …`):

    apt-get download bible-kjv=4.38 bible-kjv-text=4.38
    for package in bible-kjv*.deb; do dpkg -x $package root; done
    root/usr/bin/bible -f -p root/usr/lib gen1:1-rev22:21 </dev/null >kjv.txt
    python train.py kjv.txt --steps N --seed N --threads N  # as losses.json records them

Every `EVERY`-th chapter is held out: neither the tokenizer nor the model sees it. Needs torch,
transformers, tokenizers and safetensors. No module of llmcli imports this file. The same seed,
versions, processor and number of threads give the same weights; elsewhere rounding differs.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import math
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
END = "<|endoftext|>"
VOCAB, WIDTH, LAYERS, HEADS, CONTEXT = 2048, 256, 4, 8, 512
EVERY, FIRST = 20, 10  # chapters 10, 30, 50, … of the 1189 are held out
PASSAGES = ("Exodus 1\n", "Psalm 33\n", "Matthew 2\n", "James 5\n")
TOKENS, SHORT, SHORTS = 1024, 64, 1500  # predictions a step; short windows; steps with them
PEAK, FLOOR, WARM_UP, TAIL, DECAY = 1.5e-3, 0.02, 100, 0.35, 0.1
BOOKS = """
    Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings
    2_Kings 1_Chronicles 2_Chronicles Ezra Nehemiah Esther Job Psalm Proverbs Ecclesiastes
    Song_of_Solomon Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah
    Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans
    1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians
    2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John
    2_John 3_John Jude Revelation
"""


def chapters(text: str) -> list[str]:
    """`Genesis 1`, a newline, and the chapter's verses as one paragraph, for every chapter."""
    found: list[str] = []
    books = iter(BOOKS.split())
    book = name = ""
    verses = (line.split(" ", 1) for line in text.splitlines())
    for place, group in itertools.groupby(verses, key=lambda verse: verse[0].split(":")[0]):
        short = place.rstrip("0123456789")
        if short != book:
            book, name = short, next(books).replace("_", " ")
        found.append(f"{name} {place[len(short) :]}\n{' '.join(verse[1] for verse in group)}\n")
    return found


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, cut as GPT-2 cuts: all 256 bytes are tokens, so that any text can be one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def new_model() -> Any:
    """GPT-2 as `transformers` draws it, but with sinusoids as the first position embeddings.

    They make the position before linear to find, as in "Attention Is All You Need" (2017, §3.5);
    training moves them. GPT-2's spread of 0.02 is for larger widths. No dropout: the text is read
    only a few times.
    """
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=4 * WIDTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    rate = CONTEXT ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))
    angle = torch.arange(CONTEXT)[:, None] * rate
    waves = torch.cat((angle.sin(), angle.cos()), 1) * config.initializer_range * 2**0.5
    model.transformer.wpe.weight.data.copy_(waves)
    for block in model.transformer.h:
        block.mlp.act = torch.nn.GELU("tanh")  # `gelu_new` in one kernel: an eighth of the time
    return model


def batches(stream: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, positions) of TOKENS predictions each: SHORTS batches of short windows, then long.

    Epoch after epoch, cut at another offset each time; short windows lie at any position. They
    teach a head to look at the token before much sooner (Press et al. 2021, "Shortformer").
    """
    generator = torch.Generator().manual_seed(seed)

    def epochs(length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = TOKENS // length
        while True:
            offset = int(torch.randint(length, (1,), generator=generator))
            windows = stream[offset:].unfold(0, length + 1, length)
            order = torch.randperm(len(windows), generator=generator)
            for part in torch.split(order, rows)[:-1]:
                first = torch.randint(CONTEXT - length + 1, (rows, 1), generator=generator)
                yield windows[part], first + torch.arange(length)

    yield from itertools.islice(epochs(SHORT), SHORTS)
    yield from epochs(CONTEXT)


def rate_at(step: int, steps: int) -> float:
    """The learning rate: a straight warm-up, PEAK, in the last TAIL half a cosine to FLOOR of it.

    Until the tail begins it does not depend on `steps`, which may still be changed by then.
    """
    begin = (1 - TAIL) * steps
    way = max(0.0, (step - begin) / (steps - begin))
    cosine = (1 + math.cos(math.pi * way)) / 2
    return PEAK * min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * cosine)


def windows_of(ids: list[int]) -> list[list[int]]:
    """One chapter between two ends, cut so that each id but the first is predicted once."""
    whole = [0, *ids, 0]
    return [whole[i : i + CONTEXT + 1] for i in range(0, len(whole) - 1, CONTEXT)]


@torch.inference_mode()
def held_out_loss(model: Any, texts: list[list[int]]) -> list[float]:
    """Nats for each held-out chapter, summed over its ids and the end after them."""
    model.eval()
    sums = []
    for ids in texts:
        total = 0.0
        for window in windows_of(ids):
            here = torch.tensor(window)
            logits = model(here[None, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, here[1:], reduction="sum").item()
        sums.append(total)
    model.train()
    return sums


@torch.inference_mode()
def previous_token(model: Any, texts: list[list[int]]) -> list[list[float]]:
    """For each layer and head the mean weight that a query gives to the token just before it."""
    model.eval()
    model.set_attn_implementation("eager")
    total, count = torch.zeros(LAYERS, HEADS), 0
    for window in itertools.chain.from_iterable(map(windows_of, texts)):
        ids = torch.tensor(window[:-1])
        patterns = model(ids[None], output_attentions=True).attentions
        total += torch.stack([p[0].diagonal(-1, 1, 2).sum(1) for p in patterns])
        count += len(ids) - 1
    return [[round(x, 4) for x in row] for row in (total / count).tolist()]


def baselines(stream: list[int], texts: list[list[int]]) -> dict[str, float]:
    """Nats per token of two counting models of the training ids, on the very same held-out ids.

    `unigram` adds one to each count; `bigram` is interpolated Kneser-Ney (Chen and Goodman 1999,
    §2.7), its discount from Ney's formula n₁ / (n₁ + 2 n₂).
    """
    one, two = Counter(stream), Counter(itertools.pairwise(stream))
    first, after, before = Counter(stream[:-1]), Counter[int](), Counter[int]()
    for a, b in two:
        after[a] += 1
        before[b] += 1
    often = Counter(two.values())
    discount = often[1] / (often[1] + 2 * often[2])
    sums, count = [0.0, 0.0], 0
    for ids in texts:
        for a, b in itertools.pairwise([0, *ids, 0]):
            sums[0] -= math.log((one[b] + 1) / (len(stream) + VOCAB))
            kinds = (before[b] + 1) / (len(two) + VOCAB)
            rest = discount * after[a] / first[a] if first[a] else 1.0
            seen = max(two[a, b] - discount, 0) / first[a] if first[a] else 0.0
            sums[1] -= math.log(seen + rest * kinds)
            count += 1
    return {"unigram": sums[0] / count, "bigram": sums[1] / count}


def write_for_tests(kept: list[str], held: list[str], stream: list[int], folder: Path) -> None:
    """What llmcli's own tests measure `tiny` against.

    A few held-out chapters; how often each pair of ids follows one another in the training text;
    and the words that it has at least three times.
    """
    chosen = [text for text in held if text.startswith(PASSAGES)]
    (folder / "held_out.txt").write_text("\n".join(chosen))
    two = sorted(Counter(itertools.pairwise(stream)).items())
    pairs = np.array([pair for pair, _ in two], np.uint16)
    counts = np.array([n for _, n in two], np.uint16)
    np.savez_compressed(folder / "pair_counts.npz", pairs=pairs, counts=counts)
    words = Counter(re.findall("[a-z]+", " ".join(kept).lower()))
    often = sorted(word for word, count in words.items() if count > 2)
    text = "\n".join(often) + "\n"
    (folder / "words.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


class Training:
    """AdamW on one model, which can be left and taken up again at any step, to the same bits."""

    def __init__(self, model: Any, stream: torch.Tensor, seed: int) -> None:
        self.model, self.step, self.seconds = model, 0, 0.0
        self.batches = batches(stream, seed)
        self.curves: dict[str, list[dict[str, float]]] = {"train": [], "held_out": []}
        named = dict(model.named_parameters())
        plain = [p for name, p in named.items() if p.ndim < 2 or "wpe" in name]
        decayed = [p for name, p in named.items() if p.ndim > 1 and "wpe" not in name]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=PEAK, betas=(0.9, 0.98), weight_decay=DECAY, fused=True
        )

    def advance(self, steps: int) -> float:
        """One step of a training of `steps`; returns the loss of its batch in nats per token."""
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, steps)
        ids, positions = next(self.batches)
        logits = self.model(ids[:, :-1], position_ids=positions).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - begin
        return loss.item()

    def write(self, file: Path) -> None:
        """Everything that the next step depends on."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        plain = {"step": self.step, "seconds": self.seconds, "curves": self.curves}
        torch.save({**parts, **plain, "random": torch.get_rng_state()}, file)

    def read(self, file: Path) -> None:
        """Goes on where `write` was called; the batches up to there are drawn and left."""
        saved = torch.load(file)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.curves = saved["curves"]
        next(itertools.islice(self.batches, self.step, self.step), None)
        torch.set_rng_state(saved["random"])


def fit(training: Training, held: list[list[int]], steps: int, state: Path | None) -> None:
    """Trains up to `steps` and notes both curves; `state` is read first and kept up to date."""
    if state is not None and state.exists():
        training.read(state)
    targets = sum(len(ids) + 1 for ids in held)
    recent: list[float] = []
    while training.step < steps:
        recent.append(training.advance(steps))
        last = training.step == steps
        if training.step % 100 == 0 or last:
            mean = round(sum(recent) / len(recent), 4)
            training.curves["train"].append({"step": training.step, "loss": mean})
            speed = training.step * TOKENS / training.seconds
            print(f"step {training.step} of {steps}: {mean} nats, {speed:.0f} tokens/s", flush=True)
            recent = []
        if training.step % 500 == 0 or last:
            mean = round(sum(held_out_loss(training.model, held)) / targets, 4)
            training.curves["held_out"].append({"step": training.step, "loss": mean})
            print(f"  held out: {mean} nats", flush=True)
        if state is not None and training.step % 100 == 0:
            training.write(state)


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """The standard Hugging Face files; weights in float16, which halves them."""
    defaults = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
    settled: Any = transformers.GenerationConfig
    model.generation_config = settled(**defaults, bos_token_id=0, eos_token_id=0)
    model.half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def results(
    model: Any, names: list[str], texts: list[str], held: list[list[int]], stream: list[int]
) -> dict[str, Any]:
    """What losses.json says of the model as it is saved, all of it on the held-out chapters."""
    rounded = model.half().float()
    nats = held_out_loss(rounded, held)
    sizes = [len(text.encode()) for text in texts]
    ends = [len(ids) + 1 for ids in held]
    per = [n / end for n, end in zip(nats, ends, strict=True)]
    rows = zip(names, ends, sizes, per, strict=True)
    keys = ("name", "tokens", "bytes", "nats_per_token")
    return {
        "held_out_nats_per_token": sum(nats) / sum(ends),
        "held_out_bits_per_byte": sum(nats) / math.log(2) / sum(sizes),
        **{f"{name}_nats_per_token": loss for name, loss in baselines(stream, held).items()},
        "previous_token_by_layer_and_head": previous_token(rounded, held),
        "held_out_chapters": [dict(zip(keys, row, strict=True)) for row in rows],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="train `tiny`")
    parser.add_argument("text", type=Path, help="the Bible, one verse a line")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE, help="where the files go")
    parser.add_argument("--state", type=Path, help="kept every 100 steps, and taken up from there")
    parser.add_argument("--tests", type=Path, help="write what the tests need into this folder")
    return parser.parse_args()


def main() -> None:
    """Reads the text, trains the tokenizer, then the model, and writes both with their losses."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    raw = args.text.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    assert digest == SHA256, f"another text than the one `tiny` was trained on: sha256 {digest}"
    texts = chapters(raw.decode())
    held_texts = texts[FIRST::EVERY]
    kept = [text for i, text in enumerate(texts) if i % EVERY != FIRST]
    tokenizer = train_tokenizer(kept)
    held = [tokenizer.encode(text).ids for text in held_texts]
    stream = [0]
    for text in kept:
        stream += [*tokenizer.encode(text).ids, 0]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tests:
        write_for_tests(kept, held_texts, stream, args.tests)
    model = new_model()
    print(f"{model.num_parameters()} parameters, {len(stream)} training tokens", flush=True)
    training = Training(model, torch.tensor(stream), args.seed)
    fit(training, held, args.steps, args.state)
    report = {
        "text": {"package": "bible-kjv-text 4.38 (Debian)", "sha256": SHA256},
        "held_out": f"chapters {FIRST}, {FIRST + EVERY}, … of {len(texts)}, counted from 0",
        **results(model, [text.split("\n")[0] for text in held_texts], held_texts, held, stream),
        "seed": args.seed,
        "steps": args.steps,
        "threads": args.threads,
        "training_tokens": len(stream),
        "tokens_seen": args.steps * TOKENS,
        "minutes": round(training.seconds / 60, 1),
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
        },
        "curves": training.curves,
    }
    save(model, tokenizer, args.out)
    (args.out / "losses.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
