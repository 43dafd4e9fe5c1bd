"""One step of our engine and of transformers, not compiled, over the same sessions, tokens and contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from galley.core.step import StepChunk
from galley.core.trees import ROOT, Parents, simplified

if TYPE_CHECKING:
    from galley.engine.model import CausalModel


@dataclass(frozen=True, slots=True)
class Case:
    """`sessions` sessions of `context` tokens each feed `tokens` more, all of whose logits are wanted.

    The tokens after the first are a chain, or a tree in which a node has `width` children.
    """

    sessions: int
    tokens: int
    context: int
    width: int = 1

    @property
    def rows(self) -> int:
        """Return the tokens of the step."""
        return self.sessions * self.tokens

    def __str__(self) -> str:
        shape = f"/{self.width}" if self.width > 1 else ""
        return f"{self.sessions}x{self.tokens}{shape}@{self.context}"

    @property
    def parents(self) -> Parents:
        """Return the parents of a session's draft tokens, level by level."""
        return simplified([node // self.width + ROOT for node in range(self.tokens - 1)])

    def blocks(self, block_tokens: int) -> int:
        """Return the KV blocks that all sessions need."""
        return self.sessions * -(-(self.context + self.tokens) // block_tokens)


def some_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Return random token ids; the time of a step does not depend on them."""
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class OurStep:
    """A step of our engine: `run` over one chunk a session.

    The sessions share no block; their KV is that of random tokens. Every `stride`-th block is used.
    """

    def __init__(self, model: CausalModel, case: Case, stride: int = 1) -> None:
        self._model = model
        each = case.blocks(model.kv.block_tokens) // case.sessions
        blocks = range(0, case.sessions * each * stride, stride)
        tables = [list(blocks[at * each : (at + 1) * each]) for at in range(case.sessions)]
        vocab = model.info.vocab_size
        self._fill(some_tokens(case.context, vocab), tables)
        fed = some_tokens(case.rows, vocab, seed=1)
        self.chunks = [
            StepChunk(
                case.context,
                fed[at * case.tokens : (at + 1) * case.tokens],
                table,
                case.tokens,
                parents=case.parents,
            )
            for at, table in enumerate(tables)
        ]

    def _fill(self, context: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Compute the context's KV once and copy its blocks to every session."""
        first = tables[0]
        piece = 256
        for start in range(0, len(context), piece):
            self._model.run([StepChunk(start, context[start : start + piece], first, 0)])
        copies = [pair for table in tables[1:] for pair in zip(first, table, strict=True)]
        if context and copies:
            # Copies belong to a step, so feed the last token once more.
            again = StepChunk(len(context) - 1, context[-1:], first, 0)
            self._model.run([again], copies)

    def __call__(self) -> Tensor:
        """Run one step; the same positions are written each time."""
        return self._model.run(self.chunks)


class TransformersModel:
    """The same weights in transformers' own code, with sdpa attention, not compiled."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  # seconds
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)  # nosec B615  # a directory
        self.model = model.eval()
        self.config = model.config
        self.dtype = dtype

    def forms(self, case: Case) -> dict[str, Callable[[], object]]:
        """Return the step for each cache class; the contexts are equal, so nothing is padded."""
        return {"StaticCache": self._static(case), "DynamicCache": self._dynamic(case)}

    def _fed(self, case: Case) -> Tensor:
        fed = some_tokens(case.rows, self.config.vocab_size, seed=1)
        return torch.tensor(fed).view(case.sessions, case.tokens)  # [sessions, tokens]

    def _fill(self, cache: Any, case: Case) -> None:
        heads = self.config.num_key_value_heads
        width = self.config.hidden_size // self.config.num_attention_heads
        kv = torch.randn(case.sessions, heads, case.context, width).to(self.dtype)
        for layer in range(self.config.num_hidden_layers):
            cache.update(kv, kv.clone(), layer)

    @torch.inference_mode()
    def _static(self, case: Case) -> Callable[[], object]:
        from transformers import StaticCache  # noqa: PLC0415  # seconds

        cache: Any = StaticCache(config=self.config, max_cache_len=case.context + case.tokens)
        self._fill(cache, case)
        fed = self._fed(case)

        @torch.inference_mode()
        def step() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(case.context)
            self._run(fed, cache)

        return step

    @torch.inference_mode()
    def _dynamic(self, case: Case) -> Callable[[], object]:
        from transformers import DynamicCache  # noqa: PLC0415  # seconds

        cache = DynamicCache(config=self.config)
        self._fill(cache, case)
        fed = self._fed(case)

        @torch.inference_mode()
        def step() -> None:
            self._run(fed, cache)
            cache.crop(-case.tokens)

        return step

    def _run(self, fed: Tensor, cache: Any) -> None:
        self.model(input_ids=fed, past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed a prompt into an empty cache; compute the logits of its last token."""
        self.model(input_ids=torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1)
