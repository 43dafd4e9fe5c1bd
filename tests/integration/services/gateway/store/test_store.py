"""The session store against real servers, and against the model of it that simulations use."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from redis import asyncio as redis_asyncio

from galley.common.wire.status import message_of
from galley.core.content import prefix_hash
from galley.core.errors import (
    Broken,
    CallerFault,
    Fenced,
    KeyReused,
    LogLost,
    StoreUnavailable,
    UnknownSession,
)
from galley.core.store import (
    SESSION_TTL_S,
    CacheLocation,
    ClaimLost,
    Exchange,
    KvDirectory,
    LogBehind,
    NewSession,
    OwnerChanged,
    Ownership,
    SessionEnded,
    StoredSession,
    TokenBucket,
)
from galley.stack.ports import free_ports
from services.gateway.request.validate import session_id_for
from services.gateway.store.redis import RedisStore
from tests.fakes.owners import abort, claim, commit, create, delete, finish, hashes_of, in_time, recreate
from tests.fakes.redis_clusters import Cluster, ReplicaSet
from tests.fakes.redis_servers import Server
from tests.fakes.store import MemoryStore
from tests.fakes.tasks import count_tasks

PROMPT = [11, 0, 2**32 - 1]
ALICE, BOB = "alice", "bob"
BODY, OTHER_BODY = b"\x01" * 32, b"\x02" * 32
# At most what a server needs for a key's name and entry, beside what is in it.
_KEY_BYTES = 420


def a_session(session_id: str | None = None, **changes: Any) -> NewSession:
    values: dict[str, Any] = {
        "session_id": session_id or secrets.token_hex(16),
        "principal": ALICE,
        "body_hash": BODY,
        "fields": {"request": b"\x00\xff\r\n", "model": b"m"},
        "prompt": PROMPT,
    }
    return NewSession(**values | changes)


@asynccontextmanager
async def store_at(server: Server | Cluster | ReplicaSet | str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(server if isinstance(server, str) else server.url, **options)
    try:
        yield store
    finally:
        await store.close()


def key_of(session_id: str) -> str:
    return f"galley:sessions:default:{{{session_id}}}"


async def test_pools_of_one_server_have_sessions_of_their_own(
    shared_server: Server | Cluster, store: RedisStore
) -> None:
    new = a_session()
    owner = (await create(store, new)).ownership
    async with store_at(shared_server, pool_name="other") as other:
        with pytest.raises(UnknownSession):
            await claim(other, new.session_id, ALICE)
        with pytest.raises(UnknownSession):
            await abort(other, new.session_id, ALICE, b"aborted")
        there = await create(other, replace(new, body_hash=b"another"))
    assert there.ownership.epoch == 1
    assert await commit(store, owner, 3, [7], b".") == 4


async def test_a_lowered_burst_holds_at_once(store: RedisStore) -> None:
    name = secrets.token_hex(8)
    before = await store.exchange(TokenBucket(name, 0.001, 100.0), Exchange(-10, None, 0))
    after = await store.exchange(TokenBucket(name, 0.001, 20.0), Exchange(-5, None, 0))
    assert (round(before.level), round(after.level)) == (90, 15)


async def test_create_returns_what_was_stored(store: RedisStore) -> None:
    new = a_session()
    made = await create(store, new)
    assert made == StoredSession(
        ownership=Ownership(new.session_id, 1, made.ownership.nonce),
        principal=ALICE,
        fields=new.fields,
        prompt_len=3,
        tokens=PROMPT,
        created_ms=made.created_ms,
        claimed_ms=made.created_ms,
        body_hash=BODY,
    )
    assert made.to_new_session() == new
    assert len(made.ownership.nonce) == 16
    assert made.created_ms > 1_600_000_000_000


async def test_commits_append_to_log_meta_and_directory(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    where = KvDirectory(draft=CacheLocation("d:1", "x", 4), target=CacheLocation("t:1", "y", 5))
    assert await commit(store, owner, 3, [7, 8], b"ab", where) == 5
    moved = KvDirectory(target=CacheLocation("t:2", "z", 6))
    assert await commit(store, owner, 5, [9], b"\x00", moved) == 6
    seen = await claim(store, owner.session_id, ALICE)
    assert seen.tokens == [*PROMPT, 7, 8, 9]
    assert seen.meta == b"ab\x00"
    assert seen.prompt_len == 3
    assert seen.directory == KvDirectory(
        draft=CacheLocation("d:1", "x", 4), target=CacheLocation("t:2", "z", 6)
    )
    assert seen.ownership.epoch == 2


async def test_keys_and_layout_are_those_of_the_design(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    owner = (await create(store, a_session())).ownership
    await commit(store, owner, 3, [258], b"m")
    key = key_of(owner.session_id)
    log = await raw.get(f"{key}:log")
    assert log == b"\x0b\0\0\0" + b"\0\0\0\0" + b"\xff\xff\xff\xff" + b"\x02\x01\0\0"
    assert await raw.get(f"{key}:meta") == b"m"
    assert await raw.type(key) == b"hash"
    lives = [await raw.pttl(name) for name in (key, f"{key}:log", f"{key}:meta")]
    ttl_ms = 1000 * SESSION_TTL_S
    assert all(ttl_ms - 1000 < life <= ttl_ms for life in lives)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
async def test_long_fields_are_stored_compactly(
    store: RedisStore, raw: redis_asyncio.Redis, size: int
) -> None:
    value = bytes(at % 251 for at in range(size))
    new = a_session(fields={"request": value, "other": b"x" * 64})
    made = await create(store, new)
    assert made.fields == new.fields
    assert (await claim(store, new.session_id, ALICE)).fields == new.fields
    assert await raw.object("ENCODING", key_of(new.session_id)) == b"listpack"


@pytest.mark.parametrize("size", [4096, 4097, 1 << 20])
async def test_very_long_fields_are_stored(store: RedisStore, raw: redis_asyncio.Redis, size: int) -> None:
    new = a_session(fields={"response": bytes(at % 251 for at in range(size)), "other": b"x"})
    owner = (await create(store, new)).ownership
    await lose(raw, owner)
    await recreate(store, owner, new)
    assert (await claim(store, new.session_id, ALICE)).fields == new.fields


async def test_a_finished_session_frees_its_spare_memory(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    async def log_bytes() -> int:
        return await raw.memory_usage(f"{key_of(owner.session_id)}:log", samples=0) or 0

    owner = (await create(store, a_session())).ownership
    length = 3
    while not (length > 300 and await log_bytes() > 1.5 * 4 * length):
        length = await commit(store, owner, length, [length], b".")
        assert length < 1000
    await finish(store, owner, length, b"end")
    size = await log_bytes()
    assert 4 * length < size < 4 * length + _KEY_BYTES
    seen = await claim(store, owner.session_id, ALICE)
    assert (seen.tokens, seen.meta) == ([*PROMPT, *range(3, length)], b"." * (length - 3))


async def test_a_finished_session_can_be_read_but_not_extended(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    await finish(store, owner, 3, b"the end")
    await finish(store, owner, 3, b"the end")  # its answer was lost
    with pytest.raises(SessionEnded):
        await commit(store, owner, 3, [7], b"")
    with pytest.raises(SessionEnded):
        await store.renew(owner)
    seen = await claim(store, owner.session_id, ALICE)
    assert (seen.state, seen.finish) == ("finished", b"the end")
    with pytest.raises(SessionEnded):
        await commit(store, seen.ownership, 3, [7], b"")
    with pytest.raises(SessionEnded):
        await finish(store, seen.ownership, 3, b"another end")
    with pytest.raises(Fenced) as fenced:
        await finish(store, owner, 3, b"another end")
    assert not isinstance(fenced.value, SessionEnded), "how it ended is not for a former owner to conclude"


async def test_finish_checks_the_length_of_the_log(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    with pytest.raises(LogBehind) as behind:
        await finish(store, owner, 4, b"x")
    assert behind.value.have == 3
    with pytest.raises(LogLost):
        await finish(store, owner, 2, b"x")


async def test_abort_ends_a_session_whoever_owns_it(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    with pytest.raises(UnknownSession):
        await abort(store, owner.session_id, BOB, b"aborted")
    await abort(store, owner.session_id, ALICE, b"aborted")
    await abort(store, owner.session_id, ALICE, b"aborted again")
    with pytest.raises(SessionEnded):
        await commit(store, owner, 3, [7], b"")
    with pytest.raises(SessionEnded):
        await finish(store, owner, 3, b"the end")
    seen = await claim(store, owner.session_id, ALICE)
    assert (seen.state, seen.finish) == ("finished", b"aborted")


async def test_a_deleted_session_is_gone_for_its_owner_too(
    store: RedisStore, raw: redis_asyncio.Redis
) -> None:
    created = await create(store, a_session())
    owner, session_id = created.ownership, created.ownership.session_id
    with pytest.raises(UnknownSession):
        await delete(store, session_id, BOB)
    for _ in range(2):
        await delete(store, session_id, ALICE)
    with pytest.raises(UnknownSession):
        await delete(store, session_id, BOB)
    left = [await raw.exists(key_of(session_id) + part) for part in ("", ":log", ":meta", ":aborted")]
    assert left == [0, 0, 0, 1]
    with pytest.raises(UnknownSession):
        await commit(store, owner, 3, [7], b"")
    with pytest.raises(SessionEnded):
        await recreate(store, owner, created.to_new_session())
    again = await create(store, a_session(session_id))
    assert again.state == "live"
    await delete(store, session_id, ALICE)


async def test_a_claim_fences_the_owner_before(store: RedisStore) -> None:
    first = (await create(store, a_session())).ownership
    before_ms = await store.now_ms(first.session_id)
    claimed = await claim(store, first.session_id, ALICE)
    second = claimed.ownership
    assert claimed.claimed_ms >= before_ms
    for change in (
        commit(store, first, 3, [7], b""),
        finish(store, first, 3, b""),
        store.renew(first),
    ):
        with pytest.raises(Fenced) as fenced:
            await change
        assert type(fenced.value) is Fenced
    assert await commit(store, second, 3, [8], b"") == 4


async def test_an_owner_needs_the_nonce_too(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    with pytest.raises(Fenced):
        await commit(store, Ownership(owner.session_id, owner.epoch, b"\0" * 16), 3, [7], b"")


async def test_a_repeated_claim_does_not_fence_itself(store: RedisStore) -> None:
    first = await create(store, a_session(), nonce=b"n" * 16)
    again = await create(store, a_session(first.ownership.session_id), nonce=b"n" * 16)
    assert again.ownership == first.ownership
    claimed = await claim(store, first.ownership.session_id, ALICE, nonce=b"o" * 16)
    assert (await claim(store, first.ownership.session_id, ALICE, nonce=b"o" * 16)) == claimed


async def test_a_read_changes_nothing(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    made = await create(store, a_session())
    owner = made.ownership
    await raw.pexpire(key_of(owner.session_id), 5_000)
    seen = await store.read(owner.session_id, ALICE)
    assert seen == replace(made, idle_ms=seen.idle_ms)
    assert await raw.pttl(key_of(owner.session_id)) <= 5_000
    idle_ms = 1000 * SESSION_TTL_S - 5_000
    assert idle_ms <= seen.idle_ms < idle_ms + 5_000, "since its last write"
    with pytest.raises(UnknownSession):
        await store.read(owner.session_id, BOB)
    assert await commit(store, owner, 3, [7], b".") == 4


async def test_only_the_owner_that_was_read_can_be_replaced(store: RedisStore) -> None:
    first = (await create(store, a_session())).ownership
    second = (await claim(store, first.session_id, ALICE)).ownership
    latest_ms = await in_time(store, first.session_id)
    for former in (first, Ownership(first.session_id, second.epoch, first.nonce)):
        with pytest.raises(OwnerChanged):
            await store.claim(former, ALICE, b"n" * 16, latest_ms)
    assert await commit(store, second, 3, [7], b".") == 4


async def test_a_repeated_create_does_not_replace_a_later_owner(store: RedisStore) -> None:
    new = a_session()
    await create(store, new, b"n" * 16)
    later = (await claim(store, new.session_id, ALICE)).ownership
    latest_ms = await in_time(store, new.session_id)
    assert (await store.create(new, b"n" * 16, latest_ms)).ownership == later
    assert await commit(store, later, 3, [7], b".") == 4


async def test_a_late_call_changes_nothing(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    """A claim that waited in the network for longer than its caller took a session from its owner."""
    new = a_session()
    late_ms = await store.now_ms(new.session_id) - 1
    with pytest.raises(StoreUnavailable, match="too late"):
        await store.create(new, b"n" * 16, late_ms)
    assert not await raw.exists(key_of(new.session_id))
    owner = (await create(store, new)).ownership
    changes = (
        store.create(new, owner.nonce, late_ms),
        store.claim(owner, ALICE, b"n" * 16, late_ms),
        store.recreate(owner, new, late_ms),
        store.abort(new.session_id, ALICE, b"aborted", late_ms),
        store.delete(new.session_id, ALICE, late_ms),
    )
    for change in changes:
        with pytest.raises(StoreUnavailable, match="too late"):
            await change
    assert (await store.read(new.session_id, ALICE)).ownership == owner
    assert await commit(store, owner, 3, [7], b".") == 4


async def flip(raw: redis_asyncio.Redis, key: str, at: int) -> None:
    bit = 8 * at + 7
    await raw.setbit(key, bit, 1 - await raw.getbit(key, bit))


@pytest.mark.parametrize("at", [0, 7, 8, 13], ids=["prompt", "end of prompt", "output", "end of output"])
async def test_a_changed_token_is_lost(store: RedisStore, raw: redis_asyncio.Redis, at: int) -> None:
    new = a_session(prompt=[1, 2])
    owner = (await create(store, new)).ownership
    await store.commit(owner, 2, [7, 8], b"..", hashes_of([1, 2], [7, 8]))
    await flip(raw, f"{key_of(owner.session_id)}:log", at)
    for call in (
        store.read(owner.session_id, ALICE),
        store.claim(owner, ALICE, b"n" * 16, await in_time(store, owner.session_id)),
        store.create(new, b"o" * 16, await in_time(store, owner.session_id)),
    ):
        with pytest.raises(LogLost):
            await call


async def test_a_torn_log_is_lost(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    owner = (await create(store, a_session())).ownership
    await commit(store, owner, 3, [7], b".")
    log = f"{key_of(owner.session_id)}:log"
    for torn in (b"\0" * 15, (await raw.get(log) or b"")[:12]):
        await raw.set(log, torn)
        with pytest.raises(LogLost):
            await store.read(owner.session_id, ALICE)
    await raw.set(log, b"\0" * 15)
    with pytest.raises(LogLost) as lost:
        await store.commit(owner, 4, [8], b".", hashes_of([*PROMPT, 7], [8]))
    assert not isinstance(lost.value, LogBehind), "what is torn cannot be repaired by appending"


async def test_a_changed_request_is_lost(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    new = a_session()
    changes = {"request": b"\x01\xff\r\n", "model": b"n", "body_hash": OTHER_BODY, "prompt_len": b"2"}
    changes["state"] = b"finishee"
    for field, changed in changes.items():
        await create(store, replace(new, session_id=(session_id := secrets.token_hex(16))))
        await raw.hset(key_of(session_id), field, changed)
        with pytest.raises(LogLost):
            await store.read(session_id, ALICE)


async def test_an_owner_compares_its_hash_with_the_logs(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    other = hashes_of([*PROMPT[:2], 5], [7])
    with pytest.raises(LogLost) as lost:
        await store.commit(owner, 3, [7], b".", other)
    assert not isinstance(lost.value, LogBehind)
    await commit(store, owner, 3, [7], b".")
    with pytest.raises(LogLost):
        await store.commit(owner, 3, [7], b".", other)
    with pytest.raises(LogLost):
        await store.finish(owner, 4, b"end", other.after)
    with pytest.raises(LogBehind) as behind:
        await store.commit(owner, 5, [9], b".", other)
    assert (behind.value.have, behind.value.log_hash) == (4, prefix_hash([*PROMPT, 7]))


async def test_another_principals_session_is_unknown(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    with pytest.raises(UnknownSession):
        await claim(store, owner.session_id, BOB)
    await store.renew(owner)


async def test_create_claims_the_same_body_and_refuses_another(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    await commit(store, owner, 3, [7], b"m")
    same = await create(store, a_session(owner.session_id, fields={"request": b"with another seed"}))
    assert same.tokens == [*PROMPT, 7]
    assert same.fields["request"] == b"\x00\xff\r\n"
    assert same.ownership.epoch == 2
    with pytest.raises(KeyReused):
        await create(store, a_session(owner.session_id, body_hash=OTHER_BODY))
    await store.renew(same.ownership)


async def test_create_refuses_field_names_of_its_own(store: RedisStore) -> None:
    with pytest.raises(ValueError, match="epoch"):
        await create(store, a_session(fields={"epoch": b"1"}))
    with pytest.raises(ValueError, match="spec#1"):
        await create(store, a_session(fields={"spec#1": b"1"}))


async def test_two_owners_never_both_extend_the_log(shared_server: Server | Cluster) -> None:
    async with store_at(shared_server) as one, store_at(shared_server) as two:
        new = a_session()
        await create(one, new)

        async def own_and_write(store: RedisStore, mark: int) -> None:
            for _ in range(20):
                mine = await claim(store, new.session_id, ALICE)
                length = len(mine.tokens)
                with suppress(Fenced):
                    for step in range(5):
                        word = mark + length + step
                        assert (
                            await commit(store, mine.ownership, length + step, [word], b".")
                            == length + step + 1
                        )
                        written[length + step] = word

        written: dict[int, int] = {}
        await asyncio.gather(own_and_write(one, 1_000_000), own_and_write(two, 2_000_000))
        end = await claim(one, new.session_id, ALICE)
        assert end.tokens[:3] == PROMPT
        # Every commit that was acknowledged is there, at its place, and nothing else.
        assert dict(enumerate(end.tokens[3:], start=3)) == written
        assert end.meta == b"." * len(written)


async def lose(raw: redis_asyncio.Redis, owner: Ownership) -> None:
    key = key_of(owner.session_id)
    await raw.delete(key, f"{key}:log", f"{key}:meta")


async def test_an_owner_recreates_a_lost_session(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    first = await create(store, a_session())
    made = await claim(store, first.ownership.session_id, ALICE)
    owner = made.ownership
    await commit(store, owner, 3, [7, 8], b"ab")
    await lose(raw, owner)
    for _ in range(2):  # the answer to the first was lost
        await recreate(store, owner, made.to_new_session())
    with pytest.raises(LogBehind) as behind:
        await commit(store, owner, 5, [9], b"c")
    assert behind.value.have == 3
    assert await commit(store, owner, 3, [7, 8, 9], b"abc") == 6
    await recreate(store, owner, made.to_new_session())  # delivered late
    with pytest.raises(Fenced):
        await recreate(store, first.ownership, first.to_new_session())
    seen = await claim(store, owner.session_id, ALICE, nonce=owner.nonce)
    assert (seen.tokens, seen.meta, seen.fields) == ([*PROMPT, 7, 8, 9], b"abc", made.fields)
    assert (seen.ownership, seen.principal, seen.body_hash) == (owner, ALICE, BODY)
    assert await raw.pttl(key_of(owner.session_id)) > 1000 * SESSION_TTL_S - 1000


async def test_an_aborted_session_that_expired_early_is_not_recreated(
    store: RedisStore, raw: redis_asyncio.Redis
) -> None:
    """A step of the store's clock expires a session while its owner still takes it for lost."""
    aborted = await create(store, a_session())
    owner, session_id = aborted.ownership, aborted.ownership.session_id
    await abort(store, session_id, ALICE, b"aborted")
    await abort(store, session_id, ALICE, b"aborted again")
    await lose(raw, owner)
    for _ in range(2):
        with pytest.raises(SessionEnded):
            await recreate(store, owner, aborted.to_new_session())
    with pytest.raises(UnknownSession):
        await claim(store, session_id, ALICE)
    again = await create(store, a_session(session_id))  # its idempotency key is free again
    await lose(raw, owner)
    await recreate(store, again.ownership, again.to_new_session())
    assert (await claim(store, session_id, ALICE)).state == "live"


