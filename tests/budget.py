"""What a run took and what it left out: `pytest --budget=900 --skips=FILE`.

The processor seconds of the tests, their children's too, are printed at the end of every run; with
`--budget` a run that takes more fails. The reasons of what was skipped are added to FILE, a line
each time, so that a table of several runs can be made of it.
"""

import os
from collections.abc import Iterator

import pytest


def processor_seconds() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


class Budget:
    """Each worker of xdist sends what a test took; who reads the reports adds it up."""

    def __init__(self, most: float | None, skips: str | None) -> None:
        self.most, self.skips = most, skips
        self.seconds = self._begun = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._begun = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append(("processor", processor_seconds() - self._begun))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds += sum(
                value for name, value in report.user_properties
                if name == "processor" and isinstance(value, float)
            )  # fmt: skip

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.most is not None and self.seconds > self.most and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        of = "" if self.most is None else f" of {self.most:,.0f}"
        terminalreporter.write_line(f"{self.seconds:,.0f}{of} processor seconds")
        if self.skips is not None:
            with open(self.skips, "a", encoding="utf-8") as file:
                for report in terminalreporter.stats.get("skipped", []):
                    print(report.longrepr[-1].removeprefix("Skipped: "), file=file)
