"""Where a replica finds its model's tracker."""

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.addresses import reachable_address

_WORKER_UID = "worker"


class TrackerLocation:
    """As configured; or, when it was lost there, where the own worker's supervisor has it or makes
    it anew."""

    def __init__(self, config: XavierConfig) -> None:
        self._config = config
        self._asked_before = False

    async def find(self) -> str:
        """The tracker's pool's address; raises what keeps worker or supervisor from answering."""
        first, self._asked_before = not self._asked_before, True
        if first or self._config.worker_address is None:
            return self._config.tracker_address
        worker = await xoscar.actor_ref(self._config.worker_address, _WORKER_UID)
        supervisor = await worker.get_supervisor_ref(add_worker=False)
        try:
            address: str = await supervisor.xavier_tracker_address(
                self._config.model_uid, True, self._config.hooks
            )
        except NotFoundError:
            # A supervisor that began anew knows no model until its workers register again, which
            # they do by themselves every 15 s only. If ours has already, this does nothing.
            await worker.get_supervisor_ref(add_worker=True)
            return self._config.tracker_address
        return reachable_address(address, via=supervisor.address)
