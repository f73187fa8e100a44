"""`llmcli info` as a shell sees it: no torch, documents, notes, exit codes."""

from __future__ import annotations

import json
import sys

import children
import pytest
from cli_tiny import write_tiny
from safetensors.numpy import save_file

from llmcli.families import families
from llmcli.kernels import native


@pytest.mark.parametrize("argv", [["-m", "tiny"], ["-m", "tiny", "--json"], ["--families"]])
def test_torch_is_never_imported(argv):
    code = "import sys; from llmcli.cli.app import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or (99 if 'torch' in sys.modules else 0))"
    done = children.run(
        [sys.executable, "-c", code, "info", *argv], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


def test_the_document_has_everything(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    document = cli(
        "info", "-m", folder, "--json", "--dtype", "float64", "--batch", "2", "--device", "cpu",
        "--context-length", "100",
    ).json()  # fmt: skip
    assert document["schema"] == "llmcli.info/1"
    model, (memory,) = document["model"], document["memory"]
    assert model["parameters"] == document["architecture"]["parameters"]["total"]
    assert model["weight_format"] == memory["dtype"] == "float64"
    assert model["weight_bytes"] == memory["weights_bytes"] == 8 * model["parameters"]
    # 2 sequences × 2 layers × keys and values × 2 heads of 8 × 8 bytes
    assert memory["cache_bytes_per_token"] == 2 * 2 * 2 * 2 * 8 * 8
    assert memory["cache_bytes"] == 2 * memory["cache_copies_bytes"] == 1024 * 100
    parts = ("weights_bytes", "cache_bytes", "runtime_bytes_estimate")
    most = max(memory["cache_copies_bytes"], memory["prompt_bytes_estimate"])
    assert memory["needed_bytes"] == sum(memory[part] for part in parts) + most
    assert memory["fits"] is True
    assert memory["longest_context"] == 128
    (layers,) = document["architecture"]["layers"]
    assert (layers["count"], layers["layers"], layers["kv_heads"]) == (2, [0, 1], 2)
    tokenizer = document["tokenizer"]
    assert tokenizer["bos"] == {"id": 4, "text": "<|begin|>"}
    assert tokenizer["chat_template"]
    assert [check["ok"] for check in document["checks"].values()] == [True, True]
    assert document["ok"] is True
    assert document["file"]["formats"][0]["numbers"] == model["parameters"]
    assert document["unknown"] == []


def test_a_type_that_is_not_supported_is_told_first_and_exits_4(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "bloom"}))
    words = "`bloom` is not supported: it needs `ALiBi`"
    shown = cli("info", "-m", folder)
    assert shown.code == 4
    assert shown.out.splitlines()[0] == words
    assert shown.out.count(words) == 1
    assert "stored" in shown.out
    document = cli("info", "-m", folder, "--json").json()
    assert (document["unknown"], document["ok"]) == ([words], False)


def test_what_follows_from_the_context_length(cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    longer = cli("info", "-m", folder, "--context-length", "1000")
    assert longer.code == 0
    assert "note: the model was trained for 128 tokens" in longer.err
    assert "free, for 1,000 tokens\n" in longer.out
    beyond = cli("info", "-m", "tiny", "--context-length", "513")
    assert beyond.code == 2
    assert "512 positions" in beyond.err
    assert beyond.out == ""


@pytest.mark.parametrize("device", ["cuda:7", "tpu", "cuda:x"])
def test_a_device_that_is_not_there(cli, monkeypatch, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = cli("info", "-m", "tiny", "--device", device)
    assert result.code == 2
    assert f"there is no device `{device}`" in result.err


def test_what_would_fit_of_a_model_that_does_not(cli, tmp_path):
    """On a device that is not here; each as the options themselves say it."""
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
             "max_position_embeddings": 131072}  # fmt: skip
    write_tiny(tmp_path / "m", **large)

    def asked(*more):
        return cli("info", "-m", str(tmp_path / "m"), "--device", "cpu", "--json", *more).json()

    assert asked("--memory", "999GiB")["would_fit"] == []
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


def test_a_file_of_another_model_is_shown_and_fails(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 47}))
    result = cli("info", "-m", folder)
    assert result.code == 1
    assert "✗ check failed: the stored tensors hold" in result.out
    assert "check failed: the stored tensors hold" in result.err
    shown = cli("info", "-m", folder, "--json")
    assert shown.code == 1
    assert shown.json()["checks"]["stored_numbers"]["ok"] is False


