"""What is asked of CUDA for a capture, and in which order; a card itself is in `test_gpu`."""

from contextlib import contextmanager

import pytest
import torch

from llmcli.decoder.steps import GraphRecorder


@pytest.fixture
def asked(monkeypatch):
    """Calls to a CUDA that does nothing."""
    log = []

    class Stream:
        def wait_stream(self, other):
            log.append("wait")

    class Graph:
        def capture_begin(self, *, pool, capture_error_mode):
            log.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            log.append("end")

    @contextmanager
    def within(what):
        log.append("in" if isinstance(what, Stream) else str(what))
        yield

    current = Stream()
    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "device": within, "stream": within,
        "current_stream": lambda: current, "graph_pool_handle": lambda: "pool",
        "is_current_stream_capturing": lambda: bool(log.append("asked")),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return log


def test_steps_are_warmed_up_and_undone_on_the_stream_of_the_capture(asked):
    recorder = GraphRecorder(torch.device("cuda:1"))

    def step():
        asked.append("step")
        return torch.ones(1)

    _, out, pool = recorder.capture(step, lambda: asked.append("undo"), None)
    warm = ["step", "undo"] * 2
    order = ["cuda:1", "wait", "in", *warm, "begin pool thread_local", "step", "end", "wait"]
    assert asked == order
    assert (float(out), pool) == (1, "pool")
    stream = recorder._stream
    asked.clear()
    recorder.capture(step, lambda: asked.append("undo"), "its own")
    assert "begin its own thread_local" in asked
    assert recorder._stream is stream
    asked.clear()
    assert not recorder.busy()
    assert asked == ["cuda:1", "asked"]


def test_a_capture_that_fails_is_ended(asked):
    runs = []

    def step():
        runs.append(1)
        if len(runs) > 2:
            raise RuntimeError("not permitted")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphRecorder(torch.device("cuda")).capture(step, lambda: None, None)
    assert asked[-1] == "end"
