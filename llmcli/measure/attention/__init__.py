"""What the heads of a model attend to: metrics, matrices, pairs, and the proof of each number."""

from llmcli.measure.attention.labels import LABELS
from llmcli.measure.attention.run import measure_attention
from llmcli.measure.attention.synthetic import synthetic
from llmcli.measure.attention.wanted import Drawn
from llmcli.reports.head_metrics import METRICS, USUAL

__all__ = ["LABELS", "METRICS", "USUAL", "Drawn", "measure_attention", "synthetic"]
