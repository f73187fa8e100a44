"""The tables of shapes as text: widths, folding, what spills below a row, hostile names."""

from dataclasses import replace
from itertools import starmap

from drawn import changes, printed, shown
from rich.text import Text

from llmcli.commands.shapes import report as made
from llmcli.commands.shapes import view as views
from llmcli.records.checks import ViewCheck
from llmcli.records.text import Token
from llmcli.ui.layout import Column, Rows
from llmcli.ui.letters import axis_line


def token(id, text):
    return Token(id=id, text=text)


def tensor(**change):
    values = {
        "name": "blocks.0.attn.q", "kind": "activation", "axes": ("B", "H", "T", "dh"),
        "documents": ("b", "h", "n", "d/h"), "shape": (1, 9, 12, 64), "dtype": "float32",
        "bytes": 27648, "flops": 0, "flops_full": 0, "phase": "prefill", "layer": 0,
        "formula": "Q = T¹ W_q", "shares": "blocks.0.attn.qkv", "written": True, "stored": None,
    }  # fmt: skip
    return made.ShapeTensor(**(values | change))


PREFILL = tensor(flops=7962624, flops_full=7962624)
DECODE = tensor(phase="decode", shape=(1, 9, 1, 64), bytes=2304, flops=663552, flops_full=663552)
QUERY = made.ShapeRow(
    name="blocks.{0-29}.attn.q", layers=tuple(range(30)), tensors=(PREFILL, DECODE),
    formula="Q = T¹ W_q", memory="view of attn.qkv", source="",
)  # fmt: skip
STORED = made.Stored(
    source="blk.0.attn_q.weight", stored_shape=(576, 576), stored_format="Q4_1",
    stored_bytes=207360,
    operations=("unpaired rows of 9 heads",),
)  # fmt: skip
WEIGHT = made.ShapeRow(
    name="blocks.{0-29}.attn.W_q", layers=tuple(range(30)),
    tensors=(
        tensor(
            name="blocks.0.attn.W_q", kind="parameter", axes=("D", "H·dh"), documents=("d", "d"),
            shape=(576, 576), phase=None, stored=STORED,
        ),
    ),
    formula="Q = T¹ W_q", memory="part of attn.W_qkv", source="blk.{0-29}.attn_q.weight",
)  # fmt: skip
KEPT = made.ShapeRow(
    name="cache.{0-29}.k", layers=tuple(range(30)),
    tensors=(tensor(name="cache.0.k", kind="state", shares=None),) * 2, formula="the keys",
    memory="copy of attn.k_rot", source="",
)  # fmt: skip
REPORT = made.ShapesReport(
    weight_format="float32", batch=1, tokens=12, phases=("prefill", "decode"),
    letters=(
        made.LetterValue(letter="B", documents="b", values=(1,)),
        made.LetterValue(letter="T", documents="n", values=(12, 1)),
        made.LetterValue(letter="H", documents="h", values=(9,)),
    ),
    layers=(made.LayerKind(layers=tuple(range(30)), window=None),), tensors=(),
    rows=(WEIGHT, QUERY, KEPT),
    cache=made.CacheGrowth(per_token=46080, per_layer=(1536,), prefill=552960, decode=599040),
    flops=(
        made.CallFlops(phase="prefill", flops=3_230_000_000, flops_full=3_240_000_000),
        made.CallFlops(phase="decode", flops=270_000_000, flops_full=270_000_000),
    ),
    parameters=134515008, weight_bytes=538060032, stored_bytes=96600000,
    checks=(ViewCheck(name="symbols", words="all shapes fit", value=0.0, tolerance=0.0),),
)  # fmt: skip


def of(*rows, **changed):
    return replace(REPORT, rows=rows, **changed)


def every(report, title="m"):
    return views.render_shapes(report, title, detailed=True)


def few(report, title="m"):
    return views.render_shapes(report, title, detailed=False)


