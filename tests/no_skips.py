"""A pytest plugin: where CI=true, a skipped test fails the session.

Some tests need programs that pip cannot install (clang, a browser). They skip on a user's machine. In CI those
programs are installed, so that a skip there means that something was not tested.
"""

import os
from collections.abc import Iterator

import pytest

_skipped: list[str] = []


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(f"{report.nodeid}: {_reason(report)}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    if _skipped and os.environ.get("CI") == "true":
        terminalreporter.section("skipped tests fail the session where CI=true", red=True)
        for line in _skipped:
            terminalreporter.write_line(line)
