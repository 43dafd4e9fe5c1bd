"""From scrapes and the store to the versions of drafts that are shown, and to the audits."""

from __future__ import annotations

from collections.abc import Sequence

from galley.core.routing.choice import DraftLease
from galley.core.versions.split import Split
from galley.stack.endpoint import Service
from galley.top.fleet import Fleet, Registered
from galley.top.scrape import read_samples
from galley.top.screen import Screen, next_screen
from galley.top.versions import ALL_STABLE, Audits, DraftVersion

GATEWAYS = (Service("gateway", "127.0.0.1:1"), Service("gateway-2", "127.0.0.1:2"))


def a_screen(*scrapes: str, registered: Registered | None = None) -> Screen:
    fleet = Fleet(GATEWAYS, 0.0)
    fleet.registered = registered or Registered()
    for service, text in zip(GATEWAYS, scrapes, strict=False):
        fleet.add(service, 1.0, read_samples(text))
    return next_screen(fleet, 1.0)


def counted(version: str, sessions: int, output: int, accepted: int) -> str:
    return (
        f'galley_draft_version_sessions_total{{version="{version}"}} {sessions}\n'
        f'galley_draft_version_output_tokens_total{{version="{version}"}} {output}\n'
        f'galley_draft_version_accepted_tokens_total{{version="{version}"}} {accepted}\n'
    )


def shares(**of: float) -> str:
    return "".join(f'galley_draft_version_share{{version="{name}"}} {share}\n' for name, share in of.items())


def leases(*versions: str) -> Sequence[DraftLease]:
    return [
        DraftLease(
            address=f"10.0.0.{n}:5",
            incarnation="1",
            model="m",
            tokenizer_hash="h",
            vocab_size=9,
            version=version,
        )
        for n, version in enumerate(versions)
    ]


def test_a_deployment_with_one_version_shows_none() -> None:
    text = "galley_sessions_open 1\n"
    assert a_screen(text).versions == []
    assert a_screen(text, registered=Registered(drafts=leases("v1", "v1", ""), split=Split())).versions == []


def test_versions_of_all_gateways_and_the_store() -> None:
    split = Split(canary="v2", share=0.25, drained=frozenset({"v0", "gone"}))
    shown = a_screen(
        counted("v2", 4, 100, 40) + counted("none", 10, 100, 20),
        counted("v2", 1, 100, 60) + counted("none", 5, 100, 30),
        registered=Registered(drafts=leases("v1", "v2", "v1", "v0"), split=split),
    )
    assert shown.versions == [
        DraftVersion(ALL_STABLE, "stable", 0.75, None, 15, 0.25),
        DraftVersion("v1", "stable", None, 2, 0, None),
        DraftVersion("v2", "canary", 0.25, 1, 5, 0.5),
        DraftVersion("v0", "drained", None, 1, 0, None),
    ]


def test_a_promoted_version_is_the_stable_one() -> None:
    shown = a_screen(
        counted("v2", 4, 100, 40) + counted("none", 10, 100, 20),
        registered=Registered(drafts=leases("v1", "v2"), split=Split(stable="v2")),
    )
    assert [(row.name, row.arm, row.share) for row in shown.versions] == [
        ("v2", "stable", 1.0),
        (ALL_STABLE, "other", None),
        ("v1", "other", None),
    ]


def test_without_the_store_shares_are_those_of_the_gateways() -> None:
    text = shares(v2=0.25, none=0.75)
    assert a_screen(text, text).versions == [
        DraftVersion(ALL_STABLE, None, 0.75, None, 0, None),
        DraftVersion("v2", None, 0.25, None, 0, None),
    ]


def test_audits_of_all_gateways() -> None:
    def audits(same: int, differs: int, *, build: str = "other", damaged: int = 0) -> str:
        return (
            f'galley_audit_tokens_total{{build="{build}",result="same"}} {same}\n'
            f'galley_audit_tokens_total{{build="{build}",result="differs"}} {differs}\n'
            f'galley_audit_sessions_total{{verdict="damaged"}} {damaged}\n'
        )

    assert a_screen("galley_sessions_open 1\n").audits is None
    assert a_screen(audits(90, 10), audits(50, 0)).audits == Audits(150, 10, 0)
    deterministic = audits(98, 2, build="deterministic", damaged=1)
    assert a_screen(audits(90, 10), deterministic).audits == Audits(200, 12, 3)
