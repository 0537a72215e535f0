"""Versions that affect a result, for manifests and stage keys."""

from importlib.metadata import version

TESTED_TORCH = "2.13.0"


def installed_version(package: str) -> str:
    return version(package)


def result_versions(*packages: str) -> dict[str, str]:
    """Installed versions of bitsmith and of the named packages."""
    return {name: version(name) for name in ("bitsmith", *packages)}
