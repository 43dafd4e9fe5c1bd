"""Versions of draft weights, and the call that puts other weights into a running draft replica.

A version is a name, or the digest of the files that decide what is drafted: config.json and *.safetensors.
A replica takes a trained draft (galley/engine/load/draft_directory.py), which is DRAFT_FILES.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc

from galley.common.models.files import foreign_file
from galley.core.errors import UnsupportedModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DRAFT_FILES = (CONFIG, WEIGHTS)
DIGEST_BYTES = 16
ACCEPTED = "galley-accepted"
"""Name of the initial metadata by which a replica asks for the files that were described."""
PIECE_BYTES = 512 * 1024
"""Most bytes of a file in a message of LoadDraft."""

_VERSION_BYTES = 8
_DECIDING = (CONFIG, "*.safetensors")


def draft_version(directory: Path) -> str:
    """Return the version of the weights in `directory`: 16 hex digits. Blocks.

    Raise UnsupportedModel if it lacks a file, or has links that lead out of it.
    """
    _refuse_foreign(directory, _DECIDING)
    paths = [path for pattern in _DECIDING for path in sorted(directory.glob(pattern))]
    return version_of((path.name, _digest(path)) for path in paths)


def version_of(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the version of files that are given by name and `DIGEST_BYTES` of their blake2b."""
    digest = hashlib.blake2b(digest_size=_VERSION_BYTES)
    for name, content in sorted(files):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


async def send_draft(
    channel: grpc.aio.Channel, directory: Path, version: str = "", replaces: str = ""
) -> str:
    """Put the trained draft in `directory` into the replica at `channel`; return the version it has there.

    An empty `version` is the `draft_version`. The replica must serve the version `replaces`, if it is given:
    its lease may have been read long ago. Raise UnsupportedModel for a directory that cannot be sent, and
    AioRpcError if the replica refuses it or cannot be reached; its present weights then stay in use.
    """
    files = await asyncio.to_thread(_described, directory)
    call = rpc.DraftStub(channel).LoadDraft()
    # gRPC raises it at a write after the replica has ended the call; the response has the reason.
    with suppress(asyncio.InvalidStateError):
        draft = pb.DraftFiles(files=files, version=version, replaces=replaces)
        await call.write(pb.LoadDraftRequest(draft=draft))
        # A refusal that comes while a message is being written would be lost: gRPC then reports INTERNAL.
        if ACCEPTED in dict(await call.initial_metadata() or ()):
            async for message in _data(directory, files):
                await call.write(message)
            await call.done_writing()
    response: pb.LoadDraftResponse = await call
    return response.version


def _described(directory: Path) -> list[pb.DraftFile]:
    _refuse_foreign(directory, DRAFT_FILES)
    paths = [directory / name for name in DRAFT_FILES]
    return [pb.DraftFile(name=path.name, size=path.stat().st_size, digest=_digest(path)) for path in paths]


def _refuse_foreign(directory: Path, patterns: tuple[str, ...]) -> None:
    if (reason := foreign_file(directory, patterns)) is not None:
        raise UnsupportedModel(reason)
    for pattern in patterns:
        if not any(path.is_file() for path in directory.glob(pattern)):
            raise UnsupportedModel(f"{directory}: must hold {pattern}")


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=DIGEST_BYTES)).digest()


async def _data(directory: Path, files: Iterable[pb.DraftFile]) -> AsyncIterator[pb.LoadDraftRequest]:
    for file in files:
        path = directory / file.name
        for first in range(0, file.size, PIECE_BYTES):
            piece = await asyncio.to_thread(_read, path, first, min(PIECE_BYTES, file.size - first))
            yield pb.LoadDraftRequest(data=piece)


def _read(path: Path, first: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(first)
        return file.read(count)
