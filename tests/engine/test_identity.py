"""Two engines share a namespace if and only if they may exchange bytes, and only pages of equal
formats."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import save_file
from vllm.config import MultiModalConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum, DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.engine.vllm_scheduler import engine_config
from xinference_xavier.engine import identity as module
from xinference_xavier.engine.identity import (
    IRRELEVANT,
    configuration_fields,
    digest,
    is_irrelevant,
    page_format,
    tensor_format,
    weights_fingerprint,
)

CHUNK_TOKENS = 256


@pytest.fixture(scope="module")
def config(model_folder: Path) -> VllmConfig:
    return engine_config(model_folder)


def namespace(config: VllmConfig, cache_config: KVCacheConfig, chunk: int = CHUNK_TOKENS) -> str:
    return module.digest(module.fingerprint_fields(config, cache_config, chunk))


@pytest.fixture
def own(config: VllmConfig, cache_config: KVCacheConfig) -> str:
    return namespace(config, cache_config)


def test_replicas_of_one_launch_match_wherever_they_run(
    own: str, model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    """On hosts with other folders, addresses and amounts of memory."""
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    config = engine_config(
        folder,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=77,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=3,
        max_num_batched_tokens=512,
        seed=7,
        served_model_name="another",
        download_dir=str(tmp_path),
        kv_transfer_config=None,
    )
    parallel = config.parallel_config
    parallel.data_parallel_rank = parallel.rank = 1
    parallel.data_parallel_master_ip, parallel.data_parallel_master_port = "10.0.0.1", 4711
    config.cache_config.num_gpu_blocks = 77
    assert namespace(config, replace(cache_config, num_blocks=99)) == own


def test_each_field_has_a_name_that_an_operator_knows(
    config: VllmConfig, cache_config: KVCacheConfig
) -> None:
    found = module.readable(module.fingerprint_fields(config, cache_config, CHUNK_TOKENS))
    assert found["model.max_model_len"] == "2048"
    assert found["model.hf_config.rms_norm_eps"] == "1e-06"
    assert found["parallel.tensor_parallel_size"] == "1"


def other_weights(folder: Path) -> None:
    """Change the numbers, but not their shape."""
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = content[header:].translate(bytes(byte ^ 1 for byte in range(256)))
    weights.write_bytes(content)


def other_architecture(folder: Path) -> None:
    """Over the same weights."""
    description = json.loads((folder / "config.json").read_text())
    description["rms_norm_eps"] *= 2
    (folder / "config.json").write_text(json.dumps(description))


def other_file(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text('{"size": 99}')


@pytest.mark.parametrize(
    ("change", "matches"),
    [
        (other_weights, False),
        (other_architecture, False),
        (other_file("generation_config.json"), False),
        (other_file("preprocessor_config.json"), False),
        (other_file("modeling_own.py"), False),
        (other_file("README.md"), True),
        (other_file("tokenizer_config.json"), True),
        (other_file(".gitattributes"), True),
    ],
    ids=[
        *("weights", "architecture", "generation", "preprocessor", "code"),
        *("README", "tokenizer", "attributes"),
    ],
)
def test_files_of_a_model_count_if_they_say_how_to_compute(
    own: str,
    model_folder: Path,
    cache_config: KVCacheConfig,
    tmp_path: Path,
    change: Callable[[Path], object],
    matches: bool,
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "other")
    change(folder)
    assert (namespace(engine_config(folder), cache_config) == own) is matches


def test_the_weights_of_a_drafter_count(
    model_folder: Path, cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    """Its layers have pages in each row."""
    folder = shutil.copytree(model_folder, tmp_path / "drafter")
    draft = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(folder)}
    config = engine_config(model_folder, speculative_config=draft)
    before = namespace(config, cache_config)
    other_weights(folder)
    assert namespace(config, cache_config) != before


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}},
        {"override_generation_config": {"attn_temperature_tuning": True}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_another_engine_argument(
    own: str, model_folder: Path, cache_config: KVCacheConfig, arguments: dict[str, object]
) -> None:
    assert namespace(engine_config(model_folder, **arguments), cache_config) != own


def leaves(part: Any, prefix: str = "") -> Iterator[tuple[Any, str, str]]:
    """Each field with its owner and path. An irrelevant part is one field."""
    for field in fields(part):
        path, value = prefix + field.name, getattr(part, field.name)
        if not is_irrelevant(path) and is_dataclass(value) and not hasattr(value, "to_dict"):
            yield from leaves(value, f"{path}.")
        else:
            yield part, field.name, path


def set_to(owner: Any, name: str, value: object) -> None:
    """Without vLLM's checks: this machine does not support every value."""
    object.__setattr__(owner, name, value)


