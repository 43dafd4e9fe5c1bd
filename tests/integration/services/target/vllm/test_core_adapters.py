"""LoRA adapters in vLLM's core: the tokens are those of a model with the adapter in its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from galley.core.sampling_params import SamplingParams
from services.target.engine.vllm.adapters import Adapters
from services.target.engine.vllm.probe import Probe
from services.target.engine.vllm.protocol import NewSequence, StoredBlocks
from services.target.settings import TargetSettings
from tests.fakes.core_runs import PROPOSALS, Reference, continue_all, sequence_of
from tests.integration.services.target.vllm.conftest import BLOCK_TOKENS, MARKS

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

pytestmark = MARKS

NAMES = ("sql", "fr")
COUNT = 40
PROMPT = [3 + 7 * token % 100 for token in range(3 * BLOCK_TOKENS + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model; beside it are its adapters, and a merged model of each."""
    from tests.fakes.tiny_adapter import save_merged, save_tiny_adapter  # noqa: PLC0415
    from tests.fakes.tiny_model import VLLM_HEAD_SIZE, save_tiny_model  # noqa: PLC0415

    parent = tmp_path_factory.mktemp("adapted")
    model = save_tiny_model(parent / "model", head_size=VLLM_HEAD_SIZE)
    for seed, name in enumerate(NAMES):
        adapter = save_tiny_adapter(model, parent / name, seed)
        save_merged(model, adapter, parent / f"{name}-merged")
    return model


@pytest.fixture(scope="module")
def core(model: Path) -> Iterator[VllmCore]:
    from services.target.engine.vllm.loading import load_core  # noqa: PLC0415

    settings = TargetSettings(
        engine="vllm",
        model=str(model),
        dtype="float32",
        kv_memory_mb=64,
        max_sessions=16,
        lora_adapters=",".join(f"{name}={model.parent / name}" for name in NAMES),
    )
    core = load_core(settings, {"block_size": BLOCK_TOKENS})
    yield core
    core.close()


@pytest.fixture(scope="module")
def references(model: Path) -> Mapping[str, Reference]:
    merged = {name: Reference(model.parent / f"{name}-merged") for name in NAMES}
    return {"": Reference(model), **merged}


def adapted(lora: str, session: str = "", **sampling: float) -> NewSequence:
    named = sequence_of(f"{lora}{session}", PROMPT, SamplingParams(seed=5, **sampling))  # type: ignore[arg-type]  # floats
    return replace(named, lora=lora)


def test_a_target_offers_its_adapters(core: VllmCore) -> None:
    assert core.info.lora_adapters == NAMES
    assert not core.info.deterministic, "the probe uses no adapter"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_adapter_draws_its_own_tokens_whatever_the_drafts(
    core: VllmCore, references: Mapping[str, Reference], temperature: float
) -> None:
    sequences = [adapted(lora, temperature=temperature) for lora in references]
    truths = {one.id: references[one.lora].continue_(one.draw, COUNT).tokens for one in sequences}
    assert len({tuple(tokens) for tokens in truths.values()}) == len(truths), "an adapter changes tokens"
    for arm, propose in PROPOSALS.items():
        made = continue_all(core, sequences, COUNT, propose, truths)
        assert {name: run.tokens for name, run in made.items()} == truths, arm
        if arm == "right":
            assert all(run.draws < COUNT / 2 for run in made.values())


def test_a_prefix_is_reused_within_its_adapter_alone(core: VllmCore) -> None:
    cached = []
    for index, lora in enumerate(("", *NAMES, "", *NAMES)):
        one = replace(adapted(lora, session=str(index)), salt="the same")
        core.add(one)
        cached.append(core.step({one.id: ()})[one.id].cached)
        core.end([one.id])
    assert cached == [0] * 3 + [3 * BLOCK_TOKENS] * 3
    first = [one for one in core.facts().events if isinstance(one, StoredBlocks) and one.parent is None]
    assert [one.salt for one in first][-3:] == ["the same"] * 3


def test_all_adapters_come_back_from_a_pause_at_once(core: VllmCore) -> None:
    sequences = [adapted(lora, session="paused") for lora in ("", *NAMES)]
    for one in sequences:
        core.add(one)
        core.step({one.id: ()})
    steps = core.step({one.id: () for one in sequences})
    assert all(step.outcome is not None for step in steps.values())
    core.end([one.id for one in sequences])


def test_other_adapters_are_another_build(core: VllmCore, model: Path) -> None:
    from services.target.engine.vllm.loading import _name_build  # noqa: PLC0415

    builds = set()
    for digest in ("", "one", "other"):
        _name_build(core, model, {}, Adapters(digest=digest), Probe(deterministic=True, bits=b""))
        builds.add(core.info.fingerprint)
    assert len(builds) == 3
