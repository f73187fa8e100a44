"""GGUF files of mixtures that lie: experts that are not there, more of them, of other shapes.

Each is refused with one line that names the key or the tensor, before anything is computed.
"""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from parity_gguf import write_gguf
from parity_models import build, opened
from test_gguf_parity import mixed

from llmcli.errors import CheckpointError, UnsupportedModel

Change = Callable[[np.ndarray], np.ndarray | None]
EXPERTS = 8
GATE, UP, DOWN, ROUTER = (
    f"blk.1.{name}.weight"
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp")
)


def lying(tensors, keys, more_tensors=lambda name, tensor: ()):
    """A writer that changes those tensors, and says those values; None leaves them out."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name, tensor, **more):
            found = tensors[name](tensor) if name in tensors else tensor
            if found is not None:
                super().add_tensor(name, np.ascontiguousarray(found), **more)
            for other in more_tensors(name, tensor):
                super().add_tensor(*other, **more)

        def add_key_value(self, key, val, *more, **named):
            val = keys.get(key.partition(".")[2], val)
            if val is not None:
                super().add_key_value(key, val, *more, **named)

    return Writer


@pytest.mark.parametrize(("tensors", "keys", "says"), [
    ({}, {"expert_count": 12}, r"from `blk.1.*should be \[12.*\] but is \[8"),
    ({}, {"expert_count": 4}, "2 of 4 groups of one expert leave no 3 to choose"),
    ({}, {"expert_count": 9}, "the number of experts is 9, which the number of groups 4"),
    ({}, {"expert_count": 0}, "`deepseek2.expert_count` is `0`"),
    ({}, {"expert_count": None}, "no `deepseek2.expert_count`"),
    ({}, {"expert_count": 2**31}, "`deepseek2.expert_count` is `2147483648`"),
    ({}, {"expert_used_count": 9}, "`deepseek2.expert_used_count` is `9`"),
    ({}, {"expert_used_count": 0}, "`deepseek2.expert_used_count` is `0`"),
    ({}, {"expert_group_count": 3}, "which the number of groups 3 does not divide"),
    ({}, {"expert_group_used_count": 5}, "`deepseek2.expert_group_used_count` is `5`"),
    ({}, {"expert_feed_forward_length": 64}, r"should be \[8, 64, 96\] but is \[8, 32, 96\]"),
    ({}, {"expert_shared_count": 3}, "shared.W_gate` from `blk.1.ffn_gate_shexp.weight`"),
    ({GATE: lambda _: None}, {}, f"no tensor for `blocks.1.moe.W_gate`.*{GATE}"),
    ({ROUTER: lambda _: None}, {}, f"no parameter for .*{GATE}"),
    ({UP: lambda x: x[:-1]}, {}, r"should be \[8, 32, 96\] but is \[7, 32, 96\]"),
    ({DOWN: lambda x: x.swapaxes(1, 2)}, {}, r"should be \[8, 96, 32\] but is \[8, 32, 96\]"),
    ({UP: lambda x: x.reshape(-1, 96)}, {}, r"should be \[8, 32, 96\] but is \[256, 96\]"),
    ({ROUTER: lambda x: x[:, :-1]}, {}, r"should be \[8, 96\] but is \[8, 95\]"),
])  # fmt: skip
def test_one_line_says_what_is_wrong(tensors, keys, says, tmp_path, monkeypatch):
    model = build(mixed("deepseek_v3"), seed=3)
    assert model.config.n_routed_experts == EXPERTS
    monkeypatch.setattr(gguf, "GGUFWriter", lying(tensors, keys))
    write_gguf(model, tmp_path / "model.gguf", "F32")
    with pytest.raises((CheckpointError, UnsupportedModel), match=says) as caught:
        opened(tmp_path / "model.gguf")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint


def test_gates_in_two_tensors_are_one_too_many(tmp_path, monkeypatch):
    def both(name, tensor):
        if name == GATE:
            yield name.replace("gate", "gate_up"), np.concatenate([tensor] * 2, 1)

    monkeypatch.setattr(gguf, "GGUFWriter", lying({}, {}, both))
    write_gguf(build(mixed("qwen3_moe"), seed=3), tmp_path / "model.gguf", "F32")
    with pytest.raises(CheckpointError, match=r"both `blocks.1.moe.W_(gate|up)`"):
        opened(tmp_path / "model.gguf")
