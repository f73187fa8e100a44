"""A hub cache written file by file, for tests of what looks at one and removes from it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

MAIN, OLD = "a" * 40, "b" * 40


def write_revision(
    root: Path,
    repository: str,
    files: Mapping[str, bytes],
    *,
    commit: str = MAIN,
    refs: Sequence[str] = ("main",),
) -> Path:
    """The snapshot directory; the same bytes are the same blob, as in a cache of the library."""
    folder = root / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    for ref in refs:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def tree_of(root: Path) -> dict[str, int | str]:
    """Every file below `root` with its size, every link with where it points."""
    found: dict[str, int | str] = {}
    for where, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(where) / name
            if path.is_symlink():
                found[str(path.relative_to(root))] = os.readlink(path)
            elif path.is_file():
                found[str(path.relative_to(root))] = path.stat().st_size
    return found
