"""The tracker compares what each member has computed with what the first of its namespace has."""

import math

import pytest

from tests.harness.comparisons import COMPARED, SAMPLES, compared, report, sketch
from tests.tracker_pools import look, of
from xinference_xavier.protocol.sketches import (
    MAX_CANARIES_BYTES,
    Difference,
    Sketch,
    difference,
    pack_canaries,
    unpack_canaries,
)
from xinference_xavier.protocol.tracker import (
    NO_CANARIES,
    CanaryReport,
    Comparison,
    Left,
    Member,
    NotMemberError,
    Settings,
    Verdict,
)
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.judge import Judge

BF16: Sketch = {"layer 0": ("float32", SAMPLES), "layer 1": ("bfloat16", SAMPLES)}
BYTES: Sketch = {"layer": ("bytes", [0.0, 255.0, 100.0, 200.0])}
KEY = b"key 00000001"
ZEROS: Sketch = {"layer": ("float32", [0.0, 0.0])}


def scaled(factor: float, layer: str = "layer 1") -> Sketch:
    dtype, samples = BF16[layer]
    return {**BF16, layer: (dtype, [factor * sample for sample in samples])}


def bytes_of(*samples: float) -> Sketch:
    return {"layer": ("bytes", samples)}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (BF16, BF16, None),
        (BF16, scaled(1.05), None),
        (BF16, scaled(1.005, "layer 0"), None),
        (ZEROS, ZEROS, None),
        (BF16, {"layer 0": BF16["layer 0"]}, ("layer 1", math.inf)),
        ({"layer 0": BF16["layer 0"]}, BF16, ("layer 1", math.inf)),
        (BF16, scaled(1.5), ("layer 1", 1 / 3)),
        (BF16, scaled(1.02, "layer 0"), ("layer 0", 0.02 / 1.02)),
        (BF16, scaled(-1.0), ("layer 1", 2.0)),
        (BF16, {**BF16, "layer 1": ("float16", SAMPLES)}, ("layer 1", math.inf)),
        (BF16, {**BF16, "layer 1": ("bfloat16", SAMPLES[:2])}, ("layer 1", math.inf)),
        (BYTES, bytes_of(2, 253, 7, 9), None),
        (BYTES, bytes_of(254, 1, 7, 9), None),
        (BYTES, bytes_of(3, 252, 7, 200), ("layer", 0.75)),
    ],
    ids=[
        "none",
        "rounding to bfloat16",
        "rounding to float32",
        "zeros",
        "a layer that the other lacks",
        "a layer that ours lacks",
        "half as much again",
        "more than rounding to float32",
        "another sign",
        "another type",
        "another number of samples",
        "half of the bytes",
        "a byte that wraps around",
        "more than half of the bytes",
    ],
)
def test_a_difference_is_relative_to_the_size_of_the_samples(
    one: Sketch, other: Sketch, expected: tuple[str, float] | None
) -> None:
    found = difference(one, other)
    assert found == (expected and (expected[0], pytest.approx(expected[1])))


def test_canaries_arrive_as_they_were_packed() -> None:
    canaries = {"short": BF16, "long": BYTES, "empty": {}}
    assert unpack_canaries(pack_canaries(canaries)) == canaries


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "malformed canaries"),
        (b"[]\n", "malformed canaries"),
        (b'{"short": {"layer": ["object", 1]}}\n' + bytes(4), "malformed canaries"),
        (b'{"short": {"layer": ["float32", -1]}}\n', "malformed canaries"),
        (b'{"short": {"layer": ["float32", 2]}}\n' + bytes(4), "4 bytes of 2 samples"),
        (pack_canaries({"short": {"layer": ("float32", [math.nan])}}), "a sample is not finite"),
        (bytes(MAX_CANARIES_BYTES + 1), f"more than {MAX_CANARIES_BYTES}"),
    ],
)
def test_malformed_canaries_are_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_canaries(packed)


HALF = Difference("layer 1", 0.5)
FIRST_DIFFERS = Comparison(
    Verdict.DIFFERS, "layer 1 by 50%", "first", Difference("layer 1", pytest.approx(0.5))
)


