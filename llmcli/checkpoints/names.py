"""Parses the value of `-m`, without lookups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmcli.checkpoints.files import shown
from llmcli.errors import ModelNotFound, UsageError

_WEIGHTS = (".gguf", ".safetensors")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>[^@\0]+))?(?:@(?P<rev>[^@\s]+))?")
# pasted forms: a page's URL, a file of a repository, other tools' tags
_PAGE = re.compile(r"(?:hf:)?(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<rest>.+)")
_VIEW = re.compile(
    rf"(?P<repo>{_PART}/{_PART})/(?:blob|resolve|raw|tree)/(?P<rev>(?:refs/pr/)?[^/?]+)"
    r"(?:/(?P<file>[^?]+))?(?:\?.*)?"
)
# old hub names without an organization, still redirected
CLASSICS = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
_TAG = re.compile(rf"(?:hf:)?(?P<repo>{_PART}/{_PART}):[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class HubId:
    """`org/name` on the hub, at `revision` (None: default branch), optionally one `file`."""

    repository: str
    revision: str | None = None
    file: str | None = None


def parse(spec: str, *, revision: str | None = None) -> Path | HubId | str:
    """Parse `spec` without lookups, as a path, a hub id, or a catalog name.

    The documented rules, in order: `hf:` is the hub; a leading `.`, `/`, `~` or the suffix `.gguf`,
    `.safetensors` is a path; a name without a slash is in the catalog, except the hub's classics
    (`gpt2`); `org/name[@rev]` is the hub. Raises UsageError for a duplicate or inapplicable
    revision, ModelNotFound if no rule matches.
    """
    if not spec.strip():
        raise UsageError("the model's name is empty", hint="`llmcli env` says where it comes from")
    bare, at, rest = spec.removeprefix("hf:").partition("@")
    if bare in CLASSICS:
        spec = f"hf:{CLASSICS[bare]}{at}{rest}"
    hub = spec.startswith("hf:")
    if not hub and (spec[0] in "./~" or spec.lower().endswith(_WEIGHTS)):
        found: Path | HubId | str = Path(spec).expanduser() if spec[0] == "~" else Path(spec)
    elif not hub and "/" not in spec:
        found = spec
    else:
        return _hub_id(spec, revision)
    if revision is not None:
        raise UsageError(
            f"`--revision` goes with a model from the hub, and `{shown(spec)}` is not one",
            hint="leave `--revision` out, or write `hf:org/name`",
        )
    return found


def typed(spec: str, revision: str | None) -> str:
    """A model as command-line arguments, for an error: `org/name --revision v2`."""
    return shown(spec) + (f" --revision {shown(revision)}" if revision else "")


def hub_name(spec: str) -> str | None:
    """The correct spelling of a hub model given in another form; None if it is none.

    Forms: the URL of a page or file, `org/name/file.gguf` without `hf:`, `org/name:TAG`.
    """
    page = _PAGE.fullmatch(spec)
    rest = page["rest"].rstrip("/") if page else spec
    if tag := _TAG.fullmatch(rest):
        return tag["repo"]
    view = _VIEW.fullmatch(rest) if page else None
    plain = view or _HUB.fullmatch(rest.partition("?")[0] if page else rest)
    if plain is None or (view is None and not page and not plain["file"]):
        return None
    revision, file = plain["rev"], plain["file"]
    if file and (".." in file.split("/") or not file.lower().endswith(_WEIGHTS)):
        file = None  # a page of a small file: use the whole model
        if not page:
            return None
    at = f"@{revision}" if revision and revision != "main" else ""
    return f"hf:{plain['repo']}/{file}{at}" if file else f"{plain['repo']}{at}"


def _hub_id(spec: str, revision: str | None) -> HubId:
    match = _HUB.fullmatch(spec.removeprefix("hf:"))
    file = match["file"] if match else None
    if match is None or (file and (not spec.startswith("hf:") or ".." in file.split("/"))):
        hint = "write `org/name[@rev]`, `hf:org/name/file.gguf`, or `./` before a directory"
        if name := hub_name(spec):
            hint = f"for the model on the hub write `{shown(name, 200)}`"
        if _TAG.fullmatch(spec):
            hint += ", and the file where it has several"
        raise ModelNotFound(
            f"`{shown(spec)}` is neither a file, a model's name nor a hub id", hint=hint
        )
    if match["rev"] and revision and match["rev"] != revision:
        raise UsageError(
            f"`{shown(spec)}` and `--revision {shown(revision)}` name two different revisions",
            hint="give one of them",
        )
    return HubId(repository=match["repo"], revision=match["rev"] or revision, file=file)
