"""Do experts specialize, and does `llmcli experts` show it? Trains a tiny mixture and looks.

    python tests/benchmarks/trained_experts.py FOLDER [--steps 2000] [--json]

A Mixtral of 4 layers, width 64, 8 experts of which every token takes 2, with transformers' loss for
balance. Its text has three kinds in turns: English (the help topics of Python's standard library),
code (its modules, without their comments and docstrings), numbers (sums and tables, drawn). The
model goes to FOLDER, which is used again where it is there; nothing of it ships.

Then `llmcli experts --json` reads text that was not trained on. Of every layer: the mutual
information, in bits, of a token's first expert with the kind of text that it stands in and with
what the token is made of (letters, digits, signs, space), beside the largest of SHUFFLES shuffles
of the labels; the load of every expert by kind; and which of them takes digits. About twelve
minutes on two cores.
"""

from __future__ import annotations

import ast
import json
import math
import random
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_tools import ROOT, arguments, table

KINDS = ("English", "code", "numbers")
MADE_OF = ("letters", "digits", "signs", "space")
VOCAB, WINDOW, ROWS = 1024, 256, 16  # tokens: of the vocabulary, of a window; windows of a batch
PASSAGE = 400  # characters of one kind before the next
HELD, READ = 0.1, 24  # share of each kind that is held out, and windows of it that are read
PEAK, WARM_UP = 3e-3, 60  # learning rate, and the steps up to it
SHUFFLES = 200


def english() -> str:
    """Prose: the topics of `help()`, without their lines of code and tables."""
    from pydoc_data.topics import topics

    lines = "\n".join(topics.values()).splitlines()
    return "\n".join(line for line in lines if line[:1].isalpha())


def code() -> str:
    """Modules of the standard library as their syntax trees read: no comments, no docstrings."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                node.body = node.body[documented:] or [ast.Pass()]
        found.append(ast.unparse(tree))
    return "\n".join(found)[: 1 << 20]


def numbers(characters: int) -> str:
    """Sums with their results, and rows of a table."""
    draw = random.Random(0)
    lines: list[str] = []
    while sum(map(len, lines)) < characters:
        for _ in range(8):
            a, b = (draw.randrange(10 ** draw.randint(1, 4)) for _ in range(2))
            sign = draw.choice("+-*")
            result = {"+": a + b, "-": a - b, "*": a * b}[sign]
            lines.append(f"{a} {sign} {b} = {result}")
        lines += [", ".join(f"{draw.uniform(-99, 99):.2f}" for _ in range(6)) for _ in range(8)]
    return "\n".join(lines)


def passages(text: str, seed: int) -> Iterator[str]:
    """About PASSAGE characters of a text, from a line's beginning, wherever that is drawn."""
    draw = random.Random(seed)
    while True:
        start = text.find("\n", draw.randrange(len(text) - 2 * PASSAGE)) + 1
        yield text[start : start + PASSAGE]


