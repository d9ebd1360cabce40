"""Whether the packages of the extra `ray` are there."""

from __future__ import annotations

from importlib.util import find_spec

from speculant.errors import ConfigError


def check_ray() -> None:
    """Raise ConfigError unless Ray is installed; it is not imported."""
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise ConfigError("Ray is not installed", 'pip install -c constraints.txt "speculant[ray]"')
