"""What the taps show is what transformers computes, and looking changes nothing.

Every emitted activation equals transformers' own to 1e-9 in float64; the attention pattern is
derived from what was emitted and gives the layer's own output; outputs with and without a tap
are equal bit for bit.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from covers import covered
from decoder_parameters import parameters_of
from parity_models import prompt
from parity_recorder import record
from parity_reference import reference_hidden
from parity_types import Models, References
from torch import Tensor
from zoo import TYPES, ZOO, attending, variant

from llmcli import anatomy
from llmcli.anatomy.graph import graph
from llmcli.graph.spec import Call
from llmcli.nn.decoder import Decoder
from llmcli.parts.experts.config import ExpertsConfig

ALL = [one.name for one in ZOO]


def tapped(decoder: Decoder, ids: Tensor) -> dict[str, Tensor]:
    """Everything that one whole pass emits, in order."""
    seen: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor) -> None:
        assert name not in seen, f"{name} was emitted twice"
        seen[name] = tensor

    decoder(ids, tap=tap)
    return seen


def values(decoder: Decoder, layer: int) -> str:
    """What that layer mixes."""
    mix = graph(decoder.config).mixing(layer)
    assert mix is not None
    return mix.op.inputs[1]


def far(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the size of the tensor's largest number."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().nan_to_num(torch.inf).max() / (1 + b.abs().max())).item()


@pytest.mark.parametrize("name", covered(ALL))
def test_every_activation_is_transformers_own(
    name: str, models: Models, references: References
) -> None:
    ids = prompt(batch=2, tokens=150)
    ours = tapped(models(name, "float64").decoder, ids)
    theirs = record(references(name, "float64"), ids)
    modules = TYPES[variant(name).model_type].modules
    unseen = tuple(key for key, module in modules.items() if not module)
    known = {key for key in ours if not key.endswith((".scale", *unseen))}
    # not in every variant of a type: a multiplier of 1, a feed-forward beside the attention, …
    optional = tuple(f".{one}" for one in (
        "attn.out", "mlp.out", "resid_mid", "ln3_post.out", "ln4_post.out", "branch_sum",
        "sum_norm.out", "router_norm.out",
    ))  # fmt: skip
    expected = {key for key in theirs if key in ours or not key.endswith(optional)}
    assert known == {key for key in expected if not key.endswith("attn.pattern")}
    wrong = {key: far(ours[key], theirs[key]) for key in known}
    assert {key: value for key, value in wrong.items() if value > 1e-11} == {}


@pytest.mark.parametrize("name", covered(ALL))
def test_the_residual_stream_is_transformers_hidden_states(
    name: str, models: Models, references: References
) -> None:
    ids = prompt(tokens=80)
    decoder = models(name, "float64").decoder
    ours = tapped(decoder, ids)
    hidden = reference_hidden(references(name, "float64"), ids)
    layers = len(decoder.blocks)
    stream = [ours[f"blocks.{i}.resid_pre"] for i in range(layers)] + [ours["ln_final.out"]]
    assert [far(a, b) < 1e-11 for a, b in zip(stream, hidden, strict=True)] == [True] * len(hidden)
    for layer in range(layers):
        assert torch.equal(decoder(ids, until=layer), ours[f"blocks.{layer}.resid_post"])


@pytest.mark.parametrize("name", covered(ALL))
def test_norms_divide_by_what_they_say(name: str, models: Models) -> None:
    decoder = models(name, "float64").decoder
    ours = tapped(decoder, prompt(tokens=40))
    nodes = graph(decoder.config).nodes
    scales = [key for key in ours if key.endswith(".scale")]
    layers = decoder.config.layers
    parts = [part for layer in layers for part in layer.parts]
    assert len(scales) == 1 + sum(
        (branch.pre_norm is not None) + (branch.post_norm is not None)
        for layer in layers
        for branch in layer.branches
    ) + sum(layer.sum_norm is not None for layer in layers) + sum(
        isinstance(part, ExpertsConfig) and part.routing.norm is not None for part in parts
    )
    for scale in scales:
        norm = scale.removesuffix(".scale")
        x = ours[nodes[f"{norm}.out"].op.inputs[0]]
        if nodes[f"{norm}.out"].op.norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        offset = nodes[f"{norm}.out"].op.norm.offset
        out = x / ours[f"{norm}.scale"] * (offset + parameters_of(decoder)[f"{norm}.w"])
        if f"{norm}.b" in parameters_of(decoder):
            out = out + parameters_of(decoder)[f"{norm}.b"]
        assert far(out, ours[f"{norm}.out"]) < 1e-13


@pytest.mark.parametrize("name", covered(ALL))
def test_the_pattern_is_derived_and_gives_the_layers_output(
    name: str, models: Models, references: References
) -> None:
    """`attention_rows @ values == z`, and the rows are transformers' attentions."""
    ids = prompt(batch=2, tokens=150)
    decoder = models(name, "float64").decoder
    ours, theirs = tapped(decoder, ids), record(references(name, "float64"), ids)
    for i in attending(decoder.config):
        at, mixer = f"blocks.{i}.attn", decoder.blocks[i].mixers[0]
        q, k = (ours[key] for key in graph(decoder.config).entering(i))
        rows = torch.cat(
            [mixer.attention_rows(q[:, :, a:b], k, a) for a, b in ((0, 64), (64, 150))], 2
        )
        assert far(rows, theirs[f"{at}.pattern"]) < 1e-12
        own = decoder.config.layers[i].attention  # none of latents
        if own is None or not own.sinks:
            assert (rows.sum(-1) - 1).abs().max() < 1e-12
        assert (rows.triu(1) == 0).all()
        v = ours[values(decoder, i)].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        assert far(rows @ v, ours[f"{at}.z"]) < 1e-12


