"""Tensors, formulas, FLOPs and bytes of each part of a model. No torch."""

from llmcli.anatomy.model import parameters, states, stored_shapes
from llmcli.anatomy.plan import Plan, plan
from llmcli.graph.spec import TensorSpec

__all__ = ["Plan", "TensorSpec", "parameters", "plan", "states", "stored_shapes"]
