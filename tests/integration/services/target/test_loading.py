"""The KV pool is sized from a memory bound, and what it cannot hold is not offered."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from galley.common.server.server import Parts
from galley.core.errors import OutOfMemory
from galley.engine.kv_shape import kv_shape
from galley.engine.load.module import load_config, parse_dtype
from galley.engine.model import CausalModel
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.paged.loading import kv_blocks
from services.target.engine.vllm import loading as vllm_loading
from services.target.loading import load_engine
from services.target.ranks.rank import device_environment
from services.target.servicer import add_target
from services.target.settings import TargetSettings
from tests.fakes.engine import KnownEngine
from tests.fakes.stepped_core import StubCore
from tests.fakes.tiny_model import CONTEXT, random_llama, save


def settings(tiny: Path, **given: Any) -> TargetSettings:
    return TargetSettings.model_validate({"model": str(tiny), "dtype": "float32", "kv_memory_mb": 2} | given)


def test_the_pool_is_as_large_as_it_may_be_and_no_larger(tiny: Path) -> None:
    block_bytes = kv_shape(load_config(tiny), parse_dtype("float32", "cpu")).block_bytes
    blocks = kv_blocks(settings(tiny))
    assert blocks * block_bytes <= 2 * 2**20 < (blocks + 1) * block_bytes
    assert load_engine(settings(tiny)).info.kv_blocks == blocks


def test_a_pool_that_does_not_fit_into_memory_is_refused_with_the_remedy(tiny: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"tiny.* 100000000 MiB.*tried to allocate.*--kv-memory-mb"):
        load_engine(settings(tiny, kv_memory_mb=10**8))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
        RuntimeError("unable to mmap 9 bytes from file </m>: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_weights_that_do_not_fit_into_memory_are_refused_in_one_line(
    tiny: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalModel, "load", Mock(side_effect=error))
    with pytest.raises(OutOfMemory) as refused:
        load_engine(settings(tiny))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "where", ["galley.engine.load.resolve.resolve_model", "galley.engine.fingerprint.build_of"]
)
def test_each_part_of_loading_may_meet_the_end_of_memory(
    tiny: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, Mock(side_effect=MemoryError))
    with pytest.raises(OutOfMemory, match="--kv-memory-mb"):
        load_engine(settings(tiny))


async def test_steps_that_do_not_fit_into_memory_are_refused_at_the_start(tiny: Path) -> None:
    engine = Mock(info=KnownEngine().info)
    engine.measure.side_effect = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(OutOfMemory, match="--kv-memory-mb"):
        await add_target(grpc.aio.server(), Parts(), engine, settings(tiny))


def test_the_engine_is_the_one_that_the_settings_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = StubCore()
    monkeypatch.setattr(vllm_loading, "load_core", lambda _, given: core if given == {"seed": 1} else None)
    engine = load_engine(settings(tiny, engine="vllm", vllm_args='{"seed": 1}'))
    assert engine.info is core.info
    assert load_engine(settings(tiny)).info.fingerprint != core.info.fingerprint


def test_other_errors_of_loading_pass(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalModel, "load", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        load_engine(settings(tiny))


def test_the_context_window_is_what_the_pool_holds(loaded: CausalModel) -> None:
    assert PagedEngine(loaded, "f00d").info.context_window == CONTEXT
    wide: Any = SimpleNamespace(info=replace(loaded.info, context_window=10**6), kv=loaded.kv)
    info = PagedEngine(wide, "f00d").info
    assert info.context_window == info.kv_blocks * info.kv_block_tokens


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tensor_parallel": 3, "hosts": 2, "ranks_address": "leader:1"}, "--hosts 2"),
        ({"tensor_parallel": 4, "hosts": 2}, "--ranks-address"),
        ({"tensor_parallel": 4, "hosts": 2, "ranks_address": "leader"}, "--ranks-address"),
        ({"tensor_parallel": 4, "hosts": 2, "ranks_address": "leader:70000"}, "--ranks-address"),
        ({"host_index": 1}, "--host-index: must be < --hosts 1"),
    ],
)
def test_hosts_that_cannot_share_the_ranks_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TargetSettings(**values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"quantization": "int4"}, "quantization"),
        ({"quantization": "int8", "device": "cuda:0"}, "--quantization: must be none with --device cuda:0"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TargetSettings(**values)


def test_int8_weights_are_reported_and_are_a_build_of_their_own(tmp_path: Path) -> None:
    wide = save(random_llama(hidden_size=64, spread=0.4, seed=0), tmp_path / "wide")
    plain, int8 = load_engine(settings(wide)), load_engine(settings(wide, quantization="int8"))
    assert (plain.info.dtype, int8.info.dtype) == ("float32", "float32+int8")
    assert int8.info.deterministic
    assert int8.info.fingerprint != plain.info.fingerprint


@pytest.mark.parametrize(
    ("device", "visible", "place", "expected"),
    [
        ("cpu", "", 1, {}),
        ("cuda", "", 0, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("cuda", "", 3, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("cuda:0", "4,GPU-f00d", 1, {"CUDA_VISIBLE_DEVICES": "GPU-f00d"}),
    ],
)
def test_each_rank_of_a_host_sees_a_device_of_its_own(
    device: str, visible: str, place: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_environment(device, place) == expected


def test_a_host_with_too_few_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="must name a device for each"):
        device_environment("cuda", 2)
