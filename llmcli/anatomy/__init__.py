"""Tensors, formulas, FLOPs and bytes of each part of a model. No torch."""

from llmcli.anatomy.plan import Plan, parameters, plan, states, stored_shapes
from llmcli.graph.spec import TensorSpec

__all__ = ["Plan", "TensorSpec", "parameters", "plan", "states", "stored_shapes"]
