"""`timing`: where the time of reading a prompt and of writing tokens goes."""

from llmcli.measure.timing.plan import working_set
from llmcli.measure.timing.report import measure_timing

__all__ = ["measure_timing", "working_set"]