class TestVerdict:
    @pytest.fixture
    def judge(self) -> Judge:
        judge = Judge()
        assert judge.compare("new", {"short": sketch()}) == Comparison(Verdict.COMPARED)
        judge.add("first", {"short": sketch()})
        return judge

    def test_the_first_is_what_the_others_are_compared_with(self, judge: Judge) -> None:
        judge.add("like", {"short": sketch(1.005)})
        assert judge.compare("new", {"short": sketch()}) == Comparison(Verdict.COMPARED)
        assert judge.compare("new", {"short": sketch(2.0)}) == FIRST_DIFFERS

    def test_one_that_has_computed_nothing_waits(self, judge: Judge) -> None:
        assert judge.compare("new", {}) == Comparison(Verdict.WAITING)

    def test_one_that_cannot_compute_anything_says_why(self, judge: Judge) -> None:
        assert judge.compare("new", {}, "no queue") == Comparison(Verdict.CANNOT, "no queue")

    def test_each_canary_counts(self, judge: Judge) -> None:
        """Some differ only deep in a prompt."""
        judge.add("second", {"short": sketch(), "long": sketch()})
        assert judge.compare("new", {"short": sketch(), "long": sketch(2.0)}) == (
            FIRST_DIFFERS._replace(peer="second")
        )

    def test_nobody_is_compared_by_a_part(self, judge: Judge) -> None:
        assert judge.compare("new", {"other": sketch()}) == Comparison(Verdict.WAITING)
        fewer = {"layer 0": sketch()["layer 0"]}
        more = {**sketch(), "layer 9": ("float32", SAMPLES)}
        assert [judge.compare("new", {"short": each}).reason for each in (fewer, more)] == [
            "layer 1 in type, size or presence",
            "layer 9 in type, size or presence",
        ]

    def test_an_audit_parts_who_made_it_from_the_donor(self, judge: Judge) -> None:
        found = Comparison(Verdict.DIFFERS, "layer 1 by 50%, in an audit", "first", HALF)
        same = {"short": sketch()}
        assert judge.compare("new", same, audited={"first": HALF}) == found
        assert judge.compare("new", same, audited={"former": HALF}) == COMPARED
        judge.add("new", same, {"donor": HALF})
        assert judge.compare("donor", same) == found._replace(peer="new")
        judge.forget("new")
        assert judge.compare("donor", same) == COMPARED

    def test_the_example_goes_with_the_last_that_agrees(self, judge: Judge) -> None:
        judge.add("like", {"short": sketch()})
        judge.forget("first")
        assert judge.compare("new", {"short": sketch(2.0)}) == FIRST_DIFFERS
        judge.forget("like")
        assert judge.compare("new", {"short": sketch(2.0)}) == Comparison(Verdict.COMPARED)


NS = "namespace"
A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")


class TestTracker:
    @pytest.fixture
    async def tracker(self) -> BlockTracker:
        return BlockTracker("model")

    async def join(
        self, tracker: BlockTracker, member: Member, canaries: CanaryReport = NO_CANARIES
    ) -> Comparison:
        reply = await tracker.join(NS, member, Settings(), report=canaries)
        return reply.comparison

    async def members(self, tracker: BlockTracker) -> dict[str, Member]:
        update = (await tracker.observe("", 0, 0, 0.0)).update
        return {member.incarnation: member for member in of(Member, update)}

    async def test_a_replica_joins_with_what_it_has_computed(self, tracker: BlockTracker) -> None:
        """So a tracker that was restarted knows it at once."""
        assert (await self.join(tracker, A, report(short=1.0))).verdict is Verdict.COMPARED
        assert (await self.join(tracker, B, report(short=2.0))).peer == "a"
        members = await self.members(tracker)
        assert members["a"] == compared("a")
        assert members["b"].comparison.verdict is Verdict.DIFFERS

    async def test_or_is_compared_later(self, tracker: BlockTracker) -> None:
        assert (await self.join(tracker, A)).verdict is Verdict.WAITING
        await self.join(tracker, B)
        found = await tracker.compare(NS, "a", report(short=1.0))
        assert found.verdict is Verdict.COMPARED
        assert (await self.members(tracker))["a"] == compared("a")
        with pytest.raises(NotMemberError):
            await tracker.compare(NS, "stranger", report(short=1.0))

    async def test_one_that_joins_again_without_canaries_was_reset(
        self, tracker: BlockTracker
    ) -> None:
        await self.join(tracker, B)
        await self.join(tracker, A, report(short=1.0))
        await self.join(tracker, A)
        assert (await self.members(tracker))["a"] == A

    async def test_one_that_differed_is_named_after_it_has_left(
        self, tracker: BlockTracker
    ) -> None:
        """Others may have rows of it."""
        await self.join(tracker, B, report(short=1.0))
        for _ in range(2):
            await self.join(tracker, A, report(short=2.0))
            await tracker.join("other", A, Settings())
            update = await look(tracker, "b")
            assert [(each.incarnation, each.comparison.reason) for each in of(Left, update)] == [
                ("a", "layer 1 by 50%")
            ]
        await self.join(tracker, A, report(short=1.0))
        assert of(Left, await look(tracker, "b")) == []

    async def test_status_says_what_was_found_and_why(self, tracker: BlockTracker) -> None:
        await self.join(tracker, A, CanaryReport(cannot="no queue"))
        await self.join(tracker, B, report(short=1.0))
        replicas = (await tracker.status())["namespaces"][NS]["replicas"]
        assert [(each["verdict"], each["verdict_reason"]) for each in replicas] == [
            ("cannot compare", "no queue"),
            ("compared", ""),
        ]

    async def test_only_those_who_share_wait_for_each_other(self, tracker: BlockTracker) -> None:
        await self.join(tracker, A)
        await self.join(tracker, B, report(short=1.0))
        assert await tracker.claim(NS, "a", KEY, 10.0) == 0
        assert await tracker.claim(NS, "b", KEY, 10.0) == 0
        assert await tracker.claim(NS, "a", KEY, 10.0) == 0
        await tracker.compare(NS, "a", report(short=1.0))
        assert await tracker.claim(NS, "a", KEY, 10.0) == 1


