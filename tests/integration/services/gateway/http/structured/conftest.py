"""A world whose model calls tools and reasons, and answers what a test wrote or what a grammar allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import tokenizer_files
from tests.fakes.structured import Answers
from tests.fakes.world import World


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(
        directory,
        tokenizer_files.TOOLS_TEMPLATE,
        added=["<think>", "</think>"],
        control=["<tool_call>", "</tool_call>"],
    )
    return directory


@pytest.fixture(autouse=True)
def answers(world: World, tokenizer: Path) -> Answers:
    written = Answers(tokenizer)
    world.target.truth = written.of
    return written
