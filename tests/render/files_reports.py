"""Reports with known numbers for the tests of files: attention, a small lens, experts."""

import numpy as np
from attention_reports import report

from llmcli.commands.attention.report import HeadReport, LayerReport
from llmcli.commands.attribute.report import AttributeReport
from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.commands.lens.report import LensCell, LensReport, LensRow, LensToken
from llmcli.records.attention import Label, Metric
from llmcli.records.contribution import Contribution
from llmcli.records.document import ViewCheck
from llmcli.records.text import Token

# what a token can be: ends of scripts, separators of lines, addresses, signs from the right, bytes
EVIL = (
    "</script><script>document.title='broken'</script>",
    "\u2028\u2029\n\x1b[31m",
    ' "quoted" & <b>bold</b>',
    "http://example.com/x.js",
    "{{data}}${1}`",
    "אב [red]",
    "日本",
    "\\xf0",
    "e\u0301\u202e",
)
GOOD = ViewCheck(name="rows", words="every row adds up to 1", value=0.0, tolerance=1e-6)
WRONG = ViewCheck(name="rows", words="every row adds up to 1", value=0.5, tolerance=1e-6, where="x")
METRICS = (
    Metric(name="entropy", words="how spread out", formula="H", high=None),
    Metric(name="previous_token", words="the token before", formula="mean of A[i,i-1]"),
)
LABELS = (
    Label(name="previous", letter="p", metric="previous_token", threshold=0.4, source="x"),
    Label(name="sink", letter="s", metric="entropy", threshold=9, source="x"),
)


def tokens_of(count):
    """Ordinary tokens, the evil ones first."""
    texts = [*EVIL, *(f" word{at}" for at in range(count))]
    return tuple(Token(id=100 + at, text=text) for at, text in enumerate(texts[:count]))


def patterns(layers=2, heads=4, tokens=12, window=None, seed=0):
    """{layer: [H, T, T]}: rows that add up to 1, masked cells 0."""
    random = np.random.default_rng(seed)
    made = {}
    for layer in range(layers):
        scores = 3 * random.standard_normal((heads, tokens, tokens))
        query, key = np.indices((tokens, tokens))
        seen = (key <= query) & (query - key < (window or tokens))
        weights = np.where(seen, np.exp(scores), 0)
        made[layer] = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return made


def attention_report(layers=2, heads=4, tokens=12, *, generated=2, check=GOOD, matrices=()):
    """Heads in pairs that share keys; head (1, 2) has the label, (0, 1) a metric without rows."""

    def head(layer, number):
        place = (1 + layer * heads + number) / (layers * heads)
        before = float("nan") if (layer, number) == (0, 1) else place
        return HeadReport(
            head=number, kv_head=number // 2,
            metrics={"entropy": 1.5 + layer + number, "previous_token": before},
            labels=("previous",) if (layer, number) == (1, 2) else (),
        )  # fmt: skip

    return report(
        tokens=tokens_of(tokens), prompt_tokens=tokens - generated, metrics=METRICS,
        rows={"entropy": tokens, "previous_token": tokens - 1}, labels=LABELS,
        layers=tuple(
            LayerReport(
                layer=layer, kind="full", kv_heads=heads // 2,
                heads=tuple(head(layer, number) for number in range(heads)),
            )
            for layer in range(layers)
        ),
        matrices=tuple(matrices), checks=(check,),
    )  # fmt: skip


