"""The calls that peers and the tracker make to a replica: a thin shell over `Replica`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xoscar

from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest

if TYPE_CHECKING:
    from xinference_xavier.replica.replica import Replica


class ReplicaActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """See the methods of `Replica` with the same names."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica

    async def grant(self, request: GrantRequest) -> Grant:
        return self._replica.grant(request)

    async def release(self, grant_id: int) -> None:
        self._replica.release(grant_id)

    async def set_weights_version(self, version: str) -> bool:
        return await self._replica.set_weights_version(version)

    async def stats(self) -> dict[str, Any]:
        return await self._replica.full_stats()

    async def flush(self) -> int:
        return self._replica.flush()

    async def transfer_endpoint(self) -> Endpoint | None:
        return self._replica.transfer_endpoint

    async def self_check(self) -> dict[str, Any]:
        return await self._replica.self_check()

    async def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        return await self._replica.explain(question)
