"""Show drafts that learn from the traffic: `make demo-living`.

1. A stack of the default model with two drafts answers SQL questions and questions in Spanish, for which the
   shipped draft was not trained, with one stream each. The gateway keeps the finished sessions for training,
   and audits some of them.
2. `galley distill --follow` reads them. It trains the draft further, on a core of its own, and has each draft
   that is better on held-out sessions tried as a canary. The gateway promotes it, or rolls it back.
3. Every quarter of a minute a line says which share of the draft tokens was accepted, and which version is
   the stable one.
4. At the end the stable draft is compared with the shipped one: two stacks answer the same new prompts in
   alternating blocks.

Writes bench/results/living.json and bench/results/living.png. Needs two cores: the training has the
idle time of one.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Goal, at_least, goal_lines, result_path, write_record
from bench.living import plot
from bench.living.comparison import NEW_PROMPTS, Comparison, compare
from bench.living.learner import LearnerEnded, add_options, following, shipped
from bench.living.traffic import Traffic
from bench.living.watch import WINDOW_S, Watch, recorded_cycle
from bench.living.workloads import WORKLOADS, prompts
from galley import AsyncClient
from galley.bench.closed_loop import GatewayLoop, fixed_arm
from galley.common.registry.spool import LearningSpool
from galley.common.registry.trials import DraftVersions
from galley.core.admission.admission import ANONYMOUS_NAME
from galley.core.audit import Verdict
from galley.core.names import MODEL
from galley.core.versions.state import VersionEvent
from galley.distill.follow.journal import RECORD
from galley.distill.work import kept_lines
from galley.stack.endpoint import Endpoint
from galley.stack.options import StackOptions
from galley.stack.stack import Stack

_BASELINE_S = 60.0
"""Traffic before the training begins."""
_AUDITED = 100
"""Sessions, the latest ones, that are audited at the end."""
_SPOOL_TOKENS = 2_000_000
_ARM = fixed_arm(MODEL, 4)
"""Each round has four tokens of the draft's model, so that trials decide soon."""
_ACCEPTANCE_GAIN, _SPEED_GAIN = 0.15, 1.2


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the demonstration: `changes` of versions, with the seconds at which they happened."""

    traffic: Traffic
    changes: Sequence[tuple[float, VersionEvent]]
    cycles: Sequence[Mapping[str, Any]]
    audit: Mapping[str, int]
    stable: str


def main() -> int:
    """Run the demonstration; return 0 if a draft was promoted and no audited token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="length of the traffic (default: 30)")
    parser.add_argument("--promotions", type=int, default=0, help="stop after so many (default: do not)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens an answer (default: 96)")
    add_options(parser, cycle_tokens=60_000, new_tokens=8_000, trial_tokens=2_000)
    parser.add_argument("--arm", default=_ARM, help="how requests speculate: auto, or (default) model-4")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of the comparison (default: 7)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a kill ends the training, too
    with TemporaryDirectory() as scratch:
        work = Path(scratch) / "learning"
        try:
            with Endpoint() as endpoint:
                outcome = asyncio.run(show(given, work, endpoint))
        except LearnerEnded as ended:
            raise SystemExit(f"the training has ended:\n{ended}") from None
        draft = work / "drafts" / outcome.stable
        compared = None
        if outcome.stable and draft.is_dir():
            sources = {name: prompts(name, NEW_PROMPTS) for name in WORKLOADS}
            compared = asyncio.run(compare(shipped(), draft, sources, given.pairs, given.max_tokens))
    goals = goals_of(outcome, compared)
    record(given, outcome, compared, goals)
    audit = outcome.audit
    print(f"audit: {audit['differing']} of {audit['tokens']:,} tokens of {audit['sessions']} sessions differ")
    print(*goal_lines(goals), sep="\n")
    return 0 if compared is not None and not audit["differing"] and not audit["damaged"] else 1


