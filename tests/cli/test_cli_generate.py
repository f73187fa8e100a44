"""`generate` and its relatives on a small model with random weights; drafts are in transcripts."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cli_tiny import write_tiny
from fake_process import MIB, FakeProcess

from llmcli.checkpoints import CATALOG
from llmcli.commands.generate.measure import groups
from llmcli.commands.generate.writers import DocumentWriter
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.loading import load
from llmcli.shell.batch import read_batch
from llmcli.shell.output import Screen
from llmcli.shell.sampling import DEFAULTS, SamplingOptions, resolve

LONG = ("--ignore-eos", "-n", "12")


def test_what_json_says_of_memory(run_tiny, monkeypatch):
    """In a process that is made up: what a real one holds depends on the tests before."""
    process = FakeProcess(monkeypatch)
    parts = (load, load.load_checkpoint, 30), (Session, Session.prefill, 50)
    for owner, held, mebibytes in parts:

        def holding(*args, held=held, mebibytes=mebibytes, **more):
            process.hold(mebibytes)
            return held(*args, **more)

        monkeypatch.setattr(owner, held.__name__, holding)
    timings = run_tiny("generate", "hello", *LONG, "--json").json()["timings"]
    peaks = [(one["phase"], one["resident_bytes"] // MIB) for one in timings["peaks"]]
    assert peaks == [("base", 100), ("load", 130), ("prefill", 150), ("decode", 100)]
    assert timings["peak_memory_bytes"] == 150 * MIB


def test_a_token_that_an_interruption_kept_from_the_document_does_not_count(run_tiny, monkeypatch):
    def token(self, number, token, take=DocumentWriter.token):
        if token.index == 3:
            raise KeyboardInterrupt
        take(self, number, token)

    monkeypatch.setattr(DocumentWriter, "token", token)
    document = json.loads(run_tiny("generate", "hello", *LONG, "--json").out)
    (output,) = document["outputs"]
    assert len(output["ids"]) == document["timings"]["generated_tokens"] == 3
    assert output["finish_reason"] == "interrupted"


def test_what_json_says_of_the_kernels(run_tiny):
    narrow = run_tiny("generate", "hello", *LONG, "--dtype", "bfloat16", "--json").json()
    assert all(peak["device_bytes"] is None for peak in narrow["timings"]["peaks"])
    level = narrow["environment"]["kernel_level"]
    own = [f"llmcli {level}"] if level in native.LEVELS else []
    assert narrow["path"]["kernels"][:-2] == own


def test_each_document_of_a_batch_has_its_place_and_its_own_tokens(run_tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [f"{'x' * (37 * i % 23)}{i}" for i in range(20)]
    file.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    options = ("--raw", "--num-samples", "2", "--stop", "e", "--json")
    batch = run_tiny("generate", "--batch", str(file), *LONG, *options)
    documents = [json.loads(line) for line in batch.out.splitlines()]
    assert [document["prompt"]["text"] for document in documents] == prompts
    assert [document["index"] for document in documents] == list(range(20))
    assert {document["schema"] for document in documents} == {"llmcli.generate/1"}
    headed = [{"model", "environment"} & set(document) for document in documents]
    assert headed == [{"model", "environment"}, *[set()] * 19]  # once per stream
    for document in documents:
        timings = document["timings"]
        assert timings["prompt_tokens"] == len(document["prompt"]["ids"])
        written = [len(output["ids"]) for output in document["outputs"]]
        assert timings["generated_tokens"] == sum(written)
        assert (timings["generated_tokens_per_s"] is None) == (max(written) == 1)
        assert timings["prompt_tokens_per_s"] == pytest.approx(
            timings["prompt_tokens"] / timings["first_token_s"]
        )
    groups = {document["timings"]["first_token_s"] for document in documents}
    assert len(groups) == 5  # of four prompts, two samples each


def test_times_of_stream_json_rise(run_tiny):
    """What else a line has is in the transcript generate-stream."""
    lines = run_tiny("generate", "hello", *LONG, "--stream-json").out.splitlines()
    times = [json.loads(line)["ms"] for line in lines]
    assert len(times) == 12
    assert times == sorted(times)


def test_a_seed_that_was_drawn_is_reported_and_gives_the_same_again(cli, tmp_path):
    argv = ("generate", "x", "-m", str(write_tiny(tmp_path / "m", weights=True)), *LONG)
    first = cli(*argv)
    again = cli(*argv, "--seed", first.err.split("`--seed ")[1].split("`")[0])
    assert (again.out, again.err) == (first.out, "")
    document = cli(*argv, "--json")
    assert document.err == ""
    seed = str(document.json()["sampling"]["seed"])
    assert document.json()["outputs"][0]["text"] == cli(*argv, "--seed", seed).out


def test_of_a_setting_that_is_none_the_catalogs_is_used_then_the_engines():
    assert CATALOG["smollm2"].sampling == {"temperature": 0.2, "top_p": 0.9}
    assert all(getattr(Sampling(), name) == value for name, value in DEFAULTS.items())
    files = SimpleNamespace(generation_config={"temperature": "hot"}, metadata={})
    model, given = SimpleNamespace(name="smollm2", checkpoint=files), (SamplingOptions(), 5, ())
    wrong = resolve(model, *given, limited=False)
    assert (wrong.values.temperature, wrong.origins["temperature"]) == (0.2, "catalog")
    assert "0.2 is used" in wrong.notes[0]
    model.name, files.generation_config = "", None
    assert resolve(model, *given, limited=False).values.engine({}) == Sampling(seed=5)


def test_the_catalogs_sampling_is_that_of_its_name(cli, monkeypatch):
    """`tiny` by its name, and the same files by their path; both have a `top_k` of their own."""
    entry = CATALOG["tiny"]
    monkeypatch.setitem(CATALOG, "tiny", replace(entry, sampling={"top_k": 7, "min_p": 0.5}))
    for name, origin in (("tiny", "catalog"), (str(entry.file), "default")):
        result = cli("generate", "x", "-m", name, "--seed", "1", "-n", "1", "--json")
        found = result.json()["sampling"]["origins"]
        assert (found["top_k"], found["min_p"]) == ("generation_config.json", origin)


def test_a_terminal_gets_a_note_of_the_chat_template(run_tiny, monkeypatch):
    def err(*argv, on=("out", "err")):
        def of(stream, environ):
            there = ("out" if stream is sys.stdout else "err") in on
            return Screen(terminal=there, animate=False, colour=False, width=200)

        monkeypatch.setattr(Screen, "of", of)
        return run_tiny("generate", "x", "-n", "1", "--seed", "1", *argv).err

    line = "chat template applied · `--raw` continues the text as it stands\n"
    assert err().startswith(line)
    assert line in err("--stats", "full")
    for argv in (("--raw",), ("-q",), ("--json",), ("--stream-json",), ("--stats", "off")):
        assert "chat template" not in err(*argv)
    for some in (("out",), ("err",), ()):
        assert "chat template" not in err("--stats", "short", on=some)


@pytest.mark.parametrize("line", [
    "{", "3", "null", "[]", '""', "{}", '{"prompt": 3}', '{"ids": []}', '{"ids": [1.5]}',
    '{"ids": [true]}', '{"ids": [-1]}', '{"prompt": "x", "ids": [1]}', '{"text": "x"}', "NaN",
    "[" * 100_000,
])  # fmt: skip
def test_a_bad_line_of_a_batch_is_named(tmp_path, line):
    file = tmp_path / "b.jsonl"
    file.write_text(f'"good"\n\n{line}\n')
    with pytest.raises(UsageError, match=r"line 3 of `.*b\.jsonl`"):
        read_batch(str(file))


def test_groups_hold_every_prompt_once_with_similar_lengths():
    lengths = [i * 37 % 101 for i in range(150)]
    found = groups(lengths)
    assert sorted(index for group in found for index in group) == list(range(150))
    assert max(len(group) for group in found) == 8
    assert max(found[0]) < 64
    spread = [max(lengths[i] for i in g) - min(lengths[i] for i in g) for g in found[:8]]
    assert max(spread) < 30
    assert groups([5] * 3, samples=20) == [[0], [1], [2]]
