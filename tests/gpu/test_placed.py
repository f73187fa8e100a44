"""A model whose layers lie on several devices: the numbers are those of one device.

`card.Card` stands for the first device, the processor is the second.
"""

import pytest
import torch
from card import Card
from small_models import ids, random_decoder, walked
from zoo import MODELS

from llmcli import devices
from llmcli.commands.selftest.measure.arithmetic import copied
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.graph.precision import Precision
from llmcli.weights.dense import writable

CAPACITY = 12
CPU, CARD = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: None)
    with torch.inference_mode(), Card() as card:
        yield card


def split(decoder, first, home=CPU):
    """The same model with its first layers on the card."""
    count = len(decoder.config.layers)
    placed = [CARD] * first + [home] * (count - first)
    there = Decoder(decoder.config, Precision.of("float64"), device=home, placed=placed)
    for name in decoder.weight_names:
        writable(there.weight(name)).copy_(writable(decoder.weight(name)))
    return there


@pytest.mark.parametrize("name", sorted(MODELS))
def test_numbers(name, card):
    here = random_decoder(MODELS[name])
    tokens = ids(2, 7)
    for first in range(1, len(here.config.layers) + 1):
        there = split(here, first)
        ran = []
        for one in (here, there):
            session = Session(one, 2, CAPACITY)
            found = [session.prefill([[5, 9, 2, 7], [3, 1]])]
            found += walked(session)[0]
            ran.append(found)
        for mine, theirs in zip(*ran, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
