"""Receive the files of a draft: their names, sizes and digests are checked before anything reads them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO

from galley.common.draft_loading import (
    CONFIG,
    DIGEST_BYTES,
    DRAFT_FILES,
    version_of,
)
from galley.core.errors import DeadlinePassed, InvalidField
from galley.core.versions.state import check_version
from galley.pb.galley.v1 import galley_pb2 as pb

# A silent or slow caller must not keep others from loading.
_PATIENCE_S = 20.0
_LEAST_BYTES_PER_S = 1 << 20
_LEAST_PIECE_BYTES = 1 << 14
# It is parsed at once, and meanwhile no other thread runs.
_MAX_CONFIG_BYTES = 1 << 20


async def first_message(requests: AsyncIterator[pb.LoadDraftRequest]) -> pb.LoadDraftRequest:
    """Return the message that describes a draft. Raise DeadlinePassed if it does not come.

    It is read before a call is refused: a caller that is still writing it would not get the reason.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await anext(requests, pb.LoadDraftRequest())
    except TimeoutError:
        raise DeadlinePassed("the description of the draft did not arrive in time") from None


async def receive_draft(
    first: pb.LoadDraftRequest,
    requests: AsyncIterator[pb.LoadDraftRequest],
    accept: Callable[[], Awaitable[None]],
    directory: Path,
    max_bytes: int,
) -> str:
    """Write the files that `first` describes, at most `max_bytes`, into `directory`; return their digest.

    Call `accept` once the description is checked. What follows is read to its end, or as far as it was
    announced, also if it is refused: a caller that is still writing would not get the reason. Raise
    InvalidField, or DeadlinePassed if they come too slowly.
    """
    draft = _checked(first, max_bytes)
    try:
        async with asyncio.timeout(_PATIENCE_S + _total(draft) / _LEAST_BYTES_PER_S):
            await accept()
            pieces = _pieces(requests)
            try:
                await _receive(draft, pieces, directory)
            except InvalidField:
                await _discard(pieces, _total(draft))
                raise
    except TimeoutError:
        raise DeadlinePassed("the draft did not arrive in time") from None
    return version_of((file.name, file.digest) for file in draft.files)


def _checked(first: pb.LoadDraftRequest, max_bytes: int) -> pb.DraftFiles:
    """Return the description of a draft. Raise InvalidField."""
    if first.WhichOneof("part") != "draft":
        raise InvalidField("draft", "must be in the first message")
    draft = first.draft
    if draft.version:
        try:
            check_version(draft.version)
        except ValueError as error:
            raise InvalidField("draft.version", str(error)) from None
    if sorted(file.name for file in draft.files) != sorted(DRAFT_FILES):
        raise InvalidField("draft.files", f"must be {' and '.join(DRAFT_FILES)}")
    for file in draft.files:
        most = _MAX_CONFIG_BYTES if file.name == CONFIG else max_bytes
        if not 1 <= file.size <= most:
            raise InvalidField("draft.files", f"{file.name}: must be 1 to {most} bytes, got {file.size}")
        if len(file.digest) != DIGEST_BYTES:
            problem = f"{file.name}: digest must be {DIGEST_BYTES} bytes, got {len(file.digest)}"
            raise InvalidField("draft.files", problem)
    if _total(draft) > max_bytes:
        raise InvalidField(
            "draft.files", f"must be at most {max_bytes} bytes (--max-load-mib), got {_total(draft)}"
        )
    return draft


def _total(draft: pb.DraftFiles) -> int:
    return sum(file.size for file in draft.files)


async def _pieces(requests: AsyncIterator[pb.LoadDraftRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request.data


async def _receive(draft: pb.DraftFiles, pieces: AsyncIterator[bytes], directory: Path) -> None:
    for file in draft.files:
        await _receive_file(file, pieces, directory / file.name)
    if await anext(pieces, None) is not None:
        raise InvalidField("data", "must end with the last file")


async def _discard(pieces: AsyncIterator[bytes], most_bytes: int) -> None:
    while most_bytes > 0 and (piece := await anext(pieces, None)) is not None:
        most_bytes -= max(len(piece), _LEAST_PIECE_BYTES)


async def _receive_file(file: pb.DraftFile, pieces: AsyncIterator[bytes], path: Path) -> None:
    digest, left = hashlib.blake2b(digest_size=DIGEST_BYTES), file.size
    with path.open("xb") as written:
        while left:
            piece = await anext(pieces, None)
            if piece is None:
                problem = f"{file.name}: must be {file.size} bytes, got {file.size - left}"
                raise InvalidField("data", problem)
            # Many small ones would keep the event loop busy.
            least = min(left, _LEAST_PIECE_BYTES)
            if not least <= len(piece) <= left:
                problem = f"{file.name}: must be {least} to {left} bytes a message here, got {len(piece)}"
                raise InvalidField("data", problem)
            left -= len(piece)
            await asyncio.to_thread(_write, written, digest, piece)
    if digest.digest() != file.digest:
        raise InvalidField("data", f"{file.name}: must have the digest that was announced")


def _write(written: IO[bytes], digest: hashlib.blake2b, piece: bytes) -> None:
    written.write(piece)
    digest.update(piece)
