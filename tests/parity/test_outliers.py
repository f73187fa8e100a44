"""`load --check` finds no outlier in any checkpoint of the zoo, nor in a real one."""

import pytest
from covers import crossed
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import TYPES, ZOO, variant

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.locate import open_model
from llmcli.commands.load.measure.run import check_files
from llmcli.commands.load.report import OUTLIERS
from llmcli.records.work import Stages


def outliers(checkpoint):
    report = check_files(checkpoint, Stages())
    return next(check for check in report.checks if check.name == OUTLIERS).where


@pytest.mark.parametrize("name", crossed(one.name for one in ZOO))
def test_none_in_the_zoo(checkpoints, name):
    assert outliers(open_checkpoint(checkpoints(name))) == ""


@pytest.mark.parametrize("kind", TYPES)
def test_none_in_what_transformers_begins_with(tmp_path, kind):
    """Decays, biases and norms as they are before training."""
    one = next(one for one in ZOO if one.model_type == kind)
    config = AutoConfig.for_model(**variant(one.name).settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert outliers(open_checkpoint(tmp_path)) == ""


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_none_in_a_real_model(name):
    assert outliers(open_model(name)) == ""
