"""Measure parts of a step: attention, sampling, the pool's size, eight rows, the prefill of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.engine.sides import Case, OurStep, TransformersModel, some_tokens
from bench.paired import alternate, fastest
from galley.core.errors import GalleyError
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepChunk
from galley.engine.sampler import draw_all

if TYPE_CHECKING:
    from galley.engine.model import CausalModel

PREFILL_TOKENS = 182
SAMPLED = Case(16, 5, 256)
INVARIANCE_CASES = (Case(1, 1, 1024), Case(8, 5, 256), Case(16, 5, 256), Case(16, 5, 1024))
POOL_CASE = Case(16, 1, 256)
POOL_FACTOR = 8
CONTEXTS = (64, 256, 512, 1024, 1536)
# One session without draft tokens, and with seven.
ONE_ROW, EIGHT_ROWS = Case(1, 1, 256), Case(1, 8, 256)


# ------------------------------------------------------------------------------------ invariance --


class TorchAttention:
    """Attention without regard to bits: torch's own, over contiguous KV, for all layers of a step.

    It has two forms, a call for each sequence or one over the batch; the faster one counts. (Contexts are
    equal here, so nothing is padded, as a real batch would be.) Heads that share keys are rows of one query,
    since torch's own grouped form would repeat the keys.
    """

    def __init__(self, config: Any, case: Case, dtype: torch.dtype) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = config.hidden_size // heads
        keys = case.context + case.tokens
        group = heads // kv_heads
        self._query = torch.randn(case.sessions, kv_heads, group * case.tokens, width).to(dtype)
        self._kv = [
            torch.randn(2, case.sessions, kv_heads, keys, width).to(dtype)
            for _ in range(config.num_hidden_layers)
        ]
        at = torch.arange(case.context, keys).repeat(group)[:, None]
        seen = torch.arange(keys)[None] <= at  # [group * tokens, keys]
        self._mask = None if case.tokens == 1 else torch.where(seen, 0.0, -torch.inf).to(dtype)

    def batched(self) -> None:
        """Attend by one call a layer."""
        for keys, values in self._kv:
            self._attend(self._query, keys, values)

    def by_sequence(self) -> None:
        """Attend with one call for each sequence and layer."""
        for keys, values in self._kv:
            for at in range(len(self._query)):
                self._attend(self._query[at : at + 1], keys[at : at + 1], values[at : at + 1])

    @torch.inference_mode()
    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        scaled_dot_product_attention(query, keys, values, self._mask)


def invariance(model: CausalModel, config: Any, pairs: int) -> list[dict[str, Any]]:
    """Return the seconds of each pair for each of INVARIANCE_CASES: the cost of invariance.

    The time of attention is step(context) - step(0), and likewise for torch's. The cost of invariance is our
    attention minus torch's, as a share of step(context). The order of sums in matrix products, which also
    keeps rows independent, is oneDNN's own and costs nothing.
    """
    found = []
    for case in INVARIANCE_CASES:
        short = Case(case.sessions, case.tokens, 0)
        dtype = getattr(torch, model.info.dtype)
        theirs = TorchAttention(config, case, dtype)
        none = TorchAttention(config, short, dtype)
        form = fastest({"batched": theirs.batched, "by_sequence": theirs.by_sequence})
        # Each lays out its sessions over the same blocks, so the short steps come with their own.
        times = alternate(
            {
                "step": OurStep(model, case),
                "torch": getattr(theirs, form),
                "torch_none": getattr(none, form),
            },
            pairs,
        )
        bare = alternate({"step_none": OurStep(model, short)}, pairs)
        found.append(
            {
                "case": str(case),
                "torch_form": form,
                **{name: list(timed.wall_s) for name, timed in {**times, **bare}.items()},
            }
        )
    return found


# -------------------------------------------------------------------------------------- sampling --


def sampling(model: CausalModel, prompts: Sequence[Sequence[int]], pairs: int) -> dict[str, Any]:
    """Return the seconds of a step of 80 rows, and of sampling it at temperature 1, all drafts accepted.

    The contexts are real prompts, so that the logits are those of text.
    """
    step, histories = _text_step(model, prompts)
    logits = step()
    draws = _right_draws(logits, histories)
    times = alternate({"step": step, "sampling": lambda: draw_all(logits, draws)}, pairs)
    drawn = draw_all(logits, draws)
    return {
        "rows": len(logits),
        "drawn": sum(len(_sampled(found).tokens) for found in drawn),
        **{name: list(timed.wall_s) for name, timed in times.items()},
    }


def _text_step(
    model: CausalModel, prompts: Sequence[Sequence[int]]
) -> tuple[Callable[[], Tensor], list[list[int]]]:
    """Return a step whose chunks are the last tokens of prompts, all before them in the cache."""
    block_tokens = model.kv.block_tokens
    chunks, histories, first = [], [], 0
    for prompt in prompts[: SAMPLED.sessions]:
        count = -(-len(prompt) // block_tokens)
        table = range(first, first + count)
        first += count
        start = len(prompt) - SAMPLED.tokens
        model.run([StepChunk(0, prompt[:start], table, 0)])
        chunks.append(StepChunk(start, prompt[start:], table, SAMPLED.tokens))
        histories.append(list(prompt))
    return (lambda: model.run(chunks)), histories


def _right_draws(logits: Tensor, histories: Sequence[Sequence[int]]) -> list[Draw]:
    """Return draws whose draft tokens are the target's own, so that every row is sampled."""
    tokens = SAMPLED.tokens
    guesses: list[tuple[int, ...]] = [()] * len(histories)
    for _ in range(tokens - 1):
        draws = [_draw(history, (*known, 0)) for history, known in zip(histories, guesses, strict=True)]
        known_rows = len(draws[0].draft_tokens) + 1
        rows = logits.view(len(histories), tokens, -1)[:, :known_rows].flatten(0, 1)
        drawn = draw_all(rows.contiguous(), draws)
        guesses = [
            (*known, _sampled(found).tokens[len(known)]) for known, found in zip(guesses, drawn, strict=True)
        ]
    return [_draw(history, known) for history, known in zip(histories, guesses, strict=True)]


