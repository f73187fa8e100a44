"""The types of this folder's fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from llmcli.loading.load import Model

Checkpoints = Callable[[str], Path]
References = Callable[[str, str], PreTrainedModel]
Models = Callable[[str, str], Model]
