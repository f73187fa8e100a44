"""What a rung shows is the source that ran: names with the decoder's values, views and copies."""

import inspect
from pathlib import Path

import pytest
import torch
from covers import covered
from ladder_models import DENSE, each_with
from small_models import ids, read, weights
from zoo import CONFIGS

import llmcli.commands.ladder
from llmcli.commands.ladder.measure import loops
from llmcli.commands.ladder.measure.loops import Loops, multiply_adds
from llmcli.commands.ladder.measure.record import SHOWN, Recorder
from llmcli.commands.ladder.measure.rungs import FusedKernels
from llmcli.commands.ladder.measure.runner import RUNGS
from llmcli.commands.ladder.measure.texts import first_attention, first_mlp
from llmcli.commands.ladder.report import AXES, NAMES

N = 6
FOLDER = Path(llmcli.commands.ladder.__file__).parent / "measure"


def listings(kind, config, more=0):
    """What a rung runs for a prompt of N tokens and some more, and the decoder's own values."""
    of, tokens, taps = weights(config), ids(2, N + more), {}
    recorder = Recorder(kind.extend, on=True)
    with recorder:
        rung = kind(of)
        rung.tap = recorder.tap
        read(rung, tokens if kind.batched else tokens[:1], N)
    of.decoder(tokens[:, :N], tap=lambda name, value: taps.setdefault(name, value))
    return recorder.listings, taps


def steps_of(found, title, later=False):
    """The steps of a function by their names, those of its last line where there are several."""
    (one,) = (one for one in found if (one.title, one.later) == (title, later))
    return {step.name: step for line in one.lines for step in line.steps}


@pytest.mark.parametrize(("name", "kind"), each_with(RUNGS[:7]))
def test_the_letters_of_a_name_are_its_shape(name, kind):
    """Axis by axis: what is called `q_hnk` is h heads times n tokens times the size of a head."""
    config = DENSE[name]
    found, _ = listings(kind, config, more=2)
    mixer, width = first_attention(config), config.width
    columns = {mixer.heads * mixer.head_dim, mixer.heads * mixer.value_dim}
    columns |= {mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_dim}
    sizes = {
        "d": {width}, "h": {mixer.heads, mixer.kv_heads}, "h_kv": {mixer.kv_heads},
        "d/h": {mixer.head_dim, mixer.value_dim}, "d_v": {mixer.value_dim}, "1": {1}, "v": {43},
        "F": {first_mlp(config).hidden}, "h·d_v": columns,
        "m": range(1, N + 2),
    }  # fmt: skip
    steps = [(one.later, step) for one in found for line in one.lines for step in line.steps]
    assert len(steps) > 15
    for later, step in steps:
        sizes["n"] = {1} if later else {N}
        letters = step.axes.split(" × ") if step.axes else []
        shape = step.shape[step.axes.startswith("…") and 1 - len(letters) :]
        for letter, size in zip([one for one in letters if one != "…"], shape, strict=True):
            assert letter in "ij" or size in sizes[letter], (step.name, step.shape)


@pytest.mark.parametrize("kind", RUNGS[:7], ids=NAMES[:7])
def test_what_is_printed_is_the_source(kind):
    """Every line is one of its file; only what ran is there, and no line that did not."""
    source = "".join((FOLDER / path).read_text("utf-8") for path in (
        "loops.py", "rungs.py", "walk.py", "weights.py",
    ))  # fmt: skip
    source = "\n".join(line.strip() for line in source.split("\n"))
    found, _ = listings(kind, CONFIGS["llama"], more=1)
    lines = [line.text for one in found for line in one.lines]
    assert all("\n".join(map(str.strip, line.split("\n"))) in source for line in lines)
    assert not any("if scores.cap" in line or "layer.gate is None" in line for line in lines)
    if kind is not Loops:
        capped, _ = listings(kind, DENSE["caps"])
        assert any("soft_cap(s_" in line.text for one in capped for line in one.lines)


