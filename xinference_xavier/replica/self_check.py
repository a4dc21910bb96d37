"""A replica's check of itself and of its links, for `xinference-xavier doctor`.

Threading: runs on the replica's background loop. A probe may open a link, which later fetches use.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import TransportError
from xinference_xavier.mirror.mirror import Mirror
from xinference_xavier.protocol.transfer import Endpoint, check_endpoint
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.cancels import cancel_circles
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.host import process_info
from xinference_xavier.runtime.net import check_range, free_ports

PROBE_DEADLINE = 5.0  # seconds for a peer's answer, and again for its link to open
MAX_PEERS = 64  # that are probed


async def self_check(
    config: XavierConfig,
    host: str,
    mirror: Mirror,
    process: TransferProcess,
    fingerprint_fields: Mapping[str, str],
) -> dict[str, Any]:
    """JSON-able. `host` is this replica's address, `fingerprint_fields` are its namespace's.
    `peers` maps each peer to why no link to it opens; None if one does."""
    peers = sorted(mirror.peers)[:MAX_PEERS]
    probed = await asyncio.gather(*(_probe(peer, mirror, process) for peer in peers))
    return {
        **process_info(),
        "cancel_circles": await cancel_circles(),
        "config": config.to_dict(),
        "fingerprint_fields": dict(fingerprint_fields),
        "transfer_address": process.endpoint and process.endpoint.address,
        "transfer_starts": process.starts,
        "transfer_error": process.error,
        **await asyncio.to_thread(_ports, host, config.port_range),
        "peers": dict(zip(peers, probed, strict=True)),
    }


def _ports(host: str, port_range: tuple[int, int] | None) -> dict[str, Any]:
    if port_range is None:
        return {"free_ports": None, "port_range_error": None}
    error = None
    try:
        check_range(*port_range)
    except TransportError as failure:
        error = str(failure)
    return {"free_ports": free_ports(host, port_range), "port_range_error": error}


async def _probe(peer: str, mirror: Mirror, process: TransferProcess) -> str | None:
    address = mirror.address(peer)
    if address is None:
        return None  # it just left
    try:
        actor = await within(PROBE_DEADLINE, xoscar.actor_ref(address, replica_uid(peer)))
        endpoint: Endpoint | None = await within(PROBE_DEADLINE, actor.transfer_endpoint())
        if endpoint is not None:
            endpoint = check_endpoint(endpoint)
    except Exception as error:  # xoscar raises whatever the peer raised
        return f"its engine at {address} does not answer: {str(error) or type(error).__name__}"
    if endpoint is None:
        return "it has no transfer process"
    return await process.probe_link(peer, endpoint, PROBE_DEADLINE)
