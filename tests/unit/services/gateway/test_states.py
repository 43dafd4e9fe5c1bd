"""The states that wait for a session's next request to its draft."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, FeatureForm
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.states import MAX_STATES_BYTES, WaitingStates
from tests.fakes.replicas import STATE_SIZE, states_of

FORM = FeatureForm((2, 5), STATE_SIZE)
OTHER = FeatureForm((2, 6), STATE_SIZE)


def verdict(first: int, end: int, form: FeatureForm = FORM) -> list[pb.VerifyAnswer]:
    result = pb.VerifyResult(features_position=first, features=states_of(range(first, end), form.layers))
    return [pb.VerifyAnswer(result=result)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("verdict"), st.integers(0, 70), st.booleans()),
        st.tuples(st.just("take"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("leave"), st.just(0), st.just(False)),
    ),
    max_size=30,
)


@given(steps)
def test_states_are_contiguous_confirmed_few_and_sent_once(script: list[tuple[str, int, bool]]) -> None:
    waiting, reached, last_sent, left_at = WaitingStates(), 0, -1, 0
    for step, count, flag in script:
        match step:
            case "verdict":
                reached += count
                if not flag:  # else it was lost
                    waiting.add(FORM, verdict(reached - count, reached))
            case "take":
                end = max(0, reached - count)  # tokens that the request does not have yet
                states = waiting.take(FORM if flag else OTHER, end)
                assert flag or states == NO_STATES
                assert states.tokens <= MAX_FEATURE_TOKENS
                if states.tokens:
                    assert last_sent < states.position
                    assert left_at <= states.position
                    assert states.end <= end
                    assert states.data == states_of(range(states.position, states.end), FORM.layers)
                    last_sent = states.end - 1
            case _:
                waiting.clear()
                left_at = reached


def test_states_of_later_tokens_wait() -> None:
    waiting = WaitingStates()
    waiting.add(FORM, verdict(0, 5))
    waiting.add(FORM, verdict(5, 7))
    first, second = waiting.take(FORM, 4), waiting.take(FORM, 7)
    assert (first.position, first.end, second.position, second.end) == (0, 4, 4, 7)
    assert second.data == states_of(range(4, 7), FORM.layers)
    assert waiting.take(FORM, 9) == NO_STATES


def test_the_last_states_are_kept_while_nothing_is_requested() -> None:
    waiting = WaitingStates()
    for position in range(500):
        waiting.add(FORM, verdict(position, position + 1))
    states = waiting.take(FORM, 500)
    assert (states.position, states.end) == (500 - MAX_FEATURE_TOKENS, 500)


def test_a_request_for_another_draft_gets_none_and_neither_does_the_next() -> None:
    waiting = WaitingStates()
    waiting.add(FORM, verdict(0, 5))
    assert waiting.take(OTHER, 5) == NO_STATES
    assert waiting.take(FORM, 5) == NO_STATES
    waiting.add(FORM, verdict(5, 6))
    waiting.add(OTHER, verdict(6, 7, OTHER))
    assert waiting.take(OTHER, 7).position == 6


def test_large_states_stay_within_a_message() -> None:
    form = FeatureForm((1, 2, 3), 16384)
    waiting = WaitingStates()
    data = bytes(form.token_bytes * MAX_FEATURE_TOKENS)
    result = pb.VerifyResult(features_position=10, features=data)
    waiting.add(form, [pb.VerifyAnswer(result=result)])
    states = waiting.take(form, 10 + MAX_FEATURE_TOKENS)
    assert states.end == 10 + MAX_FEATURE_TOKENS
    assert MAX_STATES_BYTES - form.token_bytes < len(states.data) <= MAX_STATES_BYTES