def _sampled(found: Sampled | GalleyError) -> Sampled:
    if isinstance(found, Sampled):
        return found
    raise found


def _draw(history: Sequence[int], guesses: tuple[int, ...]) -> Draw:
    return Draw(
        params=SamplingParams(temperature=1.0, seed=len(history)),
        history=history,
        prompt_len=len(history),
        stop_token_ids=frozenset(),
        min_tokens=0,
        draft_tokens=guesses,
    )


# ------------------------------------------------------------------------------ contexts and pools --


def contexts(model: CausalModel, pairs: int) -> dict[str, Any]:
    """Return the seconds of a step of 16 sessions by the context that they use."""
    found = {}
    for context in CONTEXTS:
        case = Case(POOL_CASE.sessions, POOL_CASE.tokens, context)
        if case.blocks(model.kv.block_tokens) <= model.kv.blocks:
            found[str(context)] = list(alternate({"step": OurStep(model, case)}, pairs)["step"].wall_s)
    return found


def pools(small: CausalModel, large: CausalModel, pairs: int) -> dict[str, Any]:
    """Return the seconds of the same step in two pools; in the large one its blocks lie far apart."""
    stride = large.kv.blocks // POOL_CASE.blocks(large.kv.block_tokens)
    work = {"small": OurStep(small, POOL_CASE), "large": OurStep(large, POOL_CASE, stride=stride)}
    times = alternate(work, pairs)
    return {
        "small_blocks": small.kv.blocks,
        "large_blocks": large.kv.blocks,
        **{name: list(timed.wall_s) for name, timed in times.items()},
    }


# ---------------------------------------------------------------------------------- a small step --


def small(model: CausalModel, pairs: int) -> dict[str, Any]:
    """Return the seconds of a step of one row and of eight, of one session."""
    times = alternate({"one": OurStep(model, ONE_ROW), "eight": OurStep(model, EIGHT_ROWS)}, pairs)
    return {name: list(timed.wall_s) for name, timed in times.items()}


# --------------------------------------------------------------------------------------- prefill --


def prefill(model: CausalModel, peer: TransformersModel, pairs: int) -> dict[str, Any]:
    """Return the seconds of a prompt of PREFILL_TOKENS, with logits of the last one."""
    tokens = some_tokens(PREFILL_TOKENS, model.info.vocab_size)
    table = range(-(-PREFILL_TOKENS // model.kv.block_tokens))
    chunk = StepChunk(0, tokens, table, 1)
    times = alternate({"ours": lambda: model.run([chunk]), "peer": lambda: peer.prefill(tokens)}, pairs)
    return {name: list(timed.wall_s) for name, timed in times.items()}


# -------------------------------------------------------------------------------------- roofline --


def bandwidth(size_bytes: int = 512 * 2**20, tries: int = 5) -> dict[str, float]:
    """Return the bytes a second that torch's copy (reads and writes) and sum (reads) move, at best."""
    source = torch.ones(size_bytes // 4)
    into = torch.empty_like(source)
    times = alternate({"copy": lambda: into.copy_(source), "sum": source.sum}, tries)
    return {
        "copy": 2 * size_bytes / min(times["copy"].wall_s),
        "sum": size_bytes / min(times["sum"].wall_s),
    }
