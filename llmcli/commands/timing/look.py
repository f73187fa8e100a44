"""`/look timing`: where the time of reading the conversation goes."""

from __future__ import annotations

from llmcli.anatomy.work import step_bytes
from llmcli.shell.inspection import InChat, Shown
from llmcli.shell.progress import Progress

WRITTEN, PAIRS = 8, 3  # tokens that are generated, and pairs of runs


def look(chat: InChat, _given: dict[str, str]) -> Shown:
    """The conversation's last tokens as a prompt, and a few after it."""
    import torch

    from llmcli.commands.timing.measure.run import measure_timing
    from llmcli.commands.timing.view import render_timing
    from llmcli.measure.ceilings import measure_ceilings

    model, tokens = chat.model, min(len(chat.ids), chat.room - WRITTEN)
    with Progress(chat.out) as progress:
        ceilings = measure_ceilings(
            model.device, model.arithmetic, threads=torch.get_num_threads(), progress=progress,
            working_set=step_bytes(model.config, tokens + WRITTEN, numbers=model.arithmetic),
        )  # fmt: skip
        report = measure_timing(
            model, chat.ids[-tokens:], WRITTEN, pairs=PAIRS, ceilings=ceilings, progress=progress,
        )  # fmt: skip
    if report.interrupted:
        raise KeyboardInterrupt
    return render_timing(report), report.checks
