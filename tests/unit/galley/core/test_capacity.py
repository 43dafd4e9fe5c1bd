"""How much a load needs: by hand in simple cases, and by laws."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.cost.model import RowCostCurve
from galley.core.errors import InvalidField
from galley.plan.capacity import (
    LEASE_READS_PER_S,
    NO_DRAFT,
    Capacity,
    DraftSize,
    KvMemory,
    Load,
    Spares,
    TargetSize,
    Tiers,
    capacity,
    load_of_streams,
    point,
)
from services.gateway.replicas.membership import POLL_S

LOAD = Load(answers_per_s=50, prompt_tokens=90, output_tokens=10, cached_share=1)
TARGET = TargetSize(step_ms=10, kv_tokens=512)
EXACT = Spares(busy=1, replicas=0)


def test_plain_decoding_by_hand() -> None:
    """4 sessions of 4 blocks fit: 400 tokens/s, so 40 answers/s; 50 answers/s need two replicas."""
    result = capacity(LOAD, TARGET, NO_DRAFT, EXACT)
    assert result.at.sessions == 4
    assert result.bound_by == "kv"
    assert result.at.tokens_per_s == pytest.approx(400)
    assert result.answers_per_s_a_target == pytest.approx(40)
    assert (result.targets, result.drafts, result.gateways) == (2, 0, 1)
    assert result.sessions == pytest.approx(5)


def test_speculation_by_hand() -> None:
    """A free and perfect draft of one token doubles a replica's throughput."""
    result = capacity(LOAD, TARGET, DraftSize(alpha=1, cost_ratio=math.inf, max_k=1), EXACT)
    assert result.at.k == 1
    assert result.at.tokens_per_s == pytest.approx(800)
    assert (result.targets, result.drafts) == (1, 0)


def test_draft_cost_counts() -> None:
    """A round of 10 ms and two draft steps of 5: half of a pass of 20 ms, for 1.25 busy replicas, is .83."""
    draft = DraftSize(alpha=1, cost_ratio=2, max_k=2)
    result = capacity(dataclasses.replace(LOAD, answers_per_s=75), TARGET, draft, EXACT)
    assert (result.at.k, result.at.pass_ms, result.at.draft_ms) == (2, 20, 10)
    assert result.at.time_per_output_token_ms == pytest.approx(20 / 3)
    assert (result.targets, result.drafts) == (2, 1)


def test_prompts_take_rows() -> None:
    """In each pass .4 answers of 4 sessions end, and as many prompts of 90 begin: 36 rows beside 4."""
    curve = RowCostCurve(((1, 1.0), (40, 4.0)))
    cold = dataclasses.replace(LOAD, cached_share=0)
    at = point(cold, dataclasses.replace(TARGET, row_costs=curve), NO_DRAFT, 4)
    assert at.pass_ms == pytest.approx(40)


def test_rows_beyond_the_budget_take_further_steps() -> None:
    """The same 40 rows at 10 a pass, each of which costs 4 - 3 x 30 / 39: prompts are never free."""
    curve = RowCostCurve(((1, 1.0), (40, 4.0)))
    cold = dataclasses.replace(LOAD, cached_share=0)
    small = dataclasses.replace(TARGET, row_costs=curve, max_rows=10)
    assert point(cold, small, NO_DRAFT, 4).pass_ms == pytest.approx(4 * 10 * (4 - 3 * 30 / 39))


def test_full_target_gains_no_throughput_from_more_sessions() -> None:
    cold = dataclasses.replace(LOAD, cached_share=0)
    full = dataclasses.replace(TARGET, row_costs=RowCostCurve(((1, 1.0), (40, 4.0))), max_rows=10)
    few, many = (point(cold, full, NO_DRAFT, sessions) for sessions in (4, 40))
    assert many.tokens_per_s == pytest.approx(few.tokens_per_s)
    assert many.time_per_output_token_ms == pytest.approx(10 * few.time_per_output_token_ms)


@pytest.mark.parametrize(("kv_tokens", "sessions"), [(511, 3), (512, 4)])
def test_a_session_takes_whole_blocks(kv_tokens: int, sessions: int) -> None:
    result = capacity(LOAD, dataclasses.replace(TARGET, kv_tokens=kv_tokens), NO_DRAFT, EXACT)
    assert (result.at.sessions, result.bound_by) == (sessions, "kv")


NOTHING = Tiers(
    gateway_us_per_verdict=0,
    gateway_us_per_token=0,
    gateway_ms_per_answer=0,
    gateway_us_per_lease=0,
    store_us_per_change=0,
    store_us_per_lease=0,
)


