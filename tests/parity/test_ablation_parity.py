"""Effects of ablations are those of hooks in transformers."""

import pytest
import torch
import torch.nn.functional as F
from parity_models import prompt
from parity_reference import fresh_rope, precision
from test_attribution_parity import modules

from llmcli.commands.ablate.measure import measure_ablation

IDS = prompt(1, 20)


@pytest.mark.parametrize("by", ["mean", "zero"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa3"])
def test_effects_are_those_of_hooks(name, by, models, references):
    ours, reference = models(name, "float64"), references(name, "float64")
    report = measure_ablation(ours, [IDS[0].tolist()], by=by)
    effects = {(one.kind, one.layer, one.index): one.value for one in report.effects}

    def ablated(x):
        return x.mean(-2, keepdim=True).expand_as(x) if by == "mean" else torch.zeros_like(x)

    @torch.no_grad()
    def loss():
        with precision(reference):
            fresh_rope(reference)
            return float(F.cross_entropy(reference(IDS).logits[0, :-1], IDS[0, 1:]))

    plain = loss()
    assert report.value == pytest.approx(plain, abs=1e-9)
    for layer, (attention, w_o, mlp) in enumerate(modules(reference)[2]):
        hook = mlp.register_forward_hook(lambda module, given, made: ablated(made))
        assert effects["mlp", layer, None] == pytest.approx(loss() - plain, abs=1e-8)
        hook.remove()
        heads = sum(kind == "head" and at == layer for kind, at, _ in effects)
        size = len(w_o) // heads
        for head in range(heads):

            def without(module, given, own=slice(head * size, (head + 1) * size)):
                x = given[0].clone()
                x[..., own] = ablated(x[..., own])
                return (x,)

            hook = attention.register_forward_pre_hook(without)
            assert effects["head", layer, head] == pytest.approx(loss() - plain, abs=1e-8)
            hook.remove()
