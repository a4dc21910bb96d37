"""What the demo counts as a failure, and what it only tells. `GOOD` is a measurement without
either."""

import shlex
from dataclasses import replace

import pytest

from examples.demo import failures, launch_arguments, notes
from examples.experiment import Answer, Measurement
from examples.local_cluster import Completion

ROW = 1 << 20
COLD = Completion("a b", ("a", " b"), (-1.0, -2.0), 1_000, 0, 2.0)
HIT = COLD._replace(cached_tokens=896, seconds=0.2)
GOOD = Measurement(
    request="?",
    cold=COLD,
    remote=Answer(HIT, "second", 7 * ROW),
    local=HIT,
    later=(HIT, HIT._replace(seconds=0.4)),
    chunk_tokens=128,
    row_bytes=ROW,
    unshared=COLD,
)
OTHER_TOKENS = ("a", " c")


def remote(**changes: object) -> Answer:
    return GOOD.remote._replace(completion=HIT._replace(**changes))


def test_of_a_good_measurement_nothing_is_told() -> None:
    assert failures([GOOD]) == notes([GOOD], others=2.0) == []
    assert GOOD.entry() == {
        "prompt_tokens": 1_000,
        "cold_s": 2.0,
        "local_hit_s": pytest.approx(0.3),
        "remote_hit_s": 0.2,
        "remote_cached_tokens": 896,
        "bytes_received": 7 * ROW,
        "remote_tokens_equal": True,
        "remote_logprobs_max_abs_diff": 0.0,
    }


@pytest.mark.parametrize(
    ("measurement", "failure"),
    [
        (replace(GOOD, cold=HIT), "the cold answer reused 896"),
        (replace(GOOD, unshared=HIT), "the unshared answer reused 896"),
        (replace(GOOD, remote=remote(tokens=OTHER_TOKENS)), "tokens differ"),
        (replace(GOOD, unshared=COLD._replace(tokens=OTHER_TOKENS)), "tokens differ"),
        (replace(GOOD, local=HIT._replace(tokens=OTHER_TOKENS)), "tokens differ"),
        (replace(GOOD, local=HIT._replace(logprobs=(-1.0, -2.001))), "log-probabilities differ"),
        (replace(GOOD, remote=remote(cached_tokens=0)), "nothing was shared"),
    ],
)
def test_a_wrong_answer_or_none_shared_is_a_failure(measurement: Measurement, failure: str) -> None:
    (found,) = failures([measurement])
    assert failure in found


def test_launch_arguments_are_passed_through() -> None:
    arguments = launch_arguments(
        shlex.split("--dtype bfloat16 --max-model-len 4096 --xavier_fetch_timeout 2.5 --n_gpu none")
    )
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_model_len"] == 4096
    assert arguments["xavier_fetch_timeout"] == 2.5
    assert arguments["n_gpu"] is None
    assert arguments["enable_xavier"] is True


@pytest.mark.parametrize(
    "rest", [["--dtype"], ["dtype", "float32"], ["--replica", "3"], ["--enable_xavier", "false"]]
)
def test_arguments_that_do_not_fit_the_demo_are_refused(rest: list[str]) -> None:
    with pytest.raises(ValueError, match=r"launch arguments|two replicas"):
        launch_arguments(rest)
