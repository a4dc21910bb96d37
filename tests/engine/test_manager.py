"""vLLM's scheduler is answered at once, the pool stays in order, and each token is counted once."""

from importlib.util import find_spec
from unittest.mock import Mock

import pytest

from tests.engine.scheduling import (
    CHUNK,
    Request,
    Scheduling,
    assert_nothing_left,
    chunks,
    layout_of,
    slow_engine,
    waiting,
    window_scan,
)
from tests.logged import records
from xinference_xavier.engine.keys import Group
from xinference_xavier.peers import DISK
from xinference_xavier.pool.pool import PoolCounts

FAILS = Mock(side_effect=ArithmeticError("planned"))


class TestLookup:
    def test_a_cold_request_gets_a_miss_at_once(self, vllm: Scheduling) -> None:
        assert vllm.attempt(vllm.ask(6)) == 0
        assert vllm.tier.fetches == []
        assert not vllm.manager.has_pending_work()

    def test_chunks_in_the_pool_are_hits_up_to_the_first_gap(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys[:3])
        vllm.fill(keys[4:])
        assert vllm.attempt(vllm.arrive("r", keys)) == 3

    def test_chunks_being_stored_are_neither_hits_nor_fetched(self, vllm: Scheduling) -> None:
        storing = vllm.ask(4, "s", a=4)
        begun = vllm.begin_store(storing, storing.keys)
        request = vllm.arrive("r", storing.keys)
        assert vllm.attempt(request) == 0
        assert vllm.tier.fetches == []
        vllm.stored(storing, begun)
        assert vllm.attempt(request) == 4

    @pytest.mark.parametrize(
        ("own", "held", "hits"),
        [
            (1, {"a": range(1, 5)}, None),
            (1, {"a": range(1, 4)}, 1),
            (3, {"a": range(6)}, 3),
            (1, {"a": range(1, 3), "b": range(3, 6)}, 1),
        ],
        ids=["long enough", "too short", "the rest is too short", "held by two peers"],
    )
    def test_only_a_run_of_four_chunks_that_one_peer_holds_is_fetched(
        self, own: int, held: dict[str, range], hits: int | None
    ) -> None:
        vllm = Scheduling(min_fetch_tokens=4 * CHUNK)
        keys = chunks("prompt", 6)
        vllm.fill(keys[:own])
        vllm.tier.peers_hold(**{peer: [keys[n] for n in numbers] for peer, numbers in held.items()})
        assert vllm.attempt(vllm.arrive("r", keys)) == hits

    def test_nothing_is_fetched_while_the_tier_is_not_ready(self, vllm: Scheduling) -> None:
        vllm.tier.is_ready = False
        assert vllm.attempt(vllm.ask(6, a=6)) == 0


def test_an_engine_that_does_not_share_stores_and_loads_nothing() -> None:
    vllm = Scheduling(shares=False)
    request = vllm.ask(4, a=4)
    vllm.fill(request.keys)
    assert vllm.attempt(request) == 0
    assert (vllm.tier.fetches, vllm.tier.stored_rows) == ([], [])


