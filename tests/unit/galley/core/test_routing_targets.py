"""Where a session goes: laws of `galley.core.routing.choice`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.content import block_hashes, next_block_hash
from galley.core.grammar.spec import GrammarSpec
from galley.core.routing import choice
from galley.core.routing.choice import (
    LOAD_TOKENS,
    HashedTokens,
    RoutingRequest,
    TargetCandidate,
    TargetLease,
    cached_tokens,
    choose_target,
)
from galley.core.store import CacheLocation

BLOCK = 4
TOKENS = tuple(range(100, 140))


def hashed(tokens: Sequence[int], salt: bytes = b"") -> HashedTokens:
    prefix = HashedTokens(tokens, salt)
    for block_tokens in (BLOCK, 8):
        assert prefix.hash_blocks(block_tokens)
    return prefix


MINE = RoutingRequest(hashed(TOKENS, b"me"), max_position=64)
REQUEST = RoutingRequest(hashed(TOKENS), max_position=64)


def lease(address: str, **facts: object) -> TargetLease:
    plain = TargetLease(
        address=address,
        incarnation=f"life of {address}",
        model="tiny",
        fingerprint="build-1",
        tokenizer_hash="hash",
        vocab_size=256,
        context_window=1024,
        kv_block_tokens=BLOCK,
        kv_blocks_free=100,
        kv_blocks_total=100,
    )
    return replace(plain, **facts)  # type: ignore[arg-type]  # names are the test's


def caching(address: str, tokens: Sequence[int], salt: bytes = b"", **facts: object) -> TargetLease:
    return lease(address, cached_prefixes=frozenset(block_hashes(salt, tokens, BLOCK)), **facts)


def chosen(
    request: RoutingRequest, *candidates: TargetCandidate | TargetLease, avoid: Sequence[str] = ()
) -> str | None:
    all_of_them = [c if isinstance(c, TargetCandidate) else TargetCandidate(c) for c in candidates]
    picked = choose_target(request, all_of_them, avoid)
    return None if picked is None else picked.lease.address


def test_the_longest_cached_prefix_wins() -> None:
    assert chosen(REQUEST, caching("a", TOKENS[:8]), caching("b", TOKENS[:16]), lease("c")) == "b"


def test_blocks_are_hashed_in_steps_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []

    def counted(previous: bytes, tokens: Sequence[int]) -> bytes:
        blocks.append(tokens)
        return next_block_hash(previous, tokens)

    monkeypatch.setattr(choice, "next_block_hash", counted)
    prefix = HashedTokens(TOKENS[:22])
    replicas = [caching(f"r{count}", TOKENS[: 4 * count]) for count in range(1, 11)]
    assert not prefix.hash_blocks(BLOCK, 3)
    assert len(blocks) == 3
    assert prefix.cached_tokens(replicas[-1].cached_prefixes, BLOCK) == 12
    assert prefix.hash_blocks(BLOCK, 3)
    assert len(blocks) == 5
    prefix.tokens = TOKENS
    assert prefix.hash_blocks(BLOCK)
    assert chosen(replace(REQUEST, prefix=prefix), *replicas) == "r10"
    prefix.tokens = TOKENS[:10]
    assert prefix.hash_blocks(BLOCK)
    assert cached_tokens(replace(REQUEST, prefix=prefix), replicas[-1]) == 9
    assert len(blocks) == len(TOKENS) // BLOCK


def test_a_prefix_counts_in_whole_blocks_of_that_replica() -> None:
    hashes = frozenset(block_hashes(b"", TOKENS, 8))
    assert cached_tokens(REQUEST, caching("a", TOKENS[:7])) == BLOCK
    assert cached_tokens(REQUEST, lease("b", kv_block_tokens=8, cached_prefixes=hashes)) == len(TOKENS) - 1
    assert cached_tokens(REQUEST, lease("c", kv_block_tokens=0, cached_prefixes=hashes)) == 0


def test_the_prefix_of_another_tenant_does_not_count() -> None:
    assert cached_tokens(MINE, caching("a", TOKENS, b"you")) == 0
    assert cached_tokens(MINE, caching("a", TOKENS, b"me")) == len(TOKENS) - 1


def test_a_chain_without_its_first_blocks_counts_as_a_whole() -> None:
    """A lease has a bounded number of hashes; the last one covers all before it."""
    last = frozenset(block_hashes(b"", TOKENS[:16], BLOCK)[-1:])
    assert cached_tokens(REQUEST, lease("a", cached_prefixes=last)) == 16


def test_without_a_prefix_the_least_loaded_wins_then_the_one_with_more_room() -> None:
    assert (
        chosen(REQUEST, lease("a", queue_depth=3), lease("b", queue_depth=1), lease("c", queue_depth=2))
        == "b"
    )
    assert chosen(REQUEST, lease("a", kv_blocks_free=20), lease("b", kv_blocks_free=90)) == "b"


def test_own_sessions_count_before_the_lease_shows_them() -> None:
    assert (
        chosen(REQUEST, TargetCandidate(lease("a"), sessions=2), TargetCandidate(lease("b"), sessions=1))
        == "b"
    )


def test_a_prefix_is_worth_some_crowding_and_no_more() -> None:
    long = RoutingRequest(hashed(range(1, 2 * LOAD_TOKENS + 2)), max_position=512)
    home = caching("home", long.tokens)
    assert chosen(long, replace(home, queue_depth=1), lease("empty")) == "home"
    assert chosen(long, replace(home, queue_depth=20, kv_blocks_free=0), lease("empty")) == "empty"


def test_a_replica_without_room_is_left_for_one_that_has_it() -> None:
    assert (
        chosen(REQUEST, lease("full", kv_blocks_free=0), lease("busy", queue_depth=0, kv_blocks_free=10))
        == "busy"
    )


def test_room_for_the_whole_prompt_costs_nothing() -> None:
    unknown = lease("z", kv_block_tokens=0, kv_blocks_free=0)
    assert chosen(REQUEST, lease("a"), unknown) == "a", "the scores are equal, and it has free blocks"


def test_the_kv_directory_counts() -> None:
    holder = lease("b")
    held = CacheLocation("b", holder.incarnation, kv_len=30)
    assert chosen(replace(REQUEST, cached_at=held), lease("a"), holder, lease("c")) == "b"
    assert (
        chosen(replace(REQUEST, cached_at=held), lease("c"), replace(holder, incarnation="another life"))
        == "c"
    )


def test_its_own_build_comes_first() -> None:
    request = replace(REQUEST, fingerprint="build-1")
    other = caching("other", TOKENS, fingerprint="build-2")
    assert chosen(request, other, lease("own", queue_depth=50)) == "own"
    assert chosen(request, other, TargetCandidate(lease("own"), is_healthy=False)) == "other"
    assert chosen(request, other, lease("own"), avoid=["own"]) == "own", "while one lives"
    assert chosen(REQUEST, other, lease("own")) == "other", "a new session has no build yet"


def test_a_failed_replica_is_chosen_only_without_another() -> None:
    assert chosen(REQUEST, caching("a", TOKENS), lease("b", queue_depth=9), avoid=["a"]) == "b"
    assert chosen(REQUEST, lease("a"), avoid=["a"]) == "a"
    assert chosen(REQUEST, TargetCandidate(lease("a"), is_healthy=False)) == "a", "it may be back by then"


def test_a_replica_with_a_small_context_window_is_not_chosen() -> None:
    assert chosen(REQUEST, caching("small", TOKENS, context_window=63), lease("large")) == "large"
    assert chosen(REQUEST, lease("small", context_window=63)) is None


def test_only_replicas_that_offer_the_adapter_are_chosen() -> None:
    request = replace(REQUEST, lora="sql", fingerprint="build-1")
    other = lease("b", lora_adapters=("fr", "sql"), fingerprint="build-2", queue_depth=9)
    assert chosen(request, caching("a", TOKENS), lease("c", lora_adapters=("fr",)), other) == "b"
    assert chosen(request, caching("a", TOKENS), lease("c", lora_adapters=("fr",))) is None
    assert chosen(REQUEST, caching("a", TOKENS), other) == "a", "all serve the model itself"


def test_only_replicas_that_decode_by_the_grammar_are_chosen() -> None:
    request = replace(REQUEST, grammar=GrammarSpec("regex", "a+"), fingerprint="build-1")
    earlier = caching("a", TOKENS)
    later = lease("b", grammar_kinds=("json_schema", "regex"), fingerprint="build-2", queue_depth=9)
    assert chosen(request, earlier, later) == "b"
    assert chosen(request, earlier, lease("c", grammar_kinds=("json_schema",))) is None
    assert chosen(replace(request, lora="sql"), later, caching("d", TOKENS, lora_adapters=("sql",))) is None
    assert chosen(REQUEST, earlier, later) == "a"


leases = st.builds(
    lambda address, queue, free, draining, window, cached, fingerprint, adapters: caching(
        address,
        TOKENS[:cached],
        queue_depth=queue,
        kv_blocks_free=free,
        draining=draining,
        context_window=window,
        fingerprint=fingerprint,
        lora_adapters=adapters,
    ),
    st.text("abcdef", min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([32, 64, 1024]),
    st.integers(0, len(TOKENS)),
    st.sampled_from(["build-1", "build-2"]),
    st.sampled_from([(), ("sql",)]),
)
candidates = st.lists(
    st.builds(TargetCandidate, leases, st.integers(0, 20), st.booleans()),
    max_size=6,
    unique_by=lambda candidate: candidate.lease.address,
)


@settings(max_examples=200)
@given(
    candidates,
    st.sets(st.text("abcdef", min_size=1, max_size=4)),
    st.sampled_from(["", "build-1"]),
    st.sampled_from(["", "sql"]),
)
def test_any_candidates(
    candidates: list[TargetCandidate], avoid: set[str], fingerprint: str, lora: str
) -> None:
    request = replace(REQUEST, fingerprint=fingerprint, lora=lora)
    picked = choose_target(request, candidates, avoid)
    able = [c for c in candidates if not c.lease.draining and c.lease.context_window >= request.max_position]
    able = [c for c in able if lora in {"", *c.lease.lora_adapters}]
    assert (picked is None) == (not able), "nobody is refused who could be served"
    if picked is None:
        return
    assert picked in able
    assert choose_target(request, candidates[::-1], avoid) is picked, "the order does not matter"
    assert picked.is_healthy or not any(c.is_healthy for c in able)
    own = [c for c in able if c.is_healthy == picked.is_healthy and c.lease.fingerprint == fingerprint]
    assert not own or picked in own
    rivals = [c for c in own or able if c.is_healthy == picked.is_healthy and c.lease.address not in avoid]
    assert not any(
        cached_tokens(request, c.lease) > cached_tokens(request, picked.lease)
        and c.load < picked.load
        and c.lease.kv_blocks_free > picked.lease.kv_blocks_free
        for c in rivals
    )


MANY = [TargetCandidate(lease(f"t{i:02}", queue_depth=10 + i)) for i in range(20)]


def test_sessions_that_start_while_leases_are_old_go_to_many_targets() -> None:
    """All gateways have the same leases; each of these sessions is the first of its own gateway."""
    went: Counter[str] = Counter()
    for number in range(400):
        found = choose_target(replace(REQUEST, session_id=f"session-{number}"), MANY)
        assert found is not None
        went[found.lease.address] += 1
    assert max(went.values()) < 400 * 3 / len(MANY)
    busiest = [went[f"t{i:02}"] for i in range(10, 20)]
    assert sum(busiest) < 400 * 0.4, "of two targets, the less busy one is chosen"


def test_among_many_targets_a_cached_prefix_is_found() -> None:
    holder = TargetCandidate(caching("t05", TOKENS, queue_depth=10))
    candidates = [*MANY[:5], holder, *MANY[6:]]
    request = RoutingRequest(hashed(TOKENS), max_position=64)
    busy = [TargetCandidate(replace(it.lease, queue_depth=10)) for it in candidates]
    for number in range(50):
        found = choose_target(replace(request, session_id=str(number)), busy)
        assert found is not None
        assert found.lease.address == "t05"
