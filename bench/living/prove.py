"""Prove that drafts can live: `make prove-living`.

1. A stack of the default model with two drafts answers 10,000 sessions, whose mix of workloads drifts from
   what the shipped draft knows to SQL, to Spanish, and to all of them. `galley distill --follow` learns from
   them in the idle time of a core; the gateway promotes its drafts, or rolls them back.
2. Meanwhile three bad drafts are planted with `galley drafts load` and `try`. Each must be rolled back within
   a minute.
3. All sessions are audited, and a sample is asked again without drafts: no token may differ. Beside it, the
   proof of `make prove-audits` plants faults and audits further tokens, up to a million in all.
4. Each promotion is checked by a paired run of the drafts before and after it, on new prompts of the traffic
   of that time: the promoted one must be accepted more often.

Writes bench/results/living-proof.json, also if the run fails. Exits 1 if a session failed, a token differs,
a bad draft was promoted, or an audit missed a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import BENCH, Goal, goal_lines, result_path, write_record
from bench.living.checks import Audits, audit, differing_without_drafts
from bench.living.comparison import NEW_PROMPTS, BlockSize, Comparison, compare
from bench.living.learner import LearnerEnded, add_options, following
from bench.living.planted import NOISE, SHUFFLED, SLOW
from bench.living.sessions import Sessions
from bench.living.trials import Drafts, PlantedTrial, Planter, Promotion, end_trial
from bench.living.watch import LINE_EVERY_S, WINDOW_S, Watch, recorded_cycle
from bench.living.workloads import Mixture
from galley import AsyncClient
from galley.bench.closed_loop import GatewayLoop, fixed_arm
from galley.common.registry.leases import ReplicaRegistry
from galley.common.registry.trials import DraftVersions
from galley.core.names import MODEL
from galley.distill.follow.journal import RECORD
from galley.distill.work import kept_lines
from galley.stack.options import StackOptions
from galley.stack.stack import Stack

PLAN = ((NOISE, 0.07), (SHUFFLED, 0.35), (SLOW, 0.7))
"""Kinds of bad drafts, and the share of the sessions after which each is planted."""
MOST_SECONDS = 60.0
_SPOOL_TOKENS = 2_000_000
_KEPT_S = 6 * 3600
_ARM = fixed_arm(MODEL, 4)
"""Each round has four tokens of the draft's model, so that trials decide soon."""
_MAX_TOKENS = 32
_PAIR = BlockSize(speed=4, acceptance=24, streams=8)
_EXACT = {"sessions", "tokens", "audits", "bad drafts"}
"""Goals that a correct program meets whatever the machine; the run fails if one is missed."""


@dataclass(slots=True)
class Outcome:
    """The results so far."""

    sessions: Sessions | None = None
    planted: Sequence[PlantedTrial] = ()
    promotions: Sequence[Promotion] = ()
    undecided: str = ""
    cycles: Sequence[Mapping[str, Any]] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    audits: Audits | None = None
    asked_again: int = 0
    differing_again: int = 0
    audit_proof: Mapping[str, Any] = field(default_factory=dict)
    compared: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Run the proof; return 0 if no exact goal is missed."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a kill ends all processes
    outcome, interrupted = Outcome(), False
    try:
        with TemporaryDirectory() as scratch:
            asyncio.run(prove(given, Path(scratch), outcome))
    except KeyboardInterrupt:
        interrupted = True
        outcome.problems.append("interrupted")
    except Exception as error:  # noqa: BLE001  # what was found until then is kept
        traceback.print_exc()
        outcome.problems.append(f"{type(error).__name__}: {error}")
    goals = goals_of(outcome, given.sessions, given.audit_tokens)
    print(*[f"problem: {problem}" for problem in outcome.problems], *goal_lines(goals), sep="\n")
    record(given, outcome, goals)
    return 1 if interrupted or any(goal.name in _EXACT and not goal.met for goal in goals) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sessions", type=int, default=10_000, help="sessions of the traffic (default: 10000)"
    )
    parser.add_argument("--streams", type=int, default=8, help="closed loops (default: 8)")
    parser.add_argument("--again", type=int, default=300, help="sessions asked again without drafts")
    parser.add_argument("--audit-tokens", type=int, default=1_000_000, help="tokens audited in all")
    parser.add_argument("--faults", type=int, default=5, help="faults of each kind (default: 5)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs for each promotion (default: 9)")
    parser.add_argument(
        "--record",
        type=Path,
        default=result_path("living-proof"),
        help="file to write (default: %(default)s)",
    )
    add_options(parser, cycle_tokens=40_000, new_tokens=6_000, trial_tokens=1_500)
    return parser.parse_args()