def with_all_parts(model_folder: Path) -> VllmConfig:
    """One in which the parts that most engines lack are not None."""
    config = engine_config(model_folder, enable_lora=True)
    draft = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model_folder)}
    config.speculative_config = engine_config(
        model_folder, speculative_config=draft
    ).speculative_config
    config.model_config.multimodal_config = MultiModalConfig()
    return config


def test_every_field_counts_unless_it_is_known_not_to(model_folder: Path) -> None:
    config = with_all_parts(model_folder)
    before = configuration_fields(config)
    wrong = []
    for owner, name, path in leaves(config):
        value = getattr(owner, name)
        set_to(owner, name, "another value")
        counts = configuration_fields(config) != before
        set_to(owner, name, value)
        if counts is is_irrelevant(path):
            wrong.append(path)
    assert wrong == []


OTHER_VERSIONS = {
    "cache_config.simple_cpu_offload_num_blocks",
    "cache_config.user_specified_mamba_block_size",
    "logging_config",
    "watchdog_config",
    "watermark_config",
}


def test_what_does_not_matter_exists(model_folder: Path) -> None:
    """A field that vLLM renames counts under its new name."""
    known = {path for _, _, path in leaves(with_all_parts(model_folder))}
    named = {name for names in IRRELEVANT.values() for name in names}
    assert named - known <= OTHER_VERSIONS


def test_a_field_that_only_another_vllm_has(
    own: str, config: VllmConfig, cache_config: KVCacheConfig
) -> None:
    @dataclass
    class Newer(type(config.attention_config)):  # type: ignore[misc]
        rotate_twice: bool = True

    newer = copy(config)
    set_to(newer, "attention_config", Newer())
    assert namespace(newer, cache_config) != own


def test_an_object_counts_by_its_members(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    found = set()
    for method in ("one draft model", "another"):
        speculating = copy(config)
        set_to(speculating, "speculative_config", SimpleNamespace(method=method))
        found.add(namespace(speculating, cache_config))
    assert len(found) == 2


def test_what_a_value_says_counts_and_not_where_it_is(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for file, text in ((one, "1"), (same, "1"), (other, "2")):
        file.write_text(text)
    assert module.contents(one) == module.contents(same) != module.contents(other)
    assert module.contents(tmp_path / "none") == str(tmp_path / "none")


class TestHub:
    """A model that is named, not given as a folder."""

    def cached(self, cache: Path, model_folder: Path, commit: str, value: int) -> None:
        """The layout of the hub's client: snapshots by commit, and the commit that "main" is."""
        repository = cache / "models--org--name"
        snapshot = shutil.copytree(model_folder, repository / "snapshots" / commit)
        weights = snapshot / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8] + bytes([value] * 8))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)

    def fields(
        self, config: VllmConfig, cache_config: KVCacheConfig, cache: Path, revision: str | None
    ) -> dict[str, object]:
        named = copy(config)
        set_to(named, "model_config", copy(config.model_config))
        set_to(named, "load_config", copy(config.load_config))
        set_to(named.model_config, "model", "org/name")
        set_to(named.model_config, "revision", revision)
        set_to(named.load_config, "download_dir", str(cache))
        return module.fingerprint_fields(named, cache_config, CHUNK_TOKENS)

    def test_its_files_in_the_local_cache_count(
        self, config: VllmConfig, cache_config: KVCacheConfig, model_folder: Path, tmp_path: Path
    ) -> None:
        found = []
        for number, commit in enumerate(("a" * 40, "b" * 40)):
            self.cached(tmp_path, model_folder, commit, number)
            found.append(self.fields(config, cache_config, tmp_path, None))
            by_commit = self.fields(config, cache_config, tmp_path, commit)
            assert by_commit == found[-1], "main is this commit"
            assert module.known_by_name(by_commit) == []
        assert module.digest(found[0]) != module.digest(found[1])

    def test_without_them_its_name_and_revision_do(
        self, config: VllmConfig, cache_config: KVCacheConfig, tmp_path: Path
    ) -> None:
        one, other = (
            self.fields(config, cache_config, tmp_path, revision) for revision in (None, "another")
        )
        assert module.digest(one) != module.digest(other)
        assert module.known_by_name(one) == ["org/name"]

    def test_a_folder_without_weights_is_a_name(
        self, cache_config: KVCacheConfig, model_folder: Path, tmp_path: Path
    ) -> None:
        """Its loader has them elsewhere."""
        folder = shutil.copytree(model_folder, tmp_path / "other")
        config = engine_config(folder)
        (folder / "model.safetensors").unlink()
        other_file("generation_config.json")(folder)
        fields = module.fingerprint_fields(config, cache_config, CHUNK_TOKENS)
        assert module.known_by_name(fields) == [str(folder)]
        assert "file generation_config.json" in fields


