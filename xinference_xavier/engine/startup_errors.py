"""Reports to the launcher why an engine did not start; vLLM itself only logs it.

vLLM calls `install` in each process that should share. Engines and their worker processes log the
error that ends their start, and this module listens. First it refuses a vLLM that is too old or too
new.
"""

from __future__ import annotations

import logging
import os
import traceback

import vllm

from xinference_xavier import vllm_versions
from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.protocol.startup_errors import report_startup_error
from xinference_xavier.vllm_versions import SHARES, UNTESTED

_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_PHRASE = "failed to start"


def install() -> None:
    """Raises ConfigError if this vLLM does not do."""
    version = getattr(vllm, "__version__", "dev")
    vllm_versions.check(version, untested=os.environ.get(SHARES) == UNTESTED)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Listener) for handler in logger.handlers):
            logger.addHandler(_Listener(logging.ERROR))


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or _PHRASE not in record.getMessage():
            return
        config = _config_of(error)
        if config is not None:
            report_startup_error(config, error)


def _config_of(error: BaseException) -> XavierConfig | None:
    """The configuration of the engine that failed to start; None if it shares nothing."""
    # The log record names no engine, but the code that failed had the engine's configuration.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        transfer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None)
        if extra and XAVIER in extra:
            return XavierConfig.from_dict(extra[XAVIER])
    return None
