"""Dashboard of acceptance, speed-up and wasted work."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from galley.core.names import LOCAL_SOURCES
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import gauge, increase, largest, mean, quantile, rate, ratio

# As in the alert GalleyAcceptanceCollapse: what a grammar forces and callers predict tells nothing of drafts.
_OF_DRAFTS = f'strategy!~"{"|".join(LOCAL_SOURCES)}"'


def _acceptance(title: str, text: str, by: str, where: str = "", runbooks: tuple[str, ...] = ()) -> Panel:
    """Return a panel of the acceptance rate by a label; `text` goes on from what it divides."""
    accepted, verified = rate(of.ACCEPTED_TOKENS, by, where=where), rate(of.VERIFIED_TOKENS, by, where=where)
    return Panel(
        title,
        f"Accepted draft tokens divided by verified ones, {text}",
        (Query(ratio(accepted, verified), f"{{{{{by}}}}}"),),
        "percentunit",
        max_value=1,
        runbooks=runbooks,
        limits=(0.3, 0.1),
    )


SPECULATION = Dashboard(
    "speculation",
    "Galley: speculation",
    "Acceptance, speed-up and wasted work.",
    (
        Row(
            "Speed-up",
            (
                Panel(
                    "Live speed-up by workload",
                    "Estimated plain decoding time over measured time; below 1, speculation slows decoding.",
                    (
                        Query(
                            ratio(rate(of.PLAIN_TIME, "workload"), rate(of.DECODE_TIME, "workload")),
                            "{{workload}}",
                        ),
                    ),
                    runbooks=("GalleySpeculationNotPaying",),
                    unit="suffix:×",
                    limits=(1, 0.95),
                ),
                Panel(
                    "Tokens per round",
                    "Mean number of tokens confirmed in a round; 1 without draft tokens.",
                    (Query(ratio(rate(of.CONFIRMED_TOKENS), rate(of.ROUNDS)), "confirmed"),),
                    unit="suffix: tokens",
                    limits=(1.5, 1),
                ),
                Panel(
                    "Output tokens by origin",
                    "Confirmed tokens per second: accepted draft tokens, and the target's own.",
                    (Query(rate(of.CONFIRMED_TOKENS, "origin"), "{{origin}}"),),
                    stacked=True,
                    unit="suffix: tok/s",
                ),
            ),
        ),
        Row(
            "Acceptance",
            (
                _acceptance(
                    "Acceptance rate by workload",
                    "without the gateway's own from a grammar or a prediction.",
                    "workload",
                    _OF_DRAFTS,
                    runbooks=("GalleyAcceptanceCollapse",),
                ),
                _acceptance(
                    "Acceptance rate by source",
                    "by what proposed them.",
                    "strategy",
                    runbooks=("GalleyAcceptanceCollapse",),
                ),
                _acceptance("Acceptance rate by model", "by served model.", "model"),
                Panel(
                    "Acceptance rate by position",
                    "Share of the rounds with draft tokens for a position in which one of them was accepted.",
                    (
                        Query(
                            ratio(rate(of.ACCEPTED_AT, "position"), rate(of.VERIFIED_AT, "position")),
                            "{{position}}",
                        ),
                    ),
                    "percentunit",
                    max_value=1,
                ),
                Panel(
                    "Acceptance rate by rank",
                    "Accepted draft tokens divided by verified ones, by rank among the candidates.",
                    (
                        Query(
                            ratio(rate(of.ACCEPTED_BY_RANK, "rank"), rate(of.VERIFIED_BY_RANK, "rank")),
                            "{{rank}}",
                        ),
                    ),
                    "percentunit",
                    max_value=1,
                ),
                Panel(
                    "Proposals with states",
                    "Share of the proposals whose draft read the target's state of the token before the last "
                    "confirmed one.",
                    (Query(ratio(rate(of.PROPOSALS_WITH_FEATURES), rate(of.PROPOSALS)), "with states"),),
                    "percentunit",
                    max_value=1,
                ),
                Panel(
                    "Bytes of states",
                    "Bytes per second of the target's states that gateways receive, and send to drafts.",
                    (Query(rate(of.FEATURE_BYTES, "direction"), "{{direction}}"),),
                    unit="suffix: B/s",
                ),
                Panel(
                    "Accepted draft tokens by source",
                    "Accepted draft tokens per second, by what proposed them.",
                    (Query(rate(of.ACCEPTED_TOKENS, "strategy"), "{{strategy}}"),),
                    stacked=True,
                    unit="suffix: tok/s",
                ),
                Panel(
                    "Draft tokens",
                    "Tokens per second that were sent to targets, verified, and accepted.",
                    (
                        Query(rate(of.DRAFTED_TOKENS), "drafted"),
                        Query(rate(of.VERIFIED_TOKENS), "verified"),
                        Query(rate(of.ACCEPTED_TOKENS), "accepted"),
                    ),
                    unit="suffix: tok/s",
                ),
            ),
        ),
        Row(
            "Drafting",
            (
                Panel(
                    "Requested draft tokens",
                    "Mean size of the last request for draft tokens in a round, larger if drafts work ahead.",
                    (Query(mean(of.K, "workload"), "{{workload}}"),),
                    unit="suffix: tokens",
                ),
                Panel(
                    "Rounds by strategy",
                    "Rounds per second, by what proposed draft tokens last.",
                    (Query(rate(of.ROUNDS, "strategy"), "{{strategy}}"),),
                    stacked=True,
                    unit="suffix: rounds/s",
                ),
                Panel(
                    "Proposals ready in time",
                    "Share of rounds with drafting whose draft tokens were ready at the start.",
                    (Query(ratio(rate(of.OVERLAPS, where='result="hit"'), rate(of.OVERLAPS)), "hits"),),
                    "percentunit",
                    max_value=1,
                    limits=(0.5, 0.2),
                ),
                Panel(
                    "Draft wait",
                    "Time in a round during which verification waited for a draft.",
                    (
                        Query(mean(of.DRAFT_WAIT), "mean"),
                        Query(quantile(0.95, of.DRAFT_WAIT), "p95"),
                    ),
                    "s",
                    limits=(0.05, 0.25),
                ),
                Panel(
                    "Wasted draft tokens",
                    "Tokens per second that were rejected, never verified, or of a cancelled proposal.",
                    (Query(rate(of.WASTED_DRAFT_TOKENS, "reason"), "{{reason}}"),),
                    stacked=True,
                    unit="suffix: tok/s",
                ),
                Panel(
                    "Rows without a confirmed token",
                    "Rows per second that targets computed without confirming a token.",
                    (Query(rate(of.WASTED_VERIFY_TOKENS), "rows"),),
                    unit="suffix: rows/s",
                ),
            ),
        ),
        Row(
            "Versions of the draft",
            (
                Panel(
                    "Acceptance by draft version",
                    "Share of the output tokens that drafts proposed, by the version given to sessions.",
                    (
                        Query(
                            ratio(
                                rate(of.DRAFT_VERSION_ACCEPTED_TOKENS, "version"),
                                rate(of.DRAFT_VERSION_OUTPUT_TOKENS, "version"),
                            ),
                            "{{version}}",
                        ),
                    ),
                    "percentunit",
                    width=12,
                    max_value=1,
                    runbooks=("GalleyDraftRolledBack",),
                ),
                Panel(
                    "Sessions by draft version",
                    "Finished sessions per second, by the version that they were given.",
                    (Query(rate(of.DRAFT_VERSION_SESSIONS, "version"), "{{version}}"),),
                    width=12,
                    stacked=True,
                    unit="suffix: sessions/s",
                ),
                Panel(
                    "Share by draft version",
                    "Share of the sessions that the split in force gives to a version.",
                    (Query(largest(of.DRAFT_VERSION_SHARE, "version"), "{{version}}"),),
                    "percentunit",
                    width=12,
                    max_value=1,
                ),
                Panel(
                    "Loads of drafts",
                    "Loads of weights into running drafts within the last hour, by result.",
                    (Query(increase(of.DRAFT_LOADS, "1h", "result"), "{{result}}"),),
                    width=12,
                    stacked=True,
                    unit="suffix: loads",
                ),
            ),
        ),
        Row(
            "Drafts",
            (
                Panel(
                    "Proposals",
                    "Proposals per second, by outcome.",
                    (Query(rate(of.DRAFT_PROPOSALS, "outcome"), "{{outcome}}"),),
                    stacked=True,
                    unit="reqps",
                ),
                Panel(
                    "Queue age",
                    "Time from the arrival of a proposal request to its first step.",
                    quantiles(of.DRAFT_QUEUE_AGE),
                    "s",
                    runbooks=("GalleyDraftPoolDown",),
                    limits=(0.05, 0.25),
                ),
                Panel(
                    "Queue depth",
                    "Open proposal requests, by draft.",
                    (Query(gauge(of.DRAFT_QUEUE_DEPTH, "instance"), "{{instance}}"),),
                    unit="suffix: requests",
                ),
                Panel(
                    "Sessions per step",
                    "Mean number of sessions in a step, by draft.",
                    (Query(mean(of.DRAFT_BATCH_SESSIONS, "instance"), "{{instance}}"),),
                    width=12,
                    unit="suffix: sessions",
                ),
                Panel(
                    "Step duration",
                    "Duration of one forward pass of a draft.",
                    quantiles(of.DRAFT_STEP_DURATION),
                    "s",
                    width=12,
                    limits=(0.05, 0.25),
                ),
            ),
        ),
    ),
)
