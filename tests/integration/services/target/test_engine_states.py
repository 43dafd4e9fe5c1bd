"""States of confirmed tokens that the engine returns with them: bytes, of the path that was accepted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from galley.core.features import NO_STATES, States, state_bytes
from galley.core.sampling_params import SamplingParams
from galley.core.step import Computed, Draw, Sampled, StepChunk, StepOutcome, StepPlan
from galley.core.trees import CHAIN, Parents, path_to, ranks
from galley.engine.model import CausalModel, Rows
from galley.engine.states import wanted_layers, with_states
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.paged.engine import PagedEngine
from tests.fakes.draft_trees import random_tree
from tests.fakes.tiny_model import VOCAB, greedy, load_tiny_model
from tests.fakes.verify_items import generate, slice_of, verify
from tests.integration.services.target.conftest import pages

PROMPT = [5, 9, 2, 33, 17]
GREEDY = SamplingParams(temperature=0.0)


def draw_of(draft_tokens: tuple[int, ...], parents: Parents = CHAIN) -> Draw:
    return Draw(GREEDY, PROMPT, len(PROMPT), frozenset(), 0, draft_tokens, parents)


@pytest.fixture(scope="session")
def answer(tiny: Path) -> list[int]:
    return greedy(tiny, PROMPT, 4)


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % (VOCAB - 1)


def alone(model: CausalModel, tokens: list[int], layers: tuple[int, ...]) -> bytes:
    """Return the states of all tokens, which are fed as one chain."""
    rows = Rows(model.new_cache(), tokens, len(tokens))
    states = model.forward_states([rows], sorted(layers))[1][:, [sorted(layers).index(n) for n in layers]]
    return states.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def test_a_step_returns_the_states_of_its_accepted_path(loaded: CausalModel, answer: list[int]) -> None:
    """Chunks beside each other want states of other layers and rows, or none."""
    engine, a = PagedEngine(loaded, "f00d"), answer
    # The answer's first two tokens are nodes 1 and 3, each after a sibling.
    nodes, parents = (wrong(a[0]), a[0], wrong(a[1]), a[1], wrong(a[2])), (-1, -1, 1, 1, 3)
    fed = [*PROMPT, *nodes]
    tree = StepChunk(
        0, fed, range(2), 6, draw_of(nodes, parents), parents=parents, feature_layers=(2, 1), feature_rows=8
    )
    plain = StepChunk(0, PROMPT, range(2, 4), 1, draw_of(()))
    chain = (a[0], wrong(a[1]))
    cut = StepChunk(0, [*PROMPT, *chain], range(4, 6), 3, draw_of(chain), feature_layers=(2,), feature_rows=3)
    prefill = StepChunk(0, PROMPT, range(6, 8), 0)
    outcomes = engine.run(StepPlan((tree, plain, cut, prefill)))
    of_tree, of_plain, of_cut, of_prefill = outcomes
    assert of_prefill is None
    assert isinstance(of_tree, Sampled)
    assert isinstance(of_plain, Sampled)
    assert isinstance(of_cut, Sampled)
    size = loaded.info.hidden_size
    assert of_tree.tokens == tuple(a[:3])
    assert of_tree.states == alone(loaded, [*PROMPT, *a[:2]], (2, 1))[2 * state_bytes(2, size) :]
    assert of_plain == Sampled((a[0],))
    assert of_cut.tokens == tuple(a[:2])
    assert of_cut.states == alone(loaded, [*PROMPT, a[0]], (2,))[4 * state_bytes(1, size) :]


@pytest.mark.parametrize("seed", range(30))
def test_states_are_of_the_rows_of_confirmed_tokens(seed: int) -> None:
    """The state of a row is its number: those of random trees are read off, of several chunks at once."""
    rng = random.Random(seed)
    rows = 0
    chunks: list[StepChunk] = []
    outcomes: list[StepOutcome] = []
    expected: list[list[float]] = []
    for _ in range(4):
        parents = tuple(rng.randint(-1, node - 1) for node in range(rng.randint(0, 8)))
        nodes = ranks(parents, len(parents))  # equal tokens, but not of siblings
        before = rng.randint(1, 5)
        outcome, path = outcome_of(rng, nodes, parents)
        layers = rng.choice([(), (3,), (1, 3)])
        total = before + len(nodes)
        fed = [*range(rng.randint(0, 3) + before), *nodes]
        draw = draw_of(tuple(nodes), parents)
        chunks.append(
            StepChunk(
                0, fed, (), len(nodes) + 1, draw, parents=parents, feature_layers=layers, feature_rows=total
            )
        )
        outcomes.append(outcome)
        taken = [*range(before), *(before + node for node in path)] if isinstance(outcome, Sampled) else []
        expected.append([float(rows + row) for row in taken for _ in layers])
        rows += total if layers else 0
    wanted = len(wanted_layers(chunks))
    found = with_states(chunks, outcomes, torch.arange(float(rows))[:, None, None].expand(rows, wanted, 1))
    assert [numbers(outcome) for outcome in found] == expected
    assert [tokens_of(outcome) for outcome in found] == [tokens_of(outcome) for outcome in outcomes]


def outcome_of(rng: random.Random, nodes: list[int], parents: Parents) -> tuple[StepOutcome, list[int]]:
    """Return an outcome that takes a random path of the tree, and the nodes of the states due with it."""
    if rng.random() < 0.2:
        return Computed(3), []
    path = path_to(parents, rng.randrange(-1, len(nodes)))
    confirmed = [nodes[node] for node in path]
    if path and rng.random() < 0.3:
        return Sampled(tuple(confirmed)), path[:-1]  # no logits after the last node
    return Sampled((*confirmed, 99)), path


def tokens_of(outcome: StepOutcome) -> tuple[int, ...] | None:
    return outcome.tokens if isinstance(outcome, Sampled) else None


def numbers(outcome: StepOutcome) -> list[float]:
    if not isinstance(outcome, Sampled) or not outcome.states:
        return []
    return torch.frombuffer(bytearray(outcome.states), dtype=torch.bfloat16).tolist()


@pages
async def test_the_states_of_a_stream_with_trees_are_those_of_its_tokens(
    target: rpc.TargetAsyncStub, poisoned: Path
) -> None:
    """Sessions beside each other propose other trees, sampled; one wants no states."""
    model, layers = load_tiny_model(poisoned, kv_blocks=32), (1, 2)
    plain, *streams = await asyncio.gather(*(streamed(target, seed, layers) for seed in range(4)))
    assert plain[1] == NO_STATES
    for tokens, states in streams:
        assert (states.position, states.tokens) == (0, len(tokens) - 1)
        assert states.data == alone(model, tokens[:-1], layers)


async def streamed(
    target: rpc.TargetAsyncStub, seed: int, layers: tuple[int, ...]
) -> tuple[list[int], States]:
    """Return a session's tokens and states; its trees are right in part, as its answer is known."""
    given: dict[str, Any] = {
        "prompt_len": len(PROMPT),
        "max_position": len(PROMPT) + 20,
        "sampling": pb.SamplingParams(temperature=1.0, top_p=0.95, seed=11),
    }
    answer, _ = await generate(target, PROMPT, 20, lambda _: [], session_id=f"known {seed}", **given)
    rng, tokens, held, states = random.Random(seed), list(PROMPT), 0, NO_STATES
    while len(tokens) < 25:
        tree = random_tree(rng, answer[len(tokens) - len(PROMPT) :], 8, vocab=VOCAB - 1)
        part = slice_of(tokens, start=held, session_id=f"s {seed}", **given)
        (got,) = await verify(
            target,
            pb.VerifyItem(
                slice=part,
                draft_tokens=tree.draft_tokens,
                survival=tree.survival,
                parents=tree.parents,
                want_features=seed > 0,
                feature_layers=layers,
            ),
        )
        tokens += got.result.tokens
        held, data = got.result.kv_len, got.result.features
        states = states.joined(States(got.result.features_position, len(data) // state_bytes(2, 128), data))
    return tokens, states
