from __future__ import annotations

import random

from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, FeatureForm, States, state_bytes

TOKEN_BYTES = 4


def states(position: int, tokens: int, version: int = 0, token_bytes: int = TOKEN_BYTES) -> States:
    """Return states whose bytes tell their position (modulo 128) and version (0 or 1)."""
    data = b"".join(bytes([(position + i) % 128 + 128 * version]) * token_bytes for i in range(tokens))
    return States(position, tokens, data)


def test_a_state_has_two_bytes_for_each_number() -> None:
    assert state_bytes(3, 1024) == 6144
    assert FeatureForm((1, 12, 22), 1024).token_bytes == 6144
    assert FeatureForm().token_bytes == 0


def test_consecutive_states_become_one() -> None:
    assert states(5, 3).joined(states(8, 2)) == states(5, 5)
    assert NO_STATES.joined(states(8, 2)) == states(8, 2)
    assert states(8, 2).joined(NO_STATES) == states(8, 2)


def test_the_later_state_of_a_token_holds() -> None:
    both = states(5, 4).joined(states(7, 3, version=1))
    assert both == States(5, 5, states(5, 2).data + states(7, 3, version=1).data)
    assert states(5, 4).joined(states(6, 1, version=1)).end == 7
    assert states(5, 4).joined(states(5, 2, version=1)) == states(5, 2, version=1)
    assert states(5, 4).joined(states(3, 9, version=1)) == states(3, 9, version=1)


def test_only_the_later_states_are_kept_after_a_gap_or_of_another_size() -> None:
    assert states(5, 3).joined(states(9, 2)) == states(9, 2)
    assert states(5, 3).joined(states(2, 2)) == states(2, 2)
    other = states(8, 2, token_bytes=6)
    assert states(5, 3).joined(other) == other


def test_no_more_states_are_kept_than_a_message_holds() -> None:
    assert states(0, MAX_FEATURE_TOKENS).joined(states(MAX_FEATURE_TOKENS, 3)) == states(
        3, MAX_FEATURE_TOKENS
    )
    assert NO_STATES.joined(states(10, 70)) == states(16, MAX_FEATURE_TOKENS)


def test_states_since_a_position_leave_out_the_tokens_before_it() -> None:
    assert states(5, 4).since(7) == states(7, 2)
    assert states(5, 4).since(0) == states(5, 4)
    assert states(5, 4).since(9) == NO_STATES


def test_states_until_a_position_leave_out_the_tokens_from_it_on() -> None:
    assert states(5, 4).until(7) == states(5, 2)
    assert states(5, 4).until(9) == states(5, 4)
    assert states(5, 4).until(5) == NO_STATES


def test_joining_keeps_the_newest_state_of_each_token() -> None:
    rng = random.Random(11)
    held, truth = NO_STATES, dict[int, int]()
    for _ in range(2000):
        version = rng.randrange(2)
        later = states(max(0, held.end + rng.randint(-6, 3)), rng.randint(0, 9), version)
        held = held.joined(later)
        truth.update((p, p % 128 + 128 * version) for p in range(later.position, later.end))
        assert held.tokens <= MAX_FEATURE_TOKENS
        assert len(held.data) == TOKEN_BYTES * held.tokens
        assert not later.tokens or held.end == later.end
        assert list(held.data[::TOKEN_BYTES]) == [truth[p] for p in range(held.position, held.end)]
