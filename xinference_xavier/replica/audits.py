"""What a replica does with the results of probes."""

from collections.abc import Callable

from xinference_xavier.replica.canary import Canary, ProbeResult
from xinference_xavier.replica.event_reporter import EventReporter


def take_result(
    result: ProbeResult,
    canary: Canary,
    events: EventReporter,
    flush: Callable[[str | None], int],
) -> None:
    """Compare peers by a canary. After a failed audit, drop all rows with the same origin as the
    chunk, and fetch no more from there."""
    if result.lost:
        canary.stats.lost_probes += 1
        return
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
