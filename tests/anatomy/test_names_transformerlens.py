"""TransformerLens' names mean here what its hooks hold, which was compared number by number."""

import dataclasses
import json
from pathlib import Path

import pytest
from zoo import three_layers as model

from llmcli.anatomy.names import Names
from llmcli.errors import UsageError

HOOKS = json.loads(
    Path(__file__).parents[1].joinpath("data/transformerlens_names.json").read_text()
)["hooks"]
# what holds something of ours and is not accepted: it is there in some models of the kind only
LEFT_OUT = ("attn.hook_hidden_states", "attn.q_norm.hook_in", "attn.k_norm.hook_in", "emb.hook_in")


@pytest.mark.parametrize("case", list(HOOKS))
def test_a_hooks_name_means_what_the_hook_holds(case):
    config = model(case.partition("-")[0])
    names = Names(dataclasses.replace(config, layers=config.layers[:2]))
    meant = 0
    for hook, held in HOOKS[case].items():
        if hook.endswith("hook_normalized") and "_norm.hook" not in hook:
            with pytest.raises(UsageError, match="in one version"):
                names.canonical(hook)
            assert held == ""
            continue
        ours = names.canonical(hook)
        if ours is None:
            assert held == "" or hook.endswith(LEFT_OUT), hook
        else:
            assert ours in held.split(), hook
            meant += 1
    assert meant > 45


@pytest.mark.parametrize("case", list(HOOKS))
def test_a_name_that_is_listed_for_a_hook_is_one_that_there_is(case):
    config = model(case.partition("-")[0])
    names = Names(dataclasses.replace(config, layers=config.layers[:2]))
    listed = {alias for ours in names.known for alias in names.aliases(ours) if "hook_" in alias}
    here = {alias for alias in listed if not alias.startswith("blocks.0.")}
    assert here - set(HOOKS[case]) == set()
