"""Which blocks run: nobody gains by having been asked before."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from galley.bench.answers import PROMPT_SETS, Prompt, Workload, fixed_workload, own_workload
from galley.bench.closed_loop import WARM_UP, Load
from galley.bench.tuning import Cell, Sizes, loads, pair_loads

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
    warm = [load for load in loads(CELLS, 4, SIZES) if load.pair == WARM_UP and load.max_tokens > 1]
    assert [(load.arm, load.streams) for load in warm] == [(arm, 4) for arm in ARMS]


def texts(load: Load) -> list[str]:
    return [prompt.text for prompt in load.prompts]


def test_all_arms_of_a_pair_answer_the_same_texts_after_a_block_that_caches_them() -> None:
    work = list(loads(CELLS, 4, SIZES))[len(ARMS) :]
    for at in range(0, len(work), len(ARMS) + 1):
        first, *group = work[at : at + len(ARMS) + 1]
        assert (first.pair, first.arm, first.max_tokens) == (WARM_UP, "off", 1)
        assert all(texts(load) == texts(first) for load in group)
        assert not {p.label for p in first.prompts} & {p.label for load in group for p in load.prompts}


def test_no_text_of_a_pair_comes_in_another() -> None:
    by_text: dict[str, set[int]] = defaultdict(set)
    for load in paired():
        for text in texts(load):
            by_text[text].add(load.pair)
    assert all(len(pairs) == 1 for pairs in by_text.values())


def test_another_run_asks_under_other_tags_and_labels() -> None:
    first, again = (
        [prompt for load in loads(CELLS, 4, replace(SIZES, nonce=nonce)) for prompt in load.prompts]
        for nonce in ("a1b2c3d4", "e5f60718")
    )
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in again}
    assert not {prompt.label for prompt in first} & {prompt.label for prompt in again}


def test_labels_of_names_that_are_cut_to_the_same_differ_and_are_short() -> None:
    kinds = [replace(WORKLOAD, name=f"customer-support-questions-{of}") for of in ("en", "de")]
    sizes = replace(SIZES, nonce="a1b2c3d4")
    labels = [
        pair_loads(Cell(kind, 256, 0.333333, ("suffix-automaton-16",), index), 10, sizes)[0].prompts[0].label
        for index, kind in enumerate(kinds)
    ]
    assert labels[0] != labels[1]
    assert all(len(label) <= 64 for label in labels)


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
    (load,) = pair_loads(Cell(WORKLOAD, 8, 0.7, ("off",)), 0, SIZES)
    assert len(load.prompts) == 8 * SIZES.turns
    assert len({(prompt.id, prompt.label) for prompt in load.prompts}) == len(load.prompts)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_the_fixed_workloads_come_with_the_package(name: str) -> None:
    assert len(fixed_workload(name).prompts) >= 24


def test_a_file_of_the_user_s_is_a_workload(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_text("First?\n\nSecond?\n", encoding="utf-8")
    assert [prompt.text for prompt in own_workload(lines).prompts] == ["First?", "Second?"]
    objects = tmp_path / "theirs.jsonl"
    objects.write_text('{"prompt": "One?", "id": "a"}\n{"prompt": "Two?"}\n', encoding="utf-8")
    result = own_workload(objects)
    assert (result.name, [prompt.id for prompt in result.prompts]) == ("theirs", ["a", "theirs-2"])


def test_a_line_separator_within_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes('{"prompt": "one\u2028two"}\r\n{"prompt": "three"}\r\n'.encode())
    assert [prompt.text for prompt in own_workload(path).prompts] == ["one\u2028two", "three"]
    lines = tmp_path / "lines.txt"
    lines.write_bytes("one\u2028two\r\nthree\r\n".encode())
    assert [prompt.text for prompt in own_workload(lines).prompts] == ["one\u2028two", "three"]


@pytest.mark.parametrize("content", ["", "\n", "[]\n", '{"text": "x"}\n', '{"prompt": 3}\n', "{\n"])
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        own_workload(path)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'poems'"):
        fixed_workload("poems")
