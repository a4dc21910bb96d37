"""The versions of vLLM that sharing supports."""

import re

from xinference_xavier.errors import ConfigError

SHARES = "XAVIER_SHARES"
"""The environment variable that tells a replica's processes to share."""
UNTESTED = "untested"
"""The variable's value where vLLM may be newer than all tested versions."""

OLDEST, NEWEST = (0, 31), (0, 33)
"""Both are supported; `make test-matrix` tests all versions between them."""


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


SUPPORTED = f">={_name(OLDEST)},<{_name((NEWEST[0], NEWEST[1] + 1))}"
"""The supported versions as the specifier of a requirement."""
SUPPORTED_OR_NEWER = f">={_name(OLDEST)}"
"""Likewise, with `xavier_untested_vllm`."""


def is_newer(version: str) -> bool:
    """True if a `version` is newer than all that were tested."""
    numbers = _numbers(version)
    return numbers is not None and numbers > NEWEST


def check(version: str, untested: bool = False) -> None:
    """Raises ConfigError for a vLLM that is too old, or too new unless it may be `untested`.

    Accepts a build from a working tree, which may have any version, or none.
    """
    numbers = _numbers(version)
    if numbers is not None and not OLDEST <= numbers <= NEWEST:
        newer = numbers > NEWEST
        if not (untested and newer):
            raise refusal(version, "is what this model's environment has", newer)


def refusal(vllm: str, reason: str, newer: bool = False) -> ConfigError:
    """The error for a version of `vllm`, or a requirement of one, that cannot share, with the ways
    out. One that is only too new may be tried."""
    return ConfigError(
        "vllm",
        vllm,
        f"{reason}, and sharing needs {_name(OLDEST)} to {_name(NEWEST)}",
        f"launch with virtual_env_packages=['vllm{SUPPORTED}'], "
        f"{'with xavier_untested_vllm=true to try it, ' if newer else ''}"
        "with xavier_backend=builtin, or without enable_xavier",
    )


def _numbers(version: str) -> tuple[int, int] | None:
    """Major and minor; None for a build from a working tree."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None or "dev" in version else (int(found[1]), int(found[2]))
