"""What clients may say about a named prefix.

Every check raises a ValueError that names the value, the reason and the remedy.
"""

import re

from xinference_xavier.errors import shown
from xinference_xavier.stats.answers import is_part_of_path

MAX_NAME = 200
"""Most characters of a name."""
MAX_SALT = 256
"""Most characters of a salt; xinference accepts as many."""
MAX_TTL = 366 * 86400.0
"""The longest lifetime, in seconds."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TTL = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_SALT = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{MAX_SALT}}}")
"""What xinference accepts."""


def check_name(name: str) -> str:
    if not name.strip() or not is_part_of_path(name) or not name.isprintable():
        raise ValueError(
            f"name={shown(name)} is empty, or has a slash, characters that cannot be printed, or "
            "only dots, which proxies take out of a path; choose another"
        )
    return name


def check_tenant(salt: object) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not _SALT.fullmatch(salt):
        raise ValueError(
            f"cache_salt={shown(salt)} is not a text of 1 to {MAX_SALT} characters without control "
            "characters; leave it out or use the one of your requests"
        )
    return salt


def read_ttl(value: object) -> float:
    """Seconds, from a number of them or a text such as "90s", "30m", "1h" or "7d"."""
    seconds: float = -1
    if isinstance(value, str) and (match := _TTL.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    if not 0 < seconds <= MAX_TTL:
        raise ValueError(
            f"ttl={shown(value)} is not a time of at most {MAX_TTL / 86400:.0f} days; use seconds "
            'or a text such as "30m", "1h" or "7d"'
        )
    return float(seconds)