def tokenizer_of(texts: Sequence[str]) -> Any:
    """Byte-level pairs; every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def labelled(tokenizer: Any, texts: Sequence[str], count: int, seed: int) -> list[tuple[int, int]]:
    """So many (id, kind) or a few more: passages of the kinds in a drawn order."""
    draw, sources = random.Random(seed), [passages(text, seed) for text in texts]
    found: list[tuple[int, int]] = []
    while len(found) < count:
        kind = draw.randrange(len(KINDS))
        found += [(id, kind) for id in tokenizer.encode(next(sources[kind])).ids]
    return found


def train(tokenizer: Any, texts: Sequence[str], steps: int, folder: Path) -> None:
    """AdamW with a warm-up and a cosine; writes the checkpoint."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02, rope_theta=10_000.0,
        output_router_logits=True, initializer_range=0.05, bos_token_id=None, eos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    stream = torch.tensor([id for id, _ in labelled(tokenizer, texts, 1_500_000, 1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.1)
    begin = time.perf_counter()
    for step in range(steps):
        rate = min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        at = torch.randint(len(stream) - WINDOW, (ROWS,))
        rows = torch.stack([stream[start : start + WINDOW] for start in at.tolist()])
        out = model(rows, labels=rows)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99 or step == steps - 1:
            spent = time.perf_counter() - begin
            print(
                f"step {step + 1}: loss {out.loss.item():.3f}, of it balance "
                f"{config.router_aux_loss_coef * out.aux_loss.item():.3f}, {spent:.0f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    model.config.output_router_logits = False
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def made_of(text: str) -> int:
    """Which of MADE_OF a token is: what its first sign that is no space is."""
    sign = text.strip()[:1]
    if not sign:
        return 3
    return 0 if sign.isalpha() or sign == "_" else 1 if sign.isdigit() else 2


def bits(one: np.ndarray, other: np.ndarray) -> float:
    """Mutual information of two rows of numbers."""
    joint = np.zeros((one.max() + 1, other.max() + 1))
    np.add.at(joint, (one, other), 1)
    joint /= joint.sum()
    alone = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    here = joint > 0
    return float((joint[here] * np.log2(joint[here] / alone[here])).sum())


def look(folder: Path, ids: Sequence[int]) -> Any:
    """What `llmcli experts` says of those tokens."""
    words = [sys.executable, "-m", "llmcli", "experts", "-m", f"{folder.resolve()}", "--json"]
    given = ",".join(map(str, ids))
    found = subprocess.run(
        [*words, "--ids", given], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(found.stdout)


def report(said: Any, kinds: np.ndarray, signs: np.ndarray) -> list[dict[str, Any]]:
    """The figures of every layer."""
    draw, rows = np.random.default_rng(0), []
    for layer in said["layers"]:
        chosen = np.array(layer["chosen"])
        first, count = chosen[:, 0], layer["experts"]
        row: dict[str, Any] = {"layer": layer["layer"], "balance": layer["balance"]}
        for name, labels in (("kind", kinds), ("made_of", signs)):
            row[f"{name}_bits"] = bits(first, labels)
            most = max(bits(first, draw.permutation(labels)) for _ in range(SHUFFLES))
            row[f"{name}_shuffled"] = most
        row["load_by_kind"] = {
            kind: (np.bincount(chosen[kinds == at].ravel(), minlength=count)
                   / max(1, 2 * (kinds == at).sum())).round(3).tolist()
            for at, kind in enumerate(KINDS)
        }  # fmt: skip
        digits = np.bincount(chosen[signs == 1].ravel(), minlength=count)
        row["digits_to"] = int(digits.argmax())
        row["digits_share"] = float(digits.max() / (signs == 1).sum())
        row["others_share"] = float((chosen[signs != 1] == digits.argmax()).any(1).mean())
        rows.append(row)
    return rows


def main() -> None:
    """Trains where there is no model, reads what was held out, prints the figures."""
    parser = arguments(__doc__.split("\n")[0], steps=2000)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    texts = [english(), code(), numbers(1 << 19)]
    cuts = [int(len(text) * (1 - HELD)) for text in texts]
    kept = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    held = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    if not (args.folder / "config.json").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        train(tokenizer_of(kept), kept, args.steps, args.folder)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    tokens = labelled(tokenizer, held, 3500, 2)[:3500]
    ids, kinds = zip(*tokens, strict=True)
    said = look(args.folder, ids)
    signs = np.array([made_of(tokenizer.decode([id])) for id in ids])
    rows = report(said, np.array(kinds), signs)
    if args.json:
        print(json.dumps({"tokens": Counter(KINDS[kind] for kind in kinds), "layers": rows}))
        return
    columns = ["layer", "kind, bits", "shuffled", "made of, bits", "shuffled", "balance",
               "digits to", "of digits", "of others"]  # fmt: skip
    keys = ["layer", "kind_bits", "kind_shuffled", "made_of_bits", "made_of_shuffled", "balance"]
    keys += ["digits_to", "digits_share", "others_share"]
    cells = [[f"{row[key]:.3g}" for key in keys] for row in rows]
    print(table("of every layer", [columns, *cells]))
    for row in rows:
        for kind, load in row["load_by_kind"].items():
            print(f"layer {row['layer']} {kind:8}", " ".join(f"{100 * part:3.0f}" for part in load))
    print("checks:", "all hold" if said["ok"] else "RED")


if __name__ == "__main__":
    main()
