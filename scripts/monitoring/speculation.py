"""Whether drafts are right, whether they pay, and what is wasted."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import gauge, mean, quantile, rate, ratio


def _acceptance(by: str) -> tuple[Query, ...]:
    return (Query(ratio(rate(of.ACCEPTED_TOKENS, by), rate(of.VERIFIED_TOKENS, by)), f"{{{{{by}}}}}"),)


SPECULATION = Dashboard(
    "speculation",
    "Galley: speculation",
    "Whether drafts are right, whether they pay, and what is wasted.",
    (
        Row(
            "Does it pay?",
            (
                Panel(
                    "Live speed-up by workload",
                    "Plain decoding's estimated time over the real one; 1 is plain decoding's own speed.",
                    (
                        Query(
                            ratio(rate(of.PLAIN_TIME, "workload"), rate(of.DECODE_TIME, "workload")),
                            "{{workload}}",
                        ),
                    ),
                    runbook="GalleySpeculationNotPaying",
                ),
                Panel(
                    "Tokens a round",
                    "That a verdict confirms, in the mean: 1 without drafts.",
                    (Query(ratio(rate(of.CONFIRMED_TOKENS), rate(of.ROUNDS)), "confirmed"),),
                ),
                Panel(
                    "Output tokens by origin",
                    "A second: guessed by a draft, or the target's own.",
                    (Query(rate(of.CONFIRMED_TOKENS, "origin"), "{{origin}}"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Are drafts right?",
            (
                Panel(
                    "Acceptance by workload",
                    "Of the verified draft tokens.",
                    _acceptance("workload"),
                    "percentunit",
                    most=1,
                    runbook="GalleyAcceptanceCollapse",
                ),
                Panel(
                    "Acceptance by strategy",
                    "Of the verified draft tokens.",
                    _acceptance("strategy"),
                    "percentunit",
                    most=1,
                    runbook="GalleyAcceptanceCollapse",
                ),
                Panel(
                    "Acceptance by model",
                    "Of the verified draft tokens, by served model.",
                    _acceptance("model"),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Acceptance by position",
                    "Of the draft tokens that were verified at each position of a round.",
                    (
                        Query(
                            ratio(rate(of.ACCEPTED_AT, "position"), rate(of.VERIFIED_AT, "position")),
                            "{{position}}",
                        ),
                    ),
                    "percentunit",
                    width=12,
                    most=1,
                ),
                Panel(
                    "Draft tokens",
                    "A second: sent to targets, verified there, and right.",
                    (
                        Query(rate(of.DRAFTED_TOKENS), "drafted"),
                        Query(rate(of.VERIFIED_TOKENS), "verified"),
                        Query(rate(of.ACCEPTED_TOKENS), "accepted"),
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            "How much is drafted, and when",
            (
                Panel(
                    "Tokens asked for",
                    "k of a round, in the mean, by workload.",
                    (Query(mean(of.K, "workload"), "{{workload}}"),),
                ),
                Panel(
                    "Rounds by strategy",
                    "A second.",
                    (Query(rate(of.ROUNDS, "strategy"), "{{strategy}}"),),
                    stacked=True,
                ),
                Panel(
                    "Overlap hits",
                    "Of the rounds that wanted draft tokens, those that found them ready.",
                    (Query(ratio(rate(of.OVERLAPS, where='result="hit"'), rate(of.OVERLAPS)), "hits"),),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Waiting for drafts",
                    "How long verification stood idle in a round, waiting for a draft.",
                    (
                        Query(mean(of.DRAFT_WAIT), "mean"),
                        Query(quantile(0.95, of.DRAFT_WAIT), "p95"),
                    ),
                    "s",
                ),
                Panel(
                    "Draft tokens wasted",
                    "A second: refused, never verified, or drafted for a proposal that was given up.",
                    (Query(rate(of.WASTED_DRAFT_TOKENS, "reason"), "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Verification wasted",
                    "Rows a second that targets computed and that confirmed nothing.",
                    (Query(rate(of.WASTED_VERIFY_TOKENS), "rows"),),
                ),
            ),
        ),
        Row(
            "Drafts",
            (
                Panel(
                    "Proposals",
                    "A second, by what became of them.",
                    (Query(rate(of.DRAFT_PROPOSALS, "outcome"), "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Queue age",
                    "How long proposals waited for their first step.",
                    quantiles(of.DRAFT_QUEUE_AGE),
                    "s",
                    runbook="GalleyDraftPoolDown",
                ),
                Panel(
                    "Queue depth",
                    "Proposals that are not answered yet, by draft.",
                    (Query(gauge(of.DRAFT_QUEUE_DEPTH, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Sessions a step",
                    "In the mean, by draft.",
                    (Query(mean(of.DRAFT_BATCH_SESSIONS, "instance"), "{{instance}}"),),
                    width=12,
                ),
                Panel(
                    "Step duration",
                    "Of the sessions that came, or a further token for all.",
                    quantiles(of.DRAFT_STEP_DURATION),
                    "s",
                    width=12,
                ),
            ),
        ),
    ),
)