def test_the_answer_fits_a_screen_and_all_has_the_rest(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief, full = cli("info", "-m", "tiny").out, cli("info", "-m", "tiny", "--all").out
    assert len(brief.splitlines()) < 24
    assert brief.splitlines()[2].startswith("fits on cpu: ")
    assert brief.endswith("\n\n✓ 2 checks · --checks\n")
    for words in ("FLOPs", "EOS 0", "numbers of 16 bits", "most tensors while it is read"):
        assert words not in brief
        assert words in full
    assert "every parameter has its tensor" in cli("info", "-m", "tiny", "--checks").out


def test_a_lone_file_has_its_facts_and_its_metadata(cli, tmp_path):
    import numpy as np

    file = tmp_path / "alone.safetensors"
    hostile = "\x1b]0;title\x07[bold]x[/bold]\n"
    save_file({"w": np.zeros((2, 3), np.float32)}, file, metadata={"note": hostile})
    result = cli("info", "-m", file, "--metadata")
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "\x07" not in result.out
    assert 'note = "\\x1b]0;title\\x07[bold]x[/bold]\\n"' in result.out
    assert "no config.json" in result.out
    assert "memory" not in result.out
    document = cli("info", "-m", file, "--json").json()
    assert document["architecture"] is None
    assert document["memory"] == []
    assert document["file"]["metadata"] == {"note": hostile}
    assert cli("info", "-m", tmp_path / "none.safetensors").code == 3


def test_metadata_that_is_not_text_and_long_lists_in_json(cli, tmp_path):
    import gguf_bytes as g

    file = tmp_path / "x.gguf"
    pairs = [
        g.pair("general.architecture", g.STRING, "unheard_of"),
        g.pair("odd", g.STRING, b"\xff!"),
        g.pair("general.license", g.STRING, b"\xff!"),
        g.pair("general.languages", g.ARRAY, (g.STRING, [b"\xff", "de"])),
        g.pair("many", g.ARRAY, (g.U32, list(range(50)))),
        g.pair("few", g.ARRAY, (g.F32, [0.5, 1.5])),
    ]
    file.write_bytes(g.gguf(pairs, [g.tensor("w", (32,), 0, 0)], bytes(128)))
    result = cli("info", "-m", file, "--json")
    assert result.code == 4  # of a type that is not supported
    metadata = result.json()["file"]["metadata"]
    about = result.json()["about"]
    assert (about["license"], about["languages"]) == ("\\udcff!", ["\\udcff", "de"])
    assert "license \\udcff!" in cli("info", "-m", file).out
    assert metadata["odd"] == "\\udcff!"
    assert metadata["few"] == [0.5, 1.5]
    assert metadata["many"] == {"length": 50, "first": list(range(16))}


@pytest.mark.parametrize("argv", [["-m", "tiny"], ["--metadata"], ["--all"]])
def test_families_are_of_no_model(cli, argv):
    result = cli("info", "--families", *argv)
    assert (result.code, result.out) == (2, "")
    assert f"goes without `{argv[0]}`" in result.err


def test_families_are_listed(cli):
    document = cli("info", "--families", "--json").json()
    assert [family["name"] for family in document["families"]] == [f.name for f in families()]
    shown = cli("info", "--families").out
    for family in families():
        for name in (*family.hf_types, *family.hf_multimodal, *family.gguf_archs, *family.ran):
            assert name in shown


@pytest.mark.skipif(native.level() is None, reason="there are no kernels here")
@pytest.mark.parametrize("words", [["info"], ["shapes"], ["load"], ["generate", "--ids", "1,2"]])
def test_a_quantization_without_effect_is_noted(cli, tmp_path, words):
    """By every command that says what is in memory: rows of 16 numbers are half a block."""
    narrow = write_tiny(tmp_path / "m", weights=True, hidden_size=16)
    result = cli(*words, "-m", narrow, "--quantize", "int8")
    assert result.code == 0
    assert result.err.count("note: `--quantize int8` has no effect: ") == 1
    assert "no effect" not in cli(*words, "-m", narrow).err
