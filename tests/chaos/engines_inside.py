"""What the chaos harness adds to the processes of xinference's models: vLLM loads it as a plugin.

A model of xinference cannot be told to reset its caches, as trainers tell an engine of theirs. And
the small model reads no images, so its actor decodes them as a vision model's would.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

_DATA = "data:image/png;base64,"


def install(folder: Path) -> None:
    """Make it a plugin of each vLLM with `folder` in its PYTHONPATH."""
    about = folder / "chaos-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 1\n")
    plugin = f"chaos = {__name__}:extend_model_actor"
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin}\n")


def extend_model_actor() -> None:
    """vLLM calls this in the process of a model and in that of its engine, perhaps repeatedly."""
    from xinference.core.model import ModelActor

    if hasattr(ModelActor, "reset_prefix_cache"):
        return
    chat = ModelActor.chat

    async def reset_prefix_cache(self: Any, connector: bool) -> bool:
        try:
            done: bool = await self._model._engine.reset_prefix_cache(
                reset_running_requests=True, reset_connector=connector
            )
        except Exception as error:  # vLLM gives it no type of its own
            if "Failed to reset KV cache" not in str(error):
                raise
            return False  # a request loads rows
        return done

    async def chat_with_images(self: Any, messages: Any, *args: Any, **named: Any) -> Any:
        for image in _images(messages):
            Image.open(io.BytesIO(image)).load()
        return await chat(self, messages, *args, **named)

    ModelActor.reset_prefix_cache = reset_prefix_cache
    ModelActor.chat = chat_with_images


def with_image(question: str, image: bytes) -> list[dict[str, Any]]:
    """A chat's messages."""
    url = {"url": _DATA + base64.b64encode(image).decode()}
    parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": url}]
    return [{"role": "user", "content": parts}]


def _images(messages: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                yield base64.b64decode(part["image_url"]["url"].removeprefix(_DATA))
