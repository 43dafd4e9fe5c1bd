"""`galley plan --capacity` as a user meets it: a file of numbers in, what is needed out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from galley.core.kv.blocks import BLOCK_TOKENS
from tests.unit.galley.cli.test_plan import json_of, output_of, run

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "capacity.toml"
SCALE = EXAMPLE.with_name("scale.toml")
SCALE_PAGE = EXAMPLE.parents[1] / "scale.md"
SCALING = EXAMPLE.parents[1] / "operate" / "scaling.md"
CHARTS = EXAMPLE.parents[2] / "helm" / "galley" / "examples" / "values-llama70b-tp4.yaml"
ONE_NODE = CHARTS.with_name("values-llama70b-one-node.yaml")

PLAIN = """
[load]
answers_per_s = 50
prompt_tokens = 90
output_tokens = 10
cached_share = 1
[target]
step_ms = 10
kv_tokens = 512
[spares]
busy = 1
replicas = 0
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "load.toml"
    path.write_text(text)
    return f"--capacity={path}"


def test_the_numbers_of_a_file(tmp_path: Path) -> None:
    result = json_of(written(tmp_path, PLAIN))
    assert (result["targets"], result["drafts"], result["gateways"]) == (2, 0, 1)
    assert result["kv_blocks_a_target"] == 16
    assert "target_gpus" not in result


def test_an_engine_with_smaller_blocks_holds_more_sessions(tmp_path: Path) -> None:
    """A session of 100 tokens takes 4 blocks of 32 tokens, or 7 of 16."""
    text = PLAIN.replace("kv_tokens = 512", "kv_tokens = 448")
    assert "A full target: 3 sessions" in output_of(written(tmp_path, text))
    text = text.replace("[spares]", "block_tokens = 16\n[spares]")
    assert "A full target: 4 sessions" in output_of(written(tmp_path, text))
    assert json_of(written(tmp_path, text))["kv_blocks_a_target"] == 28
    # A pool of 41 blocks of 16 tokens, or of 20 of 32.
    memory = "[target.memory]\ngpus = 1\ngpu_memory_gib = 1\nshare = 1\nweights_gib = 0\n"
    memory += "kv_bytes_per_token = 1600000\n"
    text = text.replace("kv_tokens = 448\n", "").replace("[spares]", f"{memory}[spares]")
    assert json_of(written(tmp_path, text))["kv_blocks_a_target"] == 41


MEASURED = {"step_ms": 10, "row_costs": "1:1,8:1.5", "kv_tokens": 448, "block_tokens": 16}


def target_log(tmp_path: Path) -> str:
    """Write the log of a target with vLLM that was started twice, as `galley logs` prints it."""
    path = tmp_path / "target.log"
    starts = [{**MEASURED, "step_ms": 99}, MEASURED]
    lines = [f"target | {json.dumps({**start, 'threads': 1, 'event': 'steps measured'})}" for start in starts]
    path.write_text(
        "\n".join(["Loading shards: 100%", *lines, "steps measured, but no JSON", '{"event": "x"}'])
    )
    return f"--target-log={path}"


def test_the_log_of_a_target_completes_the_file(tmp_path: Path) -> None:
    log = target_log(tmp_path)
    left_out = PLAIN.replace("step_ms = 10\nkv_tokens = 512\n", "")
    lines = "\n".join(f"{name} = {value!r}" for name, value in MEASURED.items())
    written_out = json_of(written(tmp_path, left_out.replace("[target]", f"[target]\n{lines}")))
    assert json_of(written(tmp_path, left_out), log) == written_out
    assert written_out["kv_blocks_a_target"] == 28
    assert json_of(written(tmp_path, PLAIN), log)["kv_blocks_a_target"] == 32  # the file's own pool


def test_the_memory_of_the_file_replaces_the_pool_of_the_log(tmp_path: Path) -> None:
    memory = "[target.memory]\ngpus = 1\ngpu_memory_gib = 1\nshare = 1\nweights_gib = 0\n"
    memory += "kv_bytes_per_token = 1600000\n"
    text = PLAIN.replace("kv_tokens = 512\n", "").replace("[spares]", f"{memory}[spares]")
    assert json_of(written(tmp_path, text), target_log(tmp_path))["kv_blocks_a_target"] == 41


def test_a_log_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.log"
    for content, problem in ((None, "cannot read"), ("{}", "must be a target's log in JSON lines")):
        if content is not None:
            path.write_text(content)
        result = run(written(tmp_path, PLAIN), f"--target-log={path}")
        assert result.exit_code == 2
        assert "--target-log" in result.stderr
        assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_it_says_what_bounds_a_replica(tmp_path: Path) -> None:
    output = output_of(written(tmp_path, PLAIN))
    assert "A full target: 4 sessions at k=0 (bound by KV blocks)," in output
    assert "no draft token pays" in output


def test_free_drafts_are_not_said_to_pay_nothing(tmp_path: Path) -> None:
    output = output_of(written(tmp_path, PLAIN + "[draft]\nalpha = 0.8\ncost_ratio = inf\n"))
    assert "drafts cost nothing" in output
    assert "no draft token pays" not in output


