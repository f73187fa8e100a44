"""For each part of a model: its tensors, formulas, FLOPs and bytes. No torch."""

from llmcli.anatomy.model import activations, calculated, parameters, states, unwritten
from llmcli.graph.spec import TensorSpec

__all__ = ["TensorSpec", "activations", "calculated", "parameters", "states", "unwritten"]
