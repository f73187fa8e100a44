"""Sweeps: each run is what a pass with its edit alone gives."""

import pytest
import torch
from covers import KINDS
from small_models import random_model
from test_edits import TOKENS, editable
from zoo import MODELS

from llmcli.inspect.edits import along
from llmcli.inspect.sweep import Sweep
from llmcli.nn.step import Edit

IDS = TOKENS[0].tolist()


def doubled(name, position):
    def fn(x, at):
        return torch.where(along(at == position, x, x.ndim - 2), 2 * x, x)

    return Edit(name=name, fn=fn)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_passes_with_one_edit(kind):
    model, seen = random_model(MODELS[kind]), {}
    names = [one for one in editable(model) if not one.endswith(("idx", "scores", "pattern"))]
    edits = [doubled(name, 3 + at % 4) for at, name in enumerate(names)]
    plain = model.decoder(TOKENS)
    alone = [model.decoder(TOKENS, edits=[edit]) for edit in edits]
    for since, rows, logits in ((0, 1, "all"), (0, None, "last"), (3, 4, "all"), (3, None, "last")):
        sweep = Sweep(model, IDS, since=since, rows=rows, logits=logits, tap=seen.__setitem__)
        part = slice(since, None) if logits == "all" else slice(-1, None)
        close = {"rtol": 0, "atol": 0 if (since, rows) == (0, 1) else 1e-9}
        torch.testing.assert_close(sweep.plain, plain[:, part], **close)
        assert seen.keys() >= {"blocks.0.resid_pre", "logits"}
        done = []
        for numbers, found in sweep.run(edits):
            done += numbers
            for number, row in zip(numbers, found, strict=True):
                torch.testing.assert_close(row, alone[number][0, part], **close, msg=names[number])
        assert sorted(done) == list(range(len(edits)))
