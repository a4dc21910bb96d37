"""What a replica makes of the probes that its engine has computed."""

from collections.abc import Callable

from xinference_xavier.replica.canary import Canary, ProbeResult
from xinference_xavier.replica.event_reporter import EventReporter


def take_result(
    result: ProbeResult,
    canary: Canary,
    events: EventReporter,
    flush: Callable[[str | None], int],
) -> None:
    """Compare peers by a canary. After a failed audit, drop everything from where the chunk came,
    and fetch nothing from there."""
    if result.key is not None:
        canary.probed(result.key, result.sketch)
        return
    canary.stats.audits += 1
    if result.difference is None:
        return
    canary.stats.failed_audits += 1
    events.audit_failed(result.donor, result.difference)
    if result.donor is not None:
        canary.distrust(result.donor, result.difference)
    flush(result.donor)
