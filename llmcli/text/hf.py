"""The tokenizer of a directory, from the files that transformers reads.

These are tokenizer.json, otherwise a SentencePiece model, otherwise vocab.json and merges.txt. The
class, special tokens and chat template are in tokenizer_config.json, special_tokens_map.json and
chat_template.jinja (transformers, tokenization_utils_base.py, tokenization_utils_tokenizers.py,
tokenization_utils_sentencepiece.py and processing_utils.py).

vocab.json and merges.txt do not contain the pre-tokenizer. transformers determines it by the class
in tokenizer_config.json, else by the model type (models/*/tokenization_*.py,
models/auto/tokenization_auto.py). An unknown class is an error, since a wrong split gives plausible
ids and worse text.

Beside a SentencePiece model, control pieces and added tokens are matched in the text, and the rest
is encoded by SentencePiece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_bytes, read_object, shown
from llmcli.errors import CheckpointError, LlmcliError, UnsupportedModel
from llmcli.text.added import (
    AddedToken,
    AddedTokens,
    add_to_library,
    check_id,
    listed_tokens,
    of_library,
    token_text,
)
from llmcli.text.chat import MAX_SOURCE, ChatTemplate
from llmcli.text.hf_classes import (
    CLASSES,
    SAVE_AGAIN,
    TokenizerClass,
    apply_class,
    class_of,
    pair_class,
)
from llmcli.text.portions import state_of
from llmcli.text.pretokenizers import PRE_TOKENIZERS
from llmcli.text.sentencepiece import CONTROL, PieceEncoder, PieceModel, read_pieces
from llmcli.text.spelling import Spelling, spelling_of
from llmcli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

MAX_FILE = 1 << 28  # bytes; the largest known tokenizer.json has 34 million
_FILE, _PAIR = ("tokenizer.json",), ("vocab.json", "merges.txt")
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_PROBES = "a0.eA \u4e00\u0905"  # every vocabulary has one of these characters
_PIECES = ("tokenizer.model", "spiece.model")
_OTHERS = ("tekken.json", "vocab.json", "vocab.txt")


def from_directory(
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Tokenizer | None:
    """Build the tokenizer of a checkpoint's directory; None if it has none.

    `config` and `generation` (config.json, generation_config.json) provide additional end ids.
    Raises `UnsupportedModel` if there is only another kind of tokenizer, `CheckpointError` for
    broken files.
    """
    found = next((names for names in (_FILE, _PAIR) if _has(directory, names)), None)
    ends = [*eos_ids(config), *eos_ids(generation)]
    pieces = [directory / name for name in _PIECES if found is not _FILE]
    for path in filter(Path.is_file, pieces):
        return _from_pieces(path, config or {}, ends)
    if found is None:
        if other := next((name for name in _OTHERS if (directory / name).is_file()), None):
            raise UnsupportedModel(
                f"the only tokenizer is `{other}`, which llmcli does not read", hint=SAVE_AGAIN
            )
        return None
    try:
        return _from_library(directory, found, config or {}, ends)
    except (KeyboardInterrupt, SystemExit, LlmcliError):
        raise
    except BaseException as error:  # the library's panics are not `Exception`s
        raise CheckpointError(f"`{found[0]}` cannot be read: {shown(error, 120)}") from error


def _has(directory: Path, names: tuple[str, ...]) -> bool:
    return all((directory / name).is_file() for name in names)


def _from_library(
    directory: Path, found: tuple[str, ...], config: Mapping[str, Any], ends: list[int]
) -> Tokenizer:
    """The tokenizer of the files `found`, with the end ids `ends` and those of its settings."""
    settings = read_settings(directory)
    if found is _FILE:
        backend, byte_level = _read(directory / _FILE[0])
        own = class_of(settings, config, byte_level=byte_level)
        settings = apply_class(backend, own, settings)
        kind, marks = type(backend.model).__name__, own in CLASSES and CLASSES[own].marks
    else:
        kind, marks = pair_class(settings, config), False
        settings = {**CLASSES[kind].tokens, **settings}
    listed_as_special = special_tokens(settings)
    texts = set(map(token_text, listed_as_special))
    listed = listed_tokens(directory, settings, texts)
    if found is _PAIR:
        backend = _read_pair(directory, CLASSES[kind], settings, listed)
    if "added_tokens_decoder" not in settings:
        for index, token in of_library(backend).items():
            listed[index] = replace(token, special=token.special or token.content in texts)
    add_to_library(backend, listed, listed_as_special, marks=marks, rows=rows_of(config))
    added = of_library(backend)
    named = named_tokens(settings)
    ids = {role: backend.token_to_id(text) for role, text in named.items()}
    found_ids = (backend.token_to_id(text) for text in texts if text is not None)
    special = frozenset(index for index in found_ids if index is not None)
    strings = _strings(backend, [index for index in added if added[index].normalized])
    return Tokenizer(
        backend=backend,
        strings=strings,
        spelling=spelling_of(state_of(backend.decoder) or None),
        special_ids=special.union(i for i in added if added[i].special),
        bos_id=ids.get("bos_token"),
        eos_ids=_present([*ends, ids.get("eos_token")], strings),
        prefix=_prefix(backend),
        name=f"{' + '.join(found)}, {kind}",
        chat_template=chat_template_of(directory, settings, named),
        split_special=settings.get("split_special_tokens") is True,
    )


def _read(path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """Read the file's tokenizer, and whether one of its steps is byte-level."""
    import tokenizers

    # by contents: the library only accepts UTF-8 file names
    data = read_bytes(path, MAX_FILE)
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    return backend, b'"ByteLevel"' in data


