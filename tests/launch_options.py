"""How a launch parses or refuses options."""

from typing import Any

import pytest

from xinference_xavier.config import ENABLE, parse_options, take_launch_options
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import LaunchOptions


def parsed(**options: Any) -> LaunchOptions:
    return parse_options(options)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        take_launch_options({ENABLE: True, **options})
    return str(caught.value)
