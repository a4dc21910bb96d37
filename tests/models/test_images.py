"""Images in prompts: prompts with the same image share, with different ones they do not."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.models.sharing import TOLERANCE, Engines, difference, kind, three, whole_chunks
from tests.models.vision import IMAGE_TOKENS, make_vision_model, picture

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = make_vision_model(tmp_path_factory.mktemp("vision") / "model")
    with three(folder, kind({"skip_tokenizer_init": False})) as engines:
        yield engines


def test_prompts_with_the_same_image_share_and_others_do_not(engines: Engines) -> None:
    text = engines.prompts.fresh(300)

    def about(seed: int) -> dict[str, Any]:
        return {"prompt_token_ids": text, "multi_modal_data": {"image": picture(seed)}}

    tokens = IMAGE_TOKENS + len(text)
    shared = engines.share(about(1))
    assert shared.remote == whole_chunks(tokens)
    assert shared.error < TOLERANCE
    other = engines.share(about(2))
    assert (other.first[0].cached, other.remote) == (0, whole_chunks(tokens))
    assert other.error < TOLERANCE
    assert difference(shared.cold, other.cold) > 10 * TOLERANCE
    assert engines.share(text).first[0].cached == 0
