"""vLLM's core with Galley's draw: the tokens are those of a plain forward pass, whatever the drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from galley.core.errors import Broken
from galley.core.sampling_params import SamplingParams
from galley.core.step import Sampled
from services.target.engine.vllm.protocol import CoreLost, SequenceStep, StoredBlocks
from tests.fakes.core_runs import (
    PROPOSALS,
    Reference,
    continue_all,
    right_tokens,
    sequence_of,
)
from tests.fakes.tiny_model import CONTEXT, POISON
from tests.integration.services.target.vllm.conftest import BLOCK_TOKENS, MARKS

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

pytestmark = MARKS

COUNT = 48
STOPS = frozenset({3, 5, 8, 13, 21, 34, 55, 89})
PROMPTS = [[(7 * index + token * token) % POISON for token in range(5 + 9 * index)] for index in range(6)]
SAMPLINGS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (SamplingParams(temperature=0.0), {}),
    "seeded": (SamplingParams(temperature=0.8, seed=7), {}),
    "large seed": (SamplingParams(temperature=1.0, seed=2**64 - 1), {}),
    "filtered": (SamplingParams(temperature=1.2, seed=3, top_k=20, top_p=0.9, min_p=0.02), {}),
    "penalized": (
        SamplingParams(
            temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3
        ),
        {},
    ),
    "biased": (SamplingParams(temperature=0.7, seed=9, logit_bias={4: 6.0, 9: -100.0}), {}),
    "at least": (SamplingParams(temperature=1.0, seed=1), {"stop_token_ids": STOPS, "min_tokens": 20}),
    "logprobs": (SamplingParams(temperature=0.8, seed=2), {"logprobs": 5}),
}


def test_tokens_do_not_depend_on_drafts(core: VllmCore, reference: Reference) -> None:
    """All sequences run together, each with its own sampling, and k is drawn anew for each step."""
    named = zip(SAMPLINGS.items(), [*PROMPTS, *PROMPTS], strict=False)
    sequences = [sequence_of(name, prompt, params, **draw) for (name, (params, draw)), prompt in named]
    wanted = {one.id: reference.continue_(one.draw, COUNT) for one in sequences}
    truths = {name: made.tokens for name, made in wanted.items()}

    for arm, propose in PROPOSALS.items():
        made = continue_all(core, sequences, COUNT, propose, truths)
        assert {name: run.tokens for name, run in made.items()} == truths, arm
        ours, theirs = made["logprobs"].logprobs, wanted["logprobs"].logprobs
        for own, other in zip(ours, theirs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [value for _, value in own.top] == pytest.approx(
                [value for _, value in other.top], abs=1e-3
            )
        if arm == "right":
            assert all(run.draws < COUNT / 2 for run in made.values())
        elif arm in {"no", "wrong"}:
            assert all(run.draws == COUNT for run in made.values())


def test_a_draft_of_every_length_up_to_the_most_is_accepted_whole(
    core: VllmCore, reference: Reference
) -> None:
    sequence = sequence_of("a", PROMPTS[2])
    truth = reference.continue_(sequence.draw, 1 + core.max_draft_tokens * 4).tokens
    core.add(sequence)
    at = 0
    for length in (0, 1, 2, 3, 5, 8, core.max_draft_tokens):
        drafts = tuple(truth[at : at + length]) if at else ()
        outcome = core.step({"a": drafts})["a"].outcome
        assert isinstance(outcome, Sampled)
        assert outcome.tokens == tuple(truth[at : at + len(drafts) + 1])
        at += len(outcome.tokens)
    core.end(["a"])


def test_only_named_sequences_take_part(core: VllmCore, reference: Reference) -> None:
    first, second = sequence_of("first", PROMPTS[3]), sequence_of("second", PROMPTS[4])
    truths = [reference.continue_(one.draw, 6).tokens for one in (first, second)]
    core.add(first)
    core.add(second)

    made = core.step({"first": ()})
    assert list(made) == ["first"]
    assert made["first"].computed == len(first.tokens)
    assert core.facts().used_blocks == -(-len(first.tokens) // BLOCK_TOKENS)

    both = core.step({"first": (), "second": ()})
    paused = core.step({"second": ()})
    back = core.step({"first": tuple(truths[0][2:4]), "second": ()})
    tokens = {
        "first": _drawn(made["first"], both["first"], back["first"]),
        "second": _drawn(both["second"], paused["second"], back["second"]),
    }
    assert tokens == {"first": truths[0][:5], "second": truths[1][:3]}
    core.end(["first", "second"])
    assert core.facts().used_blocks == 0


def _drawn(*steps: SequenceStep) -> list[int]:
    return [token for step in steps if isinstance(step.outcome, Sampled) for token in step.outcome.tokens]


def test_a_prefix_is_reused_within_its_salt_alone(core: VllmCore) -> None:
    prompt = [token % POISON for token in range(3 * BLOCK_TOKENS + 5)]
    core.add(sequence_of("one", prompt))
    assert core.step({"one": ()})["one"].cached == 0
    core.end(["one"])
    stored = [event for event in core.facts().events if isinstance(event, StoredBlocks)]
    assert "one" in {event.salt for event in stored if event.parent is None}

    core.add(sequence_of("one", prompt))
    assert core.step({"one": ()})["one"].cached == 3 * BLOCK_TOKENS
    assert core.step({"one": ()})["one"].cached == 0
    core.add(sequence_of("other", prompt))
    assert core.step({"other": ()})["other"].cached == 0
    core.end(["one", "other"])


def test_logits_without_a_maximum_are_an_error_of_their_sequence_alone(
    core: VllmCore, reference: Reference
) -> None:
    good = sequence_of("good", PROMPTS[1])
    truth = reference.continue_(good.draw, 12).tokens
    made = continue_all(core, [sequence_of("bad", [2, POISON, 4]), good], 12)
    assert isinstance(made["bad"].steps[-1].outcome, Broken)
    assert "position 3" in str(made["bad"].steps[-1].outcome)
    assert made["good"].tokens == truth


def test_a_poisoned_draft_token_changes_nothing(core: VllmCore, reference: Reference) -> None:
    sequence = sequence_of("a", PROMPTS[1])
    truth = reference.continue_(sequence.draw, 24).tokens
    made = continue_all(
        core, [sequence], 24, lambda *known: [*right_tokens(*known)[:3], POISON, POISON], {"a": truth}
    )
    assert made["a"].tokens == truth


def test_a_sequence_may_fill_the_context_window(core: VllmCore, reference: Reference) -> None:
    room = core.info.context_window
    assert room == CONTEXT
    sequence = sequence_of("a", PROMPTS[0])
    truth = reference.continue_(sequence.draw, room - len(sequence.tokens)).tokens
    made = continue_all(core, [sequence], len(truth), right_tokens, {"a": truth})
    assert made["a"].tokens == truth


def test_a_failed_step_ends_the_core(core: VllmCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run last: the core cannot go on."""
    lost: list[bool] = []
    monkeypatch.setattr(core, "on_loss", lambda: lost.append(True))
    core.add(sequence_of("a", [core.info.vocab_size]))  # which has no embedding
    for _ in range(2):
        with pytest.raises(CoreLost, match="engine core of vLLM has failed"):
            core.step({"a": ()})
    assert lost == [True]
