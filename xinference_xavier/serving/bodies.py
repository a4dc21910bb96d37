"""What the REST routes take and return, as the API's `/openapi.json` describes it.

A report is a `ModelStatus`, whose classes explain its fields. Times are in seconds, sizes in bytes.
Endpoints read bodies themselves, because a refusal names the remedy.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, StrictStr

from xinference_xavier.frontend.prefix import DEFAULT_TTL, MAX_NAME, MAX_SALT, Copies, Retention
from xinference_xavier.options import Routing
from xinference_xavier.protocol.tracker import MAX_CHANGE_SECONDS, MAX_WEIGHTS_VERSION
from xinference_xavier.stats.answers import NamedPrefix
from xinference_xavier.stats.schema import ModelStatus, described


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Change(Body):
    """Settings of a model that runs. What is missing stays."""

    # The tracker's method for a setting is `set_` and its name.
    enabled: StrictBool | None = None
    """Sharing between its replicas."""
    routing: Routing | None = None
    """The way in which requests find a replica."""
    for_s: Annotated[float, Strict(), Field(ge=0, le=MAX_CHANGE_SECONDS)] | None = None
    """Seconds after which all that was changed for some time is as before; 0 puts it back at once.
    Without it, the change lasts."""


class Weights(Body):
    """The name of the weights that the replicas have after a reset."""

    version: Annotated[StrictStr, Field(min_length=1, max_length=MAX_WEIGHTS_VERSION)]
    """Any name; replicas with the same one share."""


class Question(Body):
    """A prompt, or the messages of a chat."""

    prompt: str | None = None
    """The text of a completion."""
    messages: list[dict[str, Any]] | None = None
    """In OpenAI's form."""


class PrefixTerms(Body):
    """How a named prefix is kept."""

    ttl: float | str = DEFAULT_TTL
    """Seconds since the last use, or a text such as "30m", "1h" or "7d"."""
    copies: Copies = 1
    """How many replicas keep it: 1 or "all"."""
    retention: Retention = "soft"
    """Whether its chunks are never evicted ("hard"), or after everything else ("soft")."""


class PrefixBody(Question, PrefixTerms):
    """A text to keep: a prompt, or messages and perhaps tools."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    """Requests use the text by it; without slash."""
    tools: list[dict[str, Any]] | None = None
    """Go with messages, in OpenAI's form."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    """The tenant that it belongs to."""
    lora_name: str | None = None
    """The adapter that it is computed for."""


@dataclass(kw_only=True)
class Report(ModelStatus):
    """How the replicas of a model share."""

    prefixes: list[NamedPrefix] = described(
        "The 100 named prefixes without a tenant that were used last; none if the caller may "
        "not ask the model.",
        list,
    )


@dataclass(kw_only=True)
class Flushed(Report):
    """A report after the pools were emptied."""

    answers: dict[str, list[str]] = described(
        'The replicas that were "flushed" and those that are "unreachable", by incarnation.',
        dict,
    )


@dataclass(kw_only=True)
class Joined(Report):
    """A report after weights got their name."""

    answers: dict[str, list[str]] = described(
        'The replicas that "joined" those with the same weights, those that were "not_reset" '
        'and those that are "unreachable", by incarnation.',
        dict,
    )


class _Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Reports(_Answer):
    models: list[Report]
    """Those whose trackers answer."""
    unavailable: dict[str, str]
    """Why the others do not, by uid."""


class Cluster(_Answer):
    """What `doctor` examines. A process has its host, versions, environment and limits; those of
    xinference also `missing`: what their xinference lacks, without which the extension is off. An
    `error` stands in place of what did not answer."""

    api: dict[str, Any]
    """The process that answers."""
    supervisor: dict[str, Any]
    """xinference's supervisor."""
    workers: dict[str, dict[str, Any]]
    """xinference's workers, by address."""
    models: dict[str, dict[str, Any]]
    """The models by uid, each with its `report` without `prefixes`, its `tracker`'s process and the
    `self_checks` of its replicas."""


class PlacedChunk(_Answer):
    """A part of a prompt."""

    first: int = Field(alias="from")
    """Token at which it begins."""
    end: int = Field(alias="to")
    """Token before which it ends."""
    replicas: dict[str, Literal["pool", "disk", "none"]]
    """Each replica's place for it, by incarnation."""


class Explained(_Answer):
    """Where a prompt's chunks are now."""

    prompt_tokens: int
    """Its length."""
    context_tokens: int
    """The model's limit."""
    chunk_tokens: int
    """The length of a chunk."""
    chunks: list[PlacedChunk]
    """Those of the prompt, in order."""


class NamedPrefixes(_Answer):
    prefixes: list[NamedPrefix]
    """Those of the tenant, or those without one."""


class Removed(_Answer):
    removed: str
    """The name."""


class Refusal(_Answer):
    detail: str
    """The reason and, where there is one, the remedy."""