async def prove(given: argparse.Namespace, scratch: Path, outcome: Outcome) -> None:
    """Run all parts; fill `outcome` as they end."""
    work, kept = scratch / "learning", scratch / "kept"
    kept.mkdir()
    drafts = Drafts(work, kept)
    options = StackOptions(
        drafts=2,
        max_load_mib=512,
        extra_args={
            "gateway": [
                *("--learn-tokens", str(_SPOOL_TOKENS), "--audit-ratio", "0"),
                *("--finished-ttl-s", str(_KEPT_S)),
            ]
        },
    )
    async with Stack(options) as stack, AsyncClient(stack.gateways[0]) as client:
        with _timed(outcome, "traffic"):
            await _traffic(given, stack, client, drafts, outcome)
        with _timed(outcome, "checks"):
            await _check(given, client, scratch, outcome)
    with _timed(outcome, "pairs"):
        await _compare(given, drafts, outcome)


@contextmanager
def _timed(outcome: Outcome, name: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        outcome.seconds[name] = round(time.monotonic() - began_s, 1)
        print(f"{name}: {outcome.seconds[name]:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------- traffic --


async def _traffic(
    given: argparse.Namespace, stack: Stack, client: AsyncClient, drafts: Drafts, outcome: Outcome
) -> None:
    versions, registry = DraftVersions(stack.store_url), ReplicaRegistry(stack.store_url)
    sessions = Sessions(GatewayLoop(client), given.sessions, given.streams, _ARM, is_needed=True)
    outcome.sessions, outcome.promotions = sessions, drafts.promotions
    watch = Watch(sessions, versions, drafts.work)
    planter = Planter(versions, registry, stack.store_url, drafts, sessions, watch, given.trial_tokens)
    outcome.planted = planter.trials
    try:
        async with following(stack.store_url, drafts.work, given):
            await _run(sessions, drafts, planter, watch)
    except LearnerEnded as ended:
        outcome.problems.append(f"the training has ended: {ended}")
    finally:
        outcome.undecided = await end_trial(versions)
        await drafts.update(versions, sessions)
        outcome.cycles = kept_lines(drafts.work / RECORD)
        outcome.changes = [
            {"at_s": round(sessions.now_s - time.time() + event.at_ms / 1000, 1), **dataclasses.asdict(event)}
            for event in reversed(await versions.history())
        ]
        await versions.close()
        await registry.close()


async def _run(sessions: Sessions, drafts: Drafts, planter: Planter, watch: Watch) -> None:
    """Run the traffic until all sessions have ended and all bad drafts are decided."""

    async def plant() -> None:
        await planter.run(PLAN)
        sessions.is_needed = False

    async with asyncio.TaskGroup() as group:
        group.create_task(plant())
        endless = [
            group.create_task(drafts.follow(planter.versions, sessions)),
            group.create_task(_look(watch, sessions)),
        ]
        await sessions.run()
        for task in endless:
            task.cancel()


async def _look(watch: Watch, sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        watch.say(f"{len(sessions.finished)} of {sessions.count} sessions; traffic: {sessions.phase.name}")
        await watch.look()


# ----------------------------------------------------------------------------------------- checks --


async def _check(given: argparse.Namespace, client: AsyncClient, scratch: Path, outcome: Outcome) -> None:
    """Audit the sessions, ask some again, and run the proof of audits beside that."""
    finished = outcome.sessions.finished if outcome.sessions is not None else []
    given_tokens = sum(len(session.tokens) for session in finished)
    proof = asyncio.create_task(
        _prove_audits(given.faults, max(0, given.audit_tokens - given_tokens), scratch / "audits.json")
    )
    try:
        outcome.audits = await audit(client, finished, given.streams, _say)
        again = await differing_without_drafts(client, finished, given.again, given.streams)
        outcome.asked_again, outcome.differing_again = again
        _say(f"{outcome.differing_again} of {outcome.asked_again} sessions differ without drafts")
        outcome.audit_proof = await proof
    finally:
        proof.cancel()
        await asyncio.wait([proof])


async def _prove_audits(faults: int, tokens: int, path: Path) -> Mapping[str, Any]:
    """Return the record of `bench.prove_audits`, in a process of its own."""
    options = ("--faults", str(faults), "--tokens", str(tokens), "--record", str(path))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.prove_audits", *options), cwd=BENCH.parent, start_new_session=True
    )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    found: Mapping[str, Any] = json.loads(await asyncio.to_thread(path.read_text, encoding="utf-8"))
    return {name: found[name] for name in ("planted", "found", "audits", "tokens", "differing", "seconds")}


async def _compare(given: argparse.Namespace, drafts: Drafts, outcome: Outcome) -> None:
    """Compare each promoted version with the one before it."""
    for number, promotion in enumerate(outcome.promotions):
        before, after = drafts.folders[promotion.before], drafts.folders[promotion.version]
        source = Mixture(NEW_PROMPTS + number).endless(promotion.weights)
        compared = await compare(before, after, {"traffic": source}, given.pairs, _MAX_TOKENS, _PAIR)
        outcome.compared.append(compared)
        _say(
            f"{promotion.version}: first draft token accepted {compared.acceptance_gain:+.3f}, by pairs "
            f"{compared.gain}; tokens/s {compared.speed}x"
        )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


# ------------------------------------------------------------------------------------------ goals --


def goals_of(outcome: Outcome, sessions: int, audit_tokens: int) -> list[Goal]:
    """Return all goals; what was not measured is missed."""
    return [
        *_token_goals(outcome, sessions),
        *_version_goals(outcome),
        *_audit_goals(outcome, audit_tokens),
    ]


def _token_goals(outcome: Outcome, least: int) -> list[Goal]:
    finished = len(outcome.sessions.finished) if outcome.sessions is not None else 0
    failed = len(outcome.sessions.failures) if outcome.sessions is not None else 0
    audits = outcome.audits or Audits()
    of = f"{audits.sessions:,} sessions, {audits.tokens:,} tokens"
    return [
        Goal("sessions", "finished", f"{finished:,}", f">= {least:,}", finished >= least),
        _none("sessions", "failed", failed, finished > 0),
        Goal("sessions", "audited", f"{audits.sessions:,}", "all", 0 < finished == audits.sessions),
        _none("tokens", f"that differ by audits of {of}", audits.differing, audits.sessions > 0),
        Goal(
            "tokens",
            "verdicts of the audits; logs of another length than the answer",
            f"{audits.verdicts}; {audits.other_lengths}",
            "same; 0",
            audits.sessions > 0 and audits.is_clean,
        ),
        _none(
            "tokens",
            f"sessions of {outcome.asked_again} that differ without drafts",
            outcome.differing_again,
            outcome.asked_again > 0,
        ),
    ]


def _version_goals(outcome: Outcome) -> list[Goal]:
    bad = {trial.version for trial in outcome.planted}
    promoted = sum(promotion.version in bad for promotion in outcome.promotions)
    done = len(outcome.compared)
    count = len(outcome.promotions)
    worse = sum(compared.gain.low <= 0 for compared in outcome.compared)
    return [
        _none("bad drafts", f"promoted, of {len(bad)}", promoted, len(bad) == len(PLAN)),
        *map(_roll_back_goal, outcome.planted),
        Goal("promotions", "by rule", str(count), ">= 1", count >= 1),
        _none(
            "promotions",
            f"of {done} not accepted more often by the pairs' interval",
            worse,
            count == done > 0,
        ),
    ]


def _roll_back_goal(trial: PlantedTrial) -> Goal:
    is_back = trial.ended_by == "roll_back by rule"
    measured = trial.ended_by if trial.seconds is None else f"{trial.ended_by} after {trial.seconds:.1f} s"
    met = is_back and trial.seconds is not None and trial.seconds <= MOST_SECONDS
    return Goal("roll-back", f"{trial.kind}, from its `try`", measured, f"<= {MOST_SECONDS:g} s", met)


def _audit_goals(outcome: Outcome, least: int) -> list[Goal]:
    proof = outcome.audit_proof
    planted, found = int(proof.get("planted", 0)), sum(proof.get("found", {}).values())
    tokens = (outcome.audits.tokens if outcome.audits is not None else 0) + int(proof.get("tokens", 0))
    alarms = sum(count for verdict, count in proof.get("audits", {}).items() if verdict != "same")
    return [
        Goal("audits", "planted faults found", f"{found} of {planted}", "all", 0 < planted == found),
        Goal("audits", "tokens audited", f"{tokens:,}", f">= {least:,}", tokens >= least),
        _none("audits", "false alarms over other models and requests", alarms, bool(proof)),
    ]


def _none(name: str, what: str, count: int, is_measured: bool) -> Goal:
    return Goal(name, what, str(count) if is_measured else "not measured", "0", is_measured and not count)


def record(given: argparse.Namespace, outcome: Outcome, goals: Sequence[Goal]) -> None:
    sessions = outcome.sessions
    windows = [] if sessions is None else sessions.windows(WINDOW_S)
    write_record(
        given.record,
        {
            "options": {name: value for name, value in vars(given).items() if name != "record"},
            "seconds": outcome.seconds,
            "sessions": 0 if sessions is None else len(sessions.finished),
            "tokens": 0 if sessions is None else sum(len(one.tokens) for one in sessions.finished),
            "failures": [] if sessions is None else sessions.failures,
            "windows": [{"at_s": at_s, **figures} for at_s, figures in windows],
            "changes": outcome.changes,
            "cycles": list(map(recorded_cycle, outcome.cycles)),
            "planted": outcome.planted,
            "promotions": outcome.promotions,
            "compared": outcome.compared,
            "undecided": outcome.undecided,
            "audits": outcome.audits,
            "asked_again": {"sessions": outcome.asked_again, "differing": outcome.differing_again},
            "audit_proof": outcome.audit_proof,
            "problems": outcome.problems,
            "goals": goals,
        },
    )
    print(f"record: {given.record}")


if __name__ == "__main__":
    sys.exit(main())
