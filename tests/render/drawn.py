"""What is drawn, printed to a console of a fixed width, as text."""

import difflib
import io
import re

from rich.console import Console


class File(io.StringIO):
    """A file of an encoding that says so; what it could not hold is seen in its text."""

    encoding = "utf-8"


def console(width=80, colour=None, encoding="utf-8"):
    """With `colour`, a system of colours of rich's, it is a terminal; without, there are none."""
    file = File()
    file.encoding = encoding
    return Console(
        file=file, width=width, color_system=colour, force_terminal=bool(colour),
        no_color=colour is None, highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip


def printed(*renderables, **how):
    """All that is written: escapes, and spaces at the ends of lines, too."""
    screen = console(**how)
    for renderable in renderables:
        screen.print(renderable, crop=False)
    return screen.file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def lines_of(*renderables, **how):
    """The lines as they are seen, as wide as they are."""
    return plain(printed(*renderables, **how)).splitlines()


def shown(*renderables, **how):
    """The text with its escapes, without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in printed(*renderables, **how).splitlines())


def changes(before, after):
    """The lines of a text that another has not, behind a `-`, and then those that it has, `+`."""
    found = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line.rstrip() for line in found if line[0] in "+-"]
