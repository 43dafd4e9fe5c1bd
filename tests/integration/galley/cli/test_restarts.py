"""Parts of a stack that end are started again, a few times in a row."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from galley.client.client import AsyncClient
from galley.client.options import GenerateOptions, Retries
from galley.stack.part import PartFailed, PartSpec
from galley.stack.stack import Stack, StackOptions
from tests.fakes.tiny_model import save_tiny_model
from tests.fakes.waiting import PATIENCE_S
from tests.integration.galley.cli.stand_in_stack import STAND_IN, stack_of, stand_in

QUICK = StackOptions(restart_pause_s=0.01)
AGAIN = ("starting it again",) * 5
# More than the gateway computes ahead of its client, so that the target must go on.
LONG = 2000
OPTIONS: GenerateOptions = {
    "max_tokens": LONG,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
}
# On a busy machine a target or a draft takes longer to start than clients wait by default.
PATIENT = Retries(patience_s=120)


def breaks_by(flag: Path, name: str) -> PartSpec:
    """Return a target that cannot start while the file `flag` exists."""
    return replace(
        stand_in(name, pool="target"),
        command=lambda _: [sys.executable, str(STAND_IN), *(["--die=3"] if flag.exists() else [])],
    )


class Changes:
    """What `run` reports, awaited in its order, each for `patience_s`."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self.note = self._queue.put_nowait

    async def must_be(self, *parts: str) -> None:
        for part in parts:
            async with asyncio.timeout(self._patience_s):
                change = await self._queue.get()
            assert part in change


async def test_replica_that_dies_is_started_again_while_another_serves() -> None:
    specs = [stand_in(name, pool="target") for name in ("target", "target-2")]
    async with stack_of(*specs, stand_in("gateway")) as stack:
        changes = Changes()

        async def work() -> str:
            for name, when in (("target", "now"), ("target-2", "now"), ("target", "in 1 s")):
                before, other = stack.address(name), {"target", "target-2"} - {name}
                await stack.kill(name)
                death = f"{name} was killed by SIGKILL; starting it again {when}; log: {stack.log(name)}"
                await changes.must_be(death, f"{name} serves again")
                assert stack.address(name) != before
                assert other < set(stack.running)
            return "done"

        assert await stack.run(work(), changes.note) == "done"
    assert stack.log("target").exists(), "the log is kept"
    assert not stack.dirs.data.exists(), "prompts are not kept"
    stack.forget()


async def test_stack_ends_when_all_replicas_of_a_pool_are_given_up(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    pool = [breaks_by(flag, name) for name in ("target", "target-2")]
    async with stack_of(*pool, stand_in("gateway"), options=QUICK) as stack:
        changes = Changes()

        async def work() -> None:
            flag.touch()
            await stack.kill("target-2")
            await changes.must_be(*AGAIN, "given up after 5 starts in a row, the stack goes on without it")
            await stack.kill("target")
            await changes.must_be(*AGAIN, "given up after 5 starts in a row, the stack ends")
            await asyncio.Event().wait()

        with pytest.raises(PartFailed, match=r"^target ended with exit code 3 before it was ready"):
            await stack.run(work(), changes.note)
    stack.forget()


async def test_the_only_replica_is_started_again() -> None:
    async with stack_of(stand_in("target", pool="target"), stand_in("gateway")) as stack:
        changes = Changes()

        async def work() -> str:
            await stack.kill("target")
            await changes.must_be("target was killed by SIGKILL; starting it again now", "serves again")
            return "done"

        assert await stack.run(work(), changes.note) == "done"
    stack.forget()


async def test_replica_whose_process_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    flag = tmp_path / "full"
    limited = replace(
        stand_in("target-2", pool="target"),
        command=lambda _: [sys.executable, str(STAND_IN), *(["x" * 2**20] if flag.exists() else [])],
    )
    async with stack_of(stand_in("target", pool="target"), limited) as stack:
        changes = Changes()

        async def work() -> None:
            flag.touch()
            await stack.kill("target-2")
            again = "target-2 cannot be started: Argument list too long; starting it again in 1 s"
            await changes.must_be("target-2 was killed by SIGKILL", again)
            flag.unlink()
            await changes.must_be("target-2 serves again")

        await stack.run(work(), changes.note)
    stack.forget()


async def test_replica_that_keeps_dying_is_given_up_and_the_stack_goes_on(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    pool = (stand_in("target", pool="target"), breaks_by(flag, "target-2"))
    async with stack_of(*pool, options=QUICK) as stack:
        changes = Changes()

        async def work() -> tuple[str, ...]:
            flag.touch()
            await stack.kill("target-2")
            pauses = ("now", "in 0.01 s", "in 0.02 s", "in 0.04 s", "in 0.08 s")
            await changes.must_be(*(f"starting it again {pause}" for pause in pauses))
            await changes.must_be("before it was ready; given up after 5 starts in a row, the stack goes on")
            return stack.running

        assert await stack.run(work(), changes.note) == ("target",)
    stack.forget()


@pytest.mark.parametrize(("pool", "reports"), [("target", False), ("", True)])
async def test_work_ends_with_a_part_that_is_not_to_be_started_again(pool: str, reports: bool) -> None:
    async with stack_of(*(stand_in(name, pool=pool) for name in ("target", "target-2"))) as stack:

        async def work() -> None:
            await stack.kill("target-2")
            await asyncio.Event().wait()

        with pytest.raises(PartFailed, match="target-2 was killed"):
            await stack.run(work(), Changes().note if reports else None)
    stack.forget()


async def tokens_of(client: AsyncClient, stack: Stack, kills: str = "") -> list[int]:
    """Return the tokens of a long answer, with a part that is killed after the first of them."""
    stream = client.stream("w5 w6", **OPTIONS)
    async for _ in stream:
        if kills and stream.tokens:
            assert len(stream.tokens) < LONG / 2
            await stack.kill(kills)
            kills = ""
    return stream.tokens


@pytest.mark.timeout(300)
async def test_answers_go_on_to_the_token_when_the_only_one_of_a_kind_is_killed(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    async with Stack(StackOptions(model=str(model), draft_model="none")) as stack:
        changes = Changes(PATIENT.patience_s)

        async def work() -> None:
            async with AsyncClient(stack.address("gateway"), retries=PATIENT) as client:
                whole = await tokens_of(client, stack)
                assert len(whole) == LONG
                for part in ("target", "draft", "gateway"):
                    before = stack.address(part), stack.pid(part)
                    assert await tokens_of(client, stack, kills=part) == whole
                    await changes.must_be(f"{part} was killed", f"{part} serves again")
                    assert stack.address(part) == before[0]
                    assert stack.pid(part) != before[1]

        await stack.run(work(), changes.note)
    stack.forget()
