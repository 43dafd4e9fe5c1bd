"""Proposals for sessions with a grammar: nothing that it does not allow, and what the target would take."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from galley.common.models.grammars import ReplicaGrammars
from galley.common.wire.codec import grammar_message
from galley.core.content import prefix_hash
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.masking import confirmed_mask
from galley.engine.model import CausalModel, Rows
from galley.engine.sampler import draw_masked
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.loading import draft_grammars
from services.draft.settings import DraftSettings
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy
from services.draft.strategies.grammars import DraftGrammars
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.draft.strategies.ngram import Lookups, NgramStrategy
from tests.fakes.tiny_model import STOP, load_tiny_model
from tests.fakes.verify_items import slice_of
from tests.fakes.vocabularies import ascii_vocabulary, of_bytes, save_ascii_tokenizer
from tests.integration.galley.engine.drafts import HEAD_TOKENS, draft_of, load_draft, save_target
from tests.integration.services.draft.jobs import job_of
from tests.integration.services.draft.steps import PATIENCE_S, serving

PROMPT = [5, 9, 2, 33, 17]
SPEC = GrammarSpec("regex", "([a-c]{2}[x-z]){2,4}")
GREEDY, HOT = SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def grammar() -> CompiledGrammar:
    return compile_grammar(ascii_vocabulary(), SPEC)


@pytest.fixture(scope="module")
def model(tiny: Path) -> CausalModel:
    return load_tiny_model(tiny, kv_blocks=64)


def proposed(strategy: Strategy, job: DraftJob) -> Proposal:
    (proposal,) = strategy.begin([job])
    while not proposal.done:
        strategy.advance([proposal])
    assert proposal.error is None
    return proposal


def answer_of(model: CausalModel, grammar: CompiledGrammar, sampling: SamplingParams) -> list[int]:
    """Return what a target with this model generates, one token a step."""
    cache, output, state = model.new_cache(), list[int](), grammar.start()
    while STOP not in output:
        history = [*PROMPT, *output]
        (logits,) = model.forward([Rows(cache, history[len(cache.tokens) :], 1)])
        draw = Draw(sampling, history, len(PROMPT), frozenset({STOP}), 0, grammar=state)
        (outcome,) = draw_masked(logits, [draw], [confirmed_mask(state, draw)])
        assert isinstance(outcome, Sampled)
        output += outcome.tokens
    return output


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("kind", [ModelStrategy, lambda steps: HybridStrategy(Lookups(), steps)])
def test_a_model_like_the_targets_proposes_the_whole_answer(
    model: CausalModel, grammar: CompiledGrammar, sampling: SamplingParams, kind: type[ModelStrategy]
) -> None:
    true = answer_of(model, grammar, sampling)
    stops = frozenset({STOP})
    strategy, session = kind(ModelSteps(model)), DraftSession()

    def ask(confirmed: int, k: int, ahead: int = 0) -> list[int]:
        tokens = [*PROMPT, *true[:confirmed]]
        return proposed(
            strategy,
            job_of(
                session,
                tokens,
                k,
                ahead=ahead,
                prompt_len=len(PROMPT),
                stop_token_ids=stops,
                sampling=sampling,
                grammar=grammar,
            ),
        ).tokens

    first = ask(0, 4)
    assert first == true[:4]
    assert ask(3, 3, ahead=2) == true[3:6]
    assert ask(2, 20) == true[2:], "a part of it was drafted before"


def test_a_proposal_after_a_rejected_token_follows_the_confirmed_ones(
    model: CausalModel, grammar: CompiledGrammar
) -> None:
    strategy, session = ModelStrategy(ModelSteps(model)), DraftSession()
    for tokens in ([], [97, 97], [98, 99], [98, 99, 120, 97, 97]):
        job = job_of(
            session,
            [*PROMPT, *tokens],
            4,
            prompt_len=len(PROMPT),
            stop_token_ids=frozenset({STOP}),
            sampling=HOT,
            grammar=grammar,
        )
        drafted = proposed(strategy, job).tokens
        state = grammar.start()
        state.confirm(tokens)
        assert len(drafted) == state.allowed_prefix(drafted) == 4


def test_a_state_follows_a_session_and_starts_anew_for_other_tokens() -> None:
    grammar = compile_grammar(ascii_vocabulary(), GrammarSpec("regex", "([a-c]{2}[x-z])+"))
    grammars, session = DraftGrammars(), DraftSession()

    def state_after(output: bytes, ahead: bytes = b"") -> GrammarState:
        job = job_of(
            session,
            [*PROMPT, *output, *ahead],
            4,
            ahead=len(ahead),
            prompt_len=len(PROMPT),
            stop_token_ids=frozenset({STOP}),
            grammar=grammar,
        )
        state = grammars.state_of(job)
        assert state is not None
        expected = grammar.start()
        expected.confirm(output)
        assert state.length == len(output)
        assert (state.masks(()) == expected.masks(())).all()
        return state

    first = state_after(b"abx" * 30, ahead=b"aby")
    assert state_after(b"abx" * 30 + b"ac", ahead=b"y") is first, "the last tokens were rejected"
    assert state_after(b"abx" * 31 + b"ac") is not first, "one that the state has seen is another now"
    for other in (b"aby" * 31, b"aby" * 3, b"", b"abxa"):
        state_after(other)


def lookup_job(grammar: CompiledGrammar | None, output: str, ahead: int = 0) -> DraftJob:
    """Return a job whose prompt holds a text that a lookup copies."""
    prompt = b"abxaby!abz  "
    return job_of(
        DraftSession(),
        [*prompt, *output.encode()],
        6,
        ahead=ahead,
        prompt_len=len(prompt),
        stop_token_ids=frozenset({STOP}),
        grammar=grammar,
    )


def test_a_lookup_is_cut_where_the_grammar_ends_it(grammar: CompiledGrammar) -> None:
    strategy = NgramStrategy(Lookups())
    assert bytes(proposed(strategy, lookup_job(None, "abx")).tokens) == b"aby!ab"
    assert bytes(proposed(strategy, lookup_job(grammar, "abx")).tokens) == b"aby"
    assert bytes(proposed(strategy, lookup_job(grammar, "abxab", ahead=2)).tokens) == b"y"
    assert proposed(strategy, lookup_job(grammar, "abxaby")).tokens == []


def test_a_hybrid_takes_no_lookup_that_the_grammar_does_not_allow(
    model: CausalModel, grammar: CompiledGrammar
) -> None:
    strategy = HybridStrategy(Lookups(), ModelSteps(model))
    free = proposed(strategy, lookup_job(None, "abxaby")).tokens
    assert bytes(free[:1]) == b"!"
    drafted = proposed(strategy, lookup_job(grammar, "abxaby")).tokens
    state = grammar.start()
    state.confirm(b"abxaby")
    assert state.allowed_prefix(drafted) == len(drafted)


def test_tokens_that_the_grammar_does_not_allow_lift_it(grammar: CompiledGrammar) -> None:
    """Only a faulty gateway sends such tokens. What is proposed then is a hint as without a grammar."""
    assert bytes(proposed(NgramStrategy(Lookups()), lookup_job(grammar, "abxaby!")).tokens[:2]) == b"ab"


def test_a_head_that_lacks_all_allowed_tokens_ends_the_proposal(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    draft = load_draft(draft_of(target, own=True).save(tmp_path / "draft"), None)
    size = draft.info.vocab_size
    missing = next(token for token in range(4, size) if token not in HEAD_TOKENS)
    vocabulary = of_bytes([bytes([token]) for token in range(size)], [2])

    def drafted(letters: Sequence[int]) -> list[int]:
        spec = GrammarSpec("regex", "".join(f"\\x{letter:02x}" for letter in letters))
        grammar = compile_grammar(vocabulary, spec)
        job = job_of(DraftSession(), [5, 6, 7], 4, prompt_len=3, grammar=grammar)
        return proposed(ModelStrategy(ModelSteps(draft)), job).tokens

    assert drafted([60, 62, 64, 66]) == [60, 62, 64, 66]
    assert drafted([60, missing, 64, 66]) == [60]
    assert draft.forward([Rows(draft.new_cache(), [5, 6], 1)])[0].isfinite().any()
    assert torch.isinf(draft.forward([Rows(draft.new_cache(), [5, 6], 1)])[0][0, missing])


def item(tokens: list[int], start: int = 0, spec: GrammarSpec = SPEC, **given: object) -> pb.ProposeItem:
    part = slice_of(
        tokens, start=start, prompt_len=len(PROMPT), stop_token_ids=[STOP], grammar_hash=spec.content_hash
    )
    if start == 0:
        part.structured_output.CopyFrom(grammar_message(spec))
    return pb.ProposeItem(slice=part, k=4)


async def test_a_grammar_arrives_with_the_first_slice_and_its_hash_with_the_others(
    model: CausalModel, grammar: CompiledGrammar
) -> None:
    true = answer_of(model, grammar, GREEDY)
    grammars = ReplicaGrammars(ascii_vocabulary())
    async with serving(ModelStrategy(ModelSteps(model)), grammars=grammars) as draft:

        async def propose(given: pb.ProposeItem) -> pb.ProposeAnswer:
            (answer,) = (await draft.stub.Propose(pb.ProposeRequest(items=[given]))).answers
            return answer

        missed = await propose(item([*PROMPT, *true[:2]], start=5))
        assert (missed.cache_miss.have, missed.cache_miss.prefix_hash) == (0, prefix_hash(()))
        first = await propose(item([*PROMPT, *true[:2]]))
        assert list(first.result.draft_tokens) == true[2:6]
        second = await propose(item([*PROMPT, *true[:4]], start=7))
        assert list(second.result.draft_tokens) == true[4:8]
        refused = await propose(item(PROMPT, spec=GrammarSpec("regex", "(a")))
        assert "structured_output.regex" in refused.status.message


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": [STOP, 3], "config.json": 4}, {STOP, 3}),
        ({"generation_config.json": None, "config.json": STOP}, {STOP}),
    ],
)
async def test_the_end_tokens_are_the_models(
    tmp_path: Path, files: dict[str, object], ends: set[int]
) -> None:
    """Not the stop tokens of whichever session comes first, some of which are its caller's."""
    save_ascii_tokenizer(tmp_path)
    for name, ids in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    grammars = draft_grammars(DraftSettings(tokenizer=str(tmp_path)), 0)
    assert grammars is not None
    part = lookup_job(None, "").slice
    first = replace(
        part, grammar=SPEC, grammar_hash=SPEC.content_hash, stop_token_ids=frozenset({STOP, ord("a")})
    )
    compiled = await grammars.compiled(first, 0)
    assert isinstance(compiled, CompiledGrammar)
    assert compiled.vocabulary.end_tokens == ends


