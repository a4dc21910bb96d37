"""Cross-replica prefix cache for vLLM models served by xinference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xinference_xavier._version import __version__

if TYPE_CHECKING:
    from xinference_xavier.serving.extension import XavierExtension


__all__ = ["__version__", "extension"]


def extension() -> XavierExtension:
    """Factory for ``XINFERENCE_EXTENSIONS=xinference_xavier:extension``.

    The serving side is imported only here: replicas import this package and need none of it.
    """
    from xinference_xavier.serving import tenants
    from xinference_xavier.serving.extension import XavierExtension, install

    install()
    return tenants.TenantsExtension() if tenants.by_key() else XavierExtension()
