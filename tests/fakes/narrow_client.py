"""A client with a small flow-control window: it receives little that its reader has not read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from galley.pb.galley.v1 import galley_pb2_grpc as rpc


@asynccontextmanager
async def narrow(address: str, lookahead_bytes: int = 1 << 16) -> AsyncIterator[rpc.GenerationAsyncStub]:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", lookahead_bytes)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield rpc.GenerationStub(channel)
