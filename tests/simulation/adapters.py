"""Files of LoRA adapters, which somebody replaces while the engine runs."""

import hashlib
from pathlib import Path

from vllm.lora.request import LoRARequest

NAMES = ("tuned", "trained")
_FILE = "adapter_model.safetensors"


class AdapterFiles:
    """They are in the current folder, as vLLM's keys depend on their paths. The content of a file
    is its length, and different each time. `requests` are those of clients, by name."""

    def __init__(self) -> None:
        self.digests = [b""]
        """The files' digests by content; content 0 is no adapter."""
        self.requests = {name: LoRARequest(name, 1 + n, name) for n, name in enumerate(NAMES)}
        for name in NAMES:
            Path(name).mkdir()
            self.replace(name)

    def replace(self, name: str) -> None:
        written = b"x" * len(self.digests)
        new = Path("new")
        new.write_bytes(written)
        new.rename(Path(name, _FILE))
        digest = hashlib.sha256(_FILE.encode() + hashlib.sha256(written).digest())
        self.digests.append(digest.digest())

    def announce(self, name: str, in_place: bool) -> LoRARequest:
        """Clients use what is there now, as vLLM's API tells the engine to: in place, or under
        another number."""
        former = self.requests[name]
        number = former.lora_int_id if in_place else former.lora_int_id + len(NAMES)
        self.requests[name] = LoRARequest(name, number, former.lora_path, load_inplace=in_place)
        return self.requests[name]

    @staticmethod
    def read(request: LoRARequest) -> int:
        """The content that vLLM loads now."""
        return Path(request.lora_path, _FILE).stat().st_size
