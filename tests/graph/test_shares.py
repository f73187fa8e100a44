"""Tensor parallelism in one process: the ranks of every small model together are the model."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch
from small_models import ids, random_decoder
from zoo import MODELS, RMS, delta, llama

from llmcli.config.model import sequential
from llmcli.decoder.decoder import Decoder
from llmcli.graph.graph import graph
from llmcli.graph.precision import Precision
from llmcli.graph.split import share
from llmcli.nn.step import Edit
from llmcli.weights.dense import writable

TILED = delta(heads=8, key_heads=4, tiled=True)  # a rank's value heads are not adjacent


class Rank:
    """A decoder of a rank's share; `given`: what each rank gave to all, by rank and activation."""

    def __init__(self, whole, rank, given, barrier):
        self.own = share(whole.config, ranks=barrier.parties, rank=rank)
        self.rank, self.given, self.barrier = rank, given, barrier
        self.nodes = graph(whole.config).nodes
        self.decoder = Decoder(self.own.config, Precision.of("float64"), device="cpu")
        for name, row in graph(whole.config).parameters.items():
            values = whole.weight(name).dense()
            values = values.mT if row.transposed else values
            if name in self.own.slices:
                at, ranges = self.own.slices[name]
                values = values.index_select(at, torch.tensor([*chain(*ranges)]))
            if rank and name in self.own.biases:
                values = torch.zeros_like(values)
            slot = writable(self.decoder.weight(name))
            (slot.mT if row.transposed else slot).copy_(values)

    def __call__(self, tokens):
        edits = {name: self.summed for name in self.own.sums}
        for name in self.own.statistics:
            edits |= {self.nodes[name].op.source: self.kept, name: self.normalized}
        try:
            return self.decoder(tokens, edits=[
                Edit(name=name, fn=lambda x, at, name=name, made=made: made(name, x))
                for name, made in edits.items()
            ])  # fmt: skip
        except Exception:
            self.barrier.abort()
            raise

    def kept(self, name, x):
        self.given[self.rank, name] = x
        self.barrier.wait()
        return x

    def summed(self, name, x):
        self.kept(name, x)
        return sum(self.given[rank, name] for rank in range(self.barrier.parties))

    def normalized(self, name, y):
        """Rows of a norm, of which other ranks have parts: by the mean square of all parts."""
        op, together = self.nodes[name].op, self.own.statistics[name]
        first = self.rank - self.rank % together
        parts = [self.given[first + n, op.source].transpose(1, 2).flatten(2)
                 for n in range(together)]  # fmt: skip
        of_all, of_own = (x.square().mean(-1) + op.norm.eps
                          for x in (torch.cat(parts, 2), parts[self.rank - first]))  # fmt: skip
        return y * (of_own / of_all).sqrt()[:, None, :, None]


@pytest.mark.parametrize(("ranks", "least"), [(2, 61), (4, 54)])
def test_ranks_together_are_the_model(ranks, least):
    every, whole = {**MODELS, "tiled": llama(sequential(TILED, norm=RMS))}, {}
    for name, config in every.items():
        model, barrier, given = random_decoder(config), threading.Barrier(ranks, timeout=60), {}
        each = [Rank(model, rank, given, barrier) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            logits = list(pool.map(Rank.__call__, each, [ids(2, 11)] * ranks))
        expected = model(ids(2, 11))
        error = max((one - expected).abs().max() / expected.abs().max() for one in logits)
        assert error < 1e-12, name
        if each[0].own.whole:
            whole[name] = each[0].own.whole
    assert len(every) - len(whole) >= least, whole  # that are cut in all parts
    for why in chain(*(parts.values() for parts in whole.values())):
        assert re.fullmatch(r"it has no heads, .+|Hk? = [23] is less than 4 ranks.*", why), why