@pytest.mark.parametrize(
    "change",
    [
        lambda group: replace(group, layer_names=group.layer_names[:-1]),
        lambda group: replace(group, kv_cache_spec=replace(group.kv_cache_spec, head_size=32)),
    ],
    ids=["layers", "spec"],
)
def test_another_group_of_layers(
    own: str,
    config: VllmConfig,
    cache_config: KVCacheConfig,
    change: Callable[[KVCacheGroupSpec], KVCacheGroupSpec],
) -> None:
    groups = [change(group) for group in cache_config.kv_cache_groups]
    assert namespace(config, replace(cache_config, kv_cache_groups=groups)) != own


def test_another_chunk_size(own: str, config: VllmConfig, cache_config: KVCacheConfig) -> None:
    """Equal keys would stand for different chunks."""
    assert namespace(config, cache_config, 2 * CHUNK_TOKENS) != own


def device(kind: str, *capability: int) -> SimpleNamespace:
    version = DeviceCapability(*capability) if capability else None
    return SimpleNamespace(device_type=kind, get_device_capability=lambda: version)


ENVIRONMENTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "protocol": lambda patch: patch.setattr(module, "PROTOCOL_VERSION", 99),
    "vLLM": lambda patch: patch.setattr(vllm, "__version__", "0.0.1"),
    "model runner": lambda patch: patch.setattr(VllmConfig, "use_v2_model_runner", True),
    "device": lambda patch: patch.setattr(module, "current_platform", device("rocm")),
    "seed of the keys": lambda patch: patch.setenv("PYTHONHASHSEED", "12345"),
    "layout": lambda patch: patch.setenv("VLLM_KV_CACHE_LAYOUT", "HND"),
    "layout on ROCm": lambda patch: patch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
    "layout of states": lambda patch: patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
}


@pytest.mark.parametrize("change", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_another_environment(
    own: str,
    config: VllmConfig,
    cache_config: KVCacheConfig,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    assert not config.use_v2_model_runner
    change(monkeypatch)
    assert namespace(config, cache_config) != own


def test_another_generation_of_devices(
    config: VllmConfig, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for minor in (0, 9):
        monkeypatch.setattr(module, "current_platform", device("cuda", 8, minor))
        found.add(namespace(config, cache_config))
    assert len(found) == 2


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 36), ("xxhash", 20)])
def test_the_length_of_a_key_depends_on_the_hash(
    model_folder: Path, algorithm: str, length: int
) -> None:
    config = engine_config(model_folder, prefix_caching_hash_algo=algorithm)
    assert module.key_bytes(config) == length


ROWS, COLUMNS = 300, 1000


