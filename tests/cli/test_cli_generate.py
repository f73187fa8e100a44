"""`generate` and its relatives on a small model with random weights."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from cli_tiny import write_tiny
from gguf_bytes import F32, I32, pair
from gguf_model import write_model
from rich.cells import cell_len
from safetensors.numpy import load_file, save_file

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.checkpoints import CATALOG
from llmcli.cli.options import OutputOptions
from llmcli.cli.output import Output, Screen
from llmcli.cli.sampling import DEFAULTS, SamplingOptions, resolve
from llmcli.commands.generate.batch import read_batch
from llmcli.commands.generate.measure import groups
from llmcli.commands.generate.writers import TextWriter
from llmcli.engine.output import Token
from llmcli.errors import UsageError
from llmcli.families import find
from llmcli.kernels import native
from llmcli.observe import peaks as marks

LONG = ("--ignore-eos", "-n", "12")
EXACT = ("--dtype", "float32")  # what `auto` is depends on the processor


def texts(result):
    return [output["text"] for output in result.json()["outputs"]]


def test_plain_text_is_what_json_says(run_tiny):
    plain = run_tiny("generate", "hello", *LONG, *EXACT)
    document = run_tiny("generate", "hello", *LONG, *EXACT, "--json").json()
    assert plain.code == 0
    assert plain.out == document["outputs"][0]["text"]
    assert plain.err == ""
    assert document["schema"] == "llmcli.generate/1"
    assert document["prompt"]["text"] == "hello"
    assert document["prompt"]["chat"] is True
    assert document["outputs"][0]["finish_reason"] == "length"
    assert len(document["outputs"][0]["ids"]) == 12
    assert "logprobs" not in document["outputs"][0]
    assert document["sampling"]["seed"] == 1
    assert document["model"]["weight_format"] == document["model"]["activation_format"] == "float32"
    assert document["environment"]["threads"] >= 1
    assert set(document["timings"]) >= {
        "load_s", "first_token_s", "prompt_tokens", "prompt_tokens_per_s",
        "generated_tokens", "generated_tokens_per_s", "peak_memory_bytes",
    }  # fmt: skip
    assert document["timings"]["prompt_tokens"] == len(document["prompt"]["ids"])
    assert document["timings"]["generated_tokens"] == 12
    peaks = document["timings"]["peaks"]
    assert [peak["phase"] for peak in peaks] == ["base", "load", "prefill", "decode"]
    most = document["timings"]["peak_memory_bytes"]
    known = [peak["resident_bytes"] for peak in peaks if peak["resident_bytes"] is not None]
    assert all(2**24 < nbytes <= most for nbytes in known)
    if marks._set_back():  # else a phase that held less than what was before is not known
        assert len(known) == 4
        assert known[0] <= known[1]
    assert all(peak["device_bytes"] is None for peak in peaks)


def test_raw_ids_and_chat_are_different_prompts(run_tiny):
    chat, raw, ids = (
        run_tiny("generate", *argv, "-n", "1", "--json").json()["prompt"]
        for argv in (["hi"], ["hi", "--raw"], ["--ids", "76,77"])
    )
    assert chat["ids"] == [1, 76, 77, 0, 2]
    assert raw["ids"] == ids["ids"] == [76, 77]
    assert ids["text"] == "hi"
    assert not raw["chat"]
    assert not ids["chat"]


def test_the_system_message_is_in_the_prompt(run_tiny):
    prompt = run_tiny("generate", "x", "--system", "s", "-n", "1", "--json").json()["prompt"]
    assert prompt["ids"] == [3, 87, 0, 1, 92, 0, 2]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_seed_gives_the_same_text_alone_in_a_batch_and_as_a_sample(
    dtype, run_tiny, tmp_path
):
    """In 16 bits a batch's products round to other numbers, and the text can go another way."""
    long = (*LONG, "--dtype", dtype)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two and some more"}\n\n{"ids": [76, 77]}\n')
    batch = run_tiny("generate", "--batch", str(file), *long, "--json")
    documents = [json.loads(line) for line in batch.out.splitlines()]
    assert [document["index"] for document in documents] == [0, 1, 2]
    given = [document["prompt"]["text"] for document in documents]
    assert given == ["one", "two and some more", "hi"]
    alone = [
        run_tiny("generate", *argv, *long, "--json")
        for argv in (["one"], ["two and some more"], ["--ids", "76,77"])
    ]
    assert [document["outputs"][0]["ids"] for document in documents] == [
        result.json()["outputs"][0]["ids"] for result in alone
    ]
    assert [document["path"]["sequences"] for document in documents] == [3, 3, 3]
    assert alone[0].json()["path"] == documents[0]["path"] | {"sequences": 1}
    assert documents[0]["path"]["activation_format"] == dtype
    sampled = texts(run_tiny("generate", "one", "--num-samples", "3", *long, "--json"))
    assert sampled[0] == texts(alone[0])[0]
    assert len(set(sampled)) == 3


