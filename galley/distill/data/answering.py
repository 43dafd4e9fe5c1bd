"""Let the target answer prompts, many at once; each answer is stored when it ends, so none is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from galley.core.errors import GalleyError, InvalidField
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw
from galley.distill.data.corpus import Corpus
from galley.distill.data.lines import kept_lines
from galley.distill.data.prompts import Prompt
from galley.engine.batch import Rows, SessionCache
from galley.engine.sampler import draw_all

if TYPE_CHECKING:
    from galley.engine.model import CausalModel


@dataclass(frozen=True, slots=True)
class Answering:
    """The sampling of answers: half of them greedy, chosen by each prompt's hash."""

    max_tokens: int = 200
    temperature: float = 0.8
    at_once: int = 32
    seed: int = 1
    greedy_share: float = 0.5

    def params(self, prompt: Prompt) -> SamplingParams:
        """Return a prompt's parameters: a function of seed and prompt, so a continued run repeats them."""
        digest = prompt.digest(self.seed)
        greedy = (digest & 0xFFFF) < self.greedy_share * 0x10000
        return SamplingParams(temperature=0.0 if greedy else self.temperature, seed=digest)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's token ids, with its end token if it ended by itself."""

    tokens: tuple[int, ...]
    temperature: float


@dataclass(slots=True)
class _Live:
    """An answer in progress."""

    place: int
    prompt: Prompt
    params: SamplingParams
    cache: SessionCache
    tokens: list[int] = field(default_factory=list)

    @property
    def unfed(self) -> Sequence[int]:
        return (*self.prompt.tokens, *self.tokens)[len(self.cache.tokens) :]

    def draw(self) -> Draw:
        history = (*self.prompt.tokens, *self.tokens)
        return Draw(self.params, history, len(self.prompt.tokens), frozenset(), 0)


def answer_all(
    model: CausalModel,
    prompts: Sequence[Prompt],
    answering: Answering,
    store: Path,
    report: Callable[[int], None],
) -> list[Answer]:
    """Return the target's answers, in order of the prompts; those already in the JSONL `store` are reused.

    `report` gets how many are done. Raises InvalidField if the store is of other prompts, or a prompt leaves
    no room for an answer.
    """
    _refuse_too_long(prompts, model.info.context_window)
    answers = _stored(store, prompts)
    report(len(answers))
    waiting = [place for place in range(len(prompts)) if place not in answers][::-1]
    live: list[_Live] = []
    with store.open("a", encoding="utf-8") as file:
        while waiting or live:
            while waiting and _room(model, live, prompts[waiting[-1]], answering):
                place = waiting.pop()
                prompt = prompts[place]
                live.append(_Live(place, prompt, answering.params(prompt), model.new_cache()))
            _step(model, live)
            for ended in [one for one in live if _ended(one, model, answering)]:
                live.remove(ended)
                answers[ended.place] = Answer(tuple(ended.tokens), ended.params.temperature)
                file.write(_line(ended) + "\n")
                file.flush()
                report(len(answers))
    return [answers[place] for place in range(len(prompts))]


def _refuse_too_long(prompts: Sequence[Prompt], window: int) -> None:
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + 2 > window:
        raise InvalidField("prompts", f"must leave room in the window of {window} tokens, got {longest}")


def _room(model: CausalModel, live: Sequence[_Live], prompt: Prompt, answering: Answering) -> bool:
    """Return True if one more answer may begin, so that all can be completed."""
    lengths = [len(one.tokens) + answering.max_tokens for one in (prompt, *(one.prompt for one in live))]
    blocks = sum(-(-length // model.kv.block_tokens) for length in lengths)
    return len(live) < answering.at_once and (not live or blocks <= model.kv.blocks)


def _step(model: CausalModel, live: Sequence[_Live]) -> None:
    """Sample one more token for each answer."""
    logits = model.forward([Rows(one.cache, one.unfed, 1) for one in live])
    outcomes = draw_all(torch.cat(logits), [one.draw() for one in live])
    for one, outcome in zip(live, outcomes, strict=True):
        if isinstance(outcome, GalleyError):
            raise outcome
        one.tokens.append(outcome.tokens[0])


def _ended(one: _Live, model: CausalModel, answering: Answering) -> bool:
    full = len(one.prompt.tokens) + len(one.tokens) >= model.info.context_window
    return full or len(one.tokens) >= answering.max_tokens or one.tokens[-1] in model.info.eos_token_ids


def _line(one: _Live) -> str:
    return json.dumps(
        {
            "place": one.place,
            "digest": one.prompt.digest(0),
            "temperature": one.params.temperature,
            "answer": one.tokens,
        }
    )


def _stored(store: Path, prompts: Sequence[Prompt]) -> dict[int, Answer]:
    """Return the answers of an earlier run."""
    answers: dict[int, Answer] = {}
    for entry in kept_lines(store):
        place = entry["place"]
        if place >= len(prompts) or prompts[place].digest(0) != entry["digest"]:
            raise InvalidField("work", f"{store}: holds answers to other prompts")
        answers[place] = Answer(tuple(entry["answer"]), entry["temperature"])
    return answers


def corpus_of(prompts: Sequence[Prompt], answers: Sequence[Answer], chosen: Sequence[int]) -> Corpus:
    """Return the chosen conversations as a corpus."""
    names = tuple(sorted({prompt.workload for prompt in prompts}))
    tokens = [(*prompts[place].tokens, *answers[place].tokens) for place in chosen]
    return Corpus(
        ids=np.concatenate([np.array(conversation, np.int64) for conversation in tokens]),
        offsets=np.cumsum([0, *map(len, tokens)]),
        prompt_len=np.array([len(prompts[place].tokens) for place in chosen]),
        workload=np.array([names.index(prompts[place].workload) for place in chosen]),
        workload_names=names,
        temperature=np.array([answers[place].temperature for place in chosen], np.float32),
    )
