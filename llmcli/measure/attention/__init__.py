"""What the heads of a model attend to: metrics, matrices, pairs, and the proof of each number."""

from llmcli.measure.attention.labels import LABELS
from llmcli.measure.attention.metrics import METRICS, USUAL
from llmcli.measure.attention.run import measure_attention
from llmcli.measure.attention.synthetic import synthetic
from llmcli.measure.attention.wanted import Drawn

__all__ = ["LABELS", "METRICS", "USUAL", "Drawn", "measure_attention", "synthetic"]