def _strings(backend: tokenizers.Tokenizer, normalized: Iterable[int]) -> list[str | None]:
    """The token of every id; those matched in `normalized` text have that form: `▁<img>`."""
    vocab = backend.get_vocab(with_added_tokens=True)
    size = 1 + max(vocab.values(), default=-1)
    if size > 2 * len(vocab) + (1 << 20):  # gaps are valid, but this many would fill the memory
        raise CheckpointError(f"one of {len(vocab)} tokens has the id {size - 1}")
    strings: list[str | None] = [None] * size
    for string, index in vocab.items():
        strings[index] = string
    for index in normalized:
        strings[index] = backend.id_to_token(index)
    return strings


def _present(ids: Iterable[int | None], strings: Sequence[str | None]) -> frozenset[int]:
    return frozenset(index for index in ids if index is not None and 0 <= index < len(strings))


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor puts before the text: BOS, nothing, or several tokens.

    As in transformers, `add_bos_token` of tokenizer_config.json is ignored if there is a
    tokenizer.json. Ids after the text (EOS) are not wanted in a prompt.
    """
    probes = (text for text in _PROBES if backend.encode(text, add_special_tokens=False).ids)
    probe = next(probes, _PROBES)
    plain = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


_MAX_PAIR = 1 << 25  # bytes of vocab.json or merges.txt; the largest known have 6 million
_MAX_MERGES = 1 << 21


def _read_pair(
    directory: Path,
    own: TokenizerClass,
    settings: Mapping[str, Any],
    added: Mapping[int, AddedToken],
) -> tokenizers.Tokenizer:
    """The library's tokenizer of vocab.json and merges.txt, with `added` tokens in its vocabulary.

    Raises `CheckpointError` for broken or contradictory files.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    vocab = _read_vocab(directory / _PAIR[0], added)
    merges = _read_merges(directory / _PAIR[1])
    try:
        backend = Tokenizer(BPE(vocab, merges))
    except Exception as error:
        why = shown(error, 120)
        raise CheckpointError(f"`{_PAIR[1]}` does not fit `{_PAIR[0]}`: {why}") from error
    if own.nfc:
        backend.normalizer = normalizers.NFC()
    spaced = bool(settings.get("add_prefix_space"))
    patterns = PRE_TOKENIZERS[own.rule].patterns if own.rule else ()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=not patterns)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters]) if cuts else letters
    backend.decoder = decoders.ByteLevel()
    role = "cls_token" if own.encloses else "bos_token"
    first = token_text(settings.get(role))
    if first is not None and (own.encloses or settings.get("add_bos_token")):
        if first not in vocab:
            raise CheckpointError(f"`{_PAIR[0]}` has no `{shown(first)}`, which begins every text")
        backend.post_processor = TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, vocab[first])]
        )
    return backend


