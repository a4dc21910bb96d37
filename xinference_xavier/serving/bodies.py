"""The bodies that the REST routes take. FastAPI reads them, and describes them in `/openapi.json`.

Times are in seconds.
"""

import json
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    model_validator,
)

from xinference_xavier.frontend.prefix import MAX_NAME, check_name, check_tenant, read_ttl
from xinference_xavier.options import Routing
from xinference_xavier.protocol.prefixes import (
    DEFAULT_TTL,
    LORA,
    Copies,
    NewPrefix,
    Retention,
    Terms,
)
from xinference_xavier.protocol.tracker import (
    MAX_CHANGE_SECONDS,
    MAX_WEIGHTS_VERSION,
    pack_question,
)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Change(Body):
    """Settings of a model that runs. What is missing stays."""

    # The tracker's method for a setting is `set_` and its name.
    enabled: StrictBool | None = None
    """True if its replicas share."""
    routing: Routing | None = None
    """The way in which requests find a replica."""
    for_s: Annotated[float, Strict(), Field(ge=0, le=MAX_CHANGE_SECONDS)] | None = None
    """Seconds after which all that was changed for some time is as before; 0 puts it back at once.
    Without it, the change lasts."""

    @property
    def settings(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"for_s"})

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.settings:
            raise ValueError("nothing is given; give enabled or routing")
        return self


class Weights(Body):
    """The name of the weights that the replicas have after a reset."""

    version: Annotated[str, Field(min_length=1, max_length=MAX_WEIGHTS_VERSION)]
    """Any name; replicas with the same one share."""


class Question(Body):
    """A prompt, or the messages of a chat."""

    prompt: str | None = None
    """The text of a completion."""
    messages: list[dict[str, Any]] | None = None
    """The messages of a chat, in OpenAI's form."""
    tools: list[dict[str, Any]] | None = None
    """Tools for the messages, in OpenAI's form."""
    cache_salt: Annotated[str, AfterValidator(check_tenant)] | None = None
    """The tenant that it belongs to."""

    @property
    def question(self) -> dict[str, Any]:
        given = {"prompt": self.prompt, "messages": self.messages, "tools": self.tools}
        return {name: value for name, value in given.items() if value}

    @model_validator(mode="after")
    def _is_one_question(self) -> Self:
        pack_question(self.question)
        return self


class PrefixTerms(Body):
    """How a named prefix is kept."""

    ttl: Annotated[float, BeforeValidator(read_ttl, json_schema_input_type=float | str)] = (
        DEFAULT_TTL
    )
    """Seconds since the last use, or a text such as "30m", "1h" or "7d"."""
    copies: Copies = 1
    """How many replicas keep it: 1 or "all"."""
    retention: Retention = "soft"
    """When its chunks are evicted: never ("hard"), or after everything else ("soft")."""

    @property
    def given(self) -> dict[str, Any]:
        return self.model_dump(include={*Terms._fields}, exclude_unset=True)


class PrefixBody(Question, PrefixTerms):
    """A text to keep: a prompt, or messages and perhaps tools."""

    name: Annotated[str, Field(max_length=MAX_NAME), AfterValidator(check_name)]
    """The name by which requests use the text, without a slash."""
    lora_name: Annotated[str, Field(min_length=1)] | None = None
    """The adapter that it is computed for."""

    def prefix(self, tenant: str) -> NewPrefix:
        adapter = {} if self.lora_name is None else {LORA: self.lora_name}
        content = json.dumps({**self.question, **adapter})
        return NewPrefix(tenant, self.name, content, Terms(**self.given))