@pytest.mark.parametrize("name", covered(ALL))
def test_the_pattern_is_derived_across_the_cache(name: str, models: Models) -> None:
    """Keys and values emitted by earlier calls, side by side, explain the last call's output."""
    ids, pieces = prompt(tokens=100), (60, 37, 1, 1, 1)
    decoder = models(name, "float64").decoder
    state, kept = decoder.new_state(1, 100), defaultdict(list)
    for piece in ids.split(pieces, dim=1):
        decoder(piece, state, tap=lambda key, value: kept[key].append(value.clone()))
    for i in attending(decoder.config):
        at, first = f"blocks.{i}.attn", 0
        q_name, k_name = graph(decoder.config).entering(i)
        for call, size in enumerate(pieces):
            names = (k_name, values(decoder, i))
            k, v = (torch.cat(kept[key][: call + 1], dim=2) for key in names)
            q = kept[q_name][call]
            rows = decoder.blocks[i].mixers[0].attention_rows(q, k, first)
            z = rows @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            assert far(z, kept[f"{at}.z"][call]) < 1e-12
            first += size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", covered(ALL))
def test_looking_changes_no_bit(name: str, dtype: str, models: Models) -> None:
    """Whole, in pieces, token by token, and in unequal rows: equal bit for bit under a tap."""
    decoder = models(name, dtype).decoder

    def outputs(look: bool) -> list[Tensor]:
        seen: list[str] = []
        tap = (lambda key, value: seen.append(key)) if look else None
        ids = prompt(batch=3, tokens=75)
        state = decoder.new_state(3, 100)
        out = [decoder(ids, tap=tap), decoder(ids, tap=tap, logits="last")]
        for piece in ids.split((40, 33, 1, 1), dim=1):
            out.append(decoder(piece, state, tap=tap))
        out.append(decoder(ids[:, :9], state, lengths=[9, 2, 5], tap=tap))
        out.append(decoder(ids[:, 9:10], state, tap=tap))
        assert bool(seen) == look
        return out

    for plain, watched in zip(outputs(look=False), outputs(look=True), strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("name", covered(ALL))
def test_the_anatomy_names_what_is_emitted(name: str, models: Models) -> None:
    """Names, order and shapes of one pass are the ones that the specs foretell."""
    model = models(name, "float32")
    ours = tapped(model.decoder, prompt(batch=2, tokens=9))
    specs = anatomy.plan(model.config, Call(batch=2, tokens=9, past=0, phase="prefill")).written
    foretold = [(spec.name, tuple(spec.shape)) for spec in specs]
    assert foretold == [(key, tuple(value.shape)) for key, value in ours.items()]
