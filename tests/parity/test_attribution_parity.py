"""Shares of a logit, and gradients, are those that hooks in transformers give."""

import pytest
import torch
from parity_models import prompt
from parity_reference import fresh_rope, precision

from llmcli.commands.attribute.measure import measure_direct
from llmcli.inspect.gradients import Gradients
from llmcli.inspect.passes import Passes
from llmcli.shell.answer import Answer

IDS, ANSWER = prompt(1, 20), Answer(answer=3, versus=7)


def modules(reference):
    """The final norm and its ε; of every layer what enters W_o, W_o as `[H·e, D]`, and the MLP."""
    if hasattr(reference, "transformer"):
        norm, blocks = reference.transformer.ln_f, reference.transformer.h
        return norm, norm.eps, [(b.attn.c_proj, b.attn.c_proj.weight, b.mlp) for b in blocks]
    norm, blocks = reference.model.norm, reference.model.layers
    found = [(b.self_attn.o_proj, b.self_attn.o_proj.weight.T, b.mlp) for b in blocks]
    return norm, norm.variance_epsilon, found


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa3"])
def test_shares_and_gradients_are_those_of_hooks(name, models, references):
    ours, reference = models(name, "float64"), references(name, "float64")
    norm, eps, layers = modules(reference)
    seen, hooks = {}, []

    def keep(*key):
        def hook(module, given, *made):
            seen[key] = made[0] if made else given[0]
            seen[key].retain_grad()

        return hook

    for at, (attention, _, mlp) in enumerate(layers):
        hooks.append(attention.register_forward_pre_hook(keep("z", at)))
        hooks.append(mlp.register_forward_hook(keep("mlp_out", at)))
    hooks.append(norm.register_forward_pre_hook(keep("stream")))
    with precision(reference):
        fresh_rope(reference)
        metric = ANSWER.of(reference(IDS).logits[0, -1])
    for hook in hooks:
        hook.remove()
    metric.backward()
    reference.zero_grad()
    with torch.no_grad():
        g, x = ANSWER.of(reference.lm_head.weight.T) * norm.weight, seen["stream",][0, -1]
        if name == "gpt2":
            g, x = g - g.mean(), x - x.mean()
        g = g / (x.pow(2).mean() + eps).sqrt()
        report = measure_direct(Passes(ours, IDS[0].tolist()), ANSWER)
        assert report.value == pytest.approx(metric.item(), abs=1e-9)
        shares = {(term.name, term.index): term.value for term in report.terms}
        names = [f"blocks.{at}.{of}" for at in range(len(layers)) for of in ("attn.z", "mlp_out")]
        found = Gradients(ours, IDS[0].tolist(), ANSWER.of, names).at
        for at, (_, w_o, _) in enumerate(layers):
            z, mlp = f"blocks.{at}.attn.z", f"blocks.{at}.mlp_out"
            heads = len(found[z])
            for head, share in enumerate((seen["z", at][0, -1] * (w_o @ g)).view(heads, -1).sum(1)):
                assert shares[z, head] == pytest.approx(float(share), abs=1e-10)
            added = float(seen["mlp_out", at][0, -1] @ g)
            bias = shares.get((f"blocks.{at}.mlp.b_down", None), 0.0)
            assert shares[mlp, None] + bias == pytest.approx(added, abs=1e-10)
            z_THe = seen["z", at].grad[0].view(IDS.shape[1], heads, -1)
            torch.testing.assert_close(found[z], z_THe.transpose(0, 1), rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(
                found[mlp], seen["mlp_out", at].grad[0], rtol=1e-8, atol=1e-10
            )
