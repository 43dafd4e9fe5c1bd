"""The draw of each rank of vLLM: Galley's own sampling in place of vLLM's rejection sampler.

With any speculative configuration, every step of vLLM's first model runner samples by one attribute,
`runner.rejection_sampler`, whether there are draft tokens or not. The sampler here draws each position by
the noise that draft and target share, and accepts a draft token if it is equal. Every rank draws the same
tokens, since a draw depends on logits, seed and position alone.

vLLM's second model runner has no such attribute. There, a logits processor that adds the noise to a request
that vLLM believes greedy would do the same (docs/decisions/049-drive-vllm-step-by-step.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from galley.core.step import Draw, Sampled

# The key of a sequence's draw in vLLM's SamplingParams.extra_args.
DRAW = "galley_draw"
# vLLM's sign of a position without a token.
_NO_TOKEN = -1
_RUNNER = (
    "rejection_sampler",
    "requests",
    "discard_request_mask",
    "input_batch",
    "sample_tokens",
    "_zero_block_ids",
)
_BATCH = ("req_ids", "num_tokens_no_spec", "token_ids_cpu", "spec_token_ids")


class NoProposer:
    """The proposer of vLLM's `custom_class`: it never proposes."""

    def __init__(self, config: object) -> None:
        """Take vLLM's configuration, which is not needed."""

    def load_model(self, model: object) -> None:
        """Load nothing."""

    def propose(self, sampled: Sequence[object], *_: object, **__: object) -> list[list[int]]:
        return [[] for _ in sampled]


class DrawExtension:
    """Methods that vLLM adds to the worker of each rank."""

    model_runner: Any

    def galley_install(self) -> list[str]:
        """Replace the sampler of this rank. Return the names that the worker lacks; none may be missing."""
        from galley.engine.sampling.draw import warm_up  # noqa: PLC0415  # numba must come after vLLM's start

        runner = self.model_runner
        if not hasattr(runner, "rejection_sampler") and not _is_last_stage():
            return []  # the last pipeline stage samples
        batch = getattr(runner, "input_batch", None)
        missing = [f"runner.{name}" for name in _RUNNER if not hasattr(runner, name)]
        missing += [f"runner.input_batch.{name}" for name in _BATCH if not hasattr(batch, name)]
        if not missing:
            warm_up()
            runner.rejection_sampler = sampler = SharedNoiseSampler(runner)
            runner.sample_tokens = sampler.masking(runner.sample_tokens)
        return missing

    def galley_zero(self, blocks: list[int]) -> None:
        """Zero blocks of KV that may hold NaN."""
        self.model_runner._zero_block_ids(blocks)  # noqa: SLF001  # there is no public way


def _is_last_stage() -> bool:
    from vllm.distributed.parallel_state import get_pp_group  # noqa: PLC0415  # set up by the worker

    return bool(get_pp_group().is_last_rank)


class SharedNoiseSampler:
    def __init__(self, runner: Any) -> None:
        # numba must come after vLLM's start.
        from galley.engine.sampler import draw_all  # noqa: PLC0415
        from galley.engine.sampling.layout import has_penalties  # noqa: PLC0415

        self._runner = runner
        self._draw_all = draw_all
        self._has_penalties = has_penalties
        self._masks: Mapping[str, Any] = {}  # of the step, by sequence

    def masking(self, sample_tokens: Callable[[None], Any]) -> Callable[[Mapping[str, Any] | None], Any]:
        """Return the runner's `sample_tokens` for Galley's masks: vLLM's own would change the logprobs."""

        def sample_masked(masks: Mapping[str, Any] | None) -> Any:
            self._masks = masks or {}
            return sample_tokens(None)

        return sample_masked

    def __call__(self, metadata: Any, _probs: object, logits: Tensor, _metadata: object) -> SamplerOutput:
        """Draw each sequence's rows of `logits` [sum of (draft tokens + 1), vocab]."""
        counts: list[int] = metadata.num_draft_tokens
        draws: dict[int, Draw] = {}
        rows: list[int] = []
        first = 0
        # A prompt that goes on after this step has a row too, of which nothing is drawn.
        for index, goes_on in enumerate(self._runner.discard_request_mask.np[: len(counts)].tolist()):
            end = first + counts[index] + 1
            if not goes_on:
                draws[index] = self._draw(index)
                rows += range(first, end)
            first = end
        if len(rows) < first:
            logits = logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]
        outcomes = self._draw_all(logits.float(), list(draws.values())) if draws else []
        sampled = {
            index: outcome
            for index, outcome in zip(draws, outcomes, strict=True)
            if isinstance(outcome, Sampled)
        }
        return _output(len(counts), sampled, logits.device)

    def _draw(self, index: int) -> Draw:
        """Return the draw of a sequence, whose history is this rank's own record of its tokens."""
        batch = self._runner.input_batch
        template: Draw = self._runner.requests[batch.req_ids[index]].sampling_params.extra_args[DRAW]
        length = int(batch.num_tokens_no_spec[index])
        # Only penalties read the tokens; all else needs their number.
        history: Sequence[int] = (
            batch.token_ids_cpu[index, :length].tolist() if self._has_penalties(template) else range(length)
        )
        return replace(
            template,
            history=history,
            draft_tokens=tuple(batch.spec_token_ids[index]),
            allowed=self._masks.get(batch.req_ids[index]),
        )


def _output(count: int, sampled: dict[int, Sampled], device: torch.device) -> SamplerOutput:
    """Return the tokens as vLLM reads them: [sequences, width], padded at the right."""
    # vLLM takes a column of one as tokens that were all drawn.
    width = max((len(drawn.tokens) for drawn in sampled.values()), default=1)
    width = max(width, 1 if len(sampled) == count else 2)
    padding = (_NO_TOKEN,) * width
    lists = [
        (*sampled[index].tokens, *padding)[:width] if index in sampled else padding for index in range(count)
    ]
    tokens = torch.tensor(lists, dtype=torch.int32, device=device)
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=_logprobs(count, width, sampled, device))


def _logprobs(
    count: int, width: int, sampled: dict[int, Sampled], device: torch.device
) -> LogprobsTensors | None:
    """Return the logprobs as vLLM reads them, [sequences * width, 1 + top]: each token's own comes first."""
    entries = {
        index * width + offset: position
        for index, drawn in sampled.items()
        for offset, position in enumerate(drawn.logprobs)
    }
    if not entries:
        return None
    top = max(len(position.top) for position in entries.values())
    ids = np.zeros((count * width, 1 + top), dtype=np.int32)
    values = np.zeros((count * width, 1 + top), dtype=np.float32)
    for row, position in entries.items():
        end = 1 + len(position.top)
        ids[row, 1:end] = [token for token, _ in position.top]
        values[row, :end] = [position.logprob, *(logprob for _, logprob in position.top)]
    ranks = np.zeros(count * width, dtype=np.int32)
    return LogprobsTensors(*(torch.from_numpy(array).to(device) for array in (ids, values, ranks)))
