"""Draw principals and their sessions."""

from __future__ import annotations

import random
from dataclasses import replace

from galley.client.options import Retries
from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.answer.answer import SessionSpec
from galley.core.grammar.spec import GrammarSpec
from galley.core.sampling_params import SamplingParams
from services.gateway.request.validate import session_id_for
from tests.simulation.grammars import STOP, VOCAB
from tests.simulation.schedule import ID_SECRET, MOST_K, PlannedSession

TWIN = "-twin"
_ME, _YOU = "me", "mes"
"""The principals. Their names run together with the first letter of a key."""
_WIDTHS = (0, 0, 2, 4)
"""Drawn with the seed of a session, so that the schedules of earlier seeds stay as they were."""


def draw_principals(rng: random.Random) -> tuple[Principal, ...]:
    return tuple(Principal(name, _limits(rng)) for name in (_ME, _YOU))


def _limits(rng: random.Random) -> PrincipalLimits:
    if rng.random() < 0.6:
        return PrincipalLimits()
    return PrincipalLimits(rng.choice([None, 1, 2]), rng.choice([None, 60.0]), 120)


def without_limits(principals: tuple[Principal, ...]) -> tuple[Principal, ...]:
    return tuple(Principal(principal.name) for principal in principals)


def plan_session(rng: random.Random, number: int, principals: tuple[Principal, ...]) -> PlannedSession:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 10, 30])))
    stops = frozenset({STOP}) if rng.random() < 0.7 else frozenset()
    name, principal = f"session-{number}", rng.choice(principals).name
    auto = rng.random() < 0.5
    seed = rng.randrange(2**32)
    spec = SessionSpec(
        session_id=session_id_for(principal, name, ID_SECRET),
        prompt=prompt,
        sampling=SamplingParams(seed=seed),
        max_position=len(prompt) + rng.choice([1, 8, 24, 40, 60]),
        vocab_size=VOCAB,
        stop_token_ids=stops,
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, None, 0]),
        k=MOST_K if auto else rng.choice([0, 2, 4, 8]),
        auto=auto,
        width=_WIDTHS[seed % len(_WIDTHS)],
        continue_without_client=rng.random() < 0.25,
    )
    within_s = rng.uniform(1.2, 4.0) if rng.random() < 0.15 else None
    pause_s = rng.choice([0.0, 0.0, 0.0, 0.0, 0.05, 0.4])
    at_s, checks_seen, breaks_off = rng.uniform(0.0, 1.0), rng.random() < 0.8, rng.random() < 0.2
    planned = PlannedSession(name, principal, spec, at_s, checks_seen, within_s, pause_s, breaks_off)
    returns, return_s = rng.choice([0, 0, 1, 5]), rng.choice([0.05, 0.5, 2.0])
    return replace(planned, retries=_retries(rng), returns=returns, return_s=return_s)


def _retries(rng: random.Random) -> Retries:
    if rng.random() < 0.5:
        return Retries()
    return Retries(
        rng.choice([0.0, 0.3, 2.0, 8.0, 30.0]),
        rng.choice([0.3, 2.0, 5.0]),
        rng.choice([0.01, 0.05, 0.5]),
        rng.choice([0.1, 0.5, 2.0]),
    )


def twin(planned: PlannedSession, rng: random.Random) -> PlannedSession:
    """Return the other principal's session of this request, by the same key or one that runs together."""
    mine = planned.principal == _ME
    other, shifted = (_YOU, planned.name[1:]) if mine else (_ME, _YOU[-1] + planned.name)
    key = rng.choice([planned.name, shifted])
    spec = replace(planned.spec, session_id=session_id_for(other, key, ID_SECRET))
    name = planned.name + TWIN
    return replace(planned, name=name, principal=other, spec=spec, key=key, at_s=rng.uniform(0.0, 1.0))


def lengthened(planned: PlannedSession) -> PlannedSession:
    """Return a session that outlasts all faults and always requests drafts."""
    spec = planned.spec
    length = len(spec.prompt) + 100
    spec = replace(spec, max_position=length, stop_token_ids=frozenset(), k=4, auto=False)
    return replace(planned, spec=spec, within_s=None, pause_s=0.0, long=True, retries=Retries(), returns=5)


def shortened(spec: SessionSpec) -> SessionSpec:
    prompt = spec.prompt[:6]
    return replace(spec, prompt=prompt, max_position=len(prompt) + 20, min_tokens=4)


def may_have_grammar(planned: PlannedSession) -> bool:
    """Return True if its answer may end before its bound, as a grammar may demand at any token."""
    spec = planned.spec
    return STOP in spec.stop_token_ids and not spec.min_tokens and not planned.long


def by_grammar(planned: PlannedSession, grammar: GrammarSpec) -> PlannedSession:
    return replace(planned, spec=replace(planned.spec, grammar=grammar))


def constrained(spec: SessionSpec) -> SessionSpec:
    """Return a session with room for an answer by a grammar, and with drafts."""
    room, k = len(spec.prompt) + 70, spec.k or 4
    return replace(spec, max_position=room, min_tokens=0, stop_token_ids=frozenset({STOP}), k=k)
