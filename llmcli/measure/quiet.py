"""See `llmcli.measure.runs`."""

from llmcli.measure.runs import quiet as quiet
