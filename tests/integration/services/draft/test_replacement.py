"""Weights of a running draft are replaced: what serves before, meanwhile and after, and what is refused."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import hashlib
import os
import pickle
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from galley.common.draft_loading import CONFIG, WEIGHTS, draft_version, send_draft
from galley.common.metrics import catalogue
from galley.common.metrics.labels import DRAFT, LOADED
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.core.errors import Unavailable
from galley.engine.load import draft_directory
from galley.engine.model import CausalModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.loading import load_replacement, load_strategies
from services.draft.loop import DraftLoop
from services.draft.settings import DraftSettings
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.draft.strategies.ngram import Lookups
from tests.fakes.feature_drafts import save_feature_draft
from tests.fakes.readings import number
from tests.fakes.tiny_model import greedy, load_tiny_model, save_tiny_model
from tests.integration.galley.engine.drafts import Draft, draft_of, save_target
from tests.integration.services.draft.conftest import draft_server
from tests.integration.services.draft.steps import MODEL, Gated, gating
from tests.integration.services.draft.steps import item as step_item
from tests.integration.services.draft.test_propose import item, proposals

PROMPT = [5, 9, 2, 33, 17, 60, 71, 12]
KINDS = [("model", 0), ("model", 3), ("hybrid", 0), ("hybrid", 3)]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MIB = 1 << 20
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def other_draft(target: Path) -> Draft:
    draft = draft_of(target)
    for name in ("lm_head.weight", "lm_head.weight.scale"):
        draft.weights[name] = draft.weights[name].roll(1, 0)
    return draft


@pytest.fixture(scope="module")
def old(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_of(target).save(tmp_path_factory.mktemp("old") / "draft")


@pytest.fixture(scope="module")
def new(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_draft(target).save(tmp_path_factory.mktemp("new") / "draft")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of temporary files, which is empty again after each test."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert left_in(directory) == []


def left_in(directory: Path) -> list[Path]:
    return list(directory.rglob("*"))


@dataclass(frozen=True)
class Served:
    stub: rpc.DraftAsyncStub
    channel: grpc.aio.Channel

    async def version(self) -> str:
        return (await self.stub.GetDraftInfo(pb.GetDraftInfoRequest())).version

    async def weights_digest(self) -> str:
        return (await self.stub.GetDraftInfo(pb.GetDraftInfoRequest())).weights_digest

    async def proposed(self, tokens: list[int], session_id: str, start: int = 0) -> list[list[int]]:
        """Return the proposals of each kind, each for a session and a tenant of its own."""
        found = []
        for kind, width in KINDS:
            name = f"{session_id}-{kind}-{width}"
            request = item(
                tokens, 4, kind, width=width, session_id=name, tenant_salt=name.encode(), start=start
            )
            found += await proposals(self.stub, request)
        return found


@asynccontextmanager
async def served(
    target: Path, draft: Path, max_load_mib: int = 1, metrics: Registry | None = None, **given: str
) -> AsyncIterator[Served]:
    async with (
        draft_server(
            Parts(metrics=metrics),
            model=str(draft),
            target_model=str(target),
            dtype="float32",
            max_load_mib=max_load_mib,
            **given,
        ) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield Served(rpc.DraftStub(channel), channel)


async def test_new_weights_serve_and_read_nothing_of_the_old(target: Path, old: Path, new: Path) -> None:
    """Sessions go on: what they had cached is not read, or their tokens would be others."""
    longer = [*PROMPT, 44, 21]
    async with served(target, new) as fresh:
        expected = await fresh.proposed(longer, "whole")
    async with served(target, old) as draft:
        first = await draft.proposed(PROMPT, "s")
        before = await draft.stub.GetDraftInfo(pb.GetDraftInfoRequest())
        assert before.version == before.weights_digest == draft_version(old)
        assert before.max_load_bytes == MIB
        assert await send_draft(draft.channel, new) == draft_version(new)
        after = await draft.stub.GetDraftInfo(pb.GetDraftInfoRequest())
        assert await draft.proposed(longer, "s", start=len(PROMPT)) == expected != first
        assert await draft.proposed(longer, "new") == expected
        before.version = before.weights_digest = after.version
        assert after == before
        assert await send_draft(draft.channel, old, "back") == "back" == await draft.version()
        assert await draft.weights_digest() == draft_version(old)
        assert await draft.proposed(PROMPT, "again") == first


async def test_weights_with_a_name_have_their_digest_too(target: Path, old: Path, new: Path) -> None:
    async with served(target, old, version="v1") as draft:
        assert (await draft.version(), await draft.weights_digest()) == ("v1", draft_version(old))
        assert await send_draft(draft.channel, new, "v2") == "v2"
        assert await draft.weights_digest() == draft_version(new)


async def test_lookups_are_kept(target: Path, old: Path, new: Path) -> None:
    async with served(target, old) as draft:
        await proposals(draft.stub, item([1, 50, 51, 52, 53], 1, "ngram", session_id="a", prompt_len=1))
        await send_draft(draft.channel, new)
        request = item([2, 50, 51], 2, "ngram", session_id="b", prompt_len=1)
        assert await proposals(draft.stub, request) == [[52, 53]]


async def test_open_requests_end_with_the_old_weights_in_as_many_steps(tiny: Path, tmp_path: Path) -> None:
    """Nor does a session need more steps afterwards, if a step takes all its tokens."""
    other = save_tiny_model(tmp_path / "other", seed=1)
    began, joined = [5, 9, 2, 33, 17], [3, 2, 8, 7]
    async with gating(tiny) as (old, stream, draft):
        await stream.send(step_item(began, 4, "a"))
        await old.step_started()
        new = Gated(ModelStrategy(ModelSteps(load_tiny_model(other, kv_blocks=256))))
        new.open()
        draft.loop.exchange({MODEL: new})
        await stream.send(step_item(joined, 2, "b"))
        old.open()
        answers = {(answer := await stream.next()).session_id: answer.result for _ in range(2)}
        assert list(answers["a"].draft_tokens) == greedy(tiny, began, 4)
        assert list(answers["b"].draft_tokens) == greedy(other, joined, 2)
        assert (old.steps, new.steps) == (["a"] * 4, ["b"] * 2)
        further = [*began, *answers["a"].draft_tokens[:2]]
        await stream.send(step_item(further, 3, "a", start=len(began)))
        assert list((await stream.next()).result.draft_tokens) == greedy(other, further, 3)
        assert (old.steps, new.steps) == (["a"] * 4, ["b"] * 2 + ["a"] * 3)


Change = Callable[[pb.DraftFiles, list[bytes]], object]


def announced(directory: Path) -> tuple[pb.DraftFiles, list[bytes]]:
    contents = [(directory / name).read_bytes() for name in (CONFIG, WEIGHTS)]
    files = [
        pb.DraftFile(name=name, size=len(content), digest=hashlib.blake2b(content, digest_size=16).digest())
        for name, content in zip((CONFIG, WEIGHTS), contents, strict=True)
    ]
    return pb.DraftFiles(files=files), contents


async def load(draft: Served, files: pb.DraftFiles | None, contents: Sequence[bytes]) -> str:
    async def messages() -> AsyncIterator[pb.LoadDraftRequest]:
        if files is not None:
            yield pb.LoadDraftRequest(draft=files)
        for content in contents:
            yield pb.LoadDraftRequest(data=content)

    return (await draft.stub.LoadDraft(messages())).version


def renamed(index: int, name: str) -> Change:
    return lambda draft, _: setattr(draft.files[index], "name", name)


def flipped(draft: pb.DraftFiles, contents: list[bytes]) -> None:
    contents[1] = contents[1][:-1] + bytes([contents[1][-1] ^ 1])


ANNOUNCEMENTS: dict[str, tuple[Change, str]] = {
    "another digest": (flipped, "model.safetensors: must have the digest"),
    "a short digest": (lambda draft, _: setattr(draft.files[1], "digest", b"x"), "digest must be 16 bytes"),
    "a pickle": (renamed(1, "pytorch_model.bin"), "must be config.json and model.safetensors"),
    "a name with folders": (renamed(0, "../config.json"), "must be config.json and model.safetensors"),
    "an absolute name": (renamed(0, "/config.json"), "must be config.json and model.safetensors"),
    "a name twice": (renamed(1, CONFIG), "must be config.json and model.safetensors"),
    "one file": (lambda draft, _: draft.files.pop(), "must be config.json and model.safetensors"),
    "too large": (lambda draft, _: setattr(draft.files[1], "size", MIB), "(--max-load-mib)"),
    "a large configuration": (lambda draft, _: setattr(draft.files[0], "size", MIB + 1), "config.json: must"),
    "an empty file": (lambda draft, _: setattr(draft.files[0], "size", 0), "config.json: must be 1 to"),
    "a bad version": (lambda draft, _: setattr(draft, "version", "a/b"), "draft.version: must be 1 to 64"),
    "a stream that is cut": (lambda _, contents: contents.pop(), "model.safetensors: must be"),
    "more than announced": (lambda _, contents: contents.append(b"x"), "must end with the last file"),
    "an empty message": (lambda _, contents: contents.insert(0, b""), "a message here, got 0"),
    "a small message": (lambda _, contents: contents.insert(0, b"x"), "a message here, got 1"),
    "files in one message": (
        lambda _, contents: contents.append(contents.pop(0) + contents.pop(0)),
        "here, got",
    ),
}


@pytest.fixture(scope="module")
def damaged(
    target: Path, old: Path, new: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, str]]:
    """Directories that arrive whole and cannot be served, each with a part of the reason."""
    directory = tmp_path_factory.mktemp("damaged")

    def changed(name: str, change: Callable[[Draft], object]) -> Path:
        draft = other_draft(target)
        change(draft)
        return draft.save(directory / name)

    plain = draft_of(target, own=True).save(directory / "reading")
    whole = changed("whole", lambda draft: draft.config.pop("galley_draft"))
    broken = changed("broken", lambda _: None)
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:-9])
    code = changed("pickled", lambda _: None)
    (code / WEIGHTS).write_bytes(pickle.dumps({"lm_head.weight": 1}))
    nested = changed("nested", lambda _: None)
    (nested / CONFIG).write_text("[" * 100_000)
    nan = torch.full((64,), torch.nan)
    return {
        "broken safetensors": (broken, "model.safetensors: cannot be read"),
        "a pickle under another name": (code, "model.safetensors: cannot be read"),
        "no JSON": (nested, "config.json: must be JSON"),
        "no trained draft": (whole, "galley_draft: must be in config.json"),
        "code": (changed("code", lambda draft: draft.config.update(auto_map={"A": "b.C"})), "auto_map"),
        "another tokenizer": (
            changed("tokenizer", lambda draft: draft.section.update(tokenizer_hash="0" * 32)),
            "tokenizer_hash: must be",
        ),
        "another vocabulary": (
            changed("vocabulary", lambda draft: draft.config.update(vocab_size=98)),
            "vocab_size: must be",
        ),
        "another target": (
            changed("target", lambda draft: draft.section.update(embeddings_sha256="0" * 64)),
            "target_model: must be the target of this draft",
        ),
        "states": (save_feature_draft(plain, directory / "states", (1,)), "feature_layers: must be []"),
        "no format": (
            changed("format", lambda draft: draft.section.update(format=[1])),
            "galley_draft: format must be",
        ),
        "no embeddings": (
            changed("embeddings", lambda draft: draft.section.update(embeddings=["own"])),
            "galley_draft: embeddings must be",
        ),
        "many layers": (
            changed("layers", lambda draft: draft.config.update(num_hidden_layers=100_000_000)),
            "num_hidden_layers: must be in [1, 64]",
        ),
        "no heads": (
            changed("heads", lambda draft: draft.config.update(num_attention_heads=0)),
            "must be a model that transformers knows",
        ),
        "a missing weight": (
            changed("missing", lambda draft: draft.weights.pop("model.norm.weight")),
            "norm",
        ),
        "no numbers": (
            changed("nan", lambda draft: draft.weights.update({NORM: nan})),
            "logits must be within",
        ),
    }


async def test_what_is_refused_changes_nothing(
    target: Path, old: Path, new: Path, damaged: dict[str, tuple[Path, str]], scratch: Path
) -> None:
    async with served(target, old) as draft:
        first = await draft.proposed(PROMPT, "s")

        async def must_refuse(call: AsyncIterator[str] | object, reason: str, name: str) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call  # type: ignore[misc]
            assert refused.value.code() is INVALID, name
            assert reason in str(refused.value.details()), name
            assert str(scratch) not in str(refused.value.details()), name
            assert left_in(scratch) == [], name

        await must_refuse(load(draft, None, [b"x"]), "must be in the first message", "no description")
        for name, (change, reason) in ANNOUNCEMENTS.items():
            files, contents = announced(new)
            change(files, contents)
            await must_refuse(load(draft, files, contents), reason, name)
        for name, (directory, reason) in damaged.items():
            await must_refuse(send_draft(draft.channel, directory), reason, name)
        assert await draft.version() == draft_version(old)
        assert await draft.proposed(PROMPT, "t") == first
        files, [config, weights] = announced(new)
        assert await load(draft, files, [config, weights[:20000], weights[20000:]]) == draft_version(new)


async def test_a_disk_that_fails_is_no_fault_of_the_caller(
    target: Path, old: Path, new: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise Unavailable(f"{path}: cannot be read: Input/output error")

    async with served(target, old) as draft:
        monkeypatch.setattr(draft_directory, "check_readable", fail)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await send_draft(draft.channel, new)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert failed.value.details() == f"{WEIGHTS}: cannot be read: Input/output error"
        assert await draft.version() == draft_version(old)


async def test_a_load_in_place_of_a_version_that_is_not_served_is_refused(
    target: Path, old: Path, new: Path
) -> None:
    """Who chose the replica by an old lease would overwrite what was loaded since."""
    async with served(target, old, version="v1") as draft:
        assert await send_draft(draft.channel, new, "v2", replaces="v1") == "v2"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await send_draft(draft.channel, old, "v3", replaces="v1")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "the replica serves v2, not v1, which the load would replace"
        assert (await draft.version(), await draft.weights_digest()) == ("v2", draft_version(new))
        assert await send_draft(draft.channel, old, "v3") == "v3"


async def test_loads_are_counted_by_their_results(
    target: Path, old: Path, new: Path, damaged: dict[str, tuple[Path, str]]
) -> None:
    registry = Registry(DRAFT)
    async with served(target, old, metrics=registry) as draft:

        def counts() -> dict[str, float]:
            return {result: number(registry, catalogue.DRAFT_LOADS, result) for result in LOADED.values}

        assert counts() == {"loaded": 0, "refused": 0, "failed": 0}
        await send_draft(draft.channel, new)
        assert counts() == {"loaded": 1, "refused": 0, "failed": 0}
        with pytest.raises(grpc.aio.AioRpcError):
            await send_draft(draft.channel, new, "a/b")
        assert counts() == {"loaded": 1, "refused": 1, "failed": 0}
        with pytest.raises(grpc.aio.AioRpcError):
            await send_draft(draft.channel, damaged["no numbers"][0])
        assert counts() == {"loaded": 1, "refused": 1, "failed": 1}


async def test_a_replica_accepts_none_by_default(target: Path, old: Path, new: Path) -> None:
    async with served(target, old, max_load_mib=0) as draft:
        with pytest.raises(grpc.aio.AioRpcError, match="--max-load-mib") as refused:
            await send_draft(draft.channel, new)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await draft.stub.GetDraftInfo(pb.GetDraftInfoRequest())).max_load_bytes == 0


async def test_one_load_at_a_time(target: Path, old: Path, new: Path, scratch: Path) -> None:
    files, _ = announced(new)
    async with served(target, old) as draft:
        call = draft.stub.LoadDraft()
        await call.write(pb.LoadDraftRequest(draft=files))
        async with asyncio.timeout(20):
            while len(left_in(scratch)) < 2:
                await draft.version()
        with pytest.raises(grpc.aio.AioRpcError, match="another draft is being loaded") as refused:
            await send_draft(draft.channel, new)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        async with asyncio.timeout(20):
            while left_in(scratch):
                await draft.version()
        assert await draft.version() == draft_version(old)
        assert await send_draft(draft.channel, new) == draft_version(new)


async def test_files_of_killed_processes_are_removed(
    target: Path, old: Path, new: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed in a thread: meanwhile the event loop serves sessions."""
    removing = []
    remove = shutil.rmtree

    def noted(directory: Path, **options: Any) -> None:
        removing.append(threading.current_thread())
        remove(directory, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    killed, running = scratch / "galley-draft-killed", scratch / "galley-draft-running"
    for directory in (killed, running):
        directory.mkdir()
        (directory / WEIGHTS).write_bytes(b"x")
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with served(target, old) as draft:
        await send_draft(draft.channel, new)
        assert sorted(left_in(scratch)) == [running, running / WEIGHTS]
        os.close(lock)
        await send_draft(draft.channel, old)
        files, [config, weights] = announced(new)
        with pytest.raises(grpc.aio.AioRpcError):
            await load(draft, files, [config, b"-" * len(weights)])
    assert left_in(scratch) == []
    assert len(removing) > 3
    assert threading.main_thread() not in removing


def models() -> list[CausalModel]:
    return [one for one in gc.get_objects() if issubclass(type(one), CausalModel)]


async def test_the_memory_of_the_old_weights_is_freed_without_a_collection(
    target: Path, old: Path, new: Path
) -> None:
    """Collections of a replica skip what was loaded at its start."""
    settings = DraftSettings(model=str(old), target_model=str(target), dtype="float32", max_load_mib=1)
    lookups = Lookups()
    gc.collect()
    gc.disable()
    try:
        others = {id(one) for one in models()}
        strategies, info = load_strategies(settings, lookups)
        new_models = [one for one in models() if id(one) not in others]
        kept: list[weakref.ref[object]] = [weakref.ref(one) for one in new_models]
        kept += [weakref.ref(one.kv.keys) for one in new_models]
        del new_models
        loop = DraftLoop(strategies, max_sessions=4, max_tokens=512, max_batch=4)
        del strategies
        assert [one for one in kept if one() is not None] == kept
        loop.exchange(load_replacement(settings, new, info, lookups))
        assert [one for one in kept if one() is not None] == []
        await loop.close()
    finally:
        gc.enable()
