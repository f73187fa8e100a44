"""`timing`: where the time of reading a prompt and of writing tokens goes."""

from llmcli.measure.timing.report import measure_timing
from llmcli.measure.timing.workload import working_set

__all__ = ["measure_timing", "working_set"]
