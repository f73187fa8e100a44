"""Which test sees which fault: one fault at a time in the package's source, the suite run on it.

    python tests/trust/trust.py [NAME …] [--topic model …] [--jobs 2] [--again] [--every]
    python tests/trust/trust.py --check | --table | --compare BEFORE.json AFTER.json

`faults/TOPIC.toml` has the faults: a name, a file, the text in it and what stands there instead.
For each one the tree is copied, the text replaced, and the tests of the topic's stages are run,
stage after stage, until one is red that is green without the fault. `seen.json` keeps which test
that was, its layer, and after how many seconds; faults that it has are not run again without
`--again`, which tries the test that saw a fault last time before the stages. `--every` runs what
the default command leaves out as well (`-m ''`): the layer of a fault that only those see is
`exhaustive`. `--compare` fails where a fault that was seen is not seen any more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEEN = HERE / "seen.json"
LIMIT = 900  # seconds a stage may take: a fault that makes a program wait is seen, too
PYTEST = (sys.executable, "-m", "pytest")
RED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A piece of a file's text, and what stands there instead; `stages`: where tests may see it."""

    name: str
    topic: str
    file: str
    old: str
    new: str
    stages: list[list[str]] = field(default_factory=list)

    def planted(self, text: str) -> str:
        """The file's text with the fault; raises ValueError where its place is not there once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.topic}: {self.name}: found {found} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Seen:
    """The first red test of a fault: "" where none was; its layer; seconds until then."""

    topic: str
    test: str
    layer: str
    seconds: float


def faults() -> list[Fault]:
    """Those of all topics."""
    found = []
    for path in sorted((HERE / "faults").glob("*.toml")):
        topic = tomllib.loads(path.read_text("utf-8"))
        found += [
            Fault(topic=path.stem, **{"stages": topic["stages"], **one}) for one in topic["fault"]
        ]
    return found


def copied(source: Path, target: Path, *, linked: bool = False) -> Path:
    """The tree without its history; `linked`: its files are the same ones."""
    ignored = shutil.ignore_patterns(".git", "build", ".mypy_cache", ".ruff_cache", ".hypothesis")
    copy = os.link if linked else shutil.copy2
    shutil.copytree(source, target, copy_function=copy, ignore=ignored)
    return target


def plant(fault: Fault, tree: Path) -> None:
    """Writes the file with the fault; kernels are built anew."""
    path = tree / fault.file
    text = fault.planted(path.read_text("utf-8"))
    path.unlink()  # it is a link
    path.write_text(text, "utf-8")
    if path.suffix in (".c", ".h"):
        for library in (tree / "llmcli/kernels").glob("*.so"):
            library.unlink()
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        (tree / "setup.py").write_text("import setuptools\nsetuptools.setup()\n")
        done = subprocess.run(build, cwd=tree, capture_output=True, text=True, check=False)
        if not list((tree / "llmcli/kernels").glob("*.so")):
            raise RuntimeError(f"{fault.name}: {done.stderr[-2000:]}")


def red(tree: Path, tests: list[str], options: list[str]) -> list[str]:
    """The tests that are red there."""
    command = [*PYTEST, "-rfE", "--tb=no", *options, *tests]
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, text=True, timeout=LIMIT,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"{' '.join(tests)} (does not end)"]
    if done.returncode in (0, 5):  # 5: none was chosen
        return []
    if found := RED.findall(done.stdout):
        return found
    if done.returncode < 0 or done.returncode > 5:
        return [f"{' '.join(tests)} (killed by signal {done.returncode})"]
    raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def green_of(tests: set[str], tree: Path) -> set[str]:
    """Those of these tests that are still there and green."""
    files = [file for file in {test.split("::")[0] for test in tests} if (tree / file).exists()]
    command = [*PYTEST, "--collect-only", "-m", "", *files]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    left = tests & set(listed.stdout.splitlines())
    return left - set(red(tree, sorted(left), ["-m", ""])) if left else left


def seen_by(
    fault: Fault, clean: Path, work: Path, every: bool, known: str, green: set[str]
) -> Seen:
    """Runs the test that is `known` to see it, if it is among the green ones, then the fault's
    stages, until a test is red that is green without the fault.
    """
    start = time.monotonic()
    tree = copied(clean, work / f"{fault.topic}-{threading.get_ident()}", linked=True)
    try:
        plant(fault, tree)
        for layer, options in [("default", []), ("exhaustive", ["-m", ""])][: 1 + every]:
            for stage in [[known], *fault.stages] if known in green else fault.stages:
                left: list[str] = []
                while found := red(tree, stage, ["-x", *options, *left]):
                    test = found[0]
                    alone = stage if test.endswith(")") else [test]  # (killed), (does not end)
                    if test in green or not red(clean, alone, ["-m", ""]):
                        return Seen(fault.topic, test, layer, round(time.monotonic() - start))
                    left += ["--deselect", test]  # red without the fault: says nothing
        return Seen(fault.topic, "", "", round(time.monotonic() - start))
    finally:
        shutil.rmtree(tree)


def kept() -> dict[str, Seen]:
    """What `seen.json` has."""
    if not SEEN.exists():
        return {}
    return {name: Seen(**one) for name, one in json.loads(SEEN.read_text("utf-8")).items()}


def keep(name: str, row: Seen) -> None:
    """Writes a row into `seen.json` as it is now, in the order of the faults: others run, too."""
    seen = kept() | {name: row}
    rows = {one.name: asdict(seen[one.name]) for one in faults() if one.name in seen}
    SEEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")


def table(seen: dict[str, Seen]) -> Iterator[str]:
    """A line a topic: faults, seen by layer, not seen; then those that are not seen by name."""
    heads = ("faults", "default", "exhaustive", "not seen", "seconds")
    yield f"{'topic':<12}" + "".join(f"{head:>11}" for head in heads)
    topics = {one.topic for one in seen.values()}
    for topic in [*sorted(topics), ""]:
        rows = [one for one in seen.values() if topic in ("", one.topic)]
        counts = [len(rows)]
        counts += [sum(one.layer == each for one in rows) for each in ("default", "exhaustive", "")]
        counts += [round(sum(one.seconds for one in rows))]
        yield f"{topic or 'all':<12}" + "".join(f"{count:>11}" for count in counts)
    yield from (f"not seen: {name}" for name, one in seen.items() if not one.test)
    yield f"not run yet: {len(faults()) - len(seen)}"


def compared(before: Path, after: Path) -> int:
    """Prints what changed between two files; 1 where a fault that was seen is not seen any more."""
    old, new = json.loads(before.read_text("utf-8")), json.loads(after.read_text("utf-8"))
    lost = [name for name, one in old.items() if one["test"] and not new.get(name, one)["test"]]
    later = [
        name for name, one in old.items()
        if one["layer"] == "default" and new.get(name, one)["layer"] == "exhaustive"
    ]  # fmt: skip
    for title, names in (("no longer seen", lost), ("seen by the exhaustive tests only", later)):
        print(f"{title}: {len(names)} of {len(old)}", *names, sep="\n  ")
    return int(bool(lost))


def main() -> int:
    """Runs the faults that are named, or those that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of faults' names")
    parser.add_argument("--topic", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="also those that have a row")
    parser.add_argument("--every", action="store_true", help="then those with a marker")
    parser.add_argument("--check", action="store_true", help="whether each place is there")
    parser.add_argument("--table", action="store_true", help="only what seen.json has")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        return compared(*args.compare)
    seen = kept()
    if args.table:
        print(*table(seen), sep="\n")
        return 0
    chosen = [
        one for one in faults()
        if (not args.topic or one.topic in args.topic)
        and (not args.names or any(part in one.name for part in args.names))
        and (args.again or args.check or one.name not in seen)
    ]  # fmt: skip
    wrong = []
    for one in chosen:
        try:
            planted = one.planted((ROOT / one.file).read_text("utf-8"))
            if one.file.endswith(".py"):
                compile(planted, one.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{one.topic}: {one.name}: {error}")
    if args.check or wrong:
        print(*(wrong or [f"{len(chosen)} faults, each at its place"]), sep="\n")
        return int(bool(wrong))
    with (
        tempfile.TemporaryDirectory(prefix="trust-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        work = Path(folder)
        clean = copied(ROOT, work / "clean")
        lock = threading.Lock()
        known = {one.name: seen[one.name].test for one in chosen if one.name in seen}
        green = green_of({test for test in known.values() if "::" in test}, clean)

        def run(fault: Fault) -> None:
            try:
                one = seen_by(fault, clean, work, args.every, known.get(fault.name, ""), green)
            except RuntimeError as error:
                print(f"{fault.topic}: {fault.name}: {error}", flush=True)
                return
            with lock:
                keep(fault.name, one)
                said = one.test or "NOT SEEN"
                print(f"{one.seconds:4.0f} s  {fault.topic}: {fault.name}: {said}", flush=True)

        list(pool.map(run, chosen))
    print(*table(kept()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
