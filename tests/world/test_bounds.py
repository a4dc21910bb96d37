"""What is remembered is bounded, and whatever happens to a request, it leaves nothing."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.world.world import World, in_world, play, text
from xinference_xavier.frontend import model_router
from xinference_xavier.routing import lengths, texts


def test_any_number_of_sessions_texts_and_names_leave_memory_flat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, most in (
        (model_router, "LIMIT", 20),
        (model_router, "MAX_NAMED", 400),
        (lengths, "LIMIT", 20),
        (texts, "MAX_PIECES", 30),
    ):
        monkeypatch.setattr(module, name, most)

    async def scenario(world: World) -> None:
        for number in range(100):
            session = {"x-session-id": f"{number}"}
            await world.answer(text(f"text {number}", 200), headers=session)
        await asyncio.sleep(3.0)
        router = world.router
        assert len(router._sessions) == 20
        assert len(router._named) <= 20
        assert len(router._router.answers._sessions) == 20
        assert len(router._texts._pieces) == 30

    play(scenario, "m-0", "m-1")


EVENTS = ("ask", "ask whole", "leave", "cancel", "full", "room", "away", "back", "drain", "stay")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 0.6)), max_size=25), st.integers()
)
def test_a_request_leaves_nothing_wherever_it_ends(
    events: list[tuple[str, float]], seed: int
) -> None:
    @in_world("m-0", "m-1", "m-2", request_limit=2)
    async def plays(world: World) -> None:
        source = random.Random(seed)
        for event, pause in events:
            replica = world.replicas[source.choice([*world.replicas])]
            asked = source.choice(world.answers) if world.answers else None
            if event.startswith("ask"):
                prompt = text(f"{source.randrange(3)}", source.choice([10, 3000]))
                world.ask(prompt, source.choice([1, 300]), stream=event == "ask")
            elif event in ("leave", "cancel") and asked is not None and asked.task is not None:
                asked.leave() if event == "leave" else asked.task.cancel()
            elif event in ("full", "room"):
                replica.limit = 0 if event == "full" else 2
            elif event in ("away", "back"):
                away = ConnectionRefusedError("nobody listens") if event == "away" else None
                replica.fails = away
            elif event in ("drain", "stay"):
                replica.drain(float("inf") if event == "drain" else None)
            await asyncio.sleep(pause)
        for replica in world.replicas.values():
            replica.fails, replica.limit = None, 2
            replica.drain(None)
        await world.done()

    plays()
