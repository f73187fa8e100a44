"""Another name for what is in `llmcli.measure.peaks`."""

from llmcli.measure.peaks import PhaseMemory, phase_peak

Held = PhaseMemory
__all__ = ["Held", "phase_peak"]
