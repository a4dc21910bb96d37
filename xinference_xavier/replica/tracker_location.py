"""Where a replica finds the tracker of its model."""

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.addresses import reachable_address

_WORKER_UID = "worker"


class TrackerLocation:
    """First the configured address; later the one that our worker's supervisor names. The
    supervisor creates a new tracker if necessary."""

    def __init__(self, config: XavierConfig) -> None:
        self._config = config
        self._is_first = True

    async def find(self) -> str:
        """Return the address of the tracker's pool. Raises whatever the calls to worker and
        supervisor raise."""
        is_first, self._is_first = self._is_first, False
        if is_first or self._config.worker_address is None:
            return self._config.tracker_address
        worker = await xoscar.actor_ref(self._config.worker_address, _WORKER_UID)
        supervisor = await worker.get_supervisor_ref(add_worker=False)
        try:
            address: str = await supervisor.xavier_tracker_address(
                self._config.model_uid, True, self._config.hooks
            )
        except NotFoundError:
            # A restarted supervisor knows no model until its workers register again, which they do
            # only every 15 s. If ours has registered already, this does nothing.
            await worker.get_supervisor_ref(add_worker=True)
            return self._config.tracker_address
        return reachable_address(address, via=supervisor.address)
