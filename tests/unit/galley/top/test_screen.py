"""From scrapes to what is shown: rates, ratios, rows, services that come and go."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.routing.choice import DraftLease, TargetLease
from galley.stack.endpoint import Service
from galley.top.fleet import RATE_S, WINDOW_S, Fleet, Registered
from galley.top.scrape import read_samples
from galley.top.screen import AWAY, DRAINING, LEASED, UP, Kv, Screen, next_screen, replicas_of
from galley.top.view import render
from tests.unit.galley.top import sample
from tests.unit.galley.top.shown import plain

GATEWAY, OTHER = Service("gateway", "127.0.0.1:1", "127.0.0.1:11"), Service("gateway-2", "127.0.0.1:2")
TARGET, DRAFT = Service("10.0.0.1:9", "10.0.0.1:9"), Service("10.0.0.2:9", "10.0.0.2:9")
IS_TARGET = 'galley_build_info{service="target"} 1\n'
IS_DRAFT = 'galley_build_info{service="draft"} 1\n'


def rounds(count: float, *, accepted: float = 0, workload: str = "chat") -> str:
    return (
        f'galley_rounds_total{{workload="{workload}",strategy="ngram"}} {count}\n'
        f'galley_confirmed_tokens_total{{origin="target",workload="{workload}"}} {count}\n'
        f'galley_confirmed_tokens_total{{origin="draft",workload="{workload}"}} {accepted}\n'
        f'galley_verified_tokens_total{{workload="{workload}",strategy="ngram"}} {2 * accepted}\n'
        f'galley_accepted_tokens_total{{workload="{workload}",strategy="ngram"}} {accepted}\n'
    )


def a_screen(*scrapes: tuple[float, Service, str | None], registered: Registered | None = None) -> Screen:
    fleet = Fleet([GATEWAY, OTHER, TARGET, DRAFT], 0.0)
    fleet.registered = registered or Registered()
    for at_s, service, text in scrapes:
        if text is None:
            fleet.fail(service, at_s, "refused")
        else:
            fleet.add(service, at_s, read_samples(text))
    return next_screen(fleet, scrapes[-1][0])


def target_lease(address: str, *, draining: bool = False) -> TargetLease:
    return TargetLease(
        address=address,
        incarnation="1",
        model="m",
        tokenizer_hash="h",
        vocab_size=9,
        fingerprint="f",
        context_window=99,
        queue_depth=3,
        draining=draining,
        kv_blocks_free=25,
        kv_blocks_total=100,
    )


def draft_lease(address: str) -> DraftLease:
    return DraftLease(
        address=address,
        incarnation="1",
        model="m",
        tokenizer_hash="h",
        vocab_size=9,
        sessions=4,
        queue_depth=2,
    )


def test_rates_are_differences_over_the_seconds_between() -> None:
    whole = a_screen((5, GATEWAY, rounds(100, accepted=50)), (7, GATEWAY, rounds(120, accepted=80))).overview
    assert whole.rounds_per_s == 10
    assert whole.tokens_per_s == 25
    assert whole.speculation.acceptance == 0.5
    assert whole.speculation.tokens_per_round == 1 + 30 / 20


def test_gateways_are_added_up_each_over_its_own_time() -> None:
    whole = a_screen(
        (5, GATEWAY, rounds(0)),
        (5, OTHER, rounds(10)),
        (7, GATEWAY, rounds(20)),
        (9, OTHER, rounds(30, accepted=20)),
    ).overview
    assert whole.rounds_per_s == 10 + 5
    assert whole.speculation.tokens_per_round == 1 + 20 / 40


def test_one_scrape_tells_no_rate() -> None:
    whole = a_screen((5, GATEWAY, rounds(100) + "galley_sessions_open 3\n")).overview
    assert whole.tokens_per_s is None
    assert whole.speculation.acceptance is None
    assert whole.sessions == 3


def test_restarted_gateway_counts_from_zero() -> None:
    whole = a_screen((5, GATEWAY, rounds(1000)), (7, GATEWAY, rounds(8))).overview
    assert whole.rounds_per_s == 4


def test_missing_series_are_not_known_and_no_error() -> None:
    screen = a_screen((5, GATEWAY, "galley_sessions_open 1\n"), (7, GATEWAY, "galley_sessions_open 2\n"))
    assert screen.overview.tokens_per_s is None
    assert screen.overview.first_token.median_s is None
    assert screen.workloads == []


def test_rates_forget_after_some_seconds_and_ratios_after_a_minute() -> None:
    scrapes = [(5.0, GATEWAY, rounds(0)), (6.0, GATEWAY, rounds(100, accepted=70))]
    still = [(6.0 + n, GATEWAY, rounds(100, accepted=70)) for n in range(1, int(WINDOW_S) + 1)]
    later = a_screen(*scrapes, *still[: int(RATE_S)]).overview
    assert later.rounds_per_s == 0
    assert later.speculation.acceptance == 0.5
    assert a_screen(*scrapes, *still).overview.speculation.acceptance is None


def test_workloads_by_their_speed() -> None:
    screen = a_screen(
        (5, GATEWAY, rounds(0) + rounds(0, workload="code") + rounds(0, workload="idle")),
        (
            7,
            GATEWAY,
            rounds(10, accepted=10)
            + rounds(20, accepted=60, workload="code")
            + rounds(0, workload="idle")
            + 'galley_plain_time_seconds_total{workload="code"} 3\n'
            + 'galley_decode_time_seconds_total{workload="code"} 2\n'
            + 'galley_k_sum{workload="code"} 90\ngalley_k_count{workload="code"} 20\n',
        ),
    )
    assert [(row.name, row.tokens_per_s) for row in screen.workloads] == [
        ("code", 40),
        ("chat", 10),
        ("idle", 0),
    ]
    code, chat, idle = screen.workloads
    assert (code.k, code.speculation.speed_up, code.speculation.tokens_per_round) == (4.5, 1.5, 4)
    assert (chat.k, chat.speculation.speed_up) == (None, None)
    assert idle.speculation.tokens_per_round is None


def test_times_are_of_what_was_observed_between() -> None:
    def commits(fast: int, slow: int) -> str:
        bounds = {"0.001": fast, "0.01": fast + slow, "+Inf": fast + slow}
        rows = (f'galley_commit_duration_seconds_bucket{{le="{le}"}} {n}\n' for le, n in bounds.items())
        return rounds(1) + "".join(rows)

    whole = a_screen((5, GATEWAY, commits(1000, 0)), (7, GATEWAY, commits(1000, 10))).overview
    assert whole.commit.median_s == pytest.approx(0.0055)


def test_counts_and_what_is_held_against_replicas() -> None:
    def scrapes(refused: int) -> str:
        return (
            f'galley_admission_rejected_total{{reason="share"}} {refused}\ngalley_sessions_open 1\n'
            'galley_streams_total{outcome="ok",fault="none"} 5\n'
            'galley_streams_total{outcome="unavailable",fault="server"} 2\n'
            'galley_streams_total{outcome="cancelled",fault="caller"} 4\n'
            'galley_breaker_state{pool="draft",replica="10.0.0.2:5"} 2\n'
            'galley_breaker_state{pool="draft",replica="10.0.0.3:5"} 0\n'
        )

    screen = a_screen(
        (5, GATEWAY, scrapes(3)), (5, OTHER, scrapes(1).replace("} 2\n", "} 0\n")), (7, GATEWAY, scrapes(7))
    )
    whole = screen.overview
    assert (whole.refused.total, whole.refused.lately) == (8, 4)
    assert (whole.failed.total, whole.failed.lately) == (2, 0)
    held = {one.replica: one.state for one in whole.breakers}
    assert held == {"10.0.0.2:5": "open", "10.0.0.3:5": "closed"}, "the worst of what gateways say"


def test_a_service_that_is_away_says_nothing_of_now_and_comes_back() -> None:
    target = (
        IS_TARGET
        + 'galley_queue_depth 4\ngalley_kv_blocks{state="used"} 1\ngalley_kv_blocks{state="free"} 3\n'
    )
    scrapes = [(5.0, TARGET, target), (7.0, TARGET, None), (9.0, TARGET, None)]
    row = next(one for one in a_screen(*scrapes).replicas if one.pool == "target")
    assert (row.state, row.problem, row.away_s) == (AWAY, "refused", 2)
    assert (row.queue, row.kv) == (None, None)
    row = next(one for one in a_screen(*scrapes, (11.0, TARGET, target)).replicas if one.pool == "target")
    assert (row.state, row.queue, row.kv) == (UP, 4, Kv(1, None, 3))


def test_service_is_away_before_its_first_scrape() -> None:
    screen = a_screen((5, GATEWAY, None))
    assert {row.state for row in screen.replicas} == {AWAY}
    assert not screen.has_live_process


def test_rows_are_by_pool_and_known_by_what_they_say() -> None:
    screen = a_screen(
        (5, DRAFT, IS_DRAFT), (5, TARGET, 'galley_kv_blocks{state="used"} 1\n'), (5, GATEWAY, rounds(1))
    )
    assert [(row.pool, row.name) for row in screen.replicas] == [
        ("gateway", "gateway"),
        ("gateway", "gateway-2"),
        ("target", "10.0.0.1:9"),
        ("draft", "10.0.0.2:9"),
    ]


def test_lease_matches_the_scraped_replica_on_its_host() -> None:
    registered = Registered(
        [target_lease("10.0.0.1:5", draining=True), target_lease("10.0.0.7:5")], [draft_lease("10.0.0.8:5")]
    )
    screen = a_screen((5, TARGET, IS_TARGET), registered=registered)
    rows = {row.address: row for row in screen.replicas if row.address}
    assert (rows["10.0.0.1:5"].name, rows["10.0.0.1:5"].state) == ("10.0.0.1:9", DRAINING)
    leased = rows["10.0.0.7:5"]
    assert (leased.state, leased.queue, leased.kv) == (LEASED, 3, Kv(75, None, 25))
    assert (rows["10.0.0.8:5"].pool, rows["10.0.0.8:5"].sessions, rows["10.0.0.8:5"].queue) == ("draft", 4, 2)
    assert screen.has_live_process


def test_two_leases_on_a_host_are_not_guessed_at() -> None:
    registered = Registered([target_lease("10.0.0.1:5"), target_lease("10.0.0.1:6")])
    screen = a_screen((5, TARGET, IS_TARGET), registered=registered)
    targets = [(row.name, row.state) for row in screen.replicas if row.pool == "target"]
    assert targets == [("10.0.0.1:9", UP), ("10.0.0.1:5", LEASED), ("10.0.0.1:6", LEASED)]


def test_a_breaker_is_shown_with_its_replica() -> None:
    held = rounds(1) + 'galley_breaker_state{pool="draft",replica="10.0.0.8:5"} 1\n'
    screen = a_screen((5, GATEWAY, held), registered=Registered([], [draft_lease("10.0.0.8:5")]))
    assert {row.address: row.breaker for row in screen.replicas}["10.0.0.8:5"] == "half open"


def test_the_sample_is_understood_whole() -> None:
    screen = sample.screen()
    whole = screen.overview
    assert {type(value) for value in (whole.sessions, whole.tokens_per_s, whole.rounds_per_s)} == {float}
    for times in (whole.first_token, whole.per_token, whole.commit):
        assert times.median_s is not None
        assert times.high_s is not None
        assert 0 < times.median_s < times.high_s
    *busy, idle = screen.workloads
    assert (idle.name, idle.tokens_per_s) == ("none", 0)
    assert {workload.name for workload in busy} == {"chat", "code", "support", "rewrite"}
    for workload in busy:
        worth = workload.speculation
        assert None not in {workload.tokens_per_s, workload.k, worth.acceptance, worth.speed_up}
    by_pool = {row.pool: row for row in screen.replicas}
    assert list(by_pool) == ["gateway", "target", "draft"]
    for pool in ("target", "draft"):
        row = by_pool[pool]
        assert None not in {row.sessions, row.queue, row.oldest_s, row.batches_per_s}
    kv = by_pool["target"].kv
    assert kv is not None
    assert kv.cached is not None
    assert by_pool["draft"].breaker == "closed"


@settings(max_examples=30)
@given(st.data())
def test_arbitrary_numbers_break_no_frame(data: st.DataObject) -> None:
    fleet = Fleet(sample.services(), 0.0)
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.just(0.0) | st.just(1.7e308)
    for at_s in (1.0, 2.0, 3.0):
        for service in sample.services():
            scrapes = sample.samples(service, 1)
            drawn = cycle(data.draw(st.lists(numbers, min_size=1, max_size=11)))
            wild = {name: {labels: next(drawn) for labels in rows} for name, rows in scrapes.items()}
            fleet.add(service, at_s, wild)
    screen = next_screen(fleet, 3.0)
    width, height = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 60))
    assert plain(render(screen, width, height), width)


def test_unavailable_registry_is_reported() -> None:
    screen = a_screen((5, GATEWAY, rounds(1)), registered=Registered(problem="no answer"))
    assert screen.problem == "no answer"
    assert replicas_of([], Registered(problem="no answer")) == []