class TestSplit:
    """Replicas that compute different rows are in different namespaces, and each among its like."""

    @pytest.fixture
    async def tracker(self) -> BlockTracker:
        return BlockTracker("model")

    async def come(
        self, tracker: BlockTracker, name: str, canaries: CanaryReport, namespace: str = NS
    ) -> str:
        """Join, go where the tracker says, and return that namespace."""
        while True:
            member = Member(name, "127.0.0.1:1")
            reply = await tracker.join(namespace, member, Settings(), report=canaries)
            if not reply.comparison.namespace:
                return namespace
            namespace = reply.comparison.namespace

    async def test_each_finds_its_like(self, tracker: BlockTracker) -> None:
        found = [
            await self.come(tracker, name, report(short=factor))
            for name, factor in zip("abcdef", (1.0, 2.0, 4.0, 2.0, 1.0, 4.0), strict=True)
        ]
        assert found == [NS, f"{NS}~1", f"{NS}~2", f"{NS}~1", NS, f"{NS}~2"]

    async def test_who_comes_joins_those_that_are_there(self, tracker: BlockTracker) -> None:
        """The first, from which they have parted, has left."""
        assert await self.come(tracker, "first", report(short=1.0)) == NS
        assert await self.come(tracker, "b", report(short=2.0)) == f"{NS}~1"
        await tracker.leave(NS, "first")
        assert await self.come(tracker, "c", NO_CANARIES) == f"{NS}~1"
        assert await self.come(tracker, "d", report(short=2.0)) == f"{NS}~1"
        assert await self.come(tracker, "e", report(short=1.0)) == NS

    async def test_before_it_is_compared_it_is_with_the_most(self, tracker: BlockTracker) -> None:
        for name, factor in zip("abc", (1.0, 2.0, 2.0), strict=True):
            await self.come(tracker, name, report(short=factor))
        assert await self.come(tracker, "new", NO_CANARIES) == f"{NS}~1"

    async def test_who_has_waited_alone_goes_to_its_like(self, tracker: BlockTracker) -> None:
        await self.come(tracker, "first", report(short=1.0))
        await tracker.join(NS, A, Settings())
        assert await self.come(tracker, "b", report(short=2.0)) == f"{NS}~1"
        await tracker.leave(NS, "first")
        found = await tracker.compare(NS, "a", report(short=2.0))
        assert found == Comparison(namespace=f"{NS}~1")

    async def test_whose_audits_failed_are_together_without_the_donor(
        self, tracker: BlockTracker
    ) -> None:
        """Whoever sees next that it is wrong goes to whoever saw it first."""
        same = report(short=1.0)
        for name in ("donor", "a", "b", "c"):
            assert await self.come(tracker, name, same) == NS
        audited = same._replace(audited=(("donor", HALF),))
        for name in ("a", "b"):
            found = await tracker.compare(NS, name, audited)
            assert (found.peer, found.namespace) == ("donor", f"{NS}~1")
            assert await self.come(tracker, name, audited, f"{NS}~1") == f"{NS}~1"
        assert await self.come(tracker, "donor", same) == NS, "one still trusts it"

    async def test_two_namespaces_that_compute_the_same_become_one(
        self, tracker: BlockTracker
    ) -> None:
        """A tracker that was lost knows the replicas as they come back."""
        assert await self.come(tracker, "b", report(short=1.0), f"{NS}~1") == f"{NS}~1"
        assert await self.come(tracker, "a", report(short=1.0), NS) == f"{NS}~1"

    async def test_other_weights_are_not_asked(self, tracker: BlockTracker) -> None:
        assert await self.come(tracker, "a", report(short=1.0), f"{NS}@1") == f"{NS}@1"
        assert await self.come(tracker, "b", report(short=1.0), f"{NS}@2") == f"{NS}@2"
        assert await self.come(tracker, "c", report(short=1.0)) == NS
