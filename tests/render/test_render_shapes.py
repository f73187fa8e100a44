"""The tables of shapes as text: widths, folding, what spills below a row, hostile names."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmcli.commands.shapes.report import (
    CacheGrowth,
    CallFlops,
    LayerKind,
    LetterValue,
    NameRow,
    ShapeRow,
    ShapesReport,
    ShapeTensor,
    Stored,
)
from llmcli.commands.shapes.view import (
    render_names,
    render_overview,
    render_shapes,
    render_stored,
)
from llmcli.reports.checks import ViewCheck
from llmcli.ui.layout import Column, Rows
from llmcli.ui.letters import axis_line


def shown(renderable, width=200):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def tensor(**change):
    values = {
        "name": "blocks.0.attn.q", "kind": "activation", "axes": ("B", "H", "T", "dh"),
        "documents": ("b", "h", "n", "d/h"), "shape": (1, 9, 12, 64), "dtype": "float32",
        "bytes": 27648, "flops": 0, "flops_full": 0, "phase": "prefill", "layer": 0,
        "formula": "Q = T¹ W_q", "shares": "blocks.0.attn.qkv", "written": True, "stored": None,
    }  # fmt: skip
    return ShapeTensor(**(values | change))


PREFILL = tensor(flops=7962624, flops_full=7962624)
DECODE = tensor(phase="decode", shape=(1, 9, 1, 64), bytes=2304, flops=663552, flops_full=663552)
QUERY = ShapeRow(
    name="blocks.{0-29}.attn.q", layers=tuple(range(30)), tensors=(PREFILL, DECODE),
    formula="Q = T¹ W_q", memory="view of attn.qkv", source="",
)  # fmt: skip
STORED = Stored(
    source="blk.0.attn_q.weight", shape=(576, 576), format="Q4_1", bytes=207360,
    operations=("unpaired rows of 9 heads",),
)  # fmt: skip
WEIGHT = ShapeRow(
    name="blocks.{0-29}.attn.W_q", layers=tuple(range(30)),
    tensors=(
        tensor(
            name="blocks.0.attn.W_q", kind="parameter", axes=("D", "H·dh"), documents=("d", "d"),
            shape=(576, 576), phase=None, stored=STORED,
        ),
    ),
    formula="Q = T¹ W_q", memory="part of attn.W_qkv", source="blk.{0-29}.attn_q.weight",
)  # fmt: skip
KEPT = ShapeRow(
    name="cache.{0-29}.k", layers=tuple(range(30)),
    tensors=(tensor(name="cache.0.k", kind="state", shares=None),) * 2, formula="the keys",
    memory="copy of attn.k_rot", source="",
)  # fmt: skip
REPORT = ShapesReport(
    weight_format="float32", batch=1, tokens=12, phases=("prefill", "decode"),
    letters=(
        LetterValue(letter="B", documents="b", values=(1,)),
        LetterValue(letter="T", documents="n", values=(12, 1)),
        LetterValue(letter="H", documents="h", values=(9,)),
    ),
    kinds=(LayerKind(layers=tuple(range(30)), window=None),), tensors=(),
    rows=(WEIGHT, QUERY, KEPT),
    growth=CacheGrowth(per_token=46080, per_layer=(1536,), prefill=552960, decode=599040),
    flops=(
        CallFlops(phase="prefill", flops=3_230_000_000, flops_full=3_240_000_000),
        CallFlops(phase="decode", flops=270_000_000, flops_full=270_000_000),
    ),
    parameters=134515008, weight_bytes=538060032, stored_bytes=96600000, ran=False,
    checks=(ViewCheck(name="symbols", words="all shapes fit", value=0.0, tolerance=0.0),),
)  # fmt: skip


def test_a_wide_screen_has_every_column_in_one_line():
    lines = shown(render_shapes(REPORT, "smollm2")).splitlines()
    assert [line for line in lines if not line.startswith("─")] == [
        "smollm2",
        "B = 1 sequence (b) · T = 12 new tokens, then 1 (n, N) · H = 9 heads (h, A, n_heads)",
        "",
        "parameters: 30 tensors in 1 row, float32",
        "name                     letters    shape       papers    bytes   memory               "
        "stored           checkpoint                 on the way                 formula",
        "blocks.{0-29}.attn.W_q   [D H·dh]   [576 576]   d × d    27 KiB   part of attn.W_qkv   "
        "Q4_1 [576 576]   blk.{0-29}.attn_q.weight   unpaired rows of 9 heads   Q = T¹ W_q",
        "the whole model: 134,515,008 numbers · 513 MiB in float32 · 92.1 MiB of tensors in "
        "the file",
        "",
        "activations: 30 tensors in 1 row, float32, bytes and FLOPs of one in prefill",
        "name                   letters      prefill       decode       papers             bytes   "
        " FLOPs   memory             formula",
        "blocks.{0-29}.attn.q   [B H T dh]   [1 9 12 64]   [1 9 1 64]   b × h × n × d/h   27 KiB   "
        "7.96 M   view of attn.qkv   Q = T¹ W_q",
        "FLOPs of the whole prefill: 3.23 G, 3.24 G as the full square · "
        "FLOPs of the whole decode: 270 M · logits of all positions · Q Kᵀ is counted at attn.z",
        "memory: own, or a view of that of another",
        "",
        "cache: 30 tensors in 1 row, float32, bytes of one in prefill",
        "name             letters      prefill       decode        papers             bytes   "
        "memory               formula",
        "cache.{0-29}.k   [B H T dh]   [1 9 12 64]   [1 9 12 64]   b × h × n × d/h   27 KiB   "
        "copy of attn.k_rot   the keys",
        "grows by 45 KiB a token · 1.5 KiB in each of 30 layers",
        "540 KiB after the prompt · 585 KiB after one token more",
        "",
        "×30, layers 0-29, identical",
        "from headers alone · with a prompt the model is run, too",
    ]


def test_a_narrow_screen_loses_nothing():
    text = shown(render_shapes(REPORT, "smollm2"), 55)
    lines = text.splitlines()
    at = lines.index("blocks.{0-29}.attn.q   [B H T dh]   [1 9 12 64]")
    assert lines[at + 1] == "    decode [1 9 1 64] · b × h × n × d/h · 27 KiB"
    assert lines[at + 2] == "    FLOPs 7.96 M · view of attn.qkv · Q = T¹ W_q"
    for part in ("Q4_1 [576 576]", "blk.{0-29}.attn_q.weight", "unpaired rows of 9 heads", "d × d"):
        assert part in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 200])
def test_no_line_is_longer_than_the_screen(width):
    text = shown(render_shapes(REPORT, "smollm2"), width)
    assert max(map(cell_len, text.splitlines())) <= width


def test_narrowest_letters_and_numbers_are_below_the_name():
    lines = shown(render_shapes(REPORT, "smollm2"), 32).splitlines()
    at = lines.index("blocks.{0-29}.attn.q")
    assert lines[at + 1 : at + 3] == ["    [B H T dh]", "    prefill [1 9 12 64]"]
    assert lines[at + 3] == "    decode [1 9 1 64]"


def test_the_tokens_of_the_prompt_are_shown_and_an_example_is_called_one():
    said = replace(REPORT, prompt=((5, "a b"), (6, "\x1b[31m"), (7, "")), ran=True)
    text = shown(render_shapes(said, "m"), 80)
    assert 'prompt of 3 tokens · "a b" · "\\x1b[31m" · id 7\n' in text
    assert "example" not in text
    assert "T is an example: --tokens" in shown(render_shapes(replace(REPORT, example=True), "m"))
    long = shown(render_shapes(replace(said, prompt=((1, "x"),) * 99), "m"), 400)
    assert "… 75 more …" in long
    assert long.count('"x"') == 24


def test_dtypes_that_differ_have_a_column():
    wide = replace(QUERY, tensors=(tensor(dtype="bfloat16"), DECODE))
    text = shown(render_shapes(replace(REPORT, rows=(wide, QUERY)), "m"))
    assert "bfloat16" in text
    assert "activations: 60 tensors in 2 rows, bytes" in text


def test_what_is_derived_is_said():
    derived = replace(QUERY, memory="derived")
    assert "no kernel writes it" in shown(render_shapes(replace(REPORT, rows=(derived,)), "m"))
    assert "no kernel writes it" not in shown(render_shapes(REPORT, "m"))


def test_windows_are_said_of_layers_and_of_the_cache():
    kinds = (LayerKind(layers=(0, 2, 4), window=None), LayerKind(layers=(1, 3, 5), window=4096))
    rows = tuple(
        replace(KEPT, name=f"cache.{{{n}}}.k", layers=kind.layers) for n, kind in enumerate(kinds)
    )
    growth = replace(REPORT.growth, per_layer=(1536, 768))
    text = shown(render_shapes(replace(REPORT, rows=rows, kinds=kinds, growth=growth), "m"))
    assert "×3, layers 0,2,4, identical\n" in text
    assert "×3, layers 1,3,5, identical · a token sees 4096 keys at most" in text
    assert "a window of 4096 keys bounds what is seen, not the cache" in text
    assert "1.5 KiB in each of 3 layers · 768 B in each of 3 layers" in text


def test_only_what_was_folded_is_called_identical():
    alone = replace(QUERY, name="blocks.0.attn.q", layers=(0,))
    other = replace(QUERY, name="blocks.1.attn.k", layers=(1,))
    assert "identical" not in shown(render_shapes(replace(REPORT, rows=(alone, other)), "m"))
    rest = replace(QUERY, name="blocks.{1-29}.resid_pre", layers=tuple(range(1, 30)))
    text = shown(render_shapes(replace(REPORT, rows=(rest, QUERY)), "m"))
    assert text.count("identical") == 1


def test_what_was_run_is_not_from_headers_alone():
    assert "from headers alone" not in shown(render_shapes(replace(REPORT, ran=True), "m"))


def test_a_model_on_few_lines():
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
    rows = (WEIGHT, entry, later, norm, QUERY, long, raw, same, KEPT)
    kinds = (LayerKind(layers=tuple(range(30)), window=4096),)
    report = replace(REPORT, rows=rows, kinds=kinds, example=True)
    assert shown(render_overview(report, "smollm2"), 80).splitlines() == [
        "smollm2",
        "B = 1 sequence · T = 12 new tokens, then 1 · H = 9 heads",
        "T is an example: --tokens",
        "",
        "parameters: 134,515,008 · 513 MiB in float32",
        "blocks.{0-29} × 30: attn.W_q [576 576]",
        "",
        "activation      letters     prefill      formula",
        "blocks.{0-29} × 30, identical, a token sees 4096 keys at most",
        "resid_pre       [B H T dh]  [1 9 12 64]  X = E, then H of the block before",
        "attn.q          [B H T dh]  [1 9 12 64]  Q = T¹ W_q",
        "attn.k          [B H T dh]  [1 9 12 64]",
        "    K = x x x x x x x x x x x x x x x x x x x x x",
        "",
        "logits_raw      [B H T dh]  [1 9 12 64]  logits = H W",
        "cache.{0-29}.k  [B H T dh]  [1 9 12 64]  copy of attn.k_rot",
        "cache 45 KiB a token · FLOPs 3.23 G prefill, 270 M decode",
        "--all: dtypes, bytes, memory, sources",
    ]
    narrow = shown(render_overview(report, "smollm2"), 40).splitlines()
    assert max(map(cell_len, narrow)) <= 40
    at = narrow.index("attn.q          [B H T dh]")
    assert narrow[at + 1] == "    [1 9 12 64] · Q = T¹ W_q"


def test_hostile_names_are_spelled_out():
    hostile = replace(WEIGHT, source="a\x1b[2J[bold]b")
    title = "m\x1b]0;x\x07"
    assert "\x1b" not in shown(render_overview(replace(REPORT, rows=(hostile,)), title))
    for text in (
        shown(render_shapes(replace(REPORT, rows=(hostile,)), title)),
        shown(render_stored([replace(STORED, source="a\x1b[2J[bold]b")], title)),
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "a\\x1b[2J[bold]b" in text


def test_stored_tensors_of_a_file():
    assert shown(render_stored([STORED], "file")).splitlines() == [
        "file",
        "name                  shape       stored     bytes",
        "──────────────────────────────────────────────────",
        "blk.0.attn_q.weight   [576 576]   Q4_1     202 KiB",
        "1 tensor · 202 KiB",
    ]


NAME = NameRow(
    name="blocks.{0-29}.attn.pattern", kind="activation", axes=("B", "H", "T", "S"),
    shape=(1, 9, 12, 12), documents=("b", "h", "n", "n"), words="attention weights",
    formula="A = softmax(S)",
    aliases=("blocks.{i}.attn.hook_pattern", "pattern{i}", "evil\x1b[31m"),
)  # fmt: skip


def test_names():
    assert shown(render_names([NAME], REPORT.letters[:1], "m"), 80).splitlines() == [
        "m",
        "B = 1 sequence (b)",
        "",
        "name   [letters] = [sizes]   the papers' letters",
        "    what it is · its formula · what others call it: {i} is a layer's number",
        "",
        "blocks.{0-29}.attn.pattern   [B H T S] = [1 9 12 12]   b × h × n × n",
        "    attention weights · A = softmax(S)",
        "    blocks.{i}.attn.hook_pattern · pattern{i} · evil\\x1b[31m",
    ]
    bare = replace(NAME, aliases=())
    narrow = shown(render_names([bare], REPORT.letters[:1], "m", example=True), 36)
    narrow = narrow.splitlines()
    assert narrow[2:4] == ["T is an example: --tokens sets it,", "and a prompt has its own"]
    assert narrow[-5:] == [
        "blocks.{0-29}.attn.pattern",
        "    [B H T S] = [1 9 12 12]",
        "    b × h × n × n",
        "    attention weights",
        "    A = softmax(S)",
    ]


@pytest.mark.parametrize(
    ("letter", "line"),
    [
        (
            LetterValue(letter="S", documents="n", values=(5, 6)),
            "S = 5 tokens so far, then 6 (n, N)",
        ),
        (LetterValue(letter="H", documents="h", values=(8, 4)), "H = 8/4 heads (h, A, n_heads)"),
        (LetterValue(letter="F", documents="4d", values=(64,)), "F = 64 neurons (4d)"),
        (LetterValue(letter="F", documents="F", values=(64,)), "F = 64 neurons"),
        (LetterValue(letter="P", documents="P", values=(1,)), "P = 1 learned positions"),
        (
            LetterValue(letter="dh", documents="d/h", values=(64,)),
            "dh = 64 a head's query and key (d/h, d_k, d_v, head_dim)",
        ),
    ],
)
def test_letters_with_their_sizes_and_other_names(letter, line):
    assert axis_line(letter.letter, letter.documents, letter.values) == line


def test_rows_spill_only_where_they_are_told_to():
    columns = (Column("a", right=False), Column("bb", first_to_go=1), Column("c", first_to_go=2))
    cells = [[Text("xxxxxx"), Text("yyyyyy"), Text("zzzzzz")]]
    assert "zzzzzz" not in shown(Rows(columns, cells), 20)
    spilled = shown(Rows(columns, cells, spill=True), 20).splitlines()
    assert spilled == [
        "a            bb", "    c", "───────────────", "xxxxxx   yyyyyy", "    zzzzzz",
    ]  # fmt: skip
    assert shown(Rows(columns, cells, spill=True), 30) == shown(Rows(columns, cells), 30)