@pytest.mark.parametrize("kind", RUNGS[:7], ids=NAMES[:7])
def test_the_names_of_a_block_have_the_decoders_values(kind):
    found, taps = listings(kind, CONFIGS["llama"])
    for title, name, tap in (
        ("embed", "x_nd", "resid_pre"), ("terms", "t_nd", "ln1.out"), ("terms", "y_nd", "attn_out"),
        ("block", "x_nd", "resid_post"), ("feed_forward", "l_nf", "mlp.post"),
    ):  # fmt: skip
        values = torch.tensor(steps_of(found, title)[name].values, dtype=torch.float64)
        torch.testing.assert_close(values, taps[f"blocks.0.{tap}"][0, :N, : values.shape[1]])
    steps = steps_of(found, "attend")
    a = next(step for name, step in steps.items() if name.startswith("a_"))
    torch.testing.assert_close(torch.tensor(a.values).sum(-1), torch.ones(len(a.values)))


def test_the_loops_show_the_last_token_in_the_first_head():
    found, taps = listings(Loops, CONFIGS["llama"])
    steps = steps_of(found, "attend")
    for name, tap in (("q_k", "q_rot"), ("k_k", "k_rot"), ("v_e", "v"), ("c_e", "z")):
        values = torch.tensor(steps[name].values[0], dtype=torch.float64)
        torch.testing.assert_close(values, taps[f"blocks.0.attn.{tap}"][0, 0, -1, : len(values)])
        assert steps[name].token in (N - 1, None)
    assert len(steps_of(found, "softmax")["a_m"].values[0]) == N


def test_a_name_is_recorded_as_its_line_left_it():
    found, _ = listings(RUNGS[3], CONFIGS["gpt2"])
    (one,) = (one for one in found if one.title == "times")
    before, after = (line.steps[0].values for line in one.lines if line.steps)
    assert before != after  # `y_nj` without its bias, then with it
    (split,) = (one for one in found if one.title == "split")
    step = split.lines[1].steps[0]
    assert step.source == ((6, 3, 8), (24, 8, 1))
    assert (step.shape, step.strides) == ((3, 6, 8), (8, 24, 1))


def test_the_fused_rung_shows_what_the_decoder_emits():
    found, taps = listings(FusedKernels, CONFIGS["qk norm"], more=1)
    steps = steps_of(found, "what the decoder emits")
    assert steps.keys() == {name for name in taps if "blocks.1" not in name}
    for name, step in steps.items():
        assert step.shape == tuple(taps[name].shape)
    assert steps_of(found, "what the decoder emits", True)["blocks.0.attn.z"].shape == (2, 4, 1, 8)


def test_every_shown_function_can_be_shown():
    """No `else`, which would be missing above its lines; a docstring for each."""
    for function in SHOWN.values():
        lines = inspect.getsource(function).split("\n")
        assert not any(line.strip() == "else:" for line in lines)
        assert function.__doc__
    assert set("bnmdhv") <= set(AXES)


# two feed-forwards of one block have one size there, whatever their configurations say
@pytest.mark.parametrize("name", covered(DENSE))
@pytest.mark.parametrize("until", [None, 0])
def test_multiply_adds_are_those_that_the_loops_do(name, until, monkeypatch):
    of, done = weights(DENSE[name]), []

    def counted(plain):  # by their last argument, a vector
        return lambda *args: done.append(len(args[-1])) or plain(*args)

    for function in ("dot", "add_weighted"):
        monkeypatch.setattr(loops, function, counted(getattr(loops, function)))
    for tokens in (1, N):
        done.clear()
        Loops(of).forward(ids(1, tokens)[0], until=until)
        assert sum(done) == multiply_adds(of.config, tokens, until)


@pytest.mark.parametrize(("until", "changed", "seen"), [
    (None, "q", False), (None, "head", False), (0, "q", False), (0, "head", True),
])  # fmt: skip
def test_the_loops_convert_before_they_are_timed(until, changed, seen):
    """What changes later is not seen, but where they had not been asked to convert it."""
    of, tokens = weights(CONFIGS["llama"]), ids(1, 4)[0]
    before, rung = Loops(of).start(tokens), Loops(of)
    rung.prepare(until)
    {"q": next(of.blocks[0].matrices), "head": of.head}[changed].W.mul_(2)
    assert torch.equal(rung.start(tokens), before) is not seen
