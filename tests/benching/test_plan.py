"""Which blocks run: nobody gains by having been asked before."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from services.benching.answers import Prompt
from services.benching.closed_loop import WARM_UP, Load
from services.benching.plan import Cell, Sizes, loads, pair_loads
from services.benching.workloads import PROMPT_SETS, Workload, fixed_workload, own_workload

if TYPE_CHECKING:
    from pathlib import Path

WORKLOAD = Workload("my workload", tuple(Prompt(f"p{at}", f"Prompt {at}?") for at in range(6)), "0")
ARMS = ("off", "auto", "ngram-4")
CELLS = [Cell(WORKLOAD, streams, 0.0, ARMS) for streams in (1, 4)]
SIZES = Sizes(prompts=2, max_tokens=8, seed=5)


def paired() -> list[Load]:
    return [load for load in loads(CELLS, 4, SIZES) if load.pair != WARM_UP]


def test_all_arms_of_a_pair_get_the_same_work_and_take_turns_at_being_first() -> None:
    work = paired()
    for at in range(0, len(work), 3):
        group = work[at : at + 3]
        assert {load.arm for load in group} == set(ARMS)
        same = {(load.pair, load.streams, load.seed, tuple(p.id for p in load.prompts)) for load in group}
        assert len(same) == 1
    assert set(Counter(load.arm for load in work[::3])) == set(ARMS)


def test_every_arm_warms_up_in_its_largest_cell() -> None:
    warm = [load for load in loads(CELLS, 4, SIZES) if load.pair == WARM_UP]
    assert [(load.arm, load.streams) for load in warm] == [(arm, 4) for arm in ARMS]


def test_no_prompt_is_put_twice_and_so_no_prefix_cache_helps() -> None:
    asked = [prompt.text.split(")")[0] for load in loads(CELLS, 4, SIZES) for prompt in load.prompts]
    assert len(set(asked)) == len(asked)


def test_under_one_label_no_prompt_comes_twice_and_no_other_arm_answers() -> None:
    by_label: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for load in paired():
        for prompt in load.prompts:
            by_label[prompt.label].append((load.arm, prompt.id))
    for label, given in by_label.items():
        assert len({arm for arm, _ in given}) == 1, label
        assert len({prompt for _, prompt in given}) == len(given), label
    assert all(label.startswith("my_workload/") and len(label) <= 64 for label in by_label)


def test_more_streams_than_prompts_ask_some_again_under_another_label() -> None:
    (load,) = pair_loads(Cell(WORKLOAD, 8, 0.7, ("off",)), 0, SIZES, 0)
    assert len(load.prompts) == 8
    assert len({(prompt.id, prompt.label) for prompt in load.prompts}) == 8


def test_prompts_that_may_be_cached_are_the_same_for_every_arm() -> None:
    found = pair_loads(CELLS[1], 0, SIZES, 7, fresh=False)
    assert len({tuple(prompt.text for prompt in load.prompts) for load in found}) == 1


# ---------------------------------------------------------------------------------------- workloads --


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_the_fixed_workloads_come_with_the_package(name: str) -> None:
    assert len(fixed_workload(name).prompts) >= 24


def test_a_file_of_the_user_s_is_a_workload(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_text("First?\n\nSecond?\n", encoding="utf-8")
    assert [prompt.text for prompt in own_workload(lines).prompts] == ["First?", "Second?"]
    objects = tmp_path / "theirs.jsonl"
    objects.write_text('{"prompt": "One?", "id": "a"}\n{"prompt": "Two?"}\n', encoding="utf-8")
    found = own_workload(objects)
    assert (found.name, [prompt.id for prompt in found.prompts]) == ("theirs", ["a", "theirs-2"])


@pytest.mark.parametrize("content", ["", "\n", "[]\n", '{"text": "x"}\n', '{"prompt": 3}\n', "{\n"])
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        own_workload(path)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="no workload 'poems'"):
        fixed_workload("poems")
