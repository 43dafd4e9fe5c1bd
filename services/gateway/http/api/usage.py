"""Usage of a request, as OpenAI counts it, and its speculation, as vLLM names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from galley.core.session.machine import Session


def usage(sessions: Iterable[Session], n: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return the usage of a request whose prompts have `n` answers each; a prompt counts once."""
    all_of = list(sessions)
    prompt = sum(len(session.spec.prompt) for session in all_of[::n])
    cached = sum(min(session.stats.cached_tokens, len(session.spec.prompt)) for session in all_of[::n])
    output = sum(session.logged_output for session in all_of)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": sum(session.predicted[0] for session in all_of),
            "rejected_prediction_tokens": sum(session.predicted[1] for session in all_of),
        },
    }


def metrics(sessions: Iterable[Session]) -> dict[str, Any]:
    """Return the acceptance of the request's drafts since this response began."""
    all_of = [session.stats for session in sessions]
    drafts = sum(next(iter(stats.verified_at), 0) for stats in all_of)
    verified = sum(stats.verified for stats in all_of)
    accepted = sum(stats.accepted for stats in all_of)
    positions = range(max((len(stats.accepted_at) for stats in all_of), default=0))
    at = [sum(stats.accepted_at[i] for stats in all_of if i < len(stats.accepted_at)) for i in positions]
    return {
        "speculative_decoding": {
            "num_drafts": drafts,
            "num_draft_tokens": verified,
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": at,
            "acceptance_rate": accepted / verified if verified else None,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        }
    }