async def test_no_former_owner_recreates_an_aborted_session(
    store: RedisStore, raw: redis_asyncio.Redis
) -> None:
    """Whoever else takes the session for its own does not know of the abort either."""
    lost = await create(store, a_session())
    owner, session_id = lost.ownership, lost.ownership.session_id
    claimed = (await claim(store, session_id, ALICE)).ownership
    await lose(raw, owner)
    await create(store, a_session(session_id))
    await abort(store, session_id, ALICE, b"aborted")
    await lose(raw, owner)
    for former in (owner, claimed):
        with pytest.raises(SessionEnded):
            await recreate(store, former, lost.to_new_session())


async def test_recreate_keeps_an_existing_session(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    lost = await create(store, a_session())
    owner, session_id = lost.ownership, lost.ownership.session_id
    later = (await claim(store, session_id, ALICE)).ownership
    await lose(raw, owner)
    other = await create(store, a_session(session_id, fields={"request": b"another seed"}))
    with pytest.raises(Fenced):
        await recreate(store, owner, lost.to_new_session())
    with pytest.raises(ClaimLost):
        await recreate(store, later, lost.to_new_session())
    await abort(store, session_id, ALICE, b"aborted")
    with pytest.raises(SessionEnded):
        await recreate(store, other.ownership, other.to_new_session())
    with pytest.raises(Fenced):
        await recreate(store, owner, lost.to_new_session())
    seen = await claim(store, session_id, ALICE)
    assert (seen.fields, seen.finish) == ({"request": b"another seed"}, b"aborted")


async def test_a_repeated_commit_changes_nothing(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    for _ in range(3):
        assert await commit(store, owner, 3, [7, 8], b"ab") == 5
    assert await commit(store, owner, 5, [9], b"c") == 6
    assert await commit(store, owner, 3, [7, 8], b"ab") == 6  # delivered late
    seen = await claim(store, owner.session_id, ALICE)
    assert (seen.tokens, seen.meta) == ([*PROMPT, 7, 8, 9], b"abc")


async def test_a_commit_of_other_tokens_at_the_same_place_is_refused(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    await commit(store, owner, 3, [7, 8], b"ab")
    with pytest.raises(LogLost) as lost:
        await commit(store, owner, 3, [7, 9], b"ab")
    assert not isinstance(lost.value, LogBehind)


async def test_a_short_log_says_how_far_it_reaches(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    with pytest.raises(LogBehind) as behind:
        await commit(store, owner, 5, [9], b"c")
    assert behind.value.have == 3
    await commit(store, owner, 3, [7], b"a")
    with pytest.raises(LogBehind) as behind:
        await commit(store, owner, 3, [7, 8], b"ab")
    assert behind.value.have == 4
    assert await commit(store, owner, 4, [8], b"b") == 5


async def test_a_commit_may_be_empty(store: RedisStore) -> None:
    owner = (await create(store, a_session())).ownership
    assert await commit(store, owner, 3, [], b"", KvDirectory(target=CacheLocation("t", "i", 3))) == 3
    assert await commit(store, owner, 2, [], b"") == 3
    assert (await claim(store, owner.session_id, ALICE)).directory.target == CacheLocation("t", "i", 3)


@pytest.mark.parametrize("part", ["log", "meta"])
async def test_a_session_that_lost_a_key_is_lost(
    store: RedisStore, raw: redis_asyncio.Redis, part: str
) -> None:
    owner = (await create(store, a_session())).ownership
    await raw.delete(f"{key_of(owner.session_id)}:{part}")
    with pytest.raises(LogLost):
        await commit(store, owner, 3, [7], b"")
    with pytest.raises(LogLost):
        await claim(store, owner.session_id, ALICE)


async def test_every_change_renews_all_keys(
    shared_server: Server | Cluster, raw: redis_asyncio.Redis
) -> None:
    async with store_at(shared_server, ttl_s=100, finished_ttl_s=1000) as store:
        owner = (await create(store, a_session())).ownership
        key = key_of(owner.session_id)
        keys = (key, f"{key}:log", f"{key}:meta")

        async def lives() -> set[bool]:
            return {99_000 < await raw.pttl(name) <= 100_000 for name in keys}

        async def age() -> None:
            for name in keys:
                await raw.pexpire(name, 5_000)

        await age()
        await store.renew(owner)
        assert await lives() == {True}
        await age()
        await commit(store, owner, 3, [7], b"")
        assert await lives() == {True}
        await age()
        owner = (await claim(store, owner.session_id, ALICE)).ownership
        assert await lives() == {True}
        await finish(store, owner, 4, b"")
        assert {999_000 < await raw.pttl(name) <= 1_000_000 for name in keys} == {True}
        await age()
        await claim(store, owner.session_id, ALICE)
        assert {999_000 < await raw.pttl(name) <= 1_000_000 for name in keys} == {True}


async def test_an_expired_session_is_unknown(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    owner = (await create(store, a_session())).ownership
    key = key_of(owner.session_id)
    for name in (key, f"{key}:log", f"{key}:meta"):
        await raw.pexpire(name, 0)  # as if its time had passed
    for call in (
        commit(store, owner, 3, [7], b""),
        store.renew(owner),
        finish(store, owner, 3, b""),
        claim(store, owner.session_id, ALICE),
    ):
        with pytest.raises(UnknownSession):
            await call


async def test_the_log_survives_a_killed_server(own_store: Server) -> None:
    async with store_at(own_store) as store:
        owner = (await create(store, a_session())).ownership
        await commit(store, owner, 3, [7, 8], b"ab")
        own_store.kill()
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 5, [9], b"c")
        own_store.start()
        assert await commit(store, owner, 5, [9], b"c") == 6
        seen = await claim(store, owner.session_id, ALICE)
        assert (seen.tokens, seen.meta) == ([*PROMPT, 7, 8, 9], b"abc")


async def test_a_late_reply_of_a_hanging_server_is_dropped(own_store: Server) -> None:
    async with store_at(own_store, call_timeout_s=0.2) as store:
        owner = (await create(store, a_session())).ownership
        own_store.pause()
        hashes = hashes_of(PROMPT, [7])
        with pytest.raises(StoreUnavailable):
            await store.commit(owner, 3, [7], b"a", hashes)
        own_store.go_on()
        assert await store.commit(owner, 3, [7], b"a", hashes) == 4
        seen = await claim(store, owner.session_id, ALICE)
        assert (seen.tokens, seen.meta) == ([*PROMPT, 7], b"a")


async def test_a_server_that_does_not_listen() -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    store = RedisStore(f"redis://{where}")
    with pytest.raises(StoreUnavailable) as away:
        await claim(store, secrets.token_hex(16), ALICE)
    assert where in str(away.value)
    assert message_of(away.value) == "the session store is unavailable"
    await store.close()


async def test_scripts_are_reloaded_after_a_flush(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    owner = (await create(store, a_session())).ownership
    for length in range(3, 9):
        await raw.script_flush()
        assert await commit(store, owner, length, [length], b".") == length + 1
    await raw.script_flush()
    await finish(store, owner, 9, b"end")


async def test_a_replica_is_unavailable_and_not_a_fault(own_store: Server) -> None:
    async with store_at(own_store) as store:
        owner = (await create(store, a_session())).ownership
        admin = redis_asyncio.Redis.from_url(own_store.url)
        await admin.replicaof("127.0.0.1", 1)  # READONLY, as after a failover
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 3, [7], b"")
        await admin.replicaof("NO", "ONE")
        await admin.config_set("maxmemory", "1")  # OOM
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 3, [7], b"")
        await admin.aclose()


async def test_a_key_of_another_type_is_a_fault(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    session_id = secrets.token_hex(16)
    await raw.set(key_of(session_id), b"something else")
    with pytest.raises(Broken, match="WRONGTYPE"):
        await claim(store, session_id, ALICE)


async def test_replies_match_requests_after_many_cancellations(shared_server: Server | Cluster) -> None:
    """redis-py issues 2624 and 2665: a cancelled await left a connection one reply behind."""
    dice = random.Random(1)
    async with store_at(shared_server, max_connections=3) as store:
        sessions = [a_session(prompt=[index + 1]) for index in range(8)]
        for session in sessions:
            await create(store, session)

        async def check(index: int) -> None:
            seen = await claim(store, sessions[index].session_id, ALICE)
            assert seen.tokens == [index + 1]
            assert seen.ownership.session_id == sessions[index].session_id

        for _ in range(150):
            tasks = [asyncio.create_task(check(index)) for index in range(8)]
            for task in dice.sample(tasks, 5):
                for _ in range(dice.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        for index in range(8):
            await check(index)


_SHIFT_MS = 60_000


async def test_commits_take_no_task(store: RedisStore) -> None:
    owners = [(await create(store, a_session())).ownership for _ in range(8)]
    for owner in owners:
        await commit(store, owner, 3, [7], b".")
    started, hashes = count_tasks(), hashes_of([*PROMPT, 7], [8])
    commits = [store.commit(owner, 4, [8], b".", hashes) for owner in owners]
    assert [await each for each in commits] == [5] * 8
    assert started() == 0


async def test_frequent_commits_postpone_the_expiry_now_and_then(
    store: RedisStore, raw: redis_asyncio.Redis
) -> None:
    owner = (await create(store, a_session())).ownership
    key, ttl_ms = key_of(owner.session_id), round(1000 * SESSION_TTL_S)
    for length, (left_ms, is_postponed) in enumerate(
        [(ttl_ms + _SHIFT_MS, False), (ttl_ms - _SHIFT_MS, True)], 3
    ):
        expires_ms = await _expires_in(raw, key, left_ms)
        await commit(store, owner, length, [7], b".")
        assert (await raw.pexpiretime(key) != expires_ms) is is_postponed


async def _expires_in(raw: redis_asyncio.Redis, key: str, left_ms: int) -> int:
    """Have a key expire, and return at what time."""
    await raw.pexpire(key, left_ms)
    return int(await raw.pexpiretime(key))


async def test_a_repeated_commit_writes(store: RedisStore, raw: redis_asyncio.Redis) -> None:
    """WAIT waits only for what its own connection has written."""
    owner = (await create(store, a_session())).ownership
    hashes = hashes_of(PROMPT, [7])
    assert await store.commit(owner, 3, [7], b".", hashes) == 4
    key, ttl_ms = key_of(owner.session_id), round(1000 * SESSION_TTL_S)
    expires_ms = await _expires_in(raw, key, ttl_ms + _SHIFT_MS)
    assert await store.commit(owner, 3, [7], b".", hashes) == 4
    assert await raw.pexpiretime(key) != expires_ms


async def test_a_cancelled_commit_happens_whole_or_not_at_all(shared_server: Server | Cluster) -> None:
    dice = random.Random(2)
    async with store_at(shared_server, max_connections=2) as store:
        owner = (await create(store, a_session(prompt=[1]))).ownership
        log = [1]
        for _ in range(200):
            length, hashes = len(log), hashes_of(log, [len(log)] * 2)
            task = asyncio.ensure_future(store.commit(owner, length, [length] * 2, b"..", hashes))
            for _ in range(dice.randrange(10)):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert await store.commit(owner, length, [length] * 2, b"..", hashes) == length + 2
            log += [length] * 2
        seen = await claim(store, owner.session_id, ALICE)
        assert seen.tokens == log
        assert len(seen.meta) == len(log) - 1


async def test_a_cancelled_call_does_not_cost_its_connection(shared_server: Server | Cluster) -> None:
    async def connections_made() -> int:
        reports = await asyncio.gather(*(node.command("INFO", "stats") for node in nodes))
        return sum(int(report["total_connections_received"]) for report in reports)

    nodes = shared_server.masters if isinstance(shared_server, Cluster) else [shared_server]
    async with store_at(shared_server, max_connections=2) as store:
        owner = (await create(store, a_session())).ownership
        before = await connections_made()
        for _ in range(50):
            task = asyncio.create_task(store.renew(owner))
            for _ in range(6):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await store.renew(owner)
        assert await connections_made() - before <= len(nodes) + 1, "one a report, and at most one more"


async def test_close_waits_for_what_is_under_way(shared_server: Server | Cluster) -> None:
    store = RedisStore(shared_server.url)
    task = asyncio.create_task(create(store, a_session()))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await store.close()
    assert not [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]


async def test_more_callers_than_connections_queue(shared_server: Server | Cluster) -> None:
    async with store_at(shared_server, max_connections=2) as store:
        made = await asyncio.gather(*(create(store, a_session()) for _ in range(50)))
        assert len({session.ownership.session_id for session in made}) == 50


async def test_the_memory_store_forgets_by_its_clock() -> None:
    now_s = 0.0
    store = MemoryStore(ttl_s=10, finished_ttl_s=100, clock=lambda: now_s)
    owner = (await create(store, a_session())).ownership
    now_s = 9
    await store.renew(owner)
    now_s = 18
    await finish(store, owner, 3, b"end")
    now_s = 117
    assert (await claim(store, owner.session_id, ALICE)).finish == b"end"
    now_s = 217
    with pytest.raises(UnknownSession):
        await claim(store, owner.session_id, ALICE)


def test_session_ids() -> None:
    named = session_id_for("me", "key", b"secret")
    assert named == session_id_for("me", "key", b"secret")
    others = {
        session_id_for("me", "other", b"secret"),
        session_id_for(ALICE, "key", b"secret"),
        session_id_for("me", "key", b"other"),
        session_id_for("me", "", b"secret"),
        session_id_for("me", "", b"secret"),
    }
    assert len(others - {named}) == 5
    assert {len(each) for each in others} == {32}


def test_fenced_owner_and_ended_session_are_distinguished() -> None:
    assert issubclass(SessionEnded, Fenced)
    assert issubclass(Fenced, CallerFault)
