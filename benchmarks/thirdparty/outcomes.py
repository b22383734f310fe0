"""A plugin of pytest that notes the outcome of each test at once, so that those before a crash are known."""

import json
import os
from pathlib import Path

_FILE = Path(os.environ["NCZ_THIRDPARTY_OUTCOMES"], f"rank{os.environ.get('HOROVOD_RANK', '0')}.jsonl")


def pytest_runtest_logreport(report) -> None:
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    if report.failed:
        outcome = getattr(report.longrepr, "reprcrash", None) or report.longrepr
        outcome = str(getattr(outcome, "message", outcome)).strip().partition("\n")[0][:300] or "failed"
    with open(_FILE, "a") as file:
        print(json.dumps([report.nodeid, outcome]), file=file)
