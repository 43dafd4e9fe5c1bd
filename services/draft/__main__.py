"""Run a draft replica: `python -m services.draft`."""

from __future__ import annotations

from galley.common.server.sigterm import heed_sigterm

if __name__ == "__main__":
    heed_sigterm()

from collections.abc import Awaitable, Callable

import grpc

from galley.common.models.grammars import ReplicaGrammars
from galley.common.redis.connections import refuse_bad_files
from galley.common.registry.leases import DRAFT_POOL
from galley.common.registry.registration import registered
from galley.common.server.process import in_passing_thread
from galley.common.server.server import Parts, Prepared, Service, run_main
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.answers.exchange import AnswerExchange
from services.draft.answers.log import ANY_VOCABULARY, AnswerLog
from services.draft.answers.mailbox import SharedAnswers
from services.draft.loading import draft_grammars, load_strategies
from services.draft.loop import DraftLoop
from services.draft.replacement import DraftReplacement
from services.draft.servicer import DraftService
from services.draft.settings import DraftSettings
from services.draft.strategies.ngram import Lookups

_DESCRIPTION = (
    "A Galley draft: proposes the next tokens of many sessions at once, by a cheap model or by none."
)


def build(settings: DraftSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[Service]]:
    """Return what builds the service on a server. Raise BadFile if a file is unusable."""
    refuse_bad_files(settings.redis_url)

    async def build_service(server: grpc.aio.Server, parts: Parts) -> Service:
        if settings.model is not None:
            parts.readiness.stage("loading model", detail=settings.model)
        shared = SharedAnswers() if settings.shares_answers else None
        lookups = Lookups(shared)
        strategies, info = await in_passing_thread(load_strategies, settings, lookups)
        spans = parts.telemetry.scope(__name__)
        loop = DraftLoop(
            strategies,
            max_sessions=settings.max_sessions,
            max_tokens=settings.max_kv_tokens,
            max_batch=settings.max_batch,
            spans=spans,
            metrics=parts.metrics,
        )
        loop.background = shared
        grammars = await in_passing_thread(draft_grammars, settings, info.vocab_size)
        exchange = None
        if shared is not None:
            exchange = AnswerExchange(_log(settings, info, grammars), shared, loop.wake)
        replacement = DraftReplacement(settings, lookups, loop, info)
        service = DraftService(loop, info, spans, exchange, grammars, replacement)
        rpc.add_DraftServicer_to_server(service, server)
        address = settings.advertise or parts.address
        return registered(service, settings, DRAFT_POOL, lambda: service.lease(address))

    return build_service


def _log(
    settings: DraftSettings, info: pb.GetDraftInfoResponse, grammars: ReplicaGrammars | None
) -> AnswerLog:
    url, ttl_s = settings.redis_url.get_secret_value(), settings.shared_answers_ttl_s
    vocab_size = info.vocab_size or (ANY_VOCABULARY if grammars is None else grammars.vocab_size)
    return AnswerLog(url, settings.pool, info.tokenizer_hash, ttl_s, vocab_size=vocab_size)


def main() -> None:
    run_main(DraftSettings, "draft", _DESCRIPTION, lambda settings: Prepared(build(settings)))


if __name__ == "__main__":
    main()
