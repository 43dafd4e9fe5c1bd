"""A stack whose processes all have metrics and certificates, and calls of every kind for it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from galley.client.client import AsyncClient, AsyncStream, GalleyRpcError
from galley.client.options import Speculation
from galley.stack.part import Facts, PartSpec
from galley.stack.parts import python_module, stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions
from tests.fakes.certificates import Mounted
from tests.fakes.tiny_model import CONTEXT, save_tiny_model
from tests.fakes.vocabularies import save_ascii_tokenizer

# Greedy, a model of random weights soon repeats itself: lookup is right then.
PROMPT = [5, 9, 2, 33, 5, 9, 2, 33, 5, 9]
FIXED = Speculation(k=4)
VERSION = "v1"
"""The version of all drafts, which is on trial."""
NO_FLAGS: Mapping[str, Sequence[str]] = MappingProxyType({})


@asynccontextmanager
async def monitored_stack(
    folder: Path, files: Mounted, replicas: int = 1, flags: Mapping[str, Sequence[str]] = NO_FLAGS
) -> AsyncIterator[Stack]:
    """Run Valkey, targets of the tiny model (target-0, …), drafts that look up, and the gateway gateway-0.

    `flags` are further ones of gateways and targets.
    """
    model = str(save_tiny_model(folder / "tiny"))
    save_ascii_tokenizer(folder / "tiny")  # grammars need one that spells every text
    served = ("--metrics-port", "0", "--tls-cert-file", files.cert, "--tls-key-file", files.key)
    peers = ("--peer-ca-file", files.ca, "--peer-cert-file", files.cert, "--peer-key-file", files.key)
    targets = [f"target-{index}" for index in range(replicas)]
    drafts = [f"draft-{index}" for index in range(replicas)]

    def parts(options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        valkey = next(part for part in stack_parts(options, dirs) if part.name == "valkey")

        def gateway(facts: Facts) -> list[str]:
            addresses = {
                flag: ",".join(str(facts[name]["address"]) for name in names)
                for flag, names in (("--target", targets), ("--draft", drafts))
            }
            return python_module(
                "services.gateway",
                *(word for pair in addresses.items() for word in pair),
                *("--redis-url", f"unix://{facts['valkey']['address']}"),
                *("--model", model, "--model-name", "tiny", *served, *peers),
                *("--draft-split", f"{VERSION}=0.5"),
                *flags.get("gateway", ()),
            )

        target = python_module(
            "services.target", "--model", model, "--dtype", "float32", *served, *flags.get("target", ())
        )
        draft = python_module("services.draft", "--tokenizer", model, "--version", VERSION, *served)
        return [
            valkey,
            *(PartSpec(name, lambda _: target) for name in targets),
            *(PartSpec(name, lambda _: draft) for name in drafts),
            PartSpec("gateway-0", gateway, after=("valkey", *targets, *drafts)),
        ]

    async with Stack(StackOptions(), parts=parts) as stack:
        yield stack


async def traffic(client: AsyncClient, workload: str = "w", prompt: Sequence[int] = PROMPT) -> None:
    """Request answers with and without drafts, resume one, and have a request and grammars refused."""
    # At other temperatures the tiny model may draw the token that poisons it.
    greedy = partial(client.stream, list(prompt), temperature=0.0)
    most = CONTEXT - len(prompt)
    for count in itertools.count():
        await read(greedy(max_tokens=most, ignore_eos=True, workload=workload, speculation=FIXED))
        plain = greedy(max_tokens=8, ignore_eos=True, speculation=Speculation(off=True))
        await read(plain)
        await read(client.resume(plain.session_id, 4))
        with pytest.raises(GalleyRpcError):
            await read(greedy(max_tokens=0))
        with pytest.raises(GalleyRpcError):  # each is compiled once
            await read(greedy(max_tokens=8, regex=f"({count}"))


async def read(stream: AsyncStream) -> None:
    async for _ in stream:
        pass
