"""What a test cannot do without: where it is missing the test is skipped, with a line."""

import pytest

from llmcli.kernels import native
from llmcli.measure.peaks import Peak

needs_kernels = pytest.mark.skipif(native.level() is None, reason="there are no kernels")


def most_during(look):
    """The report of `look()`, which is green, and how many bytes more than before it held at most.

    Where the system does not report a peak of memory, the test is skipped.
    """
    with Peak() as peak:
        before = peak.resident
        report = look()
    assert report.ok, report.checks
    if before is None or peak.resident is None:
        pytest.skip("the system does not report peak memory")
    return report, peak.resident - before
