"""Which blocks run: nobody gains by having been asked before."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from galley.bench.closed_loop import WARM_UP, Load
from galley.bench.tuning import Cell, Sizes, loads, pair_loads
from galley.bench.workloads import Prompt, Workload

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


def test_the_block_that_caches_prompts_asks_conversations_whole() -> None:
    first, *others = WORKLOAD.prompts
    asked = (replace(first, later_turns=("And?",)), *others)
    cell = replace(CELLS[1], workload=replace(WORKLOAD, prompts=asked))
    priming, *group = list(loads([cell], 1, SIZES))[len(ARMS) :]
    for at, prompt in enumerate(priming.prompts):
        for load in group:
            assert (prompt.text, prompt.later_turns) == (load.prompts[at].text, load.prompts[at].later_turns)
            whole = load.prompts[at].max_tokens
            assert prompt.max_tokens == (whole if prompt.later_turns else 1)


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
