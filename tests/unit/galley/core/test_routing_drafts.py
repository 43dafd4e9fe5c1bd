"""Which draft a session goes to: laws of `galley.core.routing.choice.choose_draft`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.routing.choice import DraftCandidate, DraftLease, choose_draft
from galley.core.session.events import Replica
from galley.core.versions.split import Split

LEASE = DraftLease(
    address="a",
    incarnation="life",
    model="",
    tokenizer_hash="hash",
    vocab_size=0,
    strategies=("model", "ngram"),
)


def candidate(address: str, *, up: bool = True, own: int = 0, **facts: object) -> DraftCandidate:
    lease = replace(LEASE, address=address, **facts)  # type: ignore[arg-type]  # names are the test's
    return DraftCandidate(lease, sessions=own, is_healthy=up)


CANDIDATES = st.lists(
    st.builds(
        candidate,
        st.sampled_from("abcdef"),
        up=st.booleans(),
        own=st.integers(0, 3),
        sessions=st.integers(0, 3),
        draining=st.booleans(),
        strategies=st.sampled_from([("ngram",), ("model", "ngram")]),
    ),
    max_size=6,
    unique_by=lambda it: it.lease.address,
)
ADDRESSES = st.sampled_from("abcdef")


@settings(max_examples=200)
@given(
    candidates=CANDIDATES, home=ADDRESSES, avoid=st.sets(ADDRESSES), strategy=st.sampled_from(["", "model"])
)
def test_the_choice(candidates: list[DraftCandidate], home: str, avoid: set[str], strategy: str) -> None:
    chosen = choose_draft(strategy, candidates, Replica(home, "life"), avoid)
    offering = [it for it in candidates if not strategy or strategy in it.lease.strategies]
    open_to_it = [it for it in offering if not it.lease.draining or it.lease.address == home]
    assert (chosen is None) == (not open_to_it)
    if chosen is None:
        return
    assert chosen in open_to_it
    good = [it for it in offering if it.is_healthy and not it.lease.draining]
    assert not good or chosen in good
    better = [it for it in good if it.lease.address not in avoid]
    assert not better or chosen in better
    if home in {it.lease.address for it in better}:
        assert chosen.lease.address == home
    elif better:
        assert load(chosen) == min(map(load, better))


def load(it: DraftCandidate) -> int:
    return max(it.lease.sessions, it.sessions)


def test_another_incarnation_at_its_address_is_not_its_home() -> None:
    old = Replica("a", "an earlier life")
    assert choose_draft("", [candidate("a", sessions=1), candidate("b")], old) == candidate("b")


def test_of_two_with_as_many_sessions_the_one_with_the_shorter_queue() -> None:
    assert choose_draft("", [candidate("a", queue_depth=2), candidate("b")]) == candidate("b")


def test_sessions_that_start_while_leases_are_old_go_to_many_drafts() -> None:
    many = [candidate(f"d{i:02}", sessions=i) for i in range(10)]
    went: Counter[str] = Counter()
    for number in range(200):
        found = choose_draft("model", many, session_id=f"session-{number}")
        assert found is not None
        went[found.lease.address] += 1
    assert max(went.values()) < 200 * 3 / len(many)
    home = Replica("d09", "life")
    assert all(choose_draft("model", many, home, session_id=str(i)) == many[9] for i in range(20))


VERSIONS = st.lists(
    st.builds(candidate, st.sampled_from("abcdef"), version=st.sampled_from(["", "v1", "v2", "v3"])),
    min_size=1,
    max_size=6,
    unique_by=lambda it: it.lease.address,
)
SPLITS = st.builds(
    Split,
    stable=st.sampled_from(["", "v1"]),
    canary=st.sampled_from(["", "v2"]),
    share=st.just(0.1),
    drained=st.sampled_from([frozenset(), frozenset({"v3"}), frozenset({"v1", "v3"})]),
)


@settings(max_examples=300)
@given(candidates=VERSIONS, split=SPLITS, is_canary=st.booleans(), avoid=st.sets(ADDRESSES), home=ADDRESSES)
def test_the_choice_by_version(
    candidates: list[DraftCandidate], split: Split, is_canary: bool, avoid: set[str], home: str
) -> None:
    is_canary = is_canary and bool(split.canary)
    chosen = choose_draft("", candidates, Replica(home, "life"), avoid, "", split, is_canary=is_canary)
    assert chosen is not None, "no session is without a draft for a split"
    given_it = [it for it in candidates if it.lease.version not in split.drained]
    assert not given_it or chosen in given_it
    others = [it for it in given_it if is_canary or not split.canary or it.lease.version != split.canary]
    assert not others or chosen in others
    good = [it for it in others if it.lease.address not in avoid]
    assert not good or chosen in good
    arm = split.canary if is_canary else split.stable
    own = [it for it in good if it.lease.version == arm] if arm else good
    assert not own or chosen in own
    at_home = [it for it in own if it.lease.address == home]
    assert not at_home or chosen in at_home


def test_one_draft_of_a_promoted_version_does_not_get_all_sessions() -> None:
    """It gets about twice as many as each other one."""
    drafts = {"new": ("v2", 0), **{f"old-{index}": ("v1", 0) for index in range(3)}}
    for number in range(100):
        candidates = [candidate(name, version=it, own=has) for name, (it, has) in drafts.items()]
        chosen = choose_draft("", candidates, session_id=str(number), split=Split(stable="v2"))
        assert chosen is not None
        version, has = drafts[chosen.lease.address]
        drafts[chosen.lease.address] = version, has + 1
    has_new, *has_old = (has for _, has in drafts.values())
    assert max(has_old) - min(has_old) <= 1
    assert has_new - 4 == pytest.approx(2 * min(has_old), abs=2)


def test_a_canary_keeps_its_share_however_busy_it_is() -> None:
    candidates = [candidate("a", version="v1"), candidate("b", version="v2", own=100)]
    chosen = choose_draft("", candidates, split=Split(canary="v2", share=0.5), is_canary=True)
    assert chosen is not None
    assert chosen.lease.version == "v2"


def test_a_session_of_the_canary_takes_another_version_rather_than_a_draft_that_failed_it() -> None:
    split = Split(canary="v2", share=0.1)
    candidates = [candidate("a", version="v1"), candidate("b", version="v2")]
    for is_canary, version in ((True, "v1"), (False, "v1")):
        chosen = choose_draft("", candidates, None, {"b"}, "", split, is_canary=is_canary)
        assert chosen is not None
        assert chosen.lease.version == version
    chosen = choose_draft("", candidates, None, {"a"}, "", split)
    assert chosen is not None
    assert chosen.lease.version == "v1", "it tries its own again"
