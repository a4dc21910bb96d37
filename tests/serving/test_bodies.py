"""A body that a route takes is refused with status 400, the value, the reason and the remedy."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse

from tests.serving.supervisors import api_context
from xinference_xavier.frontend.prefix import read_ttl
from xinference_xavier.protocol.prefixes import Terms
from xinference_xavier.serving import rest
from xinference_xavier.serving.bodies import Change, PrefixBody, PrefixTerms, Question, Weights
from xinference_xavier.serving.rest import add_route

MESSAGES = [{"role": "system", "content": "You are a guide."}]
GUIDE = {"name": "guide", "prompt": "text"}


class Api:
    """A route for each kind of body, which returns what was given."""

    async def change(self, body: Change) -> JSONResponse:
        return JSONResponse(body.model_dump(exclude_unset=True))

    async def weights(self, body: Weights) -> JSONResponse:
        return JSONResponse(body.model_dump(exclude_unset=True))

    async def explain(self, body: Question) -> JSONResponse:
        return JSONResponse(body.model_dump(exclude_unset=True))

    async def add(self, body: PrefixBody) -> JSONResponse:
        return JSONResponse(body.model_dump(exclude_unset=True))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    context, api = api_context(), Api()
    for endpoint in (api.change, api.weights, api.explain, api.add):
        add_route(context, "POST", f"/{endpoint.__name__}", "models:list", endpoint)
    context.app.include_router(context.router)
    transport = httpx.ASGITransport(context.app)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api", headers=headers
    ) as client:
        yield client


def guide(**fields: Any) -> bytes:
    return json.dumps({**GUIDE, **fields}).encode()


def question(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


CHANGE = "the body must be an object with enabled, routing, for_s, as application/json: "
WEIGHTS = "the body must be an object with version, as application/json: "
NEITHER = "the question is neither"
WRONG: list[tuple[str, bytes, str]] = [
    ("change", b"", f"{CHANGE}body=None: Field required"),
    ("change", b"nonsense", f"{CHANGE}Expecting value"),
    ("change", b"true", f"{CHANGE}body=True: "),
    ("change", b"{}", "nothing is given; give enabled or routing"),
    ("change", b'{"enabled": null}', "nothing is given"),
    ("change", b'{"for_s": 1}', "nothing is given"),
    ("change", b'{"enabled": 1}', f"{CHANGE}enabled=1: Input should be a valid boolean"),
    ("change", b'{"enabled": "false"}', "enabled='false': Input should be a valid boolean"),
    ("change", b'{"enabled": true, "more": 1}', "more=1: Extra inputs are not permitted"),
    ("change", b'{"enabled": true, "for_s": -1}', "for_s=-1: Input should be greater than or"),
    ("change", b'{"enabled": true, "for_s": "1"}', "for_s='1': Input should be a valid number"),
    (
        "change",
        b'{"routing": "fast"}',
        "routing='fast': Input should be 'auto', 'backlog' or",
    ),
    ("weights", b"{}", f"{WEIGHTS}version={{}}: Field required"),
    ("weights", b'{"version": 2}', "version=2: Input should be a valid string"),
    ("weights", b'{"version": ""}', "version='': String should have at least 1 character"),
    ("weights", question(version="v" * 65), "String should have at most 64 characters"),
    ("explain", b"{}", NEITHER),
    ("explain", question(prompt=""), NEITHER),
    ("explain", question(prompt="text", messages=MESSAGES), NEITHER),
    ("explain", question(prompt="text", tools=[{}]), NEITHER),
    ("explain", question(messages=[{}]), "message={} is not an object with a role"),
    ("explain", b'{"messages": [{"role": "user", "content": NaN}]}', "cannot be written as JSON"),
    ("explain", question(prompt="x" * (8 << 20)), "bytes of JSON, more than 8388608"),
    ("add", b"[]", "the body must be an object with "),
    ("add", guide(color="red"), "color='red': Extra inputs are not permitted"),
    ("add", guide(name=""), "name='' is empty"),
    ("add", guide(name=None), "name=None: Input should be a valid string"),
    ("add", guide(name="x" * 201), "String should have at most 200 characters"),
    ("add", guide(name="a/b"), "name='a/b' is empty, or has a slash"),
    ("add", guide(name=".."), "or only dots, which proxies take out of a path; choose another"),
    ("add", guide(name="a\nb"), "characters that cannot be printed"),
    ("add", guide(prompt=["a", "b"]), "prompt=['a', 'b']: Input should be a valid string"),
    ("add", guide(messages=MESSAGES), NEITHER),
    ("add", guide(lora_name=3), "lora_name=3: Input should be a valid string"),
    ("add", guide(copies=2), "copies=2: Input should be 1 or 'all'"),
    ("add", guide(retention="firm"), "retention='firm': Input should be 'soft' or 'hard'"),
    ("add", guide(cache_salt=""), "cache_salt='' is not a text of 1 to 256 characters"),
    ("add", guide(cache_salt=7), "cache_salt=7: Input should be a valid string"),
    ("add", guide(cache_salt="a\n"), "without control characters; leave it out"),
    ("add", guide(cache_salt="\ud800"), "cache_salt='\\ud800' is not a text"),
    ("add", guide(ttl="1w"), "ttl='1w' is not a time of at most 366 days; use seconds or a text"),
]


@pytest.mark.parametrize(
    ("route", "body", "detail"), WRONG, ids=[f"{each[0]} {each[1][:40]!r}" for each in WRONG]
)
async def test_a_wrong_body_is_refused(
    client: httpx.AsyncClient, route: str, body: bytes, detail: str
) -> None:
    answer = await client.post(f"/{route}", content=body)
    assert answer.status_code == 400
    assert detail in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100_000])
async def test_what_cannot_be_parsed_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await client.post("/change", content=body)).status_code == 400


async def test_a_body_of_another_type_is_refused(client: httpx.AsyncClient) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await client.post("/change", content=b'{"enabled": true}', headers=form)
    assert (answer.status_code, "as application/json" in answer.text) == (400, True)


async def test_a_body_that_is_too_long_is_not_read(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "MAX_BODY", 20)
    read = list[int]()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(100):
            read.append(number)
            yield b" " * 10

    answer = await client.post("/change", content=pieces())
    assert (answer.status_code, len(read)) == (413, 3)
    assert answer.json()["detail"] == "the body has more than 20 bytes; send a shorter one"


@pytest.mark.parametrize("fields", [{"messages": MESSAGES, "tools": [{"type": "function"}]}, GUIDE])
def test_a_text_is_kept_softly_for_an_hour_since_its_last_use(fields: dict[str, Any]) -> None:
    new = PrefixBody(**{**fields, "name": "guide"}).prefix("tenant")
    content = {key: value for key, value in fields.items() if key != "name"}
    assert new == ("tenant", "guide", json.dumps(content), Terms(3600.0, 1, "soft"))


def test_it_may_belong_to_an_adapter_and_have_other_terms() -> None:
    body = PrefixBody.model_validate(
        {**GUIDE, "lora_name": "poet", "ttl": "7d", "copies": "all", "retention": "hard"}
    )
    new = body.prefix("")
    assert json.loads(new.content) == {"prompt": "text", "lora_name": "poet"}
    assert new.terms == Terms(7 * 86400.0, "all", "hard")


def test_a_change_has_only_what_it_names() -> None:
    assert PrefixTerms.model_validate({"retention": "soft"}).given == {"retention": "soft"}


@pytest.mark.parametrize(
    ("value", "seconds"), [("90s", 90), ("30m", 1800), (" 1h", 3600), ("1.5h", 5400), (7, 7)]
)
def test_lifetimes(value: object, seconds: float) -> None:
    assert read_ttl(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "h", "-1s", 0, -1, "0s", 1e9, 10**400, "9999d", None, True, []]
)
def test_wrong_lifetimes(value: object) -> None:
    with pytest.raises(ValueError, match=r"ttl=.* is not a time of at most 366 days; use seconds"):
        read_ttl(value)
