"""Faults planted in the decoder and in the rungs: the ladder must see every one of them.

A fault in the decoder shows between rungs 7 and 8, one in rung k between k - 1 and k.
"""

import math
from dataclasses import replace

import decoder_faults
import pytest
import torch
from decoder_faults import model
from small_models import ids

from llmcli.commands.ladder.measure.rungs import cache, combined, heads, loops, matrices, rows
from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import Cache, KeyValueCache
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.runner import Workload
from llmcli.nn import step

# name: (rung, configuration, plant(monkeypatch, weights))
FAULTS = {name: (8, *planted) for name, planted in decoder_faults.FAULTS.items()}


def fault(rung, config):
    """Registers a function that plants a fault for `rung` of the model `config`."""

    def register(plant):
        name = plant.__name__.replace("_", " ")
        FAULTS[name] = (rung, config, plant)
        return plant

    return register


def differences(of, *numbers):
    """What the climb reports for the rungs `numbers`, after the first of them."""
    tokens = ids(3, 9)
    course = Workload(prompts=tokens[:, :6], more=tokens[0, 6:], rounds=0)
    return run_ladder(of, course, numbers=numbers)[1:]


# In a rung, against the one below.


@fault(2, "llama")
def a_token_that_does_not_see_itself(monkeypatch, of):
    seen = loops.seen
    monkeypatch.setattr(
        loops, "seen", lambda i, mixer: seen(i, mixer) if i == 0 else seen(i - 1, mixer)
    )


@fault(2, "window")
def rows_forget_the_window(monkeypatch, of):
    attend = rows.attend

    def unlimited(q, K, V, i, mixer, show):
        return attend(q, K, V, i, replace(mixer, window=None), show)

    monkeypatch.setattr(rows, "attend", unlimited)


@fault(3, "gpt2")
def mask_without_the_next_token(monkeypatch, of):
    monkeypatch.setattr(matrices, "mask", lambda n, w: torch.full((n, n), -torch.inf).triu(2))


@fault(3, "gpt2")
def activation_after_the_output_layer(monkeypatch, of):
    """The documents' slip: `Activation(X W + B)` for every layer, the last one too."""
    feed_forward = Matrices._feed_forward
    monkeypatch.setattr(
        Matrices, "_feed_forward",
        lambda self, layer, T: matrices.activate("gelu_tanh", feed_forward(self, layer, T)),
    )  # fmt: skip


@fault(3, "llama")
def softmax_over_the_queries(monkeypatch, of):
    """Down the columns: the right shape, and the wrong sum is 1."""

    def columns(scores):
        powers = (scores - scores.max(-2, keepdim=True).values).exp()
        return powers / powers.sum(-2, keepdim=True)

    monkeypatch.setattr(matrices, "softmax", columns)


@fault(4, "keys of their own")
def heads_first_without_the_transpose(monkeypatch, of):
    monkeypatch.setattr(
        HeadsAsDimension, "_split", lambda self, name, X, h, letter="h": X.view(h, len(X), -1)
    )


@fault(4, "gpt2")
def merged_without_the_transpose(monkeypatch, of):
    monkeypatch.setattr(HeadsAsDimension, "_merge", lambda self, C: C.reshape(C.shape[1], -1))


@fault(4, "gpt2")
def biases_left_out_as_heads_are_concatenated(monkeypatch, of):
    concatenate = heads.concatenate
    monkeypatch.setattr(heads, "concatenate", lambda layer: replace(concatenate(layer), b_v=None))


@fault(5, "gpt2")
def keys_and_values_exchanged(monkeypatch, of):
    combine = combined.combine

    def exchanged(layer):
        W, b = combine(layer)
        q, k, v = W.chunk(3, 1)
        return torch.cat((q, v, k), 1), b

    monkeypatch.setattr(combined, "combine", exchanged)


@fault(5, "gpt2")
def combined_head_by_head(monkeypatch, of):
    """q k v of head 1, then of head 2: a layout that other models have."""
    heads_ = of.config.layers[0].attention.heads
    combine = combined.combine

    def interleaved(layer):
        W, b = combine(layer)
        parts = [part.chunk(heads_, 1) for part in W.chunk(3, 1)]
        return torch.cat([part[h] for h in range(heads_) for part in parts], 1), b

    monkeypatch.setattr(combined, "combine", interleaved)


@fault(6, "llama")
def a_cache_that_loses_the_newest_key(monkeypatch, of):
    write = Cache.write
    monkeypatch.setattr(
        Cache, "write", lambda self, K, V, start: write(self, K * 0 if start else K, V, start)
    )


@fault(6, "gpt2")
def a_new_token_at_position_zero(monkeypatch, of):
    arange = torch.arange

    def restarted(start, stop=None):
        return arange(start) if stop is None else arange(stop - start)

    monkeypatch.setattr(cache, "torch", _Replaced(torch, arange=restarted))


@fault(6, "window")
def one_row_that_reads_beyond_its_window(monkeypatch, of):
    kept = KeyValueCache._kept
    monkeypatch.setattr(
        KeyValueCache, "_kept", lambda self, slots, count, window: kept(self, slots, count, None)
    )


@fault(7, "llama")
def sequences_that_share_a_cache(monkeypatch, of):
    kept = Batch._kept

    def first(self, slots, count, window):
        return tuple(x[:1].expand_as(x) for x in kept(self, slots, count, window))

    monkeypatch.setattr(Batch, "_kept", first)


class _Replaced:
    """A module with some of its names replaced, for one importer alone."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, dtype, monkeypatch):
    rung, config, plant = FAULTS[name]
    of = model(config, dtype)
    (sound,) = differences(of, rung - 1, rung)
    assert sound.ok
    plant(monkeypatch, of)
    (found,) = differences(of, rung - 1, rung)
    assert not found.ok
    assert math.isfinite(found.difference)  # another number, not a crash or NaN
    assert found.difference > 3 * found.allowed


def test_there_are_faults_in_the_decoder_and_in_every_rung():
    assert {rung for rung, _, _ in FAULTS.values()} == set(range(2, 9))
    assert sum(rung == 8 for rung, _, _ in FAULTS.values()) >= 20


def test_a_fault_in_the_loops_is_one_between_two_rungs_only(monkeypatch):
    """The rungs above agree among themselves: the report names the place."""
    plant = FAULTS["a token that does not see itself"][2]
    of = model("llama", torch.float64)
    plant(monkeypatch, of)
    assert [rung.ok for rung in differences(of, *range(1, 9))] == [False] + [True] * 6


def test_all_positions_rotated_by_one_more_are_no_fault(monkeypatch):
    """A rotation is relative: q and k both turned on leave every product as it is."""
    of = model("llama", torch.float64)
    tables = step.rope.tables
    monkeypatch.setattr(
        step.rope, "tables", lambda f, positions, factor: tables(f, positions + 1, factor)
    )
    (found,) = differences(of, 7, 8)
    assert found.ok
