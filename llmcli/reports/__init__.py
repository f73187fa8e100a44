"""What measuring returns: plain dataclasses of numbers and strings, ready for JSON.

`measure` fills them, `render` shows them, `--json` prints them. No torch, no rich.
"""
