"""How `galley up` divides the cores of the machine among the parts of its stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.stack.options import StackOptions


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StackOptions]:
    """Return the options of the stacks that `galley up` would run."""
    stacks: list[StackOptions] = []
    monkeypatch.setattr("galley.cli.up._keep_up", lambda options, *_: stacks.append(options))
    monkeypatch.setattr("galley.cli.up.run_stack", lambda _: None)
    return stacks


def up(*flags: str) -> Result:
    return CliRunner().invoke(app, ["up", "--grpc-port=0", "--http-port=-1", *flags])


@pytest.mark.parametrize(
    ("cores", "flags", "chosen"),
    [
        (1, [], (1, 1, 1)),
        (2, [], (1, 2, 1)),
        (6, ["--replicas=2"], (2, 3, 1)),
        (2, ["--replicas=5"], (5, 1, 1)),
        (64, [], (1, 64, 1)),
        (2, ["--replicas=auto"], (1, 2, 1)),
        (64, ["--replicas=auto"], (8, 8, 1)),
        (20, ["--replicas=auto"], (2, 10, 1)),
        (64, ["--replicas=auto", "--tensor-parallel=2"], (4, 8, 1)),
        (8, ["--replicas=auto", "--threads=2"], (4, 2, None)),
        (64, ["--replicas=auto", "--threads=16", "--tensor-parallel=2"], (2, 16, None)),
        (2, ["--replicas=auto", "--threads=3"], (1, 3, None)),
        (12, ["--tensor-parallel=3", "--threads=auto"], (1, 4, 1)),
    ],
)
def test_the_cores_are_divided_among_the_targets(
    cores: int,
    flags: list[str],
    chosen: tuple[int, int, int | None],
    started: list[StackOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("galley.cli.up.usable_cores", lambda: cores)
    result = up(*flags)
    (options,) = started
    assert (options.replicas, options.threads, options.draft_threads) == chosen
    assert f"{cores} cores: chose --replicas {chosen[0]} --threads {chosen[1]}\n" in result.stderr


def test_nothing_is_said_where_nothing_is_chosen(started: list[StackOptions]) -> None:
    result = up("--replicas=2", "--threads=3")
    (options,) = started
    assert (options.replicas, options.threads, options.draft_threads) == (2, 3, None)
    assert "cores" not in result.stderr


def test_a_file_holds_a_number_or_the_word(
    tmp_path: Path, started: list[StackOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("galley.cli.up.usable_cores", lambda: 16)
    file = tmp_path / "galley.toml"
    file.write_text('[up]\nthreads = 3\nreplicas = "auto"\n')
    up("--config", str(file))
    file.write_text('[up]\nthreads = "auto"\n')
    up("--config", str(file))
    assert [(options.replicas, options.threads) for options in started] == [(5, 3), (1, 16)]


@pytest.mark.parametrize(
    ("value", "got"), [('"two"', "text"), ("1.5", "a number"), ("true", "true or false")]
)
def test_another_word_in_a_file_is_refused_by_its_key(tmp_path: Path, value: str, got: str) -> None:
    file = tmp_path / "galley.toml"
    file.write_text(f"[up]\nthreads = {value}\n")
    refused = up("--config", str(file))
    assert refused.exit_code == 2
    assert f'{file}:2: up.threads: must be a whole number or "auto", got {got}' in refused.stderr