def test_each_document_of_a_batch_counts_its_own_tokens(run_tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps("x" * length) for length in range(1, 12)))
    options = ("--raw", "--num-samples", "2", "--stop", "e", "--json")
    batch = run_tiny("generate", "--batch", str(file), *LONG, *options)
    documents = [json.loads(line) for line in batch.out.splitlines()]
    assert len(documents) == 11
    for document in documents:
        timings = document["timings"]
        assert timings["prompt_tokens"] == len(document["prompt"]["ids"])
        written = [len(output["ids"]) for output in document["outputs"]]
        assert timings["generated_tokens"] == sum(written)
        assert (timings["generated_tokens_per_s"] is None) == (max(written) == 1)
        assert timings["prompt_tokens_per_s"] == pytest.approx(
            timings["prompt_tokens"] / timings["first_token_s"]
        )
    assert len({document["timings"]["first_token_s"] for document in documents}) == 3  # groups


def test_plain_samples_and_batches_have_a_line_before_each(run_tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n"two"\n')
    found = run_tiny("generate", "--batch", str(file), *LONG, "--json").out.splitlines()
    one, two = (json.loads(line)["outputs"][0]["text"] for line in found)
    expected = f"--- 0 · one\n{one}\n--- 1 · two\n{two}\n"
    assert run_tiny("generate", "--batch", str(file), *LONG).out == expected
    three = texts(run_tiny("generate", "one", "--num-samples", "3", *LONG, "--json"))
    assert run_tiny("generate", "one", "--num-samples", "3", *LONG).out == "".join(
        f"--- {index}\n{text}\n" for index, text in enumerate(three)
    )


def test_the_line_before_a_text_of_a_batch_is_one_short_line(run_tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = ["two\nlines\x1b[1m", "long " * 20, "漢字" * 18]
    file.write_text("\n".join(map(json.dumps, prompts)))
    options = ("--raw", "-n", "1", "--num-samples", "2")
    out = run_tiny("generate", "--batch", str(file), *options).out
    heads = [line for line in out.split("\n") if line.startswith("--- ")]
    assert len(heads) == 6
    assert heads[0] == "--- 0.0 · two\\nlines\\x1b[1m"
    assert heads[3].startswith("--- 1.1 · long long")
    assert all(head.endswith("…") and 60 < cell_len(head) <= 72 for head in heads[2:])


def test_many_prompts_come_back_in_order(run_tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [f"{'x' * (37 * i % 23)}{i}" for i in range(20)]
    file.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    result = run_tiny("generate", "--batch", str(file), "-n", "2", "--raw", "--json")
    documents = [json.loads(line) for line in result.out.splitlines()]
    assert [document["prompt"]["text"] for document in documents] == prompts
    assert [document["index"] for document in documents] == list(range(20))
    assert {document["schema"] for document in documents} == {"llmcli.generate/1"}
    headed = [{"model", "environment"} & set(document) for document in documents]
    assert headed == [{"model", "environment"}, *[set()] * 19]  # once per stream


def test_stream_json_has_a_line_for_each_token(run_tiny):
    lines = run_tiny("generate", "hello", *LONG, "--stream-json").out.splitlines()
    tokens = [json.loads(line) for line in lines]
    document = run_tiny("generate", "hello", *LONG, "--logprobs", "2", "--json").json()
    assert [token["index"] for token in tokens] == list(range(12))
    assert [token["id"] for token in tokens] == document["outputs"][0]["ids"]
    assert "".join(token["text"] for token in tokens) == document["outputs"][0]["text"]
    logprobs = document["outputs"][0]["logprobs"]
    assert [token["logprob"] for token in tokens] == pytest.approx(
        [token["logprob"] for token in logprobs]
    )
    assert set(tokens[1]) == {"sequence", "index", "id", "text", "logprob", "ms"}
    assert set(tokens[0]) == {*tokens[1], "model", "environment"}
    assert tokens[0]["model"] == document["model"]
    assert tokens[-1]["finish_reason"] == "length"
    times = [token["ms"] for token in tokens]
    assert times == sorted(times)
    for token in logprobs:
        assert len(token["top"]) == 2
        assert token["top"][0]["logprob"] >= token["top"][1]["logprob"]
        assert token["top"][0]["logprob"] >= token["logprob"] - 1e-6
    lines = run_tiny("generate", "hello", *LONG, "--logprobs", "2", "--stream-json").out
    tops = [json.loads(line)["top"] for line in lines.splitlines()]
    assert tops == [token["top"] for token in logprobs]


def test_stop_texts_end_the_text_and_are_not_in_it(run_tiny):
    whole = texts(run_tiny("generate", "hello", "-n", "40", "--ignore-eos", "--json"))[0]
    stop = next(whole[i : i + 2] for i in range(4, 40) if whole.find(whole[i : i + 2]) == i)
    result = run_tiny("generate", "hello", "-n", "40", "--ignore-eos", "--stop", stop, "--json")
    output = result.json()["outputs"][0]
    assert output["finish_reason"] == "stop"
    assert output["text"] == whole[: whole.index(stop)]


def test_a_prompt_too_long_says_by_how_much(run_tiny):
    result = run_tiny("generate", "x" * 131, "--raw", "--json")
    error = result.json()["error"]
    assert result.code == error["code"] == 2
    assert error["kind"] == "prompt_too_long"
    assert "131 tokens, 3 more than the context of 128" in error["message"]
    result = run_tiny("generate", "x" * 128)
    assert "131 tokens with the chat template, 3 more" in result.err


def test_a_full_context_is_told_and_ends_the_text(run_tiny):
    result = run_tiny("generate", "x" * 120, "--raw", "--ignore-eos", "--json")
    assert "leaves room for 9 of the 256 new tokens in a context of 128" in result.err
    output = result.json()["outputs"][0]
    assert len(output["ids"]) == 9
    assert output["finish_reason"] == "length"


@pytest.mark.parametrize("draft", [(), ("--draft", "ngram")])
def test_without_a_limit_the_text_ends_with_the_context(run_tiny, draft):
    argv = ("generate", "x", "--raw", "--ignore-eos", "-c", "600", *EXACT, *draft)
    result = run_tiny(*argv, "-n", "-1", "--json")
    document = result.json()
    assert "leaves room for" not in result.err
    assert document["outputs"][0]["finish_reason"] == "length"
    assert len(document["outputs"][0]["ids"]) == 600  # one token read, 599 more and the last one
    assert document["sampling"]["max_tokens"] == -1
    limited = run_tiny(*argv, "--max-tokens", "600", "--json").json()
    assert limited["outputs"] == document["outputs"]
    short = run_tiny(*argv, "-n", "-1", "--stats", "short").err.splitlines()
    assert "generated 600 (context full), " in short[-1]


def test_without_a_limit_the_model_ends_its_text(run_tiny):
    argv = ("generate", "hello", "-c", "600", "--num-samples", "4", "--json")
    outputs = run_tiny(*argv, "-n", "-1").json()["outputs"]
    assert [output["finish_reason"] for output in outputs] == ["eos"] * 4
    assert outputs == run_tiny(*argv, "-n", "600").json()["outputs"]


def test_a_context_beyond_the_trained_one_is_told(run_tiny):
    result = run_tiny("generate", "x" * 130, "--raw", "-n", "2", "--context-length", "200")
    assert result.code == 0
    assert "was trained for 128 tokens" in result.err
    assert run_tiny("generate", "x", "-n", "1", "--context-length", "200", "-q").err == ""


def test_ids_outside_the_vocabulary(run_tiny):
    result = run_tiny("generate", "--ids", "5,261")
    assert result.code == 2
    assert "token id `261` is outside the vocabulary of 261 tokens" in result.err


def test_a_seed_that_was_drawn_is_reported_and_gives_the_same_again(cli, tmp_path):
    folder = str(write_tiny(tmp_path / "m", weights=True))
    first = cli("generate", "x", "-m", folder, *LONG)
    seed = first.err.split("`--seed ")[1].split("`")[0]
    again = cli("generate", "x", "-m", folder, *LONG, "--seed", seed)
    assert (again.out, again.err) == (first.out, "")
    document = cli("generate", "x", "-m", folder, *LONG, "--json")
    assert document.err == ""
    seed = str(document.json()["sampling"]["seed"])
    assert texts(document)[0] == cli("generate", "x", "-m", folder, *LONG, "--seed", seed).out


def test_random_weights_without_a_seed_are_those_of_seed_0(cli, tiny):
    base = ("generate", "x", "-m", tiny, "--random-weights", *LONG, "--json")
    first, second = cli(*base).json(), cli(*base, "--seed", "0").json()
    assert first["outputs"] == second["outputs"]
    assert first["sampling"]["seed"] == first["model"]["random_weights_seed"] == 0


def test_greedy_runs_report_no_seed(cli, tiny):
    assert cli("generate", "x", "-m", tiny, "--random-weights", "--greedy", *LONG).err == ""


def test_statistics(run_tiny):
    short = run_tiny("generate", "hello", *LONG, *EXACT, "--stats", "short").err
    assert re.fullmatch(
        r"prompt 8 tokens, [\d.]+ m?s · generated 12 \(-n 12\), [\d.]+ tok/s · "
        r"[\d.]+ [MG]iB · seed 1\n", short,
    )  # fmt: skip
    full = run_tiny("generate", "hello", *LONG, *EXACT, "--stats", "full", "-k", "3").err
    words = " ".join(full.split())
    assert "top k 3 (flag)" in words
    assert "temperature 0.8 (default)" in words
    assert "float32 on cpu" in words
    assert "path torch linear · torch scaled_dot_product_attention · one text at a time" in words
    narrow = run_tiny("generate", "hello", *LONG, "--dtype", "bfloat16", "--json").json()
    level = narrow["environment"]["kernel_level"]
    own = [f"llmcli {level}"] if level in native.LEVELS else []
    assert narrow["path"]["kernels"][:-2] == own
    samples = run_tiny("generate", "hello", *LONG, "--num-samples", "3", "--stats", "full").err
    assert " · 3 texts side by side" in samples


def test_colours_of_confidence_only_where_colour_is(run_tiny, monkeypatch):
    result = run_tiny("generate", "hello", *LONG, "--logprobs", "0")
    assert result.err.startswith("note: `--logprobs` shows colours, which are off here: --json")
    plain = result.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run_tiny("generate", "hello", *LONG, "--logprobs", "0").out
    assert "\x1b[31m" in coloured
    assert "\x1b[" not in run_tiny("generate", "hello", *LONG).out
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as scope:
            scope.setenv(name, value)
            assert run_tiny("generate", "hello", *LONG, "--logprobs", "0").out == plain


def test_near_ties_of_a_greedy_run_are_told(cli, tmp_path, monkeypatch):
    """Half of the tokens have a twin with the same row of the head, and so the same logit."""
    file = write_tiny(tmp_path / "m", weights=True) / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    table[1:130:2] = table[0:130:2]
    save_file(tensors, file)

    def run(*argv):
        return cli(*argv, "-m", str(file.parent), *EXACT)

    base = ("generate", "hello", "--greedy", "--ignore-eos", "-n", "60")
    output = run(*base, "--json", "--logprobs", "2").json()["outputs"][0]
    tied = [token for token in output["logprobs"] if token["tied"]]
    assert 0 < len(tied) < 60
    assert output["tied_tokens"] == len(tied)
    for token in output["logprobs"]:
        best, second = token["top"]
        assert token["margin"] == pytest.approx(best["logprob"] - second["logprob"], abs=1e-9)
    assert all((token["margin"] == 0) == token["tied"] for token in output["logprobs"])
    assert run(*base, "--json").json()["outputs"][0]["tied_tokens"] == len(tied)
    lines = run(*base, "--stream-json").out.splitlines()
    streamed = [json.loads(line) for line in lines]
    assert [(one["margin"], one["tied"]) for one in streamed] == [
        (one["margin"], one["tied"]) for one in output["logprobs"]
    ]
    first = next(index for index, one in enumerate(streamed) if one["tied"])
    words = " ".join(run(*base, "--stats", "full").err.split())
    assert f"near ties {len(tied)} of 60 tokens (margin below rounding): " in words
    assert f" at {first}" in words
    several = " ".join(run(*base, "--num-samples", "2", "--stats", "full").err.split())
    assert f" at {first} of text 0, " in several
    assert " of text 1" in several or "…" in several
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(*base, "--logprobs", "0").out.count("\x1b[4;") > 0
    sampled = run(*base[:2], "-n", "3", "--json", "--logprobs", "1", "--stats", "full")
    assert "tied_tokens" not in sampled.json()["outputs"][0]
    assert {token["tied"] for token in sampled.json()["outputs"][0]["logprobs"]} == {None}
    assert "near ties" not in sampled.err


def test_generation_config_gives_defaults_and_flags_win(cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 7, "top_p": "high", "do_sample": True})
    )
    result = cli("generate", "x", "-m", str(folder), "--random-weights", "--seed", "1", "-n", "2",
                 "--top-k", "9", "--json")  # fmt: skip
    sampling = result.json()["sampling"]
    assert (sampling["temperature"], sampling["origins"]["temperature"]) == (
        0.6,
        "generation_config.json",
    )
    assert (sampling["top_k"], sampling["origins"]["top_k"]) == (9, "flag")
    assert (sampling["top_p"], sampling["origins"]["top_p"]) == (0.95, "default")
    assert "`top_p` 'high', which must be greater than 0 and at most 1: 0.95 is used" in result.err


def test_what_is_not_followed_of_the_configuration_is_named_once(cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    configured = {
        "num_beams": 4, "suppress_tokens": "3", "no_repeat_ngram_size": 2, "typical_p": 0.9,
        "min_length": 0, "bad_words_ids": [], "watermarking_config": None, "guidance_scale": 1.0,
        "forced_bos_token_id": 0, "max_length": 20, "encoder_repetition_penalty": 1.0,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(configured))
    base = ("-m", str(folder), "--random-weights", "--seed", "1", "-n", "2")
    drawn = cli("generate", "x", *base, "--json")
    ignored = ["num_beams", "no_repeat_ngram_size", "forced_bos_token_id", "suppress_tokens"]
    assert drawn.json()["sampling"]["ignored"] == [*ignored, "typical_p"]
    named = ", ".join(f"`{name}`" for name in [*ignored, "typical_p"])
    assert drawn.err.count(f"generation_config.json sets {named}, which llmcli does not") == 1
    greedy = cli("generate", "x", *base, "--json", "--greedy").json()
    assert greedy["sampling"]["ignored"] == ignored
    assert "generation_config.json" not in cli("generate", "x", *base, "-q").err
    neutral = {"num_beams": 1, "typical_p": 1.0, "min_new_tokens": None, "epsilon_cutoff": 0.0}
    assert not resolve(SamplingOptions(), neutral).notes


def test_tokens_limit_and_stop_strings_of_the_configuration_are_followed(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)

    def run(configured, *argv):
        (folder / "generation_config.json").write_text(json.dumps(configured))
        result = cli("generate", "hello", "-m", str(folder), "--greedy", "--ignore-eos", *EXACT,
                     "--json", *argv)  # fmt: skip
        assert "generation_config" not in result.err
        return result.json()

    free = run({}, "-n", "8")["outputs"][0]
    first, second = free["ids"][:2]
    assert first != second
    for names, gone in (
        ({"suppress_tokens": [first, 10**9, -1]}, (first,)),
        ({"begin_suppress_tokens": [first]}, ()),
        ({"suppress_tokens": [first], "begin_suppress_tokens": [second]}, (first,)),
    ):
        ids = run(names, "-n", "8")["outputs"][0]["ids"]
        assert ids[0] not in (first, *names.get("begin_suppress_tokens", ()))
        assert not set(gone) & set(ids)
    limited = run({"max_new_tokens": 3, "max_length": 2})
    assert limited["outputs"][0]["ids"] == free["ids"][:3]
    assert limited["sampling"]["max_tokens"] == 3
    assert len(run({"max_new_tokens": 3}, "-n", "5")["outputs"][0]["ids"]) == 5
    text = free["text"]
    stop = text[3:5]
    stopped = run({"stop_strings": [stop]}, "-n", "8")
    assert stopped["sampling"]["stop"] == [stop]
    assert stopped["outputs"][0]["text"] == text[: text.index(stop)]
    other = run({"stop_strings": stop}, "-n", "8", "--stop", "never")
    assert other["outputs"][0]["text"] == text
    answer = cli("chat", "-m", str(folder), "--prompt", "hello", "--greedy", *EXACT, "--json")
    assert answer.json()["messages"][1]["content"] == text[: text.index(stop)]
    (folder / "generation_config.json").write_text('{"max_length": 20}')
    assert "sets `max_length`" in cli("generate", "x", "-m", str(folder), "--random-weights").err


@pytest.mark.parametrize(
    ("given", "values", "ignored"),
    [
        ({"temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
         []),
        ({"temp": -1.0, "top_k": -1, "top_p": 2.0, "min_p": -0.5, "xtc_probability": 0.0},
         {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}, []),
        ({"penalty_repeat": 1.5, "penalty_last_n": 0}, {"repetition_penalty": 1}, []),
        ({"penalty_repeat": 1.5, "penalty_last_n": 32, "mirostat": 2, "xtc_probability": 0.5},
         {"repetition_penalty": 1.5}, ["xtc_probability", "penalty_last_n", "mirostat"]),
    ],
)  # fmt: skip
def test_a_gguf_file_gives_defaults_and_flags_win(cli, tmp_path, given, values, ignored):
    kinds = {float: F32, int: I32}
    pairs = [pair(f"general.sampling.{key}", kinds[type(one)], one) for key, one in given.items()]
    path = tmp_path / "m.gguf"
    write_model(path, more=pairs)
    base = ("generate", "hello", "-m", str(path), "-n", "1", "--seed", "1", "--json")
    result = cli(*base)
    found = result.json()["sampling"]
    for name, value in values.items():
        assert (found[name], found["origins"][name]) == (value, "general.sampling")
    assert {found["origins"][name] for name in set(DEFAULTS) - set(values)} == {"default"}
    assert found["ignored"] == ignored
    assert result.err.count("which llmcli does not follow") == bool(ignored)
    flagged = cli(*base, "-t", "0.5").json()["sampling"]
    assert (flagged["temperature"], flagged["origins"]["temperature"]) == (0.5, "flag")


def test_the_catalog_gives_defaults_where_the_model_has_none_of_its_own():
    tuned = CATALOG["smollm2"].sampling
    assert tuned == {"temperature": 0.2, "top_p": 0.9}
    alone = resolve(SamplingOptions(), None, tuned)
    assert (alone.values["temperature"], alone.values["top_p"]) == (0.2, 0.9)
    assert (alone.origins["temperature"], alone.origins["top_k"]) == ("catalog", "default")
    both = resolve(SamplingOptions(top_p=1.0), {"temperature": 0.6, "top_p": 0.5}, tuned)
    assert (both.values["temperature"], both.origins["temperature"]) == (
        0.6,
        "generation_config.json",
    )
    assert (both.values["top_p"], both.origins["top_p"]) == (1.0, "flag")
    wrong = resolve(SamplingOptions(), {"temperature": "hot"}, tuned)
    assert wrong.origins["temperature"] == "catalog"
    assert "0.2 is used" in wrong.notes[0]


def test_the_catalogs_sampling_is_that_of_its_name(cli, monkeypatch):
    """`tiny` by its name, and the same files by their path; both have a `top_k` of their own."""
    entry = CATALOG["tiny"]
    monkeypatch.setitem(CATALOG, "tiny", replace(entry, sampling={"top_k": 7, "min_p": 0.5}))
    for name, origins in (("tiny", ("generation_config.json", "catalog")),
                          (str(entry.file), ("generation_config.json", "default"))):  # fmt: skip
        result = cli("generate", "x", "-m", name, "--seed", "1", "-n", "1", "--json")
        found = result.json()["sampling"]["origins"]
        assert (found["top_k"], found["min_p"]) == origins


@pytest.fixture
def on_a_terminal(cli, monkeypatch, tmp_path):
    """Runs `generate` on a terminal; `tiny` is the default model, and no other is here."""
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "cache"))
    # by its module: the package has a function of that name
    monkeypatch.setattr(sys.modules["llmcli.checkpoints.locate"], "DEFAULT_MODEL", "tiny")
    monkeypatch.setattr("llmcli.observe.memory.nvidia_gpus", lambda environ: ())
    monkeypatch.setattr("llmcli.observe.memory.free_memory", lambda: 6 << 30)
    monkeypatch.setattr("llmcli.observe.memory.sys.platform", "linux")
    for name in ("LLMCLI_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv, terminals=("out", "err"), dtype="float32"):
        def of(stream, environ):
            there = ("out" if stream is sys.stdout else "err") in terminals
            return Screen(terminal=there, animate=False, colour=False, width=200)

        with monkeypatch.context() as patch:
            patch.setattr(Screen, "of", of)
            return cli("generate", "x", "--seed", "1", "-n", "1", "--dtype", dtype, *argv)

    return run


BETTER = (
    "`tiny` is small and often wrong: try `-m llama3.2-1b` (770 MiB, Llama 3.2 Community); "
    "`llmcli models` lists more"
)


def test_the_first_answer_of_the_default_model_names_the_best_that_fits(on_a_terminal, tmp_path):
    for quiet in (("-q",), ("--json",), ("--offline",), ("-m", "tiny"), ("--stream-json",)):
        assert "often wrong" not in on_a_terminal(*quiet).err
    for terminals in (("err",), ("out",), ()):
        assert "often wrong" not in on_a_terminal(terminals=terminals).err
    assert not list(tmp_path.glob("cache/*"))
    first, second = on_a_terminal(), on_a_terminal()
    assert (first.code, second.code) == (0, 0)
    assert first.err.splitlines()[-1] == BETTER
    assert "often wrong" not in second.err


def test_no_better_model_is_named_where_the_disk_is_full(on_a_terminal, monkeypatch):
    """That it has been said could not be kept, and it would be said each time."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    result = on_a_terminal()
    assert result.code == 0
    assert "often wrong" not in result.err


@pytest.mark.parametrize("name", ["LLMCLI_MODEL", "LLMCLI_OFFLINE"])
def test_no_better_model_is_named_where_the_environment_decides(on_a_terminal, monkeypatch, name):
    monkeypatch.setenv(name, "tiny" if name == "LLMCLI_MODEL" else "1")
    assert "often wrong" not in on_a_terminal().err


def test_a_cache_that_cannot_be_written_is_no_matter(on_a_terminal, tmp_path):
    (tmp_path / "cache").write_text("not a directory")
    result = on_a_terminal()
    assert (result.code, "often wrong" in result.err) == (0, False)


@pytest.mark.parametrize(
    ("level", "free", "named"),
    [
        (None, 4, "smollm2-360m"), (None, 10, "smollm2-1.7b"), (None, 24, "qwen3-4b"),
        (None, 1, ""), ("avx2", 4, "qwen3-4b"), ("avx2", 2, "smollm2-1.7b"),
        ("avx2", 1, "smollm2-360m"), ("avx2", 0.25, ""),
    ],
)  # fmt: skip
def test_what_is_named_fits_the_memory_that_is_free(
    on_a_terminal, monkeypatch, level, free, named
):
    monkeypatch.setattr("llmcli.observe.memory.free_memory", lambda: int(free * 2**30))
    monkeypatch.setattr(native, "level", lambda: level)
    dtype = "float32" if level is None else "auto"
    said = re.search(r"`-m (\S+)`", on_a_terminal(dtype=dtype).err)
    assert (said[1] if said else "") == named
    if named:  # as `info` judges the whole of it
        entry = CATALOG[named]
        config = find(entry.config["model_type"], "safetensors").from_hf(entry.config)
        weights = Arithmetic.of("float32").weight_bytes(config) if level is None else entry.size
        assert weights < free * 2**30


def test_a_terminal_is_told_of_the_chat_template(run_tiny, monkeypatch):
    def err(*argv, terminals=("out", "err")):
        def of(stream, environ):
            there = ("out" if stream is sys.stdout else "err") in terminals
            return Screen(terminal=there, animate=False, colour=False, width=200)

        with monkeypatch.context() as patch:
            patch.setattr(Screen, "of", of)
            return run_tiny("generate", "x", "-n", "1", "--seed", "1", *argv).err

    line = "chat template applied · `--raw` continues the text as it stands\n"
    assert err().startswith(line)
    assert line in err("--stats", "full")
    for argv in (("--raw",), ("-q",), ("--json",), ("--stream-json",), ("--stats", "off")):
        assert "chat template" not in err(*argv)
    for terminals in (("out",), ("err",), ()):
        assert "chat template" not in err("--stats", "short", terminals=terminals)


def test_a_line_on_a_terminal_ends_between_words(cli, monkeypatch):
    text = "The formula of water is H2O: two atoms of hydrogen, one of oxygen.\n\n"
    code = "```\nfor every_line in the_code: stay(as_it_is)\n```\n"
    screen = Screen(terminal=True, animate=False, colour=False, width=20)
    monkeypatch.setattr(Screen, "of", lambda stream, environ: screen)

    def written(*whole, labels=None):
        out = Output("generate", OutputOptions())
        writer = TextWriter(out, labels=labels, colour=False, ids_only=False)
        with redirect_stdout(io.StringIO()) as stream:
            for number, one in enumerate(whole):
                cut = [one[i : i + 3] for i in range(0, len(one), 3)]
                for index, piece in enumerate(cut):
                    finish = "length" if index == len(cut) - 1 else None
                    token = Token(
                        sequence=number, index=index, id=0, text=piece, logprob=None, top=(),
                        finish=finish, margin=None, tied=None,
                    )  # fmt: skip
                    writer.token(number, token, 0.0)
            writer.close()
        return stream.getvalue()

    wrapped = "The formula of water\nis H2O: two atoms of\nhydrogen, one of\noxygen.\n\n"
    assert written(text + code + "end") == wrapped + code + "end\n"
    assert written(text[:9], "b", labels=("0", "1")) == "--- 0\nThe formu\n--- 1\nb\n"


def test_do_sample_false_is_greedy_unless_a_flag_says_otherwise():
    configured = {"do_sample": False, "temperature": 0.7}
    assert resolve(SamplingOptions(), configured).greedy
    assert resolve(SamplingOptions(temperature=0.5), configured).values["temperature"] == 0.5
    idle = resolve(SamplingOptions(top_k=5), configured)
    assert idle.greedy
    assert "`--top-k` changes nothing" in idle.notes[0]


def test_defaults_are_the_engines():
    from llmcli.engine.sampling import Sampling

    assert all(getattr(Sampling(), name) == value for name, value in DEFAULTS.items())
    assert resolve(SamplingOptions(), None).sampling(5) == Sampling(seed=5)


@pytest.mark.parametrize(
    "line",
    ["{", "3", "null", "[]", '""', "{}", '{"prompt": 3}', '{"ids": []}', '{"ids": [1.5]}',
     '{"ids": [true]}', '{"ids": [-1]}', '{"prompt": "x", "ids": [1]}', '{"text": "x"}', "NaN",
     "[" * 100_000],
)  # fmt: skip
def test_a_bad_line_of_a_batch_is_named(tmp_path, line):
    file = tmp_path / "b.jsonl"
    file.write_text(f'"good"\n\n{line}\n')
    with pytest.raises(UsageError, match=r"line 3(, column \d+)? of `.*b\.jsonl`"):
        read_batch(str(file))


def test_a_bad_line_says_what_is_wrong_and_where(run_tiny, tmp_path):
    file = tmp_path / "b.jsonl"
    for line, message in (
        ('{"prompt": "x"', f"line 2, column 15 of `{file}` is not JSON: expecting ',' delimiter"),
        ('{"prompt": "x", "n": 1}', f"line 2 of `{file}` has the unknown key `n`"),
        ('{"ids": [5, 261]}', f"line 2 of `{file}`: token id `261` is outside the vocabulary"),
    ):
        file.write_text(f'"good"\n{line}\n')
        result = run_tiny("generate", "--batch", str(file))
        assert result.code == 2
        assert message in result.err


def test_groups_hold_every_prompt_once_with_similar_lengths():
    lengths = [i * 37 % 101 for i in range(150)]
    found = groups(lengths)
    assert sorted(index for group in found for index in group) == list(range(150))
    assert max(len(group) for group in found) == 8
    assert max(found[0]) < 64
    spread = [max(lengths[i] for i in g) - min(lengths[i] for i in g) for g in found[:8]]
    assert max(spread) < 30
    assert groups([5] * 3, samples=20) == [[0], [1], [2]]


def test_a_checkpoint_without_a_tokenizer_runs_on_ids(cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    base = ("-m", str(folder), "--random-weights", "--seed", "1", "-n", "3", "--ignore-eos")
    ids = cli("generate", "--ids", "7,8", *base, "--json").json()["outputs"][0]["ids"]
    assert cli("generate", "--ids", "7,8", *base).out.split() == [str(id) for id in ids]
    result = cli("generate", "text", *base)
    assert result.code == 4
    assert "has no tokenizer" in result.err
    assert "--ids" in result.err
    (folder / "tokenizer.model").write_bytes(b"a kind that is not read")
    assert cli("generate", "--ids", "7,8", *base, "--json").json()["outputs"][0]["ids"] == ids
    assert cli("score", "--ids", "7,8", *base[:5], "--json").json()["tokens_scored"] == 1
    assert cli("generate", "text", *base).code == 4


def test_a_model_without_template_continues_and_refuses_chat(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", template=False)
    base = ("-m", str(folder), "--random-weights", "--seed", "1", "-n", "1")
    assert cli("generate", "hi", *base, "--json").json()["prompt"]["chat"] is False
    assert cli("generate", "hi", *base, "--chat").code == 2