def _read_vocab(path: Path, added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Read the vocabulary, and put the added tokens into it under their ids in the files.

    The library would number them from the vocabulary's size on, which is wrong if ids have gaps.
    """
    if path.stat().st_size > _MAX_PAIR:
        raise CheckpointError(f"`{path.name}` has more than {_MAX_PAIR} bytes")
    vocab = read_object(path) or {}
    at: dict[int, str] = {}
    joined = [(token.content, index) for index, token in added.items()]
    for text, index in joined:
        if not text:
            raise CheckpointError(f"the added token `{index}` has no text")
    for text, index in [*vocab.items(), *joined]:
        check_id(path.name, text, index)
        if at.setdefault(index, text) != text:
            both = f"`{shown(at[index])}` and `{shown(text)}`"
            raise CheckpointError(f"`{path.name}` or an added token gives {both} the id {index}")
        if vocab.setdefault(text, index) != index:
            both = f"the id {vocab[text]}, an added token {index}"
            raise CheckpointError(f"`{path.name}` gives `{shown(text)}` {both}")
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Read the pairs in rank order, without `#version` and blank lines."""
    data = read_bytes(path, _MAX_PAIR)
    try:
        lines = data.decode("utf-8-sig").split("\n")  # the only line end, as in the library
    except UnicodeDecodeError:
        raise CheckpointError(f"`{path.name}` is not UTF-8") from None
    if len(lines) > _MAX_MERGES:
        raise CheckpointError(f"`{path.name}` has more than {_MAX_MERGES} lines")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        pair = line.removesuffix("\r").split(" ")
        if pair == [""] or line.startswith("#version"):
            continue
        if len(pair) != 2 or not all(pair):
            where, given = f"line {number} of `{path.name}`", shown(line.removesuffix("\r"), 40)
            raise CheckpointError(f"{where} is not a pair of tokens: `{given}`")
        merges.append((pair[0], pair[1]))
    return merges


_MOST_ADDED = 1 << 20  # ids beyond the model's; more gaps would fill the memory


def _from_pieces(path: Path, config: Mapping[str, Any], ends: list[int]) -> Tokenizer:
    """The tokenizer of the SentencePiece model at `path`, with `ends` and those of its settings."""
    settings = read_settings(path.parent)
    model = read_pieces(path)
    named = {**model.names, **named_tokens(settings)}
    added = _piece_added(path.parent, settings, model, set(named.values()), rows_of(config))
    strings: list[str | None] = list(model.strings)
    last = max(added, default=0)
    if last >= len(strings) + _MOST_ADDED:
        raise CheckpointError(f"an added token has the id {last}")
    strings += [None] * (last + 1 - len(strings))
    for index, token in added.items():
        strings[index] = token.content
    at = {token.content: index for index, token in added.items()}
    bos, eos = at.get(named["bos_token"]), at.get(named["eos_token"])
    if isinstance(prefixed := settings.get("add_prefix_space"), bool):
        model = replace(model, space_prefix=prefixed)
    inside = None
    if model.space_prefix and not settings.get("legacy", model.unigram):
        inside = PieceEncoder(replace(model, space_prefix=False))
    adds_bos = settings.get("add_bos_token", not model.unigram)
    matched = AddedTokens(added, leftmost=True)
    return Tokenizer(
        backend=PieceEncoder(model),
        strings=strings,
        spelling=Spelling(replace=(("▁", " "),), byte_fallback=True, strip=int(model.space_prefix)),
        special_ids=matched.special_ids,
        bos_id=bos,
        eos_ids=_present([*ends, eos], strings),
        prefix=(bos,) if adds_bos and bos is not None else (),
        name=f"{path.name}, {'Unigram' if model.unigram else 'BPE'}",
        added=matched,
        inside=inside,
        chat_template=chat_template_of(path.parent, settings, named),
        split_special=settings.get("split_special_tokens") is True,
    )


def _piece_added(
    directory: Path,
    settings: Mapping[str, Any],
    model: PieceModel,
    named: set[str],
    rows: int | None,
) -> dict[int, AddedToken]:
    """Id → token for all tokens matched in a text.

    Special tokens defined only in the settings get the next ids, up to the `rows` of the embedding.
    """
    listed_as_special = dict.fromkeys(filter(None, map(token_text, special_tokens(settings))))
    named = named.union(listed_as_special)
    added = {
        index: AddedToken(content=model.strings[index], special=True)
        for index, kind in enumerate(model.kinds)
        if kind == CONTROL or model.strings[index] in named
    }
    added |= listed_tokens(directory, settings, named, both=True)
    known = {token.content for token in added.values()}
    free = max(len(model.strings), 1 + max(added, default=-1))
    for index, text in enumerate((text for text in listed_as_special if text not in known), free):
        if rows is None or index < rows:
            added[index] = AddedToken(content=text, special=True)
    return {index: token for index, token in added.items() if token.content}


def read_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, overridden by special_tokens_map.json in old formats."""
    settings = read_object(directory / "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in settings:
        settings.update(read_object(directory / "special_tokens_map.json") or {})
    return settings


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name (`bos_token`, …, or a model's own) → text of the special tokens for templates."""
    found = {name: token_text(token) for name, token in _named(settings).items()}
    return {name: text for name, text in found.items() if text is not None}


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    own = settings.get("extra_special_tokens")
    named = {key: settings.get(key) for key in _ROLES}
    named |= {key: token for key, token in settings.items() if key.endswith("_token")}
    return named | (own if isinstance(own, dict) else {})


def special_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """All special tokens as given, in transformers' order: named ones, then listed ones."""
    listed = (settings.get(f"{kind}_special_tokens") for kind in ("extra", "additional"))
    more = next((tokens for tokens in listed if tokens and isinstance(tokens, list)), [])
    return [*_named(settings).values(), *more]


def eos_ids(config: Mapping[str, Any] | None) -> list[int]:
    """Read `eos_token_id` of config.json or generation_config.json: absent, a number, or a list.

    Other values are ignored here and reported by the configuration's reader.
    """
    value = (config or {}).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [index for index in listed if isinstance(index, int) and not isinstance(index, bool)]


def rows_of(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding; None if the configuration lacks them."""
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def chat_template_of(
    directory: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    """The `default` chat template; without a default, the first.

    Templates in chat_template.jinja and additional_chat_templates/ take precedence over the
    settings (a string, an object, or a list of named ones); chat_template.json, read by processors,
    comes last.
    """
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {path.name.removesuffix(".jinja"): path for path in more}
    if (path := directory / "chat_template.jinja").is_file():
        files["default"] = path
    source: Any = settings.get("chat_template")
    if source is None or "default" in files:
        source = {name: _template_file(path) for name, path in files.items()} or None
    if source is None:
        source = (read_object(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(source, dict):
        source = source.get("default", next(iter(source.values()), None))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`chat_template` is neither a text nor named texts")
    return ChatTemplate(source, special_tokens=named)


def _template_file(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_SOURCE + 1)
    except ValueError as error:
        raise CheckpointError(f"`{path.name}` is not UTF-8") from error