def test_gateways_and_stores_are_counted_by_cpu() -> None:
    """50 answers/s of 10 tokens: .5 cores of tokens, .5 of verdicts, .05 of answers; .6 of changes."""
    tiers = dataclasses.replace(
        NOTHING,
        gateway_us_per_verdict=1000,
        gateway_us_per_token=1000,
        gateway_ms_per_answer=1,
        store_us_per_change=1000,
    )
    result = capacity(LOAD, TARGET, NO_DRAFT, EXACT, tiers)
    assert result.gateway_cores == pytest.approx(1.05)
    assert (result.gateways, result.gateways_bound_by) == (2, "cpu")
    assert result.stores == 1
    assert result.store_cores == pytest.approx(0.6)
    result = capacity(LOAD, TARGET, NO_DRAFT, EXACT, NOTHING)
    assert (result.gateways, result.gateways_bound_by, result.stores) == (1, "sessions", 1)


def test_drafts_that_come_in_time_save_verdicts() -> None:
    """A round of the draft confirms 2 tokens; a quarter of what it adds comes in time."""
    tiers = dataclasses.replace(NOTHING, store_us_per_change=1000)
    draft = DraftSize(alpha=1, cost_ratio=math.inf, max_k=1)
    result = capacity(LOAD, TARGET, draft, EXACT, tiers)
    assert result.store_cores == pytest.approx((500 / 1.25 + 2 * 50) / 1000)


def test_reading_leases_bounds_a_pool_and_takes_cores() -> None:
    """At 2 reads a second, 10 ms a lease and 5 % of a core, a pool has 2.5 replicas."""
    tiers = dataclasses.replace(NOTHING, gateway_us_per_lease=10_000, store_us_per_lease=10_000)
    load = dataclasses.replace(LOAD, answers_per_s=200)
    result = capacity(load, TARGET, NO_DRAFT, Spares(busy=1, replicas=1), tiers)
    # One of the 2.5 is spare: 5 targets take 4 pools.
    assert (result.pools, result.targets, result.gateways) == (4, 5 + 4, 4 + 4)
    # Each of 8 gateways reads 2.25 leases twice a second.
    assert result.store_cores == pytest.approx(8 * 2.25 * 2 * 0.01)


@pytest.mark.parametrize("draft", [NO_DRAFT, DraftSize(alpha=0.8, cost_ratio=6)], ids=["plain", "drafts"])
@pytest.mark.parametrize("replicas", [0, 1, 3, 100])
def test_pools_with_their_spares_stay_within_their_bound(draft: DraftSize, replicas: int) -> None:
    for answers_per_s in (1, 10_000, 12_345, 99_000, 1_000_000):
        load = dataclasses.replace(LOAD, answers_per_s=answers_per_s)
        result = capacity(load, TARGET, draft, Spares(replicas=replicas))
        assert result.targets + result.drafts <= Tiers().pool_replicas * result.pools


def test_spares_that_fill_a_pool_are_refused() -> None:
    with pytest.raises(InvalidField, match="replicas: must leave room in a pool of 250 targets and drafts"):
        capacity(LOAD, TARGET, NO_DRAFT, Spares(replicas=250))


def test_the_load_of_open_streams_keeps_so_many_open() -> None:
    """A full target has 4 sessions at 10 ms a token: 40 of them open are 400 answers/s of 10 tokens."""
    load = load_of_streams(40, LOAD, TARGET, NO_DRAFT)
    assert load.answers_per_s == pytest.approx(400)
    assert capacity(load, TARGET, NO_DRAFT, EXACT).sessions == pytest.approx(40)
    with pytest.raises(InvalidField):
        load_of_streams(0, LOAD, TARGET, NO_DRAFT)


def test_leases_are_read_as_often_as_the_plan_says() -> None:
    assert LEASE_READS_PER_S == 1 / POLL_S


def test_spares_come_on_top() -> None:
    result = capacity(LOAD, TARGET, NO_DRAFT, Spares(busy=0.5, replicas=1))
    assert result.targets == 4
    assert result.gateways == 2
    assert result.drafts == 0


def test_latency_objectives_bound_a_replica() -> None:
    curve = RowCostCurve(((1, 1.0), (4, 4.0)))
    load = dataclasses.replace(LOAD, time_per_output_token_ms=20)
    result = capacity(load, dataclasses.replace(TARGET, row_costs=curve), NO_DRAFT, EXACT)
    assert (result.at.sessions, result.bound_by) == (2, "time")


def test_max_sessions_bounds_a_replica() -> None:
    result = capacity(LOAD, dataclasses.replace(TARGET, max_sessions=3), NO_DRAFT, EXACT)
    assert (result.at.sessions, result.bound_by) == (3, "max_sessions")


