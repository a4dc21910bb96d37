"""Launches that cannot work are refused with a helpful message and leave nothing behind."""

from collections.abc import Iterator

import pytest

from examples.local_cluster import ClusterError, LocalCluster
from tests.e2e.model import Model


@pytest.fixture
def refused(cluster: LocalCluster) -> Iterator[Model]:
    model = Model(cluster, "refused")
    yield model
    assert model.is_gone()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"xavier_pool_bytes": "4QiB"}, "xavier_pool_bytes='4QiB' is not a size"),
        ({"xavier_transport": "carrier pigeon"}, "is not a known transport; use one of auto, gloo"),
        ({"xavier_pool_byte": 1}, "xavier_pool_bytes"),
        ({"enable_xavier": "perhaps"}, "enable_xavier='perhaps' is neither true nor false"),
        ({"model_engine": "transformers"}, "model_engine='transformers' cannot share its cache"),
    ],
)
def test_bad_input_is_refused_before_anything_exists(
    refused: Model, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ClusterError, match="400") as refusal:
        refused.launch(**options)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"xavier_cache_bytes": 0}, "xavier_cache_bytes requires MLX Xavier or SGLang"),
        ({"xavier_gpu_cache_bytes": -1}, "must be a non-negative integer"),
        (
            {"model_engine": "MLX", "vllm_transfer_backend_type": "nixl"},
            "NIXL requires explicit prefill and decode replica roles",
        ),
        ({"model_engine": "SGLang", "xavier_cache_bytes": 0}, "a positive integer"),
    ],
)
def test_a_launch_of_the_built_in_xavier_reaches_it(
    refused: Model, arguments: dict[str, object], sentence: str
) -> None:
    """Its engines are not here, but xinference says what it does not like about the arguments."""
    with pytest.raises(ClusterError) as refusal:
        refused.cluster.launch("small", refused.uid, enable_xavier=True, **arguments)
    assert sentence in str(refusal.value)


def test_what_only_the_engine_can_know_fails_the_launch_with_its_own_words(refused: Model) -> None:
    with pytest.raises(ClusterError) as failure:
        refused.launch(replica=1, xavier_chunk_tokens=200)
    sentence = (
        "xavier_chunk_tokens=200 is not a multiple of the model's block size, 128 tokens; use 256"
    )
    assert sentence in str(failure.value)
