"""Patches are those that hooks in transformers make."""

import pytest
import torch
from parity_models import prompt
from parity_reference import fresh_rope, precision

from llmcli.commands.patch.measure import PatchRequest, measure_patch
from llmcli.shell.answer import Answer

CLEAN, ANSWER = prompt(1, 9), Answer(answer=3, versus=7)
CORRUPTED = torch.cat((CLEAN[:, :3], (CLEAN[:, 3:5] + 1) % 50, CLEAN[:, 5:]), 1)


@pytest.mark.parametrize("noising", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa3"])
def test_patches_are_those_of_hooks(name, noising, models, references):
    ours, reference = models(name, "float64"), references(name, "float64")
    blocks = reference.transformer.h if name == "gpt2" else reference.model.layers
    outs = [b.attn.c_proj if name == "gpt2" else b.self_attn.o_proj for b in blocks]

    def number(ids, module, hook):
        """With what enters the module as the hook makes it."""
        held = module.register_forward_pre_hook(hook)
        with precision(reference), torch.no_grad():
            fresh_rope(reference)
            found = ANSWER.of(reference(ids).logits[0, -1]).item()
        held.remove()
        return found

    heads = ours.config.layers[0].attention.heads
    base, other = (CLEAN, CORRUPTED) if noising else (CORRUPTED, CLEAN)
    ids = [one[0].tolist() for one in (CLEAN, CORRUPTED)]
    numbers = [number(one, blocks[0], lambda module, given: None) for one in (CLEAN, CORRUPTED)]
    for leaf, entered in (("resid_pre", blocks), ("attn.z", outs)):
        names = [f"blocks.{layer}.{leaf}" for layer in range(len(blocks))]
        request = PatchRequest(what=leaf, names=names, answer=ANSWER, noising=noising)
        report = measure_patch(ours, *ids, request)
        assert report.ok
        for cell in report.cells:
            seen, module = [], entered[cell.layer]
            number(other, module, lambda module, given, seen=seen: seen.append(given[0]))

            def hook(module, given, seen=seen, cell=cell):
                x = given[0].clone()
                if cell.head is None:
                    x[0, cell.position] = seen[0][0, cell.position]
                else:
                    part = x.view(1, 9, heads, -1)
                    part[..., cell.head, :] = seen[0].view(part.shape)[..., cell.head, :]
                return (x, *given[1:])

            found = number(base, module, hook)
            assert cell.number == pytest.approx(found, abs=1e-9)
            share = (found - numbers[1]) / (numbers[0] - numbers[1])
            assert cell.value == pytest.approx(share, abs=1e-8)
