"""Reads values from an untrusted configuration.

A configuration decides how much is allocated, so the type and range of every value are checked
before use; errors name the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmcli.errors import CheckpointError, UnsupportedModel

# Far above every published model, low enough to be harmless before weights are checked.
LIMITS = {
    "layers": 1024,
    "heads": 1 << 14,
    "head_dim": 1 << 14,
    "width": 1 << 20,
    "hidden": 1 << 24,
    "vocab": 1 << 24,
    "positions": 1 << 40,
}
NO_KEYS: Mapping[str, str] = MappingProxyType({})


class ConfigReader:
    """Checked access to a configuration's keys.

    `prefix` is prepended to every key (`llama.` in GGUF metadata). `keys`: other names that some
    keys may have in this configuration, which errors then use. A null value counts as absent,
    except for flags. All readers raise CheckpointError.
    """

    def __init__(
        self, mapping: Mapping[str, Any], *, prefix: str = "", keys: Mapping[str, str] = NO_KEYS
    ) -> None:
        self._mapping = mapping
        self._prefix = prefix
        self._keys = keys

    def name(self, key: str) -> str:
        """The key as the configuration names it."""
        usual = self._prefix + key
        own = self._keys.get(key, usual)
        return usual if self._mapping.get(own) is None and usual in self._mapping else own

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._mapping.get(self.name(key)) is not None

    def contains(self, key: str) -> bool:
        """Whether the key is present, possibly with an explicit null."""
        return self.name(key) in self._mapping

    def all(self) -> dict[str, Any]:
        """A copy of the mapping."""
        return dict(self._mapping)

    def raw(self, key: str) -> Any:
        """The unchecked value; None if absent."""
        return self._mapping.get(self.name(key))

    def section(self, key: str) -> ConfigReader | None:
        """A nested object; None if absent or empty."""
        value = self.raw(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.invalid(key, "an object")
        return ConfigReader(value, prefix="")

    def integer(self, key: str, default: int | None = None, *, most: int, least: int = 1) -> int:
        """An integer from `least` to `most`."""
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.invalid(key, f"a whole number from {least} to {most}")
        return value

    def per_layer(
        self, key: str, layers: int, default: Sequence[int] | None = None, *, most: int
    ) -> tuple[int, ...]:
        """One integer per layer: GGUF has either one for all layers, or an array."""
        value = self.raw(key)
        if value is None and default is not None:
            return tuple(default)
        if not isinstance(value, list | tuple):
            return (self.integer(key, most=most),) * layers
        if len(value) != layers:
            raise self.invalid(key, f"one number, or one for each of {layers} layers")
        return tuple(ConfigReader({key: item}).integer(key, most=most) for item in value)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        above: bool = True,
        infinite: bool = False,
    ) -> float:
        """A number above `least` (or equal to it unless `above`), finite unless `infinite`.

        Infinity is `Infinity` in transformers, and since version 5 `{"__float__": "Infinity"}`.
        """
        value = _untagged(self._present(key, default))
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not (_finite(value) or (infinite and value in (math.inf, -math.inf))):
            raise self.invalid(key, "a number" if infinite else "a finite number")
        if value < least or (above and value == least):
            raise self.invalid(key, f"a number {'above' if above else 'from'} {least:g}")
        return float(value)

    def optional_number(self, key: str, *, least: float = 0.0, above: bool = True) -> float | None:
        """A number as `number` reads it; None if absent."""
        return self.number(key, least=least, above=above) if self.has(key) else None

    def numbers(
        self,
        key: str,
        count: int,
        *,
        least: float = 0.0,
        above: bool = True,
        infinite: bool = False,
    ) -> tuple[float, ...]:
        """A list of `count` numbers, each as `number` reads it."""
        value = self.raw(key)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.invalid(key, f"a list of {count} numbers")
        return tuple(
            ConfigReader({key: item}).number(key, least=least, above=above, infinite=infinite)
            for item in value
        )

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null is false, as in transformers, which tests `if value`."""
        value = self._mapping.get(self.name(key), default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.invalid(key, "a string")
        return value

    def ids(self, key: str, default: Sequence[int], *, vocab: int) -> tuple[int, ...]:
        """Token ids, one or a list. Ids outside the vocabulary cannot occur and are removed."""
        value = self._mapping.get(self.name(key), list(default))
        if value is None:  # null: none, rather than the default
            return ()
        listed = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
            raise self.invalid(key, "a token id or a list of them")
        return tuple(dict.fromkeys(i for i in listed if 0 <= i < vocab))

    def each(self, key: str, layers: int, known: Sequence[object], expected: str) -> list[Any]:
        """A list with one of `known` for each layer, of their type: 1 is not true, 1.0 is not 1.

        `expected`: what an error says of it.
        """
        listed, kind = self.raw(key), type(known[0])
        if not isinstance(listed, list) or len(listed) != layers:
            raise self.invalid(key, expected)
        if not all(isinstance(one, kind) and one in known for one in listed):
            raise self.invalid(key, expected)
        return listed

    def layer_types(self, layers: int, known: Container[str]) -> list[str]:
        """The type of each layer. Raises UnsupportedModel for types that are not in `known`."""
        listed = self.raw("layer_types")
        if not isinstance(listed, list) or len(listed) != layers:
            raise self.invalid("layer_types", f"a list with a type for each of {layers} layers")
        for name in listed:
            if not isinstance(name, str) or name not in known:
                raise UnsupportedModel(f"layers of type `{shortened(name)}` are not supported")
        return listed

    def divide(self, key: str, size: int, by: str, parts: int) -> int:
        """`size / parts`, the values of `key` and `by`, without remainder."""
        return require_divisible(f"`{self.name(key)}`", size, f"`{self.name(by)}`", parts)

    def invalid(self, key: str, expected: str) -> CheckpointError:
        """The error for a key with a wrong or missing value."""
        name = self.name(key)
        if self.raw(key) is None:
            return CheckpointError(f"the configuration has no `{name}`: it must be {expected}")
        return CheckpointError(
            f"the configuration says `{name}` is `{shortened(self.raw(key))}`:"
            f" it must be {expected}"
        )

    def _present(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        return default if value is None else value


def shortened(value: Any, width: int = 40) -> str:
    """The value as at most `width` characters."""
    if isinstance(value, list | tuple | dict):  # may be deep or huge
        return f"{type(value).__name__} of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:  # printing it would be slow
        return f"a number of {value.bit_length()} bits"
    text = str(value) if isinstance(value, str) else repr(value)
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: width + 1]
    )
    return text if len(text) <= width else text[: width - 1] + "…"


def farthest(settings: Mapping[str, Any]) -> tuple[str, Any]:
    """The key and number, also in nested objects, with the magnitude farthest from 1."""
    found: list[tuple[str, Any]] = [("", 1)]
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found.append(farthest(value))
        elif isinstance(value, int | float) and value and _finite(value):
            found.append((key, value))
    return max(found, key=lambda one: abs(math.log(abs(one[1]))))


def require_divisible(what: str, size: int, parts_name: str, parts: int) -> int:
    """`size / parts`; raises CheckpointError if there is a remainder."""
    if size % parts:
        raise CheckpointError(
            f"the configuration says {what} is {size}, which {parts_name} {parts} does not divide"
        )
    return size // parts


def _untagged(value: Any) -> Any:
    """Convert transformers 5's object for an infinity to a number; other values are unchanged."""
    tagged = value.get("__float__") if isinstance(value, Mapping) and len(value) == 1 else None
    infinite = {"Infinity": math.inf, "-Infinity": -math.inf}
    return infinite.get(tagged, value) if isinstance(tagged, str) else value


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False
