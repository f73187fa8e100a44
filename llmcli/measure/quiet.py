"""Another name for what is in `llmcli.measure.runs`."""

from llmcli.measure.runs import gc_disabled

quiet = gc_disabled
