"""The file of API keys: what it may say, whom it lets in, and that it is read anew."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.errors import Unauthenticated
from services.gateway.auth.authentication import Authentication, Credentials
from services.gateway.auth.principals_file import read_principals

NOW = datetime(2026, 5, 1, tzinfo=UTC)
KEY = "a-key-of-team-a"


def entry(key: str, principal: str, more: str = "") -> str:
    return f'[[keys]]\nprincipal = "{principal}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{more}\n'


class Watched:
    def __init__(self, path: Path, text: str) -> None:
        self.path = path / "keys.toml"
        self.path.write_text(text)
        self.now_s = 0.0
        self.today = NOW
        named = NamedFile("api_keys_file", str(self.path))
        file = WatchedFiles(
            [named], lambda: read_principals(named), check_interval_s=1.0, clock=lambda: self.now_s
        )
        self.keys = Authentication(file, now=lambda: self.today)

    async def who(self, **metadata: str) -> Principal:
        named = {name.replace("_", "-"): value for name, value in metadata.items()}
        return await self.keys.authenticate(Credentials(named))

    async def refusal(self, **metadata: str) -> str:
        with pytest.raises(Unauthenticated) as caught:
            await self.who(**metadata)
        return str(caught.value)


async def test_a_key_names_its_principal_either_way(tmp_path: Path) -> None:
    watched = Watched(tmp_path, entry(KEY, "team-a") + entry("other", "team-b"))
    for metadata in (
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x_api_key": KEY},
    ):
        assert (await watched.who(**metadata)).name == "team-a"
    assert (await watched.who(authorization="Basic xyz", x_api_key="other")).name == "team-b"


async def test_a_refusal_never_repeats_the_key(tmp_path: Path) -> None:
    watched = Watched(tmp_path, entry(KEY, "team-a", "expires = 2026-05-01T00:00:01Z"))
    assert "needed" in await watched.refusal()
    assert "needed" in await watched.refusal(authorization=f"Basic {KEY}")
    for presented in (KEY + "x", KEY[:-1], KEY.upper(), "é", "x" * 100_000):
        message = await watched.refusal(x_api_key=presented)
        assert "not known" in message
        assert presented not in message
    await watched.who(x_api_key=KEY)
    watched.today = NOW + timedelta(seconds=1)
    message = await watched.refusal(x_api_key=KEY)
    assert "expired" in message
    assert KEY not in message


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_a_repeated_credential_is_refused_even_if_one_is_good(tmp_path: Path, name: str) -> None:
    watched = Watched(tmp_path, entry(KEY, "team-a"))
    repeated = Credentials({"authorization": f"Bearer {KEY}"}, frozenset({name}))
    with pytest.raises(Unauthenticated, match=f"{name}: must be sent once") as caught:
        await watched.keys.authenticate(repeated)
    assert KEY not in str(caught.value)
    assert (await Authentication().authenticate(repeated)).name == "anonymous", "credentials are not read"


async def test_a_key_is_compared_to_its_last_character(tmp_path: Path) -> None:
    longest = "k" * 1024
    watched = Watched(tmp_path, entry(longest, "team-a"))
    assert (await watched.who(x_api_key=longest)).name == "team-a"
    assert "not known" in await watched.refusal(x_api_key=longest + "k")


async def test_limits_are_the_principals_and_else_the_defaults(tmp_path: Path) -> None:
    limits = (
        "[defaults]\nmax_sessions = 4\n"
        "[principals.team-a]\ntokens_per_s = 2.5\nburst_tokens = 7\nmax_priority = 3\n"
    )
    watched = Watched(tmp_path, entry(KEY, "team-a") + entry("new", "team-a") + entry("b", "team-b") + limits)
    expected = Principal("team-a", PrincipalLimits(4, 2.5, 7, 3))
    assert await watched.who(x_api_key=KEY) == await watched.who(x_api_key="new") == expected
    assert (await watched.who(x_api_key="b")).limits == PrincipalLimits(4, None, None, 0)


async def test_changed_file_is_read_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, entry(KEY, "team-a"))
    watched.path.write_text(entry("new", "team-a"))
    await watched.who(x_api_key=KEY)
    watched.now_s = 1.0
    assert "not known" in await watched.refusal(x_api_key=KEY)
    await watched.who(x_api_key="new")


@pytest.mark.parametrize("spoilt", ["no toml", "", None], ids=["malformed", "empty", "gone"])
async def test_an_unreadable_new_file_is_ignored(
    tmp_path: Path, spoilt: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path, entry(KEY, "team-a"))
    if spoilt is None:
        watched.path.unlink()
    else:
        watched.path.write_text(spoilt)
    watched.now_s = 1.0
    with caplog.at_level(logging.ERROR):
        await watched.who(x_api_key=KEY)
    watched.path.write_text(entry("new", "team-a"))
    watched.now_s = 2.0
    await watched.who(x_api_key="new")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "keys: must be given"),
        ("[[keys]]\nprincipal = 'a'", r"keys\[0\].sha256: must be given"),
        (entry(KEY, "a") + entry("b", "a b"), r"keys\[1\].principal"),
        ("[[keys]]\nprincipal = 'a'\nsha256 = 'abc'", r"keys\[0\].sha256"),
        (entry(KEY, "anonymous"), r"keys\[0\].principal: must not be 'anonymous'"),
        (entry(KEY, "a") + entry(KEY, "b"), r"keys\[1\].sha256: must be unique, got that of keys\[0\]"),
        (entry(KEY, "jwt:a"), r"keys\[0\].principal: must not begin with 'jwt:'"),
        (entry(KEY, "a", "expires = 2027-01-01T00:00:00"), r"keys\[0\].expires: must have a time zone"),
        (entry(KEY, "a", "key = 'plain'"), r"keys\[0\].key: unknown"),
        (
            entry(KEY, "a") + "[principals.b]\nmax_sessions = 1",
            "principals.b: must be the principal of an entry of keys",
        ),
        (entry(KEY, "a") + "[principals.a]\nmax_sessions = 0", "principals.a.max_sessions"),
        (entry(KEY, "a") + "[principals.a]\ntokens_per_s = nan", "principals.a.tokens_per_s"),
        ("[[keys]]\nprincipal = a", "line 2"),
    ],
)
def test_an_error_in_the_file_is_named(tmp_path: Path, text: str, reported: str) -> None:
    with pytest.raises(BadFile, match=reported) as caught:
        Watched(tmp_path, text)
    assert caught.value.setting == "api_keys_file"
    assert "keys.toml" in caught.value.problem


def test_a_missing_or_binary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"none\.toml: No such file"):
        read_principals(NamedFile("api_keys_file", str(tmp_path / "none.toml")))
    (tmp_path / "noise.toml").write_bytes(b"\xff")
    with pytest.raises(BadFile, match=r"noise\.toml: must be TOML in UTF-8: .*can't decode"):
        read_principals(NamedFile("api_keys_file", str(tmp_path / "noise.toml")))


async def test_each_principal_allows_learning_for_itself(tmp_path: Path) -> None:
    learn = "[principals.team-a]\nlearn = true\n[principals.team-b]\nmax_sessions = 2\n"
    watched = Watched(tmp_path, "".join(entry(name, f"team-{name}") for name in "abc") + learn)
    assert [(await watched.who(x_api_key=name)).learns for name in "abc"] == [True, False, False]
    watched.path.write_text("keys = []\n[defaults]\nlearn = true\n")
    with pytest.raises(BadFile, match=r"defaults\.learn"):
        read_principals(NamedFile("api_keys_file", str(watched.path)))
