"""Two engines share a namespace if and only if they may exchange bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from xinference_xavier.engine import namespace as module
from xinference_xavier.engine.namespace import digest, weights_fingerprint

CHUNK_TOKENS = 256


def engine_config(folder: Path, **other: Any) -> VllmConfig:
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 128,
        "enforce_eager": True,
        "max_model_len": 2048,
        "skip_tokenizer_init": True,
    }
    return EngineArgs(model=str(folder), **arguments | other).create_engine_config()


@pytest.fixture(scope="module")
def config(model_folder: Path) -> VllmConfig:
    return engine_config(model_folder)


@pytest.fixture
def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{number}" for number in range(8)], spec)]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def namespace(config: VllmConfig, cache_config: KVCacheConfig) -> str:
    return module.digest(module.fingerprint_fields(config, cache_config, CHUNK_TOKENS))


@pytest.fixture
def own(config: VllmConfig, cache_config: KVCacheConfig) -> str:
    return namespace(config, cache_config)


def test_it_is_the_same_at_the_next_start(
    own: str, model_folder: Path, cache_config: KVCacheConfig
) -> None:
    assert namespace(engine_config(model_folder), cache_config) == own


def test_it_does_not_depend_on_where_the_model_is(
    own: str, model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    assert namespace(engine_config(folder), cache_config) == own


def test_arguments_that_change_no_byte_do_not_matter(
    own: str, model_folder: Path, cache_config: KVCacheConfig
) -> None:
    config = engine_config(model_folder, max_model_len=1024, max_num_seqs=3)
    assert namespace(config, replace(cache_config, num_blocks=99)) == own


def test_other_weights_of_the_same_shape(
    own: str, model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tuned")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = content[header:].translate(bytes(byte ^ 1 for byte in range(256)))
    weights.write_bytes(content)
    assert namespace(engine_config(folder), cache_config) != own


@pytest.mark.parametrize("tensor", ["first", "last"])
def test_a_fine_tune_of_one_tensor(
    own: str, model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path, tensor: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tuned")
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0 if tensor == "first" else -1]
    tensors[name] *= 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size == (
        model_folder / "model.safetensors"
    ).stat().st_size
    assert namespace(engine_config(folder), cache_config) != own


def test_long_rope_depends_on_the_longest_possible_prompt(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    """It chooses its factors by that limit, for all prompts."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 1024,
    }
    overrides = {"rope_parameters": rope}
    short, long = (
        engine_config(model_folder, max_model_len=length, hf_overrides=overrides)
        for length in (1024, 2048)
    )
    assert namespace(short, cache_config) != namespace(long, cache_config)


def test_another_protocol_version(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROTOCOL_VERSION", 99)
    assert namespace(config, cache_config) != own


def test_another_architecture_over_the_same_weights(
    own: str, model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "other")
    description = json.loads((folder / "config.json").read_text())
    description["rms_norm_eps"] *= 2
    (folder / "config.json").write_text(json.dumps(description))
    assert namespace(engine_config(folder), cache_config) != own


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}},
        {"revision": "another"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_another_engine_argument(
    own: str, model_folder: Path, cache_config: KVCacheConfig, arguments: dict[str, object]
) -> None:
    assert namespace(engine_config(model_folder, **arguments), cache_config) != own


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "quantization", "fp8"),
        ("cache_config", "kv_cache_layout", "LBHNC"),
        ("parallel_config", "tensor_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "world_size", 2),
    ],
)
def test_arguments_that_this_machine_does_not_support(
    own: str,
    config: VllmConfig,
    cache_config: KVCacheConfig,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    name: str,
    value: object,
) -> None:
    monkeypatch.setattr(getattr(config, part), name, value, raising=False)  # vLLM 0.27 lacks one
    assert namespace(config, cache_config) != own


@pytest.mark.parametrize(
    "change",
    [
        lambda group: replace(group, layer_names=group.layer_names[:-1]),
        lambda group: replace(group, kv_cache_spec=replace(group.kv_cache_spec, head_size=32)),
    ],
    ids=["layers", "spec"],
)
def test_other_layers_in_a_group(
    own: str,
    config: VllmConfig,
    cache_config: KVCacheConfig,
    change: Callable[[KVCacheGroupSpec], KVCacheGroupSpec],
) -> None:
    groups = [change(group) for group in cache_config.kv_cache_groups]
    assert namespace(config, replace(cache_config, kv_cache_groups=groups)) != own


def test_another_chunk_size(own: str, config: VllmConfig, cache_config: KVCacheConfig) -> None:
    """Equal keys would stand for different chunks."""
    assert module.digest(module.fingerprint_fields(config, cache_config, 2 * CHUNK_TOKENS)) != own


