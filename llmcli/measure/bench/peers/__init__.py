"""Other engines that can run the same weights beside ours, where they are installed."""

from llmcli.measure.bench.peers.open import PEERS, PeerEngine, open_peer
from llmcli.measure.bench.peers.same import compare

__all__ = ["PEERS", "PeerEngine", "compare", "open_peer"]
