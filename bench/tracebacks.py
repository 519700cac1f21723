"""A pytest plugin (``-p bench.tracebacks``): a failure's traceback at once. pytest itself tells all of them at the end,
which a run that is cut short never reaches."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that started them
        config.pluginmanager.register(_Tracebacks(config))


class _Tracebacks:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")
            terminal.flush()  # who ends this process may leave no time for it
