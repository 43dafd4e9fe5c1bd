"""Gather what to train and measure on: existing corpora, or prompts that the target answers."""

from __future__ import annotations

import numpy as np
import torch

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.distill.data.answering import Answering, answer_all, corpus_of
from galley.distill.data.corpus import Corpus, joined, read_corpus, taken, write_corpus
from galley.distill.data.prompts import Prompt, read_prompts, split, user_turn_opening
from galley.distill.options import Options
from galley.distill.reports import Reports
from galley.engine.model import CausalModel

# Bounds in tokens of a generated user's turn.
_MIN_PROMPT, _MAX_PROMPT = 4, 256
_AT_ONCE = 32


def gather(options: Options, reports: Reports) -> tuple[Corpus, Corpus]:
    """Return the corpus to train on and the one held out; the target's answers are kept in `work`.

    Raises InvalidField naming the option whose file is at fault.
    """
    if options.corpus:
        whole = joined([read_corpus(path) for path in options.corpus])
        if options.held_out is not None:
            return whole, read_corpus(options.held_out)
        return _divided(whole, options)
    kept = options.work / "train.npz", options.work / "heldout.npz"
    if all(path.exists() for path in kept):
        return read_corpus(kept[0]), read_corpus(kept[1])
    both = _answered(options, reports)
    for corpus, path in zip(both, kept, strict=True):
        write_corpus(corpus, path)
    return both


def _divided(whole: Corpus, options: Options) -> tuple[Corpus, Corpus]:
    prompts = [
        Prompt("", tuple(whole.tokens(place)[: whole.prompt_len[place]].tolist()))
        for place in range(len(whole))
    ]
    train, held_out = split(prompts, options.held_out_share, options.seed)
    return taken(whole, np.array(train)), taken(whole, np.array(held_out))


def _answered(options: Options, reports: Reports) -> tuple[Corpus, Corpus]:
    """Return both corpora from the target's answers."""
    tokenizer = _tokenizer(options)
    model = CausalModel.load(
        options.target, dtype=getattr(torch, options.dtype), device="cpu", threads=options.threads
    )
    prompts = read_prompts(options.prompts, tokenizer)
    if options.self_prompts:
        prompts += _made_up(model, tokenizer, options, reports)
    train, held_out = split(prompts, options.held_out_share, options.seed)
    reports.stage("answers", len(prompts))
    answering = Answering(options.answer, options.temperature, _AT_ONCE, options.seed)
    answers = answer_all(model, prompts, answering, options.work / "answers.jsonl", reports.done)
    return corpus_of(prompts, answers, train), corpus_of(prompts, answers, held_out)


def _tokenizer(options: Options) -> Tokenizer:
    try:
        return Tokenizer.load(str(options.target))
    except (OSError, ValueError) as error:
        raise InvalidField("target", str(error)) from error


def _made_up(model: CausalModel, tokenizer: Tokenizer, options: Options, reports: Reports) -> list[Prompt]:
    """Return prompts that the target generates at temperature 1 after the opening of a user's turn."""
    opening = user_turn_opening(tokenizer)
    reports.stage("prompts", options.self_prompts)
    answering = Answering(_MAX_PROMPT, 1.0, _AT_ONCE, options.seed, greedy_share=0.0)
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