def test_documented_example_is_printed() -> None:
    page = SCALING.read_text()
    for line in output_of(f"--capacity={EXAMPLE}").splitlines():
        assert line.rstrip() in page


def test_streams_of_the_documented_example_are_printed() -> None:
    output = output_of(f"--capacity={SCALE}", "--streams=10000,100000,1000000")
    for line in output.splitlines():
        assert line.rstrip() in SCALE_PAGE.read_text()


def test_each_number_of_streams_is_planned(tmp_path: Path) -> None:
    result = json_of(written(tmp_path, PLAIN), "--streams=4,40")
    assert {count: found["targets"] for count, found in result.items()} == {"4": 1, "40": 10}  # type: ignore[index]


def test_small_needs_of_streams_are_shown(tmp_path: Path) -> None:
    lines = output_of(written(tmp_path, PLAIN), "--streams=4,400").splitlines()
    few, many = (line.split() for line in lines[-3:-1])
    assert (few[1], many[1]) == ("400", "40k")
    assert few[6] == "0.04"
    assert float(many[6]) > 1


@pytest.mark.parametrize("streams", ["0", "many", "4,"])
def test_streams_that_are_no_numbers_are_refused(tmp_path: Path, streams: str) -> None:
    result = run(written(tmp_path, PLAIN), f"--streams={streams}")
    assert result.exit_code == 2
    assert "--streams" in result.stderr


@pytest.mark.parametrize("flag", ["--streams=4", "--target-log=target.log"])
def test_streams_and_logs_need_a_load(flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 2
    assert "needs --capacity" in result.stderr


def test_the_production_values_are_what_the_example_gives() -> None:
    example, chart = tomllib.loads(EXAMPLE.read_text()), yaml.safe_load(CHARTS.read_text())
    needed = json_of(f"--capacity={EXAMPLE}")
    assert needed["targets"] == chart["target"]["replicas"] == chart["keda"]["target"]["minReplicas"]
    assert needed["drafts"] == chart["keda"]["draft"]["minReplicas"]
    assert needed["gateways"] == chart["keda"]["gateway"]["minReplicas"]
    memory = example["target"]["memory"]
    each_gib = memory["weights_gib"] / memory["gpus"]
    assert f"{memory['weights_gib']} GiB in the GPUs, {each_gib} GiB in each" in CHARTS.read_text()


@pytest.mark.parametrize("file", [CHARTS, ONE_NODE], ids=lambda file: file.stem)
def test_a_70b_target_has_the_size_of_the_example(file: Path) -> None:
    example, chart = tomllib.loads(EXAMPLE.read_text()), yaml.safe_load(file.read_text())
    target, gpus = chart["target"], example["target"]["memory"]["gpus"]
    assert example["spares"]["gateway_sessions"] == chart["gateway"]["settings"]["max_sessions"]
    for setting in ("max_sessions", "max_rows"):
        assert example["target"][setting] == target["settings"][setting]
    assert gpus == target["tensorParallel"] == target["gpus"]
    blocks = int(str(json_of(f"--capacity={EXAMPLE}")["kv_blocks_a_target"]))
    pool_mb = blocks * BLOCK_TOKENS * example["target"]["memory"]["kv_bytes_per_token"] // 2**20
    assert pool_mb // gpus == target["settings"]["kv_memory_mb"]
    assert f"`kv_memory_mb: {target['settings']['kv_memory_mb']}`" in SCALING.read_text()


def test_gpus_are_counted_where_memory_is_given() -> None:
    result = json_of(f"--capacity={EXAMPLE}")
    assert result["target_gpus"] == 4 * int(str(result["targets"]))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("= 3", "must be TOML"),
        ("[loads]", "loads: must be one of load, target, draft, spares, tiers"),
        ("load = 3", "load: must be a table"),
        (PLAIN + "[draft]\nalpha = 0.5", "draft.cost_ratio"),
        (PLAIN.replace("step_ms = 10", 'step_ms = "fast"'), "target.step_ms"),
        (PLAIN.replace("kv_tokens = 512", "kv_tokens = 127"), "kv_tokens: must be >= 128"),
        (PLAIN.replace("kv_tokens = 512", ""), "must have either kv_tokens or [target.memory]"),
        (PLAIN.replace("kv_tokens = 512", 'kv_tokens = 512\nrow_costs = "5:1"'), "start with 1:1"),
        (PLAIN.replace("kv_tokens = 512", "kv_tokens = 512\nblock_tokens = 0"), "block_tokens: must be >= 1"),
        (PLAIN.replace("kv_tokens = 512", 'kv_tokens = 512\nblock_tokens = "x"'), "target.block_tokens"),
        (PLAIN.replace("busy = 1", "busy = 1\nbored = 1"), "spares.bored"),
        (PLAIN + "[tiers]\nlease_share = 0.6", "lease_share: must be in (0, 0.5]"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_key(tmp_path: Path, text: str, line: str) -> None:
    result = run(written(tmp_path, text))
    assert result.exit_code == 2
    words = " ".join((result.output + result.stderr).replace("│", " ").split())
    assert line in words


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = run(f"--capacity={tmp_path / 'none.toml'}")
    assert result.exit_code == 2
    assert "cannot read" in result.output + result.stderr