class TestErrors:
    """An error of ours costs a hit or a store. It never ends the engine."""

    def test_a_lookup_that_raises_is_a_miss(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        request = vllm.ask(6, a=6)
        monkeypatch.setattr(vllm.manager.selection, "plan", FAILS)
        for _ in range(2):
            assert vllm.attempt(request) == 0
        assert vllm.manager.stats()["scheduler_errors"] == 1
        (record,) = records(caplog)
        assert record.exc_info is not None
        vllm.schedule(request, 0)
        vllm.stored(request, vllm.begin_store(request, request.keys))
        vllm.finish(request)
        assert_nothing_left(vllm)
        assert vllm.attempt(vllm.ask(6, "next")) == 6

    def test_a_request_that_cannot_be_looked_up_shares_nothing(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = vllm.ask(4)
        vllm.fill(request.keys)
        monkeypatch.setattr(vllm.manager._idle_wait, "before_lookups", FAILS)
        assert vllm.attempt(request) == 0
        assert vllm.begin_store(request, request.keys) == []
        assert vllm.manager.stats()["scheduler_errors"] == 1

    @pytest.mark.parametrize("where", ["end_pass", "scheduled", "finished"])
    def test_of_the_rest_of_a_step_is_counted(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        monkeypatch.setattr(vllm.manager.tier_lookup, where, FAILS)
        request = vllm.arrive("r", chunks("prompt", 4))
        assert vllm.attempt(request) == 0
        vllm.schedule(request, 0)
        vllm.finish(request)
        assert vllm.manager.stats()["scheduler_errors"] == 1

    def test_a_chunk_lost_before_its_load_ends_the_engine(self, vllm: Scheduling) -> None:
        """To load anything else would be a wrong token."""
        request = vllm.ask(4)
        vllm.fill(request.keys)
        assert vllm.attempt(request) == 4
        vllm.pool.reset()
        with pytest.raises(AssertionError, match="lost between its lookup and its load"):
            vllm.schedule(request, 4)


class TestEndOfAPass:
    """The connector leaves it out unless it is due."""

    def test_is_due_until_rows_are_spare(self) -> None:
        vllm = Scheduling(slots=32 * 1024)
        assert not vllm.manager.pass_end_is_due
        for number in range(33):
            vllm.fill(chunks(f"prompt {number}", 1024))
        due = 0
        vllm.end_step()
        while vllm.manager.pass_end_is_due:
            due += 1
            vllm.end_step()
        assert due == 32 * 1024 / 64 / 128, "128 rows at a time, until one in 64 is free"

    def test_is_due_while_something_is_fetched(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.end_step()
        assert vllm.manager.pass_end_is_due
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.finish(request)
        vllm.end_step()
        vllm.end_step()
        assert not vllm.manager.pass_end_is_due

    def test_is_due_after_a_request_was_put_off(self) -> None:
        """The next step may have no place for a request that this one put off."""
        vllm = slow_engine()
        assert vllm.attempt(vllm.ask(6, a=0)) is None
        assert vllm.manager.pass_end_is_due
        vllm.end_step()
        assert not vllm.manager.pass_end_is_due


class TestTwoGroups:
    """Full attention, scanned from the start, and a sliding window, scanned from the end."""

    WINDOW = 2

    @pytest.fixture
    def vllm(self) -> Scheduling:
        return Scheduling(layout=layout_of(Group(CHUNK), Group(CHUNK)))

    def scan(self, vllm: Scheduling, request: Request) -> tuple[int | None, int | None]:
        full = vllm.scan(request)
        lookup = vllm.manager.lookup
        return full, window_scan(lookup, request.groups[1], self.WINDOW, request.context)

    def test_each_gets_a_retry_while_the_fetch_for_both_is_pending(self, vllm: Scheduling) -> None:
        """vLLM would take a group without a RETRY for a miss, and compute the request."""
        full, window = chunks("prompt", 6, group=0), chunks("prompt", 6, group=1)
        vllm.tier.peers_hold(a=full + window)
        request = vllm.arrive("r", full, window)
        assert self.scan(vllm, request) == (None, None)
        vllm.end_step()
        (fetch,) = vllm.tier.fetches
        assert {row.key for row in fetch.rows} == {*full, *window}
        assert self.scan(vllm, request) == (None, None)
        vllm.tier.end(fetch)
        assert self.scan(vllm, request) == (6, 6)

    def test_equal_hashes_of_two_groups_are_two_chunks(self, vllm: Scheduling) -> None:
        vllm.fill(chunks("prompt", 6, group=1))
        assert vllm.attempt(vllm.arrive("r", chunks("prompt", 6, group=0))) == 0


class TestStore:
    def test_is_published_once_it_is_complete(self, vllm: Scheduling) -> None:
        request = vllm.ask(4)
        begun = vllm.begin_store(request, request.keys)
        assert (begun, vllm.tier.stored_rows) == (request.keys, [])
        vllm.stored(request, begun)
        assert {row.key for row in vllm.tier.stored_rows} == set(request.keys)

    def test_that_fails_leaves_nothing(self, vllm: Scheduling) -> None:
        request = vllm.ask(4)
        begun = vllm.begin_store(request, request.keys)
        vllm.manager.complete_store(begun, request.context, success=False)
        assert vllm.tier.stored_rows == []
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_that_is_void_frees_its_rows(self, vllm: Scheduling) -> None:
        """vLLM's workers would write wrong bytes into them."""
        request = vllm.ask(3)
        begun = vllm.begin_store(request, request.keys)
        vllm.manager.void_store(request.req_id, begun)
        vllm.stored(request, begun)
        assert vllm.tier.stored_rows == []
        assert_nothing_left(vllm)
        vllm.stored(request, vllm.begin_store(request, request.keys))
        assert len(vllm.tier.stored_rows) == 3

    def test_skips_chunks_that_are_held_or_being_stored(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys[:2])
        first, second = vllm.arrive("r", keys), vllm.arrive("s", keys)
        assert vllm.begin_store(first, keys[:4]) == keys[2:4]
        assert vllm.begin_store(second, keys) == keys[4:]

    def test_drops_the_tail_for_which_its_own_prefix_would_be_evicted(self) -> None:
        vllm = Scheduling(slots=6)
        request = vllm.ask(10)
        vllm.fill(request.keys[:4])
        vllm.fill(chunks("other", 2))
        assert vllm.begin_store(request, request.keys[4:]) == request.keys[4:6]
        assert sorted(vllm.tier.evicted_keys) == sorted(chunks("other", 2))

    def test_of_a_prompt_longer_than_the_pool_keeps_its_beginning(self) -> None:
        vllm = Scheduling(slots=128)
        request = vllm.ask(200)
        for number in range(0, 200, 8):
            vllm.stored(request, vllm.begin_store(request, request.keys[number : number + 8]))
            vllm.end_step()
        vllm.finish(request)
        hits = vllm.attempt(vllm.arrive("s", request.keys))
        assert hits is not None
        assert hits > 110


class TestRecency:
    def test_a_prefix_that_vllm_itself_serves_is_in_use(self) -> None:
        """vLLM neither looks such chunks up nor stores them again."""
        vllm = Scheduling(slots=6)
        hot, cold = chunks("hot", 3), chunks("cold", 3)
        vllm.fill(hot)
        vllm.fill(cold)
        vllm.finish(vllm.arrive("r", hot))
        vllm.fill(chunks("another", 3))
        assert sorted(vllm.tier.evicted_keys) == sorted(cold)


class TestCapacity:
    """Eviction while peers hold some of the chunks."""

    KEYS = chunks("prompt", 4)

    @pytest.fixture
    def vllm(self) -> Scheduling:
        """A pool of twelve rows, all in use. Those of `KEYS` are copies from the peer `a`."""
        vllm = Scheduling(slots=12)
        vllm.fill(chunks("old", 2))
        vllm.fetch_and_finish(vllm.ask(4, a=4))
        vllm.fill(chunks("new", 6))
        return vllm

    def test_copies_are_evicted_from_their_end_before_older_rows(self, vllm: Scheduling) -> None:
        vllm.fill(chunks("more", 3))
        assert vllm.tier.evicted_keys == self.KEYS[:0:-1]

    def test_a_copy_stays_if_the_original_is_gone(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(a=self.KEYS[:1], b=self.KEYS)
        vllm.fill(chunks("more", 2))
        assert set(vllm.tier.evicted_keys) == {self.KEYS[0], chunks("old", 2)[1]}

    def test_an_original_stays_although_a_peer_copied_it(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(a=chunks("old", 2))
        vllm.fill(chunks("more", 2))
        assert set(vllm.tier.evicted_keys) == set(chunks("old", 2)), "the oldest ones"

    def test_a_copy_in_use_stays(self, vllm: Scheduling) -> None:
        for number in range(20):
            request = vllm.arrive(f"again {number}", self.KEYS)
            assert vllm.attempt(request) == 4
            vllm.finish(request)
            vllm.fill(chunks(f"more {number}", 2))
        assert len(vllm.tier.fetches) == 1


class TestReset:
    def test_keeps_rows_of_jobs_in_quarantine_until_a_later_job_ends(
        self, vllm: Scheduling
    ) -> None:
        """Until then, no slot is reused that a job from before may write or read."""
        stored = chunks("stored", 3)
        vllm.fill(chunks("loaded", 4))
        loading = vllm.arrive("l", chunks("loaded", 4))
        vllm.scan(loading)
        vllm.schedule(loading, 4)
        storing = vllm.arrive("s", stored)
        vllm.begin_store(storing, stored)

        vllm.manager.reset_cache()
        in_quarantine = PoolCounts(rows=32, ready=0, filling=0, pinned=4, quarantined=7)
        assert vllm.pool.counts() == in_quarantine

        assert vllm.begin_store(storing, stored) == [], "they are of before the reset"
        vllm.manager.begin_lookups(storing.req_id, 0)
        begun = vllm.begin_store(storing, stored)
        assert vllm.pool.counts().quarantined == 7
        vllm.stored(storing, begun)
        assert vllm.pool.counts().ready == 3
        assert_nothing_left(vllm)

    def test_frees_rows_of_jobs_when_vllm_reports_their_end(self, vllm: Scheduling) -> None:
        """vLLM 0.33 and later report it."""
        storing = vllm.ask(3)
        vllm.begin_store(storing, storing.keys)
        vllm.manager.reset_cache()
        vllm.manager.on_reset_flushed()
        assert_nothing_left(vllm)

    def test_voids_a_store_whose_end_is_reported_all_the_same(self, vllm: Scheduling) -> None:
        storing = vllm.ask(2)
        begun = vllm.begin_store(storing, storing.keys)
        vllm.pool.reset()
        vllm.stored(storing, begun)
        assert vllm.tier.stored_rows == []
        assert not vllm.pool.holds(storing.keys[0])

    def test_voids_a_pending_fetch(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0
        assert vllm.pool.counts().quarantined == 6
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_hides_a_pending_fetch_from_later_requests(self, vllm: Scheduling) -> None:
        """They begin one of their own, whose rows count."""
        request = waiting(vllm)
        vllm.manager.reset_cache()
        later = vllm.arrive("later", request.keys)
        assert vllm.attempt(later) is None
        assert len(vllm.tier.fetches) == 2
        vllm.tier.end(vllm.tier.fetches[1])
        assert vllm.attempt(later) == 6

    def test_voids_the_plans_of_this_step(self, vllm: Scheduling) -> None:
        request = vllm.ask(6, a=6)
        assert vllm.scan(request) is None
        vllm.manager.reset_cache()
        vllm.end_step()
        assert vllm.tier.fetches == []


class TestAccounting:
    """Each prompt token is counted by the source of its KV."""

    def counts(self, vllm: Scheduling) -> dict[str, int]:
        hits: dict[str, int] = vllm.manager.stats()["hits"]
        return {name: tokens // CHUNK for name, tokens in hits.items()}

    def test_of_a_request_with_tokens_from_every_source(self, vllm: Scheduling) -> None:
        request = vllm.ask(8, a=7)
        vllm.fill(request.keys[:3])
        assert vllm.attempt(request, own_prefix=1) is None
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.scan(request, own_prefix=1) == 6
        vllm.schedule(request, 6, own_prefix=1)
        assert self.counts(vllm) == {
            "prefix_cache": 1, "local_pool": 2, "disk": 0, "remote": 4, "computed": 1,
        }  # fmt: skip
        assert vllm.manager.requests["r"].source == "remote", "as most of its tokens"

    def test_of_chunks_that_the_disk_had(self, vllm: Scheduling) -> None:
        request = vllm.ask(8, disk=7)
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.schedule(request, vllm.scan(request) or 0)
        assert self.counts(vllm) == {
            "prefix_cache": 0, "local_pool": 0, "disk": 7, "remote": 0, "computed": 1,
        }  # fmt: skip

    def test_of_chunks_that_an_earlier_request_fetched(self, vllm: Scheduling) -> None:
        first = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.schedule(first, vllm.scan(first) or 0)
        second = vllm.arrive("s", first.keys)
        vllm.schedule(second, vllm.scan(second) or 0)
        assert self.counts(vllm)["remote"] == 6
        assert self.counts(vllm)["local_pool"] == 6

    def test_of_a_request_that_is_scheduled_again_after_its_load(self, vllm: Scheduling) -> None:
        request = vllm.ask(6)
        vllm.fill(request.keys[:4])
        vllm.schedule(request, vllm.scan(request) or 0)
        vllm.loaded(request, 4)
        vllm.schedule(request, 0)
        assert self.counts(vllm) == {
            "prefix_cache": 0, "local_pool": 4, "disk": 0, "remote": 0, "computed": 2,
        }  # fmt: skip

    def test_of_finished_requests(self, vllm: Scheduling) -> None:
        vllm.finish(vllm.arrive("r", chunks("prompt", 1)))
        assert vllm.manager.stats()["requests"] == 1

    if find_spec("vllm.v1.metrics.cache_hit_source"):  # from 0.32 on

        @pytest.mark.parametrize(("donor", "source"), [("a", "p2p"), (DISK, "disk")])
        def test_vllm_learns_from_where_chunks_were_fetched(
            self, vllm: Scheduling, donor: str, source: str
        ) -> None:
            """vLLM asks only for chunks that it loads."""
            request = vllm.ask(6, **{donor: 6})
            vllm.fill(request.keys[:2])
            vllm.attempt(request)
            vllm.tier.end(vllm.tier.fetches[0])
            vllm.schedule(request, vllm.scan(request) or 0)
            asked = vllm.manager.get_load_source
            sources = [asked(key, request.context).value for key in request.keys]
            assert sources == 2 * ["host"] + 4 * [source]
