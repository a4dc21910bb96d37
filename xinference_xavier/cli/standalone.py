"""Sharing between vLLM servers without xinference: the tracker in a process of its own.

No one replaces a lost tracker: restart it at the same address, and the replicas fill it again.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig, kv_transfer_config, parse_options
from xinference_xavier.errors import ConfigError
from xinference_xavier.limits import CALL_DEADLINE, LOOK
from xinference_xavier.options import ONLY_UNDER_XINFERENCE
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import (
    is_wildcard,
    join_address,
    split_address,
    without_brackets,
)
from xinference_xavier.runtime.aio import UNREACHABLE as UNREACHABLE
from xinference_xavier.runtime.aio import ask
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.runtime.validate import MAX_PORT, check_count
from xinference_xavier.tracker.actor import BlockTracker

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)


def transfer_config(
    model_uid: str, address: str, options: Mapping[str, Any], name: str | None = None
) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a model whose tracker is at `address`, and for the server of
    that `name`. `options` are those of a launch. Raises ConfigError."""
    for option in ONLY_UNDER_XINFERENCE:
        if (value := options.get(option)) is not None:
            raise ConfigError(
                option, value, "does nothing in a server without xinference", "leave it out"
            )
    parsed = parse_options(options)
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            "name", name, "is not a name", "use letters, digits, dots, dashes and underscores"
        )
    check_reachable(address)
    if parsed.pool_bytes is None:
        raise ConfigError(
            "xavier_pool_bytes", None, "is required without xinference", "use a size such as 4GiB"
        )
    return kv_transfer_config(XavierConfig(model_uid, address, replica=name, **vars(parsed)))


def check_reachable(address: str) -> None:
    """Raises ConfigError for what cannot be the address of a tracker as others reach it."""
    host, port = endpoint(address)
    if is_wildcard(host):
        raise ConfigError(
            "address", address, "is not an address that replicas can reach", "use the tracker's own"
        )
    if not port:
        raise ConfigError("address", address, "has no port", "use the one the tracker listens on")


async def serve(
    model_uid: str,
    address: str,
    *,
    hooks: str | None,
    listening: Callable[[str], object],
    on_event: Callable[[Mapping[str, Any]], object],
    until: asyncio.Event,
) -> None:
    """Serve the model's tracker until `until` is set.

    `listening` is called once with the address, `on_event` with each event in the form of
    `event_dict`. Raises ConfigError if it cannot listen at `address`.
    """
    host, port = endpoint(address)
    try:
        pool = await xoscar.create_actor_pool(
            join_address(host, port), n_process=0, use_uvloop=False
        )
    except OSError as error:
        raise ConfigError(
            "address", address, f"cannot be used ({error})", "use a free port of this host"
        ) from None
    async with pool:
        tracker = await xoscar.create_actor(
            BlockTracker,
            model_uid,
            hooks=hooks,
            address=pool.external_address,
            uid=tracker_uid(model_uid),
        )
        listening(pool.external_address)
        forwarding = asyncio.ensure_future(_forward_events(tracker, on_event))
        await until.wait()
        forwarding.cancel()
        with suppress(asyncio.CancelledError):
            await forwarding


async def set_weights_version(model_uid: str, address: str, version: str) -> dict[str, list[str]]:
    """See `BlockTracker.set_weights_version`. Raises ConfigError, ValueError for a malformed
    version, and what `UNREACHABLE` has."""
    check_reachable(address)
    answers: dict[str, list[str]] = await ask(
        2 * CALL_DEADLINE,
        without_brackets(address),
        tracker_uid(model_uid),
        "set_weights_version",
        version,
    )
    return answers


async def _forward_events(tracker: Any, on_event: Callable[[Mapping[str, Any]], object]) -> None:
    last, log = 0, RateLimitedLog(logger)
    while True:
        try:
            for number, event in await tracker.events(last):
                last = number
                on_event(event)
        except Exception as error:  # the disk of the output may be full for a moment
            log.warn("events", "events are not printed: error=%r", error)
        await asyncio.sleep(LOOK)


def endpoint(address: str) -> tuple[str, int]:
    """Host and port; raises ConfigError."""
    try:
        host, port = split_address(address)
        host.encode("idna")  # as whoever looks it up does
        check_count("port", port, 0, MAX_PORT)
        return host, port
    except ValueError:
        raise ConfigError(
            "address",
            address,
            "is not of the form host:port, with a port of at most 65535",
            "use an address such as 10.0.0.1:9920",
        ) from None
