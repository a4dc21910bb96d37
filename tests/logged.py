"""What this package logged in a test.

Not all that `caplog` has is the test's: asyncio reports a future whose error nobody retrieved when
it is collected, and an earlier test may have left one.
"""

from logging import LogRecord

import pytest


def records(caplog: pytest.LogCaptureFixture) -> list[LogRecord]:
    return [record for record in caplog.records if record.name.startswith("xinference_xavier")]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in records(caplog)]