def test_without_end_tokens_a_draft_knows_no_grammar(tmp_path: Path) -> None:
    save_ascii_tokenizer(tmp_path)
    with capture_logs() as logs:
        assert draft_grammars(DraftSettings(tokenizer=str(tmp_path)), 0) is None
    assert [entry["event"] for entry in logs] == ["structured output unavailable"]


async def test_a_deadline_that_passes_while_a_grammar_is_compiled_ends_the_request() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(go_on.wait, PATIENCE_S)
        grammars = ReplicaGrammars(ascii_vocabulary(), thread)
        async with serving(NgramStrategy(Lookups()), grammars=grammars) as draft:
            late, due = item(PROMPT), item([7, 8, 9, 7, 8])
            late.slice.remaining_ns, due.slice.session_id = 1_000_000, "due"
            (answer,) = (await draft.stub.Propose(pb.ProposeRequest(items=[late]))).answers
            assert answer.status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            go_on.set()
            (answer,) = (await draft.stub.Propose(pb.ProposeRequest(items=[due]))).answers
            assert answer.WhichOneof("outcome") == "result"


async def test_a_draft_without_a_tokenizer_proposes_without_the_grammar() -> None:
    async with serving(NgramStrategy(Lookups())) as draft:
        request = pb.ProposeRequest(items=[item([7, 8, 9, 7, 8])])
        (answer,) = (await draft.stub.Propose(request)).answers
        assert list(answer.result.draft_tokens) == [9, 7, 8, 9]