def test_another_vllm(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.0.1")
    assert namespace(config, cache_config) != own


def test_another_kind_of_device(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for device, capability in (("cuda", (9, 0)), ("cuda", (8, 0)), ("rocm", None)):
        platform = SimpleNamespace(
            device_type=device,
            get_device_capability=lambda has=capability: has and DeviceCapability(*has),
        )
        monkeypatch.setattr(module, "current_platform", platform)
        found.add(namespace(config, cache_config))
    assert len(found | {own}) == 4


def test_another_model_runner(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not config.use_v2_model_runner
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    assert namespace(config, cache_config) != own


def test_another_hash_seed(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key would ever match."""
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    assert namespace(config, cache_config) != own


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_KV_CACHE_LAYOUT", "HND"),
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
    ],
)
def test_a_variable_that_changes_the_layout(
    own: str,
    config: VllmConfig,
    cache_config: KVCacheConfig,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert namespace(config, cache_config) != own


def test_speculation(
    own: str, config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = SimpleNamespace(method="a draft model")
    monkeypatch.setattr(config, "speculative_config", speculation)
    assert namespace(config, cache_config) != own


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 36), ("xxhash", 20)])
def test_the_length_of_a_key_depends_on_the_hash(
    model_folder: Path, algorithm: str, length: int
) -> None:
    config = engine_config(model_folder, prefix_caching_hash_algo=algorithm)
    assert module.key_bytes(config) == length


FIELDS = {"dtype": torch.float32, "layers": ["a", "b"], "chunk_tokens": 128, "none": None}
ROWS, COLUMNS = 300, 1000


@pytest.mark.process
def test_a_digest_is_the_same_in_every_process_and_order() -> None:
    code = (
        "import torch; from xinference_xavier.engine.namespace import digest;"
        "print(digest({'none': None, 'chunk_tokens': 128, 'layers': ['a', 'b'],"
        " 'dtype': torch.float32}))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == digest(FIELDS)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"layers": ["b", "a"]},
        {"chunk_tokens": 256},
        {"none": 0},
        {"another": 1},
    ],
)
def test_every_field_counts(other: dict[str, object]) -> None:
    assert digest(FIELDS | other) != digest(FIELDS)


def save(folder: Path, suffix: str, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    if suffix == ".safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / f"model{suffix}")
    return folder


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.rand(ROWS, COLUMNS, generator=generator),
        "small": torch.rand(3, generator=generator),
        "norm": torch.rand(COLUMNS, generator=generator),
    }


both_formats = pytest.mark.parametrize("suffix", [".safetensors", ".bin"])


@both_formats
def test_a_copy_in_another_folder_is_the_same_model(tmp_path: Path, suffix: str) -> None:
    original = save(tmp_path / "a", suffix, weights(0))
    shutil.copytree(original, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not weights")
    assert weights_fingerprint(original) == weights_fingerprint(tmp_path / "copy")


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        (".safetensors", "embedding"),
        (".safetensors", "norm"),
        (".safetensors", "small"),
        (".bin", "embedding"),
        (".bin", "norm"),  # tensors smaller than the sampling step may be missed
    ],
)
def test_fine_tunes_of_equal_size_differ(tmp_path: Path, suffix: str, tensor: str) -> None:
    """A fine-tune changes every number of a tensor, if only a little."""
    tuned = weights(0)
    tuned[tensor] *= 1 + 2**-20
    one, other = save(tmp_path / "a", suffix, weights(0)), save(tmp_path / "b", suffix, tuned)
    sizes = [next(folder.iterdir()).stat().st_size for folder in (one, other)]
    assert sizes[0] == sizes[1]
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_weights_in_shards_and_subfolders_count(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", ".safetensors", weights(0))
    one = weights_fingerprint(folder)
    save(folder / "more", ".safetensors", weights(1))
    two = weights_fingerprint(folder)
    assert one != two
    shutil.rmtree(folder / "more")
    save(folder / "more", ".safetensors", weights(2))
    assert weights_fingerprint(folder) not in {one, two}


def test_a_model_may_be_one_file(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf"
    for file, content in ((one, b"x"), (other, b"y")):
        file.parent.mkdir()
        file.write_bytes(content * 10_000)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_models_on_a_hub_differ_by_name() -> None:
    assert weights_fingerprint(Path("org/one")) != weights_fingerprint(Path("org/other"))


def test_empty_tensors_are_allowed(tmp_path: Path) -> None:
    save(tmp_path / "a", ".safetensors", {"empty": torch.zeros(0), "one": torch.ones(1)})
    save(tmp_path / "b", ".safetensors", {"empty": torch.zeros(0), "one": torch.zeros(1)})
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")


def bytes_read_by_this_process() -> int:
    (line,) = (line for line in Path("/proc/self/io").read_text().split("\n") if "rchar" in line)
    return int(line.split()[1])


def test_only_the_samples_are_read(tmp_path: Path) -> None:
    """A buffer would read a whole block of a network file system, 1 MiB or more, for each."""
    tensors = {f"layer.{number}": torch.rand(1 << 16) for number in range(100)}
    folder = save(tmp_path / "model", ".safetensors", tensors)
    before = bytes_read_by_this_process()
    weights_fingerprint(folder)
    read = bytes_read_by_this_process() - before
    with (folder / "model.safetensors").open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    samples = 100 * (module._SAMPLES // 100 + 1)
    assert header < read <= header + 64 * samples + 4096
