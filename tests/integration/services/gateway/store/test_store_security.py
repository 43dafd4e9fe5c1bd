"""TLS, and the users of docs/operate/redis.md: enough to work, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from galley.common.redis.calls import Copies
from galley.common.registry.leases import DEFAULT_POOL, DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.spool import LearningSpool, SpooledSession
from galley.common.registry.trials import DraftVersions
from galley.common.tls import files as files_module
from galley.common.tls.files import BadFile
from galley.core.audit import AuditReport, Verdict
from galley.core.errors import Broken, GalleyError, StoreUnavailable
from galley.core.lookup.lookup import AnswerPart, RecentAnswers
from galley.core.store import CacheLocation, Exchange, KvDirectory, TokenBucket
from galley.core.versions.counts import session_counts
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.stack.ports import free_ports
from services.draft.answers.log import AnswerLog
from services.draft.answers.mailbox import SharedKind
from services.gateway.audit.records import AuditRecords
from services.gateway.store.redis import RedisStore
from tests.fakes.certificates import Authority, mounted
from tests.fakes.log_lines import logged
from tests.fakes.owners import abort, claim, commit, create, delete, finish
from tests.fakes.redis_clusters import (
    CLUSTER,
    Cluster,
    TcpServer,
    cluster_servers,
    either,
    replica_set,
    serving,
)
from tests.fakes.redis_servers import BINARIES, REDIS, Server, running
from tests.integration.services.gateway.store.test_store import ALICE, PROMPT, a_session, store_at

GATEWAY, REPLICA, SENTINEL = "galley-gateway", "galley-replica", "galley-sentinel"
DRAFT, OPS = "galley-draft", "galley-ops"
PASSWORD = "change-me"
FORBIDDEN = r"NOPERM|[Nn]o permission|can't access"
DOC = Path(__file__).parents[5] / "docs" / "operate" / "redis.md"
LIMITED = TokenBucket("jwt:a%7Bb@example.com", per_s=0.5, burst=30.0)
LEASE = draft_lease("host:1", pb.GetDraftInfoResponse(incarnation="life", strategies=["ngram"]))


@pytest.fixture(scope="module", params=BINARIES)
def guarded(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server


def documented_user(name: str) -> list[str]:
    for line in DOC.read_text(encoding="utf-8").splitlines():
        match line.split():
            case ["user", found, *_] if found == name:
                return re.findall(r"\([^)]*\)|\S+", line)[2:]
            case _:
                pass
    raise LookupError(name)


async def make_user(server: Server, name: str, without: str = "") -> None:
    rules = [rule for rule in documented_user(name) if rule != without]
    await server.command("ACL", "SETUSER", name, "reset", *rules)
    await server.command("SCRIPT FLUSH")


def url_of(server: Server, user: str) -> str:
    return server.url.replace("unix://", f"unix://{user}:{PASSWORD}@") + "?db=1"


async def serve_sessions(url: str) -> None:
    store, registry = RedisStore(url, copies=Copies(0)), ReplicaRegistry(url)
    try:
        await store.ping()
        new = a_session()
        owner = (await create(store, new)).ownership
        where = KvDirectory(draft=CacheLocation("d:1", "x", 4))
        assert await commit(store, owner, 3, [7, 8], b"..", where) == 5
        assert await commit(store, owner, 3, [7, 8], b"..", where) == 5
        await store.renew(owner)
        owner = (await claim(store, new.session_id, ALICE)).ownership
        await finish(store, owner, 5, b"end")
        await abort(store, new.session_id, ALICE, b"aborted")
        assert (await claim(store, new.session_id, ALICE)).tokens == [*PROMPT, 7, 8]
        await delete(store, new.session_id, ALICE)
        assert (await store.exchange(LIMITED, Exchange(-1, 2, 3))).leased == 3
        await registry.read(DRAFT_POOL)
    finally:
        await store.close()
        await registry.close()


async def serve(url: str) -> None:
    """Do what a gateway does in the store: serve sessions, audit them, and keep them to learn from."""
    await serve_sessions(url)
    await record_audits(url)
    await follow_a_trial(url)
    await keep_to_learn(url)


async def record_audits(url: str) -> None:
    records = AuditRecords(url, DEFAULT_POOL)
    try:
        await records.add(AuditReport("a", Verdict.DAMAGED), 0)
        assert (await records.counts()).damaged
        assert await records.incidents()
        await records.end_turn("target:1", 1_000_000_000)
        assert await records.begin_turn("target:1")
    finally:
        await records.close()


async def follow_a_trial(url: str) -> None:
    drafts = DraftVersions(url)
    try:
        state = await drafts.try_version("v2", 0.1)
        counts = session_counts(output_tokens=9, accepted=4, round_ns=1_000_000)
        assert await drafts.add("v2", counts, state.trial)
        assert (await drafts.counts())["v2"] == counts
        await drafts.roll_back()
    finally:
        await drafts.close()


SPOOLED = [SpooledSession(f"session{index}", "", 0.0, 1, [1, 2, 3]) for index in range(3)]


async def keep_to_learn(url: str) -> None:
    spool = LearningSpool(url)
    try:
        for session in SPOOLED:
            assert await spool.add("anna", session, 7)
        assert await spool.remove("anna", SPOOLED[-1].session_id, is_recent=True)
    finally:
        await spool.close()


async def operate(url: str) -> None:
    """Do what `galley drafts` and the training on sessions do."""
    registry, drafts, spool = ReplicaRegistry(url), DraftVersions(url), LearningSpool(url)
    try:
        await registry.read(DRAFT_POOL)
        await drafts.try_version("v3", 0.1)
        await drafts.promote("v3")
        await drafts.counts()
        assert await drafts.history()
        for principal in await spool.principals():
            await spool.read(principal, await spool.sessions(principal))
        await spool.read("anna", [SPOOLED[0].session_id])
        await spool.forget("anna")
    finally:
        for each in (registry, drafts, spool):
            await each.close()


async def register(url: str) -> None:
    registry = ReplicaRegistry(url)
    try:
        await registry.publish(DRAFT_POOL, LEASE)
        assert LEASE in await registry.read(DRAFT_POOL)
        await registry.publish(DRAFT_POOL, replace(LEASE, sessions=1))
        await registry.withdraw(DRAFT_POOL, LEASE.address, LEASE.incarnation)
    finally:
        await registry.close()


PART = AnswerPart(b"session1", 5, [1, 2, 3])


async def share_answers(url: str, pool: str = "default") -> None:
    log = AnswerLog(url, pool, "hash", ttl_s=60)
    try:
        await log.exchange(SharedKind((b"salt", "chat"), RecentAnswers()), [PART])
        assert PART in await log.exchange(SharedKind((b"salt", "chat"), RecentAnswers()), [])
    finally:
        await log.close()


async def register_and_share(url: str) -> None:
    await register(url)
    await share_answers(url)


async def make_user_of_a_pool(server: Server, name: str, patterns: Sequence[str]) -> None:
    rules = [rule for rule in documented_user(name) if not rule.startswith("~")]
    await server.command("ACL", "SETUSER", name, "reset", *rules, *patterns)


async def test_a_replica_of_one_pool_reaches_no_other(guarded: Server) -> None:
    """The patterns of a user may name the pool (docs/operate/redis.md)."""
    await make_user_of_a_pool(guarded, REPLICA, ["~galley:replicas:{blue}:*"])
    own, other = (ReplicaRegistry(url_of(guarded, REPLICA), name) for name in ("blue", "green"))
    await own.publish(DRAFT_POOL, LEASE)
    assert await own.read(DRAFT_POOL) == [LEASE]
    for call in (other.publish(DRAFT_POOL, LEASE), other.read(DRAFT_POOL)):
        with pytest.raises(Broken, match=FORBIDDEN):
            await call
    await own.close()
    await other.close()


async def test_a_gateway_of_one_pool_reaches_no_other(guarded: Server) -> None:
    patterns = ["~galley:replicas:{blue}:*", "~galley:sessions:blue:*", "~galley:budgets:blue:*"]
    await make_user_of_a_pool(guarded, GATEWAY, patterns)
    url, new = url_of(guarded, GATEWAY), a_session()
    async with store_at(url, pool_name="blue") as own, store_at(url, pool_name="green") as other:
        await create(own, new)
        assert (await claim(own, new.session_id, ALICE)).tokens == PROMPT
        budget = Exchange(0, 1, 0)
        assert (await own.exchange(LIMITED, budget)).granted
        others = other.exchange(LIMITED, budget)
        for call in (create(other, new), claim(other, new.session_id, ALICE), others):
            with pytest.raises(Broken, match=FORBIDDEN):
                await call
    registry = ReplicaRegistry(url, "blue")
    await registry.read(DRAFT_POOL)
    await registry.close()


async def a_lease_that_ended(server: Server) -> None:
    registry = ReplicaRegistry(f"{server.url}?db=1", lease_s=0.001)
    await registry.publish(DRAFT_POOL, replace(LEASE, address="gone:1"))
    await registry.close()


WORK = {GATEWAY: serve, REPLICA: register, DRAFT: register_and_share, OPS: operate}


@pytest.mark.parametrize("user", WORK)
async def test_a_documented_user_has_enough_permissions(guarded: Server, user: str) -> None:
    await make_user(guarded, user)
    await a_lease_that_ended(guarded)
    await WORK[user](url_of(guarded, user))


IN_CLUSTERS = {"+asking", "+cluster|slots"}


def needed(user: str) -> Sequence[str]:
    commands = [rule for rule in documented_user(user) if rule.startswith("+")]
    return [command for command in commands if command not in IN_CLUSTERS]


@pytest.mark.parametrize(("user", "command"), [(user, command) for user in WORK for command in needed(user)])
async def test_a_documented_user_needs_each_permission(guarded: Server, user: str, command: str) -> None:
    await make_user(guarded, user, without=command)
    await guarded.command("FLUSHALL")
    await a_lease_that_ended(guarded)
    await guarded.command("SCRIPT FLUSH")
    with pytest.raises(GalleyError):
        await WORK[user](url_of(guarded, user))


async def test_a_target_reads_no_answers_of_drafts(guarded: Server) -> None:
    await make_user(guarded, REPLICA)
    with pytest.raises(Broken, match=FORBIDDEN):
        await share_answers(url_of(guarded, REPLICA))


async def test_a_draft_of_one_pool_shares_with_no_other(guarded: Server) -> None:
    await make_user_of_a_pool(guarded, DRAFT, ["~galley:replicas:{blue}:*", "~galley:answers:blue:*"])
    await share_answers(url_of(guarded, DRAFT), "blue")
    with pytest.raises(Broken, match=FORBIDDEN):
        await share_answers(url_of(guarded, DRAFT), "green")


@pytest.mark.parametrize("user", [REPLICA, DRAFT])
async def test_a_replica_reads_no_session(guarded: Server, user: str) -> None:
    await make_user(guarded, user)
    owner = await _a_session_there(guarded)
    store = RedisStore(url_of(guarded, user))
    with pytest.raises(Broken, match=FORBIDDEN):
        await claim(store, owner, ALICE)
    await store.close()


async def test_who_operates_reads_no_session_and_registers_no_replica(guarded: Server) -> None:
    await make_user(guarded, OPS)
    owner = await _a_session_there(guarded)
    store = RedisStore(url_of(guarded, OPS))
    with pytest.raises(Broken, match=FORBIDDEN):
        await claim(store, owner, ALICE)
    await store.close()
    for work in (record_audits, share_answers, register):
        with pytest.raises(GalleyError, match=FORBIDDEN):
            await work(url_of(guarded, OPS))


async def _a_session_there(server: Server) -> str:
    store = RedisStore(f"{server.url}?db=1")
    owner = (await create(store, a_session())).ownership
    await store.close()
    return owner.session_id


async def test_an_error_does_not_show_a_wrong_password(guarded: Server) -> None:
    await make_user(guarded, GATEWAY)
    store = RedisStore(url_of(guarded, GATEWAY).replace(PASSWORD, "guessed"))
    with pytest.raises(StoreUnavailable, match="password") as refused:
        await store.ping()
    assert "guessed" not in str(refused.value)
    await store.close()


@pytest.mark.parametrize("shared_server", [CLUSTER], indirect=True)
async def test_the_documented_users_are_enough_in_a_cluster(shared_server: Cluster) -> None:
    for node in shared_server.masters:
        for user in WORK:
            await make_user(node, user)
    for user, work in WORK.items():
        await work(shared_server.url.replace("://", f"://{user}:{PASSWORD}@"))


async def test_the_documented_users_are_enough_behind_a_sentinel() -> None:
    async with replica_set(either()) as servers:
        await servers.sentinel.command("ACL", "SETUSER", SENTINEL, "reset", *documented_user(SENTINEL))
        await servers.sentinel.command("ACL", "SETUSER", "default", "off")
        for user, work in WORK.items():
            await make_user(servers.master, user)
            url = servers.url.replace("://", f"://{user}:{PASSWORD}@").replace("/0?", "/1?")
            await work(f"{url}&sentinel_user={SENTINEL}&sentinel_password={PASSWORD}")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "galley-test")


def tls_options(authority: Authority) -> list[str]:
    mine = authority.issue("server")
    files = {"cert": mine.cert, "key": mine.key, "ca-cert": authority.ca}
    return [part for name, path in files.items() for part in (f"--tls-{name}-file", str(path))]


def trusting(url: str, authority: Authority) -> str:
    mine = authority.issue("client")
    first = "&" if "?" in url else "?"
    return f"{url}{first}ca={authority.ca}&cert={mine.cert}&key={mine.key}"


@pytest.fixture(scope="module")
def tls_server(authority: Authority) -> Iterator[TcpServer]:
    options = tls_options(authority)
    with serving(lambda directory: TcpServer(REDIS, directory, free_ports(1)[0], tls=options)) as server:
        yield server


async def must_work(url: str) -> None:
    async with store_at(url) as store:
        for _ in range(4):
            owner = (await create(store, a_session())).ownership
            assert await commit(store, owner, 3, [7], b".") == 4
    registry = ReplicaRegistry(url)
    await registry.publish(DRAFT_POOL, LEASE)
    assert await registry.read(DRAFT_POOL) == [LEASE]
    await registry.close()


async def test_the_store_works_over_tls(tls_server: TcpServer, authority: Authority) -> None:
    await must_work(trusting(f"rediss://{tls_server.address}/0", authority))


async def test_a_cluster_works_over_tls(authority: Authority) -> None:
    with cluster_servers(REDIS, tls=tls_options(authority)) as cluster:
        await cluster.form()
        await must_work(trusting(f"rediss+cluster://{cluster.addresses}", authority))


async def test_a_replica_set_and_its_sentinels_work_over_tls(authority: Authority) -> None:
    async with replica_set(REDIS, tls=tls_options(authority)) as servers:
        await must_work(trusting(servers.url.replace("redis+", "rediss+"), authority))


async def test_a_server_of_another_authority_is_not_trusted(
    tls_server: TcpServer, authority: Authority, tmp_path: Path
) -> None:
    mine, other = authority.issue("client"), Authority(tmp_path, "other")
    files = f"cert={mine.cert}&key={mine.key}"
    for url in (
        f"rediss://{tls_server.address}/0?{files}",
        f"rediss://{tls_server.address}/0?ca={other.ca}&{files}",
        f"rediss://localhost:{tls_server.port}/0?ca={authority.ca}&{files}",
    ):
        async with store_at(url) as store:
            with pytest.raises(StoreUnavailable, match=r"[Cc]ertificate"):
                await store.ping()


async def test_a_client_without_certificate_is_refused(tls_server: TcpServer, authority: Authority) -> None:
    for url in (f"rediss://{tls_server.address}/0?ca={authority.ca}", f"redis://{tls_server.address}/0"):
        async with store_at(url, call_timeout_s=1.5) as store:
            with pytest.raises(StoreUnavailable):
                await store.ping()


async def test_only_the_given_authority_is_trusted(
    tls_server: TcpServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    mine, other = authority.issue("client"), Authority(tmp_path, "other")
    files = f"cert={mine.cert}&key={mine.key}"
    await must_work(f"rediss://{tls_server.address}/0?{files}")
    async with store_at(f"rediss://{tls_server.address}/0?ca={other.ca}&{files}") as store:
        with pytest.raises(StoreUnavailable, match=r"[Cc]ertificate"):
            await store.ping()


async def test_new_connections_use_the_current_files(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    files = mounted(tmp_path / "client", authority.ca, authority.issue("client"))
    options = tls_options(authority)
    with serving(lambda directory: TcpServer(REDIS, directory, free_ports(1)[0], tls=options)) as server:
        url = f"rediss://{server.address}/0?ca={files.ca}&cert={files.cert}&key={files.key}"
        async with store_at(url) as store:
            await store.ping()
            await change_over(server, other)
            await store.ping()
            await server.command("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(StoreUnavailable, match=r"[Cc]ertificate"):
                await store.ping()
            files.put_pair(other.ca, other.issue("client"))
            await store.ping()
            files.put(ca=other.ca, cert=b"half", key=b"written")
            await server.command("CLIENT", "KILL", "TYPE", "normal")
            with logged(files_module) as logs:
                await store.ping()
            assert logs[0]["error"].startswith("redis_url: ca=, cert= and key= must name usable files")


async def change_over(server: TcpServer, authority: Authority) -> None:
    mine = authority.issue("server")
    files = {"tls-cert-file": mine.cert, "tls-key-file": mine.key, "tls-ca-cert-file": authority.ca}
    await server.command("CONFIG", "SET", *(str(part) for item in files.items() for part in item))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ca=/nowhere", "/nowhere: No such file or directory"),
        ("ca={ca}&cert={cert}&key=/nowhere", "/nowhere: No such file or directory"),
        ("cert={cert}&key={other}", "KEY_VALUES_MISMATCH"),
        ("ca={key}", "must name usable files"),
    ],
)
def test_unusable_files_are_refused_before_connecting(options: str, why: str, authority: Authority) -> None:
    mine, other = authority.issue("mine"), authority.issue("other")
    reported = options.format(ca=authority.ca, cert=mine.cert, key=mine.key, other=other.key)
    with pytest.raises(BadFile, match=why) as refused:
        RedisStore(f"rediss://:secret@store?{reported}")
    assert refused.value.setting == "redis_url"
    assert "secret" not in str(refused.value)
