"""What a session does not show of shapes: hostile names, and rows and letters by themselves."""

from drawn import printed, shown
from rich.text import Text
from zoo import MODELS

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.shapes import view as views
from llmcli.commands.shapes.measure import ShapesRequest, model_shapes
from llmcli.commands.shapes.report import Stored
from llmcli.ui.layout import Column, Rows
from llmcli.ui.letters import axis_line

HOSTILE = "a\x1b[2J[bold]b"
STORED = Stored(source=HOSTILE, stored_shape=(97, 32), stored_format="F32", stored_bytes=12416)


def report(name="window"):
    """The shapes of a small model whose embedding has a hostile name in its file."""
    request = ShapesRequest(
        config=MODELS[name], numbers=Arithmetic.of("float32"), batch=1, tokens=12, example=True
    )
    return model_shapes(request, {"embed.W": STORED})


def test_rows_and_letters(golden):
    columns = (Column("a", right=False), Column("bb", drop=1), Column("c", drop=2))
    cells = [[Text("xxxxxx"), Text("yyyyyy"), Text("zzzzzz")]]
    golden("shapes", {
        "a row spills where it is told to": shown(Rows(columns, cells, below=True), width=20),
        "and loses its last columns where it is not": shown(Rows(columns, cells), width=20),
        "unless there is room": shown(Rows(columns, cells, below=True), width=30),
        "letters with their sizes and other names": [
            axis_line(*letter) for letter in (
                ("S", "n", (5, 6)), ("H", "h", (8, 4)), ("F", "4d", (64,)), ("F", "F", (64,)),
                ("P", "P", (1,)), ("dh", "d/h", (64,)),
            )
        ],
    })  # fmt: skip
    assert printed(Rows(columns, cells, below=True), width=30) == (
        printed(Rows(columns, cells), width=30)
    )


def test_nothing_that_a_file_says_reaches_the_terminal_raw():
    title = "m\x1b]0;x\x07"
    for view in (
        views.render_shapes(report(), title, detailed=False),
        views.render_shapes(report(), title, detailed=True),
        views.render_stored([STORED], title),
    ):
        text = printed(view, width=200)
        assert not {"\x1b", "\x07"} & set(text)
        assert "\\x1b]0;x\\x07" in text
    assert "[2J[bold]b" in text
