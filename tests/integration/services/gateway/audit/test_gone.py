"""The target of an audit leaves the pool before the audit, or meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from galley.common.metrics import catalogue
from services.gateway.audit import auditor
from tests.fakes.replicas import FakeTarget
from tests.fakes.world import MAX_TOKENS, World
from tests.integration.services.gateway.audit.test_by_itself import done, finish
from tests.integration.services.gateway.test_metrics import counted


@pytest.fixture
async def other(world: World) -> AsyncIterator[FakeTarget]:
    """A target of another build."""
    with TemporaryDirectory(prefix="galley-") as directory:
        other = FakeTarget(Path(directory), world.tokenizer_hash)
        other.fingerprint = "build-2"
        await other.start()
        yield other
        await other.stop()


async def test_an_audit_whose_build_goes_meanwhile_reports_what_it_has_compared(
    world: World, other: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "_LOOK_S", 0.01)
    targets = [world.target, other]
    addresses = ",".join(target.address for target in targets)
    it = await counted(world, target=addresses, pool=world.id, audit_ratio=1.0, draft="none")
    for target in targets:
        target.gate.close_after(MAX_TOKENS)
    await finish(it.gateway)
    [served] = [target for target in targets if target.calls]
    await served.watch.until(lambda: served.calls[-1].slice.session_id.startswith("audit-"))
    served.queue_depth = 1
    for target in targets:
        target.gate.open()
    looks = served.described
    await served.watch.until(lambda: served.described >= looks + 3)
    served.model = "another model"
    await done(it)
    assert it.number(catalogue.AUDIT_SESSIONS, "same") == 1
    assert 0 < it.number(catalogue.AUDIT_TOKENS, "deterministic", "same") < MAX_TOKENS
    world.expect_error("replica refused")


async def test_a_session_whose_build_has_gone_is_not_compared_and_the_next_session_is_audited(
    world: World, other: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "_LOOK_S", 0.01)
    monkeypatch.setattr(auditor, "_ABSENT_NS", 1)
    targets = [world.target, other]
    addresses = ",".join(target.address for target in targets)
    it = await counted(world, target=addresses, pool=world.id, audit_ratio=1.0, draft="none")
    for target in targets:
        target.queue_depth = 1
    await finish(it.gateway)
    [served] = [target for target in targets if target.calls]
    looks = served.described
    await served.watch.until(lambda: served.described >= looks + 3)
    served.model = "another model"
    for target in targets:
        target.queue_depth = 0
    await done(it)
    assert it.number(catalogue.AUDIT_SESSIONS, "not_compared") == 1
    await finish(it.gateway)
    await done(it)
    assert it.number(catalogue.AUDIT_SESSIONS, "same") == 1
    world.expect_error("replica refused")