async def show(given: argparse.Namespace, work: Path, endpoint: Endpoint) -> Outcome:
    """Run traffic and training for the given time, in a stack that is announced at `endpoint`."""
    options = StackOptions(
        drafts=2,
        max_load_mib=512,
        metrics=True,
        extra_args={"gateway": ["--learn-tokens", str(_SPOOL_TOKENS), "--audit-ratio", "0"]},
    )
    async with Stack(options) as stack, AsyncClient(stack.gateways[0]) as client:
        endpoint.announce(stack.gateways[0], stack.services, stack.store_url)
        print(f"galley top --stack {endpoint.name} shows it in another terminal", flush=True)
        versions = DraftVersions(stack.store_url)
        traffic = Traffic(GatewayLoop(client), WORKLOADS, 1, given.max_tokens, given.arm)
        watch = Watch(traffic, versions, work)
        sending = asyncio.create_task(traffic.run())
        try:
            await watch.follow(sending, _BASELINE_S, 0)
            async with following(stack.store_url, work, given):
                await watch.follow(sending, given.minutes * 60 - _BASELINE_S, given.promotions)
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
        changes = await _changes(versions, traffic)
        stable = (await versions.read()).split.stable
        await versions.close()
        audit = await _audited(client, stack.store_url)
    return Outcome(traffic, changes, kept_lines(work / RECORD), audit, stable)


async def _changes(versions: DraftVersions, traffic: Traffic) -> list[tuple[float, VersionEvent]]:
    """Return the changes of versions, the first one first."""
    ago_s = [(time.time() - event.at_ms / 1000, event) for event in await versions.history()]
    return [(traffic.now_s - ago, event) for ago, event in reversed(ago_s)]


async def _audited(client: AsyncClient, store_url: str) -> Mapping[str, int]:
    """Audit the latest sessions; return the sums of what was found."""
    spool = LearningSpool(store_url)
    ids = (await spool.sessions(ANONYMOUS_NAME))[:_AUDITED]
    await spool.close()
    reports = [await client.audit(session_id) for session_id in ids]
    return {
        "sessions": len(reports),
        "tokens": sum(report.compared for report in reports),
        "differing": sum(report.differing for report in reports),
        "damaged": sum(report.verdict is Verdict.DAMAGED for report in reports),
    }


def goals_of(outcome: Outcome, compared: Comparison | None) -> list[Goal]:
    differing = outcome.audit["differing"] + outcome.audit["damaged"]
    goals = [Goal("audit", "audited tokens that differ", str(differing), "0", differing == 0)]
    if compared is None:
        return [*goals, Goal("living", "drafts promoted", "0", ">= 1", met=False)]
    gained = compared.acceptance_gain
    acceptance = Goal(
        "living",
        "first draft token accepted at T = 0, promoted less shipped draft",
        f"{gained:+.3f}",
        f">= +{_ACCEPTANCE_GAIN:g}",
        gained >= _ACCEPTANCE_GAIN,
    )
    speed = at_least(
        "living", "tokens/s at 1 stream, promoted over shipped draft", compared.speed, _SPEED_GAIN, "x"
    )
    return [*goals, acceptance, speed]


def record(
    given: argparse.Namespace, outcome: Outcome, compared: Comparison | None, goals: Sequence[Goal]
) -> None:
    """Write the record and the plot."""
    path = result_path("living")
    traffic = outcome.traffic
    windows = [
        {"at_s": at_s, **{name: dataclasses.asdict(of) for name, of in figures.items()}}
        for at_s, figures in traffic.windows(WINDOW_S)
    ]
    changes = [{"at_s": round(at_s, 1), **dataclasses.asdict(event)} for at_s, event in outcome.changes]
    write_record(
        path,
        {
            "options": vars(given),
            "windows": windows,
            "changes": changes,
            "cycles": list(map(recorded_cycle, outcome.cycles)),
            "audit": outcome.audit,
            "stable": outcome.stable,
            "comparison": compared,
            "goals": goals,
        },
    )
    plot.draw(path.with_suffix(".png"), traffic.windows(WINDOW_S), outcome.changes)
    print(f"record: {path}")


if __name__ == "__main__":
    sys.exit(main())
