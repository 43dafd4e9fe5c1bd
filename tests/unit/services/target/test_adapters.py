"""The adapters that a target is told to offer, and the checks of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from galley.core.errors import UnsupportedModel
from services.target.engine.vllm.adapters import Adapters, read_adapters
from services.target.settings import MAX_ADAPTERS, parse_adapters


def save(directory: Path, weights: bytes = b"weights", **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **config}))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))


def test_names_and_directories_are_read() -> None:
    assert parse_adapters("") == {}
    assert parse_adapters(" sql=/a/b , team/fr-2.1=c=d ,") == {
        "sql": Path("/a/b"),
        "team/fr-2.1": Path("c=d"),
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sql", "must be NAME=DIRECTORY, got 'sql'"),
        ("sql=", "must be NAME=DIRECTORY, got 'sql='"),
        ("=/a", "names must be 1 to 128 letters, digits and _ . / -, got ''"),
        ("m:sql=/a", "names must be 1 to 128 letters, digits and _ . / -, got 'm:sql'"),
        (f"{'x' * 129}=/a", "names must be 1 to 128"),
        ("sql=/a,sql=/b", "names must differ, got 'sql' twice"),
        (
            ",".join(f"a{index}=/a" for index in range(MAX_ADAPTERS + 1)),
            "must have at most 64 entries, got 65",
        ),
    ],
)
def test_what_names_no_adapter_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_adapters(text)


@pytest.mark.parametrize(
    ("ranks", "room"), [((4,), 8), ((1,), 1), ((8, 9), 16), ((64, 200), 256), ((512,), 512)]
)
def test_the_engine_gets_room_for_all_adapters_at_once(
    tmp_path: Path, ranks: tuple[int, ...], room: int
) -> None:
    found = read_adapters({f"a{rank}": save(tmp_path / str(rank), r=rank) for rank in ranks})
    assert found.arguments() == {"enable_lora": True, "max_loras": len(ranks) + 1, "max_lora_rank": room}


def test_a_pattern_of_ranks_counts(tmp_path: Path) -> None:
    found = read_adapters({"a": save(tmp_path / "a", r=4, rank_pattern={"q_proj": 30})})
    assert found.rank == 32


def test_without_adapters_the_engine_is_as_before() -> None:
    assert read_adapters({}) == Adapters()
    assert Adapters().arguments() == {}
    assert not Adapters().digest


def test_a_changed_file_or_name_is_another_digest(tmp_path: Path) -> None:
    plain = save(tmp_path / "a")
    digests = [
        read_adapters(adapters).digest
        for adapters in (
            {"a": plain},
            {"a": save(tmp_path / "b")},
            {"b": plain},
            {"a": plain, "b": plain},
            {"a": save(tmp_path / "c", b"others")},
            {"a": save(tmp_path / "d", lora_alpha=3)},
        )
    ]
    assert digests[0] == digests[1], "the directory does not matter"
    assert len(set(digests)) == 5


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, 'must have "peft_type": "LORA"'),
        ({"r": 0}, r"r must be in \[1, 512\], got 0"),
        ({"r": 513}, r"r must be in \[1, 512\], got 513"),
        ({"r": "4"}, "r must be in"),
        ({"rank_pattern": {"q_proj": 600}}, r"r must be in \[1, 512\], got 600"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"lora_adapters: sql: .*{problem}"):
        read_adapters({"sql": save(tmp_path / "a", **config)})


def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    directory = save(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(
        UnsupportedModel, match=f"lora_adapters: sql: .*{directory} must have adapter_model.saf"
    ):
        read_adapters({"sql": directory})
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(
        UnsupportedModel, match=r"lora_adapters: sql: .*adapter_config\.json must be readable JSON"
    ):
        read_adapters({"sql": directory})
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json must be readable JSON: .*No such file"):
        read_adapters({"sql": tmp_path / "nowhere"})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_a_link_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    directory, elsewhere = save(tmp_path / "a"), tmp_path / "elsewhere"
    elsewhere.write_text('{"peft_type": "LORA", "r": 4}')
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(elsewhere)
    with pytest.raises(UnsupportedModel, match=f"lora_adapters: sql: .*{name}: is a link that leads out"):
        read_adapters({"sql": directory})
