"""Variables of the chat template: what a user or a file gives, and what the template looks up."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from llmcli.errors import UsageError
from llmcli.ui.theme import encodable, one_line

MOST_NESTED = 32  # lists and objects in each other


def value_of(text: str, where: str) -> Any:
    """`true`, `3`, `"high"` or `high`: JSON where it is any, else the text itself.

    Raises UsageError for what `check_value` refuses.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise _too_deep(where) from None
    check_value(value, where)
    return value


def check_value(value: Any, where: str) -> None:
    """Raises UsageError for a value of JSON that no template takes, and no JSON of ours can have.

    So are those nested deeper than `MOST_NESTED`, and texts with half a surrogate pair.
    """
    layer = [value]
    for _ in range(MOST_NESTED + 1):
        if any(isinstance(one, str) and encodable(one) != one for one in layer):
            raise UsageError(
                f"{where} has half a surrogate pair, which is not a character",
                hint="write both of `\\ud83d\\ude00`, or the character itself in UTF-8",
            )
        groups = [[*one, *one.values()] if isinstance(one, Mapping) else one for one in layer
                  if isinstance(one, Mapping | list)]  # fmt: skip
        layer = [item for group in groups for item in group]
    if layer:
        raise _too_deep(where)


def _too_deep(where: str) -> UsageError:
    return UsageError(
        f"{where} is nested more than {MOST_NESTED} deep",
        hint="give plain values, such as true, 3 or a text",
    )


def checked_variables(value: Any, where: str) -> dict[str, Any]:
    """`variables` of a JSON document; `where` it stands, for errors.

    Raises UsageError for what is not an object, and what `check_variable` and `check_value` refuse.
    """
    if not isinstance(value, dict):
        raise UsageError(
            f"`variables` of {where} is not an object", hint='such as {"enable_thinking": false}'
        )
    for name, one in value.items():
        check_variable(name, f"`variables` of {where}")
        check_value(one, f"`variables.{name}` of {where}")
    return value


def check_variable(name: str, where: str) -> None:
    """Raises UsageError for what cannot be the name of a variable of a template."""
    if not name.isidentifier() or name in ("messages", "add_generation_prompt"):
        raise UsageError(
            f"{where} cannot have a variable `{name}`",
            hint="a name such as `enable_thinking` can be one",
        )


def check_name(
    name: str, known: Collection[str], model: str, *, others: Collection[str] = (), option: str
) -> None:
    """Raises UsageError for a name that the chat template of `model` does not look up.

    `others` are names that `option` takes beside these.
    """
    if name in known:
        return
    near = get_close_matches(name, [*known, *others], 1)
    hint = f"it has {', '.join(sorted(known))}" if known else "it has no variables"
    if others:
        hint = f"`{option}` takes {', '.join([*others, *sorted(known)])}"
    raise UsageError(
        f"`{option} {one_line(name)}`: the chat template of `{model}` has no such variable",
        hint=f"did you mean `{near[0]}`?" if near else one_line(hint),
    )
