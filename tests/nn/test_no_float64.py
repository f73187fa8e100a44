"""Off the CPU and CUDA nothing is in float64, which Apple's GPU lacks: `meta` stands for it."""

import pytest
import torch
from covers import KINDS, in_turn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import MODELS, VOCAB

from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.graph.precision import Precision
from llmcli.inspect.statistics import Statistics
from llmcli.model import dtype_name
from llmcli.ops.quant.codes import mxfp4

META = torch.device("meta")


class NoFloat64(TorchDispatchMode):
    """Refuses float64 on the meta device; what is copied from there to the CPU is all zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:  # in inference mode, `Tensor.to` comes here whole
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        made = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs, made))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                assert leaf.dtype != torch.float64, f"{func} has float64"
        return made


def test_the_mode_sees_float64():
    with NoFloat64():
        x = torch.zeros(2, device=META)
        with pytest.raises(AssertionError):
            x.double()
        with pytest.raises(AssertionError):
            torch.zeros(2, dtype=torch.float64, device=META)
        assert torch.equal(x.cpu(), torch.zeros(2))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*in_turn(KINDS, [torch.bfloat16, torch.float32]), (KINDS[0], torch.float16)],
)
def test_a_prompt_a_step_and_every_activation(name, dtype):
    with NoFloat64():
        decoder = Decoder(MODELS[name], Precision.of(dtype_name(dtype)), device=META)
        state = decoder.new_state(2, 8)
        numbers = Statistics()

        def tap(name, tensor):
            if tensor.is_floating_point():
                numbers.add(tensor)

        for tokens, logits in ((5, "last"), (1, "all")):
            ids = torch.zeros(2, tokens, dtype=torch.long, device=META)
            out = decoder(ids, state, tap=tap, logits=logits)
            assert out.shape == (2, tokens if logits == "all" else 1, VOCAB)
            assert out.is_meta
        assert numbers.seen


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    ],
    ids=str,
)
def test_the_sampler(options):
    with NoFloat64():
        sampler = Sampler(
            Sampling(**options), [[1, 2], [3]], samples=2, vocab=VOCAB, device=META, logprobs=3,
            limit=4,
        )  # fmt: skip
        for rows in (4, 2):
            ids, choices = sampler.pick(torch.zeros(rows, VOCAB, device=META))
            assert (ids.device.type, len(choices)) == ("meta", rows)
            sampler.keep([1, 0])


def test_powers_of_two():
    with NoFloat64():
        mxfp4(torch.zeros(3, 17, dtype=torch.uint8, device=META), torch.zeros(3, 32, device=META))
