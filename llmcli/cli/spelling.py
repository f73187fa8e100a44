"""Signs that an encoding lacks, spelled with those of ASCII, for all that is written."""

from __future__ import annotations

import codecs

_SPELLED = {
    "✓": "ok",
    "✗": "FAIL",
    "·": ".",
    "•": "*",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "→": "->",
    "←": "<-",
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
    "≈": "~",
    "∞": "inf",
    "√": "sqrt",
    "Σ": "sum",
    "α": "alpha",
    "σ": "sigma",
    "ε": "eps",
    "‖": "||",
    "│": "|",
    "─": "-",
    **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"),
    **dict.fromkeys("█▓▀▄", "#"),
    "▒": "=",
    "░": ":",
    "ᵀ": "^T",
    "ʰ": "^h",
    **{power: f"^{number}" for number, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{below: f"_{number}" for number, below in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    "ᵢ": "_i",
    "′": "'",
    "±": "+-",
    "∘": "o",
    "⊕": "(+)",
    "μ": "mu",
    "µ": "u",
    "π": "pi",
    "ω": "omega",
    "φ": "phi",
    "Φ": "Phi",
    "Δ": "Delta",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "\u200e": "",  # which is not seen either where it can be written
}


def spelled(text: str) -> str:
    """`text` with every sign that is not ASCII spelled, `?` for those that have no spelling."""
    return "".join(c if c.isascii() else _SPELLED.get(c, "?") for c in text)


def _handle(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return spelled(error.object[error.start : error.end]), error.end


ERRORS = "llmcli.spelled"  # the name for `errors=` of a stream
codecs.register_error(ERRORS, _handle)
