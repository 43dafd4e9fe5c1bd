"""Test where prompts come from: the fixed sets, and files in the forms of public sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from galley.bench.workloads import (
    EDITS,
    EXTRACT,
    FIXED_SETS,
    TASKS,
    Prompt,
    fixed_workload,
    mixed_workload,
    own_workload,
)


@pytest.mark.parametrize("name", FIXED_SETS)
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


def test_tasks_have_six_categories_in_turn_and_conversations_of_several_turns() -> None:
    prompts = fixed_workload(TASKS).prompts
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == {
        "multi_turn",
        "translation",
        "summarization",
        "question_answering",
        "mathematics",
        "passages",
    }
    assert sum(counts.values()) >= 60
    assert len(set(counts.values())) == 1
    assert {prompt.category for prompt in prompts if prompt.later_turns} == {"multi_turn"}
    assert all(prompt.later_turns for prompt in prompts if prompt.category == "multi_turn")
    assert [prompt.category for prompt in prompts[:6]] == [prompt.category for prompt in prompts[6:12]]


def test_tasks_are_no_part_of_the_mixture_that_other_benchmarks_use() -> None:
    assert not any(prompt.id.startswith(TASKS) for prompt in mixed_workload().prompts)


def test_each_prompt_of_extract_has_a_schema_and_each_of_edits_the_file_before_the_edit() -> None:
    extract, edits = fixed_workload(EXTRACT).prompts, fixed_workload(EDITS).prompts
    assert len({json.dumps(prompt.schema) for prompt in extract}) == len({p.category for p in extract}) == 8
    assert all(prompt.schema and prompt.schema["type"] == "object" for prompt in extract)
    assert {prompt.category for prompt in edits} == {"rename", "fix", "translate"}
    assert all(prompt.prediction and prompt.prediction in prompt.text for prompt in edits)


def test_a_file_may_state_the_schema_and_the_prediction_of_an_answer(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.jsonl",
        {"prompt": "One?", "schema": {"type": "integer"}},
        {"turns": ["Two?", "And?"], "prediction": "No."},
    )
    first, second = own_workload(path).prompts
    assert (first.schema, first.prediction) == ({"type": "integer"}, None)
    assert (second.schema, second.prediction) == (None, "No.")
    later = second.next_turn("No!")
    assert later is not None
    assert later.prediction is None, "the prediction was of the first answer"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"schema": "{}"}, "schema: must be an object, got str"),
        ({"prediction": 3}, "prediction: must be text, got int"),
    ],
)
def test_a_schema_or_prediction_of_another_kind_is_refused(
    tmp_path: Path, entry: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 1: {problem}"):
        own_workload(written(tmp_path / "bad.jsonl", {"prompt": "x", **entry}))


def written(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_a_question_list_by_turns_and_category_is_read(tmp_path: Path) -> None:
    # The fields of Spec-Bench's question.jsonl, which are those of MT-bench.
    path = written(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"question_id": 82, "category": "writing", "turns": ["Draw."]},
        {"question_id": 101, "category": "math", "turns": ["Add."]},
    )
    prompts = own_workload(path).prompts
    assert [(prompt.id, prompt.category, prompt.text, prompt.later_turns) for prompt in prompts] == [
        ("81", "writing", "Write.", ("Again.",)),
        ("101", "math", "Add.", ()),
        ("82", "writing", "Draw.", ()),
    ]


def test_speed_bench_is_read_as_its_two_scripts_prepare_it(tmp_path: Path) -> None:
    common = {"sub_category": "a", "source": "s", "src_id": "1", "difficulty": "easy", "multiturn": True}
    messages = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    path = written(
        tmp_path / "qualitative.jsonl",
        {"question_id": "q1", "category": "rag", "messages": messages, **common},
        {"question_id": "q2", "category": "rag", "turns": ["One?", "Two?"], **common},
    )
    first, second = own_workload(path).prompts
    assert (first.text, first.later_turns) == (second.text, second.later_turns) == ("One?", ("Two?",))


def test_the_categories_of_a_file_become_workloads(tmp_path: Path) -> None:
    questions = [{"category": name, "turns": [f"{name} {at}?"]} for name in ("qa", "rag") for at in range(2)]
    workload = own_workload(written(tmp_path / "list.jsonl", *questions))
    assert [(one.name, [p.text for p in one.prompts]) for one in workload.by_category()] == [
        ("list.qa", ["qa 0?", "qa 1?"]),
        ("list.rag", ["rag 0?", "rag 1?"]),
    ]
    assert fixed_workload("chat").by_category() == [fixed_workload("chat")]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"turns": []}, "turns: must be text"),
        ({"turns": ["One?", 2]}, "turns: must be text"),
        ({"turns": "One?"}, "turns: must be text"),
        ({"turns": ["One?", " "]}, "turns: must be text"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "messages: must be text of users"),
        ({"messages": ["One?"]}, "messages: must be text of users"),
        ({"question": "One?"}, "must be an object with prompt, turns or messages"),
        (
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]},
            "turns: must be a question, got the placeholder",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    path = written(tmp_path / "list.jsonl", {"turns": ["One?"]}, entry)
    with pytest.raises(ValueError, match=f"line 2: {problem}"):
        own_workload(path)


def test_the_number_of_a_line_counts_empty_ones_and_its_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('\ufeff{"prompt": "One?"}\n\n{"prompt": "Two?"', encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: must be JSON: Expecting ',' delimiter"):
        own_workload(path)


def test_parquet_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="convert it: pandas"):
        own_workload(path)


def test_a_later_turn_follows_the_answers_before_it() -> None:
    first = Prompt("p", "One?", label="here", max_tokens=3, later_turns=("Two?", "Three?"))
    second = first.next_turn("Uno.")
    assert second is not None
    third = second.next_turn("Dos.")
    assert third is not None
    assert (third.label, third.max_tokens) == ("here", 3)
    assert [(message["role"], message["content"]) for message in third.messages] == [
        ("user", "One?"),
        ("assistant", "Uno."),
        ("user", "Two?"),
        ("assistant", "Dos."),
        ("user", "Three?"),
    ]
    assert third.next_turn("Tres.") is None
