"""A FIFO in place of any file that a setting leads to, and mounts that hang: who waits, and for how long."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from galley.common.models.files import CONFIGS
from galley.common.server.server import Parts, start_server
from galley.common.tls.files import CHECK_INTERVAL_S
from galley.engine.load.support import refuse_raw_config
from galley.plan.pair import read_model
from services.draft.__main__ import build as build_draft
from services.draft.settings import DraftSettings
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings
from services.target.engine.vllm.adapters import read_adapters
from services.target.settings import TargetSettings, parse_adapters
from tests.attack.stack import Attacked, undisturbed, unharmed
from tests.fakes import tokenizer_files
from tests.fakes.certificates import Authority, mounted
from tests.fakes.issuers import AUDIENCE, ISSUER
from tests.fakes.mounts import hanging, require_mounts
from tests.fakes.waiting import PATIENCE_S

TLS = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
GATEWAY = (
    *TLS,
    *("peer_ca_file", "peer_cert_file", "peer_key_file"),
    *("jwt_jwks_file", "jwt_ca_file", "api_keys_file", "id_secret_file", "redis_url_file"),
    *("redis_ca", "model"),
)
DRAFT = (*TLS, "redis_url_file", "redis_ca", "tokenizer")
KEYS = f'[[keys]]\nprincipal = "p"\nsha256 = "{"0" * 64}"\n'
REFUSED = re.compile(r"/fifos/tokenizer\.json: must be a (regular file|file or a directory)")
NAMES_A_DIRECTORY = re.compile(r"hub id|=DIRECTORY")
"""What the description of such a setting has."""
RESOLVED = {"target_model"}
"""Checked as the model of a target is (tests/integration/galley/engine/test_loading.py)."""


def test_every_setting_that_names_a_file_or_directory_is_attacked() -> None:
    kinds = (GatewaySettings, DraftSettings, TargetSettings)
    named = {
        name
        for kind in kinds
        for name, field in kind.model_fields.items()
        if name.endswith("_file") or NAMES_A_DIRECTORY.search(field.description or "")
    }
    assert named == {*GATEWAY, *DRAFT, "lora_adapters"} - {"redis_ca"} | RESOLVED


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return a valid value of each setting."""
    authority = Authority(tmp_path, "authority")
    pair = mounted(tmp_path / "pair", authority.ca, authority.issue("server"))
    texts = {"jwt_jwks_file": "{}", "api_keys_file": KEYS, "id_secret_file": "secret"}
    texts |= {"redis_url_file": "redis://127.0.0.1:1"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tokenizer_files.write(tmp_path)
    return {
        **{name: str(tmp_path / name) for name in texts},
        **dict.fromkeys(("tls_client_ca_file", "peer_ca_file", "jwt_ca_file", "redis_ca"), pair.ca),
        **dict.fromkeys(("tls_cert_file", "peer_cert_file"), pair.cert),
        **dict.fromkeys(("tls_key_file", "peer_key_file"), pair.key),
        **{name: str(tmp_path) for name in ("model", "tokenizer")},
    }


def values_with(files: dict[str, str], names: Sequence[str], name: str, fifo: Path) -> dict[str, str]:
    """Return settings of `names` in which `name` leads to the FIFO."""
    leads_there = str(fifo.parent if name in {"model", "tokenizer"} else fifo)
    values = {key: value for key, value in files.items() if key in names} | {name: leads_there}
    if name.startswith("jwt_"):
        values |= {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
    for other in {"jwt_jwks_file", "jwt_ca_file"} - {name}:
        values.pop(other, None)
    if values.pop("redis_ca", None) and name == "redis_ca":
        values["redis_url"] = f"rediss://127.0.0.1:1?ca={fifo}"
        del values["redis_url_file"]
    return values


async def start_gateway(values: dict[str, str]) -> None:
    settings = GatewaySettings.model_validate(values)
    gateway = prepare(settings)
    running = await start_server(settings, gateway.build, Parts(), gateway.interceptors)
    await running.stop()


async def start_draft(values: dict[str, str]) -> None:
    settings = DraftSettings.model_validate(values)
    running = await start_server(settings, build_draft(settings))
    await running.stop()


def outcome(work: Callable[[], Coroutine[Any, Any, object]], unblock: Callable[[], object]) -> str:
    """Return the error of some work, in a thread of its own, that may wait for a file; fail if it does."""
    results: list[str] = []

    def run() -> None:
        try:
            asyncio.run(work())
            results.append("")
        except Exception as error:  # noqa: BLE001  # the outcome of the test
            results.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not results:
        unblock()
        pytest.fail("it waits")
    return results[0]


def write_into(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def fifo_among(directory: Path, name: str) -> Path:
    """Return a FIFO among the files of a tokenizer."""
    directory.mkdir()
    tokenizer_files.write(directory)
    path = directory / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    return fifo_among(tmp_path / "fifos", "tokenizer.json")


@pytest.mark.parametrize("name", GATEWAY)
def test_a_gateway_waits_for_no_fifo(files: dict[str, str], fifo: Path, name: str) -> None:
    values = values_with(files, GATEWAY, name, fifo)
    error = outcome(lambda: start_gateway(values), lambda: write_into(fifo))
    assert REFUSED.search(error)
    assert name in {"redis_ca", "model"} or name in error.replace("-", "_")


@pytest.mark.parametrize("name", DRAFT)
def test_a_draft_waits_for_no_fifo(files: dict[str, str], fifo: Path, name: str) -> None:
    values = values_with(files, DRAFT, name, fifo)
    assert REFUSED.search(outcome(lambda: start_draft(values), lambda: write_into(fifo)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_waits_for_no_fifo_beside_its_tokenizer(tmp_path: Path, name: str) -> None:
    fifo = fifo_among(tmp_path / "fifos", name)
    error = outcome(lambda: start_draft({"tokenizer": str(fifo.parent)}), lambda: write_into(fifo))
    assert f"{fifo}: must be a file" in error


@pytest.mark.parametrize("name", ["config.json", "training.json"])
def test_a_plan_waits_for_no_fifo_of_a_model(tmp_path: Path, name: str) -> None:
    fifo = fifo_among(tmp_path / "fifos", name)

    async def read() -> None:
        read_model("m", fifo.parent, refuse_raw_config, [])

    error = outcome(read, lambda: write_into(fifo))
    assert f"{fifo}: must be a file" in error


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_target_waits_for_no_fifo_of_an_adapter(tmp_path: Path, name: str) -> None:
    fifo = tmp_path / name
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)

    async def read() -> None:
        read_adapters(parse_adapters(f"sql={tmp_path}"))

    error = outcome(read, lambda: write_into(fifo))
    assert f"lora_adapters: sql: {fifo}: must be a file" in error


async def test_a_fifo_in_place_of_the_keys_blocks_no_other(stack: Attacked) -> None:
    async with unharmed(stack), undisturbed(stack) as bystander:
        with stack.keys_replaced_by_fifo():
            await stack.expect_error("files not reloaded")
            await bystander.progress()


async def test_keys_on_a_mount_that_hangs_block_no_other(stack: Attacked) -> None:
    require_mounts()
    async with unharmed(stack), undisturbed(stack) as bystander:
        with hanging(stack.keys.parent):
            until_s = time.monotonic() + 2 * CHECK_INTERVAL_S
            while time.monotonic() < until_s:
                await bystander.progress()
        await bystander.progress()
        await stack.forget_errors("files not reloaded")