def lens_report(positions=5, rows=4, *, check=GOOD, first=1, generated=0):
    """Row 0 is the embedding; the last position but one settles in a layer that is not shown.

    Tokens and probabilities are made so that each cell differs.
    """
    names = ["blocks.0.resid_pre", *(f"blocks.{at}.resid_post" for at in range(rows - 1))]

    def cell(row, place):
        share = (1 + row + place) / (rows + positions + 1)
        return LensCell(
            top=(
                LensToken(id=row * 50 + place, text=EVIL[(row + place) % 9], probability=share),
                LensToken(id=900, text=" other", probability=(1 - share) / 2),
            ),
            entropy=1.0 + row, kl=float("inf") if (row, place) == (0, 0) else 2.0 / (1 + row),
            target_rank=rows - row, target_probability=share / 2,
        )  # fmt: skip

    return LensReport(
        dtype="float32", vocabulary=1000, tokens=tokens_of(positions + first),
        prompt_tokens=positions + first - generated,
        positions=tuple(range(first, positions + first)), target="the model's top token",
        targets=tuple(
            LensToken(id=700 + at, text=f" target{at}", probability=0.5) for at in range(positions)
        ),
        rows=tuple(
            LensRow(
                name=name, layer=None if row == 0 else row - 1,
                cells=tuple(cell(row, place) for place in range(positions)),
            )
            for row, name in enumerate(names)
        ),
        settled=tuple(
            "blocks.77.resid_post" if at == positions - 2 else names[min(at, rows - 1)]
            for at in range(positions)
        ),
        checks=(check,),
    )  # fmt: skip


def experts_report(
    tokens=4, layers=2, experts=6, per_token=2, *, check=GOOD, generated=1, first=0, shared=True
):
    """Token t of layer i takes the experts t - i, t - i + 1 …; the last layer has groups.

    Weights are 0.5, 0.4 …, margins 0.1, 0.2 …, without the last one's. Of all but the first
    `first` positions.
    """
    positions = np.arange(first, tokens)
    chosen = positions[:, None] + np.arange(per_token)
    weights = np.broadcast_to(0.5 - 0.1 * np.arange(per_token), chosen.shape).astype(np.float32)
    margins = np.where(positions < tokens - 1, 0.1 * (positions + 1), np.nan).astype(np.float32)
    made = []
    for layer in range(layers):
        own = (chosen - layer) % experts
        load = np.bincount(own.ravel(), minlength=experts)
        last = layer == layers - 1
        made.append(ExpertsLayer(
            layer=layer, experts=experts, per_token=per_token,
            scores="sigmoid" if last else "softmax", corrected=last, groups=3 if last else 1,
            kept_groups=2 if last else 1, group_best=2, load=tuple(load.tolist()),
            mean_weights=tuple(0.45 if count else float("nan") for count in load), entropy=1.5,
            balance=0.875, unused=tuple(np.flatnonzero(load == 0).tolist()), mean_margin=0.2,
            smallest_margin=0.1, smallest_at=first, shared_share=0.25 if last and shared else None,
            chosen=own, weights=weights, margins=margins,
            shared_shares=np.full(len(positions), 0.25, np.float32) if last and shared else None,
        ))  # fmt: skip
    return ExpertsReport(
        dtype="float32", tokens=tokens_of(tokens), prompt_tokens=tokens - generated,
        positions=tuple(positions.tolist()), layers=tuple(made), checks=(check,),
    )  # fmt: skip


def attribution_report(tokens=5, layers=2, heads=4, *, method="direct", check=GOOD):
    """Terms of each sign; of gradients, of the stream and every head at every position."""
    texts, terms = tokens_of(tokens), []
    for layer in range(layers):
        for head in range(heads):
            own = {"kind": "head", "name": f"blocks.{layer}.attn.z", "index": head, "layer": layer}
            value = (-1) ** head * (layer + head / heads)
            places = range(tokens) if method == "gradient" else (None,)
            terms += [Contribution(**own, position=at, value=value) for at in places]
    stream = {"kind": "resid_pre", "name": "blocks.1.resid_pre", "layer": 1}
    bias = Contribution(kind="bias", name="ln_final.b", layer=None, value=-0.5)
    terms += [bias] if method == "direct" else [
        Contribution(**stream, position=at, value=at / 7) for at in range(tokens)
    ]
    return AttributeReport(
        dtype="float32", method=method, tokens=texts, number="logits", index=None,
        answer=texts[0], versus=texts[1], value=sum(term.value for term in terms),
        corrupted=texts[::-1] if method == "gradient" else None,
        corrupted_value=0.25 if method == "gradient" else None, layers=layers,
        terms=tuple(terms), checks=(check,),
    )  # fmt: skip
