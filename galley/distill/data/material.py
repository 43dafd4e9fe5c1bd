"""Gather what to train and measure on: existing corpora, or prompts that the target answers.

Many prompts are answered at once; each answer is stored when it ends, so none is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import GalleyError, InvalidField
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw
from galley.distill.data.corpus import Conversation, Corpus, corpus_of, read_corpus, write_corpus
from galley.distill.data.prompts import Prompt, read_prompts, split, user_turn_opening
from galley.distill.options import Options
from galley.distill.training.evaluation import Reports
from galley.distill.work import kept_lines
from galley.engine.batch import Rows, SessionCache
from galley.engine.model import CausalModel
from galley.engine.sampler import draw_all

# Bounds in tokens of a generated user's turn, and answers at once.
_MIN_PROMPT, _MAX_PROMPT = 4, 256
_AT_ONCE = 32


def gather(options: Options, reports: Reports) -> tuple[Corpus, Corpus]:
    """Return the corpus to train on and the one held out; the target's answers are kept in `work`.

    Raises InvalidField naming the option whose file is at fault.
    """
    if options.corpus:
        whole = list(chain.from_iterable(read_corpus(path) for path in options.corpus))
        if options.held_out is not None:
            return corpus_of(whole), read_corpus(options.held_out)
        prompts = [Prompt("", tuple(map(int, one.tokens[: one.prompt_len]))) for one in whole]
        return _divided(prompts, whole, options)
    kept = options.work / "train.npz", options.work / "heldout.npz"
    if all(path.exists() for path in kept):
        return read_corpus(kept[0]), read_corpus(kept[1])
    both = _answered(options, reports)
    for corpus, path in zip(both, kept, strict=True):
        write_corpus(corpus, path)
    return both


def _divided(
    prompts: Sequence[Prompt], conversations: Sequence[Conversation], options: Options
) -> tuple[Corpus, Corpus]:
    """Return the corpora of the conversations to train on and of those held out, by their prompts' hashes."""
    train, held_out = split(prompts, options.held_out_share, options.seed)
    return corpus_of([conversations[i] for i in train]), corpus_of([conversations[i] for i in held_out])


def _answered(options: Options, reports: Reports) -> tuple[Corpus, Corpus]:
    """Return both corpora from the target's answers."""
    try:
        tokenizer = Tokenizer.load(str(options.target))
    except (OSError, ValueError) as error:
        raise InvalidField("target", str(error)) from error
    model = CausalModel.load(
        options.target, dtype=getattr(torch, options.dtype), device="cpu", threads=options.threads
    )
    prompts = read_prompts(options.prompts, tokenizer)
    if options.self_prompts:
        prompts += _made_up(model, tokenizer, options, reports)
    split(prompts, options.held_out_share, options.seed)  # refuses too few
    reports.stage("answers", len(prompts))
    answering = Answering(options.answer, options.temperature, options.seed)
    answers = answer_all(model, prompts, answering, options.work / "answers.jsonl", reports.done)
    conversations = [
        Conversation(
            (*prompt.tokens, *answer.tokens), len(prompt.tokens), prompt.workload, answer.temperature
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return _divided(prompts, conversations, options)


def _made_up(model: CausalModel, tokenizer: Tokenizer, options: Options, reports: Reports) -> list[Prompt]:
    """Return prompts that the target generates at temperature 1 after the opening of a user's turn."""
    opening = user_turn_opening(tokenizer)
    reports.stage("prompts", options.self_prompts)
    answering = Answering(_MAX_PROMPT, 1.0, options.seed, greedy_share=0.0)
    openings = [Prompt("self", opening, number) for number in range(options.self_prompts)]
    turns = answer_all(model, openings, answering, options.work / "prompts.jsonl", reports.done)
    texts = {
        tokenizer.decode(turn.tokens).strip()
        for turn in turns
        if _MIN_PROMPT <= len(turn.tokens) < _MAX_PROMPT
    }
    chats = [[{"role": "user", "content": text}] for text in sorted(texts) if text]
    made = [Prompt("self", tuple(tokenizer.encode_chat(chat))) for chat in chats]
    room = model.info.context_window - options.answer
    return [prompt for prompt in made if len(prompt.tokens) <= room]


@dataclass(frozen=True, slots=True)
class Answering:
    """The sampling of answers: half of them greedy, chosen by each prompt's hash."""

    max_tokens: int
    temperature: float
    seed: int
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
    window, longest = model.info.context_window, max(len(prompt.tokens) for prompt in prompts)
    if longest + 2 > window:
        raise InvalidField("prompts", f"must leave room in the window of {window} tokens, got {longest}")
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
                line = {
                    "place": ended.place,
                    "digest": ended.prompt.digest(0),
                    "temperature": ended.params.temperature,
                    "answer": ended.tokens,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
                report(len(answers))
    return [answers[place] for place in range(len(prompts))]


def _room(model: CausalModel, live: Sequence[_Live], prompt: Prompt, answering: Answering) -> bool:
    """Return True if one more answer may begin, so that all can be completed."""
    lengths = [len(one.tokens) + answering.max_tokens for one in (prompt, *(one.prompt for one in live))]
    blocks = sum(-(-length // model.kv.block_tokens) for length in lengths)
    return len(live) < _AT_ONCE and (not live or blocks <= model.kv.blocks)


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


def _stored(store: Path, prompts: Sequence[Prompt]) -> dict[int, Answer]:
    """Return the answers of an earlier run."""
    answers: dict[int, Answer] = {}
    for entry in kept_lines(store):
        place = entry["place"]
        if place >= len(prompts) or prompts[place].digest(0) != entry["digest"]:
            raise InvalidField("work", f"{store}: holds answers to other prompts")
        answers[place] = Answer(tuple(entry["answer"]), entry["temperature"])
    return answers
