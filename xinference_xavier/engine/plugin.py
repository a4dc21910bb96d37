"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`).

vLLM does so wherever this package is installed. So where nothing is shared, it imports next to
nothing.
"""

import os

from xinference_xavier.vllm_versions import SHARES


def install() -> None:
    """Raises ConfigError if this process should share and its vLLM does not do."""
    if SHARES in os.environ:
        from xinference_xavier.engine.process import install as listen

        listen()
