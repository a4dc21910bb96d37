"""A replica examined from inside, for whoever looks for the reason why it does not share.

Threading: on the replica's background loop. Opens links to peers where there are none yet, which
fetches will use.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import TransportError
from xinference_xavier.protocol.transfer import Contact, check_contact
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.cancels import cancel_circles
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.host import process_facts
from xinference_xavier.runtime.net import check_range, free_ports

REACH_DEADLINE = 5.0
"""Seconds in which a peer must answer and its link be open."""
MAX_PEERS = 64
"""That are tried."""


class Patient(NamedTuple):
    """What of a replica is examined. `ingredients` are its namespace's."""

    config: XavierConfig
    host: str
    mirror: Mirror
    process: TransferProcess
    ingredients: Mapping[str, str]


async def examine(patient: Patient) -> dict[str, Any]:
    """JSON-able. `peers` says of each why no link to it can be opened, None if one can."""
    config, process = patient.config, patient.process
    peers = sorted(patient.mirror.peers)[:MAX_PEERS]
    reached = await asyncio.gather(*(_reach(patient, peer) for peer in peers))
    return {
        **process_facts(),
        "cancel_circles": await cancel_circles(),
        "config": config.to_dict(),
        "ingredients": dict(patient.ingredients),
        "transfer_address": process.contact and process.contact.address,
        "transfer_starts": process.starts,
        "transfer_error": process.error,
        **await asyncio.to_thread(_ports, patient),
        "peers": dict(zip(peers, reached, strict=True)),
    }


def _ports(patient: Patient) -> dict[str, Any]:
    ports = patient.config.port_range
    if ports is None:
        return {"free_ports": None, "port_range_error": None}
    try:
        check_range(*ports)
    except TransportError as error:
        return {"free_ports": free_ports(patient.host, ports), "port_range_error": str(error)}
    return {"free_ports": free_ports(patient.host, ports), "port_range_error": None}


async def _reach(patient: Patient, peer: str) -> str | None:
    address = patient.mirror.address(peer)
    if address is None:
        return None  # it has just left
    try:
        actor = await within(REACH_DEADLINE, xoscar.actor_ref(address, replica_uid(peer)))
        contact: Contact | None = await within(REACH_DEADLINE, actor.transfer_contact())
        if contact is not None:
            check_contact(*contact)
    except Exception as error:  # what a peer raises arrives as whatever it is
        return f"its engine at {address} does not answer: {_said(error)}"
    if contact is None:
        return "it has no transfer process"
    return await patient.process.reach(peer, contact, REACH_DEADLINE)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
