"""What `env` says about paths, about what is not set, and about threads."""

import sys
from pathlib import Path

import children
import pytest

from llmcli.kernels import native

VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "LLMCLI_CACHE", "XDG_CACHE_HOME", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LLMCLI_KERNELS", "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY", "KMP_BLOCKTIME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def values(cli, *argv):
    document = cli("env", "--json", *argv).json()
    return {setting["name"]: setting["value"] for setting in document["settings"]}, document


def test_paths_are_absolute_in_json_and_short_in_text(cli, monkeypatch, tmp_path):
    found, _ = values(cli)
    assert found["llmcli cache"] == f"{tmp_path}/.cache/llmcli"
    assert found["hub home"] == f"{tmp_path}/.cache/huggingface"
    assert found["hub cache"] == f"{tmp_path}/.cache/huggingface/hub"
    assert found["offline"] is False
    text = cli("env").out
    for words in ("~/.cache/llmcli ", "~/.cache/huggingface/hub ", "PyTorch's choice for"):
        assert words in text
    monkeypatch.setenv("HF_HUB_CACHE", "here")
    assert values(cli)[0]["hub cache"] == str(Path("here").absolute())
    monkeypatch.setenv("LLMCLI_CACHE", "/else/where")
    assert "  /else/where  " in cli("env").out


def test_the_hubs_places_are_those_of_its_library(cli, monkeypatch):
    variables = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")
    ask = f"""{children.EACH}
os.environ[words] = "/else/where"
from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_HOME)
"""
    told = children.run(
        [sys.executable, "-c", ask, *variables], capture_output=True, text=True, check=True
    )
    *places, codes = told.stdout.splitlines()
    assert codes == "exit codes: 0 0 0"
    for variable, place in zip(variables, places, strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "/else/where")
            found, _ = values(cli)
        assert [found["hub cache"], found["hub home"]] == place.split()


@pytest.fixture
def kernels(monkeypatch):
    """Sets $LLMCLI_KERNELS, as if the process had been started with it."""

    def set_to(level):
        monkeypatch.setenv("LLMCLI_KERNELS", level)
        native.level.cache_clear()

    yield set_to
    monkeypatch.undo()
    native.level.cache_clear()


def test_the_level_of_the_kernels_is_named(cli, kernels):
    native.level.cache_clear()
    found, document = values(cli)
    assert found["kernels"] is None
    assert document["environment"]["kernel_level"] == native.status()
    assert f"kernels    {native.status()}\n" in cli("env").out
    kernels("off")
    found, document = values(cli)
    assert found["kernels"] == document["environment"]["kernel_level"] == "off"


@pytest.mark.parametrize("argv", [("env",), ("tokens", "-m", "tiny", "a"), ("info", "-m", "tiny")])
def test_a_level_that_does_not_exist_is_refused_before_anything_is_done(cli, kernels, argv):
    kernels("avx3")
    refused = cli(*argv)
    assert refused.code == 2
    assert refused.out == ""
    assert "`LLMCLI_KERNELS=avx3` is not a level" in refused.err
    levels = f"{', '.join(native.LEVELS[:-1])} or {native.LEVELS[-1]}"
    assert f"hint: set it to off, {levels}, or unset it" in refused.err
