"""What an answer takes after its first token counts as well: steps are longer where more run."""

import asyncio
import random
from collections import Counter
from statistics import fmean

import pytest

from tests.world.world import ENGINE, World, in_world, play, text

COMMON = text("common", 5120)


def played(routing: str) -> tuple[Counter[str], float]:
    """Questions about one text: requests by replica, and the mean seconds of an answer's token."""
    sent, tokens = Counter[str](), list[float]()

    async def scenario(world: World) -> None:
        source = random.Random(0)
        while world.now < 60.0:
            await asyncio.sleep(source.expovariate(5.0))
            world.ask(COMMON + text(f"question {len(world.answers)}", 80), 300)
        await world.done()
        for each in (each for each in world.answers if each.asked > 10.0):
            assert each.status == 200
            assert each.first is not None
            assert each.last is not None
            sent[each.replica] += 1
            tokens.append((each.last - each.first) / 299)

    play(scenario, *(f"m-{number}" for number in range(8)), routing=routing)
    return sent, fmean(tokens)


def test_a_prefix_that_all_have_in_common_does_not_crowd_its_first_holder() -> None:
    sent, token_s = played("auto")
    assert len(sent) == 8
    assert max(sent.values()) / fmean(sent.values()) <= 1.25
    _, in_turn_s = played("off")
    assert token_s <= 1.05 * in_turn_s


@pytest.mark.parametrize("scarce", ["slots", "blocks"])
def test_a_replica_without_room_gets_nothing_while_another_has_some(scarce: str) -> None:
    """It would wait there until an answer ends, however little there is to compute."""
    engine = ENGINE._replace(requests=4) if scarce == "slots" else ENGINE._replace(kv_tokens=9000)

    @in_world("m-0", "m-1", engine=engine)
    async def plays(world: World) -> None:
        long = text("long", 4096)
        await world.ask(long, 10).task
        (holder,) = {each.replica for each in world.answers}
        others = 4 if scarce == "slots" else 1
        for number in range(others):
            world.replicas[holder].other(text(f"other {number}", 100 if others > 1 else 8000), 3000)
        await asyncio.sleep(2.5)
        asked = world.ask(long + "and?" * 20, 10)
        await asked.task
        assert asked.replica != holder

    plays()


@in_world("m-0")
async def test_an_answers_length_is_foretold_by_its_session_its_limit_or_all(world: World) -> None:
    async def steps(prompt: str, answer: int = 10, session: str = "", **body: int) -> float:
        """The foretold steps of the answer."""
        asked = world.ask(prompt, answer, headers={"x-session-id": session}, **body)
        await asked.task
        await asyncio.sleep(3.0)
        return asked.terms["decode"] / (ENGINE.base_s + ENGINE.slope_s)

    assert await steps("a", 40, "chat", max_tokens=100) == pytest.approx(100, abs=0.2)
    assert await steps("b", 400, max_tokens=3000) == pytest.approx(40, abs=0.2), "as all"
    assert await steps("c", 60, "chat", max_tokens=3000) == pytest.approx(40, abs=0.2), "session"
    assert await steps("d", 100, max_tokens=2500) == pytest.approx(230, abs=0.2), "such limits"
    assert await steps("e", 100, max_tokens=30) == pytest.approx(30, abs=0.2), "never more"
    assert await steps("f", 100, "chat") == pytest.approx(50, abs=0.2)


@in_world("m-0")
async def test_an_answer_without_any_item_has_no_time(world: World) -> None:
    route = world.router.open()
    assert route is not None
    await world.router.place(route)
    world.router.completed(route)
    world.router.end(route)
    assert not sum(world.router.counts.decodes.actual.counts)


@in_world("m-0")
async def test_forecasts_are_compared_with_what_came(world: World) -> None:
    foretold = Counter[str]()
    for number in range(3):
        asked = world.ask(text("long", 4096) + text(f"{number}", 100), 50, max_tokens=50)
        await asked.task
        foretold.update(asked.terms)
        assert asked.terms.keys() == {"backlog", "fetch", "compute", "decode"}
    await world.ask(text("whole", 100), 50, stream=False).task
    counts = world.router.counts
    assert counts.first_bytes.keys() == {"backlog", "local"}
    assert counts.decodes.predicted.sum == pytest.approx(foretold["decode"], abs=0.01)
    assert counts.decodes.actual.sum == pytest.approx(3 * 49 * 0.0071, rel=0.02)
    assert counts.decodes.error.sum == pytest.approx(3 * 0.0071, rel=0.1), "the first token"
    first = sum(each.predicted.sum for each in counts.first_bytes.values())
    assert first == pytest.approx(foretold.total() - foretold["decode"], abs=0.01)
    for found in counts.first_bytes.values():
        assert found.error.sum == pytest.approx(abs(found.actual.sum - found.predicted.sum))