def test_memory_by_hand() -> None:
    """2 x 80 GiB x 0.9 - 134 = 10 GiB; at 320 KiB a token and 32 tokens a block, 1,024 blocks."""
    memory = KvMemory(gpus=2, gpu_memory_gib=80, weights_gib=134, kv_bytes_per_token=320 * 1024)
    assert memory.tokens() == 1024 * 32


rates = st.floats(0.1, 200)
lengths = st.integers(1, 2000)
loads = st.builds(
    Load, answers_per_s=rates, prompt_tokens=lengths, output_tokens=lengths, cached_share=st.floats(0, 1)
)
drafts = st.builds(DraftSize, alpha=st.floats(0, 1), cost_ratio=st.floats(0.5, 50), max_k=st.integers(0, 8))
CURVE = RowCostCurve(((1, 1.0), (16, 1.2), (256, 3.0)))
SIZE = TargetSize(step_ms=20, kv_tokens=100_000, row_costs=CURVE, max_sessions=16)


@given(load=loads, draft=drafts)
def test_the_replicas_carry_the_load(load: Load, draft: DraftSize) -> None:
    result = capacity(load, SIZE, draft, Spares(busy=0.7, replicas=0))
    assert result.targets * result.answers_per_s_a_target * 0.7 >= load.answers_per_s * (1 - 1e-6)
    assert (result.targets - 1) * result.answers_per_s_a_target * 0.7 < load.answers_per_s * (1 + 1e-6)


@given(load=loads, draft=drafts, more=st.floats(1, 10))
def test_more_load_never_needs_less(load: Load, draft: DraftSize, more: float) -> None:
    grown = dataclasses.replace(load, answers_per_s=load.answers_per_s * more)
    less, much = (capacity(each, SIZE, draft, Spares()) for each in (load, grown))
    for name in ("targets", "drafts", "gateways", "sessions", "store_bytes"):
        assert getattr(less, name) <= getattr(much, name)


@given(load=loads, draft=drafts)
def test_a_draft_never_makes_it_slower(load: Load, draft: DraftSize) -> None:
    for sessions in (1, 8, 16):
        assert (
            point(load, SIZE, draft, sessions).time_per_output_token_ms
            <= point(load, SIZE, NO_DRAFT, sessions).time_per_output_token_ms
        )


def refused(field: str, bound: str, **changes: object) -> None:
    def changed(value: object) -> object:
        names = {each.name for each in dataclasses.fields(value)}  # type: ignore[arg-type]  # dataclasses all
        return dataclasses.replace(value, **{k: v for k, v in changes.items() if k in names})  # type: ignore[type-var]

    def result() -> Capacity:
        known = (LOAD, TARGET, DraftSize(alpha=0.5, cost_ratio=2), Spares(), Tiers())
        parts = (changed(part) for part in known)
        return capacity(*parts)  # type: ignore[arg-type]  # of the kinds that they were

    with pytest.raises(InvalidField) as refusal:
        result()
    assert refusal.value.field == field
    assert bound in refusal.value.problem


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("answers_per_s", 0, "> 0"),
        ("answers_per_s", math.nan, "> 0"),
        ("prompt_tokens", 0, ">= 1"),
        ("output_tokens", 0, ">= 1"),
        ("cached_share", 1.1, "in [0, 1]"),
        ("time_per_output_token_ms", 0, "> 0"),
        ("time_per_output_token_ms", 5, ">= 10"),
        ("step_ms", 0, "> 0"),
        ("kv_tokens", 127, ">= 128"),
        ("max_sessions", 0, "in [1, 4096]"),
        ("max_rows", 0, ">= 1"),
        ("alpha", 2, "in [0, 1]"),
        ("cost_ratio", 0, "> 0"),
        ("max_k", 257, "in [0, 256]"),
        ("busy", 0, "in (0, 1]"),
        ("replicas", -1, "in [0, 1024]"),
        ("gateway_sessions", 0, "in [1, 4096]"),
        ("gateway_us_per_token", -1, ">= 0"),
        ("store_us_per_change", math.nan, ">= 0"),
        ("lease_share", 0, "in (0, 0.5]"),
    ],
)
def test_invalid_fields_are_refused_with_their_bound(field: str, value: float, bound: str) -> None:
    refused(field, bound, **{"alpha": 0.0, "max_k": 0, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpus", 0), ("gpu_memory_gib", 0), ("kv_bytes_per_token", 0), ("weights_gib", 72), ("share", 1.5)],
)
def test_invalid_memory_is_refused(field: str, value: float) -> None:
    memory = KvMemory(gpus=1, gpu_memory_gib=80, weights_gib=10, kv_bytes_per_token=1000)
    with pytest.raises(InvalidField) as refusal:
        dataclasses.replace(memory, **{field: value}).tokens()  # type: ignore[arg-type]  # numbers, all
    assert refusal.value.field == field