def test_screens(golden):
    kinds = (
        made.LayerKind(layers=(0, 2, 4), window=None), made.LayerKind(layers=(1, 3, 5), window=4096)
    )  # fmt: skip
    caches = [
        replace(KEPT, name=f"cache.{{{n}}}.k", layers=kind.layers) for n, kind in enumerate(kinds)
    ]
    windows = of(*caches, layers=kinds, cache=replace(REPORT.cache, per_layer=(1536, 768)))
    prompt = replace(REPORT, prompt=tuple(starmap(token, [(5, "a b"), (6, "\x1b[31m"), (7, "")])))
    wide = replace(QUERY, tensors=(tensor(dtype="bfloat16"), DECODE))
    alone = replace(QUERY, name="blocks.0.attn.q", layers=(0,))
    other = replace(QUERY, name="blocks.1.attn.k", layers=(1,))
    rest = replace(QUERY, name="blocks.{1-29}.resid_pre", layers=tuple(range(1, 30)))
    hostile, title = replace(WEIGHT, source="a\x1b[2J[bold]b"), "m\x1b]0;x\x07"
    name = made.NameRow(
        name="blocks.{0-29}.attn.pattern", kind="activation", axes=("B", "H", "T", "S"),
        shape=(1, 9, 12, 12), documents=("b", "h", "n", "n"), words="attention weights",
        formula="A = softmax(S)",
        aliases=("blocks.{i}.attn.hook_pattern", "pattern{i}", "evil\x1b[31m"),
    )  # fmt: skip
    letter = REPORT.letters[:1]
    columns = (Column("a", right=False), Column("bb", drop=1), Column("c", drop=2))
    cells = [[Text("xxxxxx"), Text("yyyyyy"), Text("zzzzzz")]]
    whole = shown(every(REPORT), width=200)

    def new(report):
        return changes(whole, shown(every(report), width=200))

    golden("shapes", {
        "a wide screen has every column in one line": whole,
        "a narrow one loses nothing": shown(every(REPORT), width=55),
        "the narrowest has letters and numbers below the name":
            shown(every(of(QUERY)), width=32),
        "the tokens of the prompt": new(prompt),
        "only the first of a long prompt": new(
            replace(prompt, prompt=tuple(token(1, f"x{at}") for at in range(99)))
        ),
        "an example is called one": new(replace(REPORT, example=True)),
        "dtypes that differ have a column": new(of(wide, QUERY)),
        "what is derived is said": new(of(WEIGHT, replace(QUERY, memory="derived"), KEPT)),
        "windows of layers and of the cache": shown(every(windows), width=200),
        "what was not folded is not identical": shown(every(of(alone, other))),
        "what was folded is": shown(every(of(rest, QUERY))),
        "on few lines": shown(few(few_lines())),
        "on few lines, in 40 columns": shown(few(few_lines()), width=40),
        "hostile names": shown(every(of(hostile), title), width=200),
        "hostile names on few lines": shown(few(of(hostile), title)),
        "the tensors of a file": shown(views.render_stored([STORED], "file")),
        "hostile ones":
            shown(views.render_stored([replace(STORED, source="a\x1b[2J[bold]b")], title)),
        "names": shown(views.render_names([name], letter, "m")),
        "names in 36 columns, of an example": shown(
            views.render_names([replace(name, aliases=())], letter, "m", example=True), width=36
        ),
        "a row spills where it is told to": shown(Rows(columns, cells, spill=True), width=20),
        "and loses its last columns where it is not": shown(Rows(columns, cells), width=20),
        "unless there is room": shown(Rows(columns, cells, spill=True), width=30),
        "letters with their sizes and other names": [
            axis_line(*letter) for letter in (
                ("S", "n", (5, 6)), ("H", "h", (8, 4)), ("F", "4d", (64,)), ("F", "F", (64,)),
                ("P", "P", (1,)), ("dh", "d/h", (64,)),
            )
        ],
    })  # fmt: skip
    for view in (
        few(of(hostile), title), every(of(hostile), title),
        views.render_stored([replace(STORED, source="a\x1b[2J[bold]b")], title),
    ):  # fmt: skip
        assert not {"\x1b", "\x07"} & set(printed(view))
    assert printed(Rows(columns, cells, spill=True), width=30) == (
        printed(Rows(columns, cells), width=30)
    )


def few_lines():
    entry = replace(
        QUERY, name="blocks.0.resid_pre", layers=(0,), formula="X = E", memory="view of embed"
    )
    later = replace(
        entry, name="blocks.{1-29}.resid_pre", layers=tuple(range(1, 30)),
        formula="X = H of the block before = T + X", memory="view of resid_post before",
    )  # fmt: skip
    norm = replace(
        QUERY, name="blocks.{0-29}.ln1.scale", tensors=(tensor(axes=("B", "T", "1")),) * 2
    )
    raw = replace(QUERY, name="logits_raw", layers=(), formula="logits = H W", memory="own")
    same = replace(raw, name="logits", memory="view of logits_raw")
    long = replace(QUERY, name="blocks.{0-29}.attn.k", formula="K = " + "x " * 20 + "x")
    kinds = (made.LayerKind(layers=tuple(range(30)), window=4096),)
    return of(WEIGHT, entry, later, norm, QUERY, long, raw, same, KEPT, layers=kinds, example=True)