@pytest.mark.process
def test_a_digest_is_the_same_in_every_process_and_order() -> None:
    code = (
        "import torch; from xinference_xavier.engine.identity import digest;"
        "print(digest({'none': None, 'chunk_tokens': 128, 'layers': ['a', 'b'],"
        " 'dtype': torch.float32}))"
    )
    fields = {"dtype": torch.float32, "layers": ["a", "b"], "chunk_tokens": 128, "none": None}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == digest(fields)


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


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
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


# -- formats of pages ------------------------------------------------------------------------------

BLOCKS = 24
LAYERS = [["full.0", "full.1"], ["window.0"]]


def vllm_config(dtype: torch.dtype) -> Any:
    """What is read of a configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_of(layers: list[list[str]], dtype: torch.dtype) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=dtype)
    groups = [KVCacheGroupSpec(names, spec) for names in layers]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def test_the_number_of_blocks_does_not_matter() -> None:
    formats = {
        tensor_format(torch.empty(blocks, 2, 128, 4, 64), blocks) for blocks in (BLOCKS, 1000, 64)
    }
    assert formats == {"torch.float32 (1 × blocks, 2, 128, 4, 64) in the order [0, 1, 2, 3, 4]"}


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(2 * BLOCKS, 2, 64, 4, 64),  # a kernel with smaller blocks than vLLM
        torch.empty(BLOCKS, 2, 4, 128, 64),
        torch.empty(BLOCKS, 2, 4, 128, 64).transpose(2, 3),  # the same shape in another order
        torch.empty(2, BLOCKS, 128, 4, 64),
        torch.empty(BLOCKS, 2, 128, 4, 64, dtype=torch.float16),
    ],
    ids=["kernel blocks", "shape", "order", "keys and values apart", "type"],
)
def test_other_formats_of_equal_size_differ(other: torch.Tensor) -> None:
    assert tensor_format(other, BLOCKS) != tensor_format(torch.empty(BLOCKS, 2, 128, 4, 64), BLOCKS)


@pytest.mark.parametrize(
    ("processor", "kernel"),
    [("AMX", "amx"), ("AVX-512", "vec"), ("ARM", "neon")],
)
def test_processors_lay_out_pages_of_equal_size_differently(
    monkeypatch: pytest.MonkeyPatch, processor: str, kernel: str
) -> None:
    """vLLM's kernels for AMX pack K and V, those for AVX keep K by column."""
    arm, x86 = CpuArchEnum.ARM, CpuArchEnum.X86
    architecture = arm if processor == "ARM" else x86
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: architecture)
    monkeypatch.setattr(module, "get_current_attn_backends", lambda _config, _layers: [])
    config = cache_of([["layer"]], torch.bfloat16)
    layers = {"layer": torch.empty(BLOCKS, 2, 32, 64)}
    (group,) = page_format(vllm_config(torch.bfloat16), config, layers)
    assert group["kernels"] == [kernel]


def test_each_group_has_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"full": "FLASH_ATTN", "window": "TRITON_ATTN"}

    def of_layers(_config: object, layers: list[str]) -> list[Any]:
        name = backends[layers[0].partition(".")[0]]
        return [SimpleNamespace(get_name=lambda: name)]

    monkeypatch.setattr(module, "get_current_attn_backends", of_layers)
    config = cache_of(LAYERS, torch.float32)
    caches: dict[str, Any] = {
        "full.0": torch.empty(BLOCKS, 2, 16, 8),
        "full.1": torch.empty(BLOCKS, 2, 16, 8),
        "window.0": [torch.empty(BLOCKS, 3), torch.empty(BLOCKS, 5)],  # a state in two tensors
    }
    formats = page_format(vllm_config(torch.float32), config, caches)
    assert [group["backends"] for group in formats] == [["FLASH_ATTN"], ["TRITON_ATTN"]]
    assert [len(group["tensors"]) for group in formats] == [1, 2]
    del caches["full.1"], caches["window.0"]  # another pipeline stage has them
    assert [len(g["tensors"]) for g in page_format(vllm_config(torch.float32), config, caches)] == [
        1,
        0,
    ]
