"""`llmcli info` as a shell sees it, and a GGUF model in several files."""

import pytest
from cli_tiny import write_tiny
from gguf_model import write_model
from needs import needs_kernels


@needs_kernels
def test_what_would_fit_of_a_model_that_does_not(cli, tmp_path):
    """On a device that is not here; each as the options themselves say it."""
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
             "max_position_embeddings": 131072}  # fmt: skip
    write_tiny(tmp_path / "m", **large)

    def asked(*more):
        return cli("info", "-m", str(tmp_path / "m"), "--device", "cpu", "--json", *more).json()

    assert asked("--memory", "999GiB")["would_fit"] == []
    (memory,) = asked("--memory", "999GiB", "--batch", "2")["memory"]
    parts = ("weights_bytes", "cache_bytes", "runtime_bytes_estimate")
    most = max(memory["cache_copies_bytes"], memory["prompt_bytes_estimate"])
    assert memory["needed_bytes"] == sum(memory[part] for part in parts) + most
    document = asked("--memory", "12 GB")
    (device,) = document["memory"]
    assert (device["fits"], device["free_bytes"]) == (False, 12 << 30)
    offers = document["would_fit"]
    assert [offer["options"].split(" -c ")[0] for offer in offers] == [
        "--quantize int8", "--quantize int4",
    ][-len(offers):]  # fmt: skip
    assert offers
    for offer in offers:
        again = asked("--memory", "12G", *offer["options"].split())
        (device,) = again["memory"]
        assert (device["fits"], again["would_fit"]) == (True, [])
        assert (device["context"], device["needed_bytes"]) == (
            offer["context"], offer["needed_bytes"],
        )  # fmt: skip
    shown = cli("info", "-m", str(tmp_path / "m"), "--memory", "12GiB", "--device", "cpu").out
    assert "would fit: --quantize int" in shown
    card = cli("info", "-m", str(tmp_path / "m"), "--memory", "1MiB", "--json").json()
    assert [one["device"] for one in card["memory"]] == ["cuda"]
    assert card["would_fit"] == []
    assert cli("info", "-m", "tiny", "--memory", "80").code == 0  # GiB
    for wrong in ("0GiB", "x", "-1GiB", "9" * 30):
        done = cli("info", "-m", "tiny", "--memory", wrong)
        assert (done.code, done.out) == (2, "")


# a model in GGUF, whatever the command


@pytest.fixture
def models(tmp_path):
    """(the model in one file, the same in three parts)."""
    return write_model(tmp_path / "whole.gguf")[0], write_model(tmp_path / "m.gguf", parts=3)


def test_any_part_is_the_whole_model(cli, models):
    whole, parts = models

    def said(*argv, of):
        found = cli(*argv, "-m", of)
        assert found.code == 0, found.err
        return found

    argv = ["generate", "hello", "--temperature", "0", "-n", "8", "--dtype", "float32"]
    text = said(*argv, of=whole).out
    assert text
    assert [said(*argv, of=part).out for part in (parts[0], parts[2])] == [text, text]
    one, other = (said("info", "--json", of=path).json() for path in (whole, parts[1]))
    for key in ("tensors", "formats"):
        assert other["file"][key] == one["file"][key]
    assert other["file"]["bytes"] == sum(part.stat().st_size for part in parts)
    assert other["file"]["files"] == 3
    assert other["checks"] == one["checks"]
    shapes = [said("shapes", "--params", of=path).out for path in (whole, parts[1])]
    one, other = (text.partition("\n")[2] for text in shapes)
    assert other.replace(str(parts[0]), "") == one.replace(str(whole), "")
    parts[1].unlink()
    for command in ("info", "shapes"):
        found = cli(command, "-m", parts[0])
        assert (found.code, found.out) == (4, "")
        assert "`m-00002-of-00003.gguf`" in found.err
        assert "Traceback" not in found.err
