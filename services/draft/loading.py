"""Load the strategies and the description of a draft; torch is imported only for a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from galley.common.draft_loading import draft_version
from galley.common.host import this_host
from galley.common.logs import get_logger
from galley.common.models.fast_tokenizer import CONFIG
from galley.common.models.files import (
    CONFIGS,
    DRAFT_SECTION,
    end_token_ids,
    foreign_file,
    tokenizer_hash,
)
from galley.common.models.grammars import ReplicaGrammars, load_grammars
from galley.common.models.hub import local_directory
from galley.common.server.process import limit_threads, report_memory
from galley.core import names
from galley.core.errors import UnsupportedModel
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.settings import DraftSettings
from services.draft.strategies.base import NoneStrategy, Strategy
from services.draft.strategies.ngram import Lookups, NgramStrategy

if TYPE_CHECKING:
    from galley.engine.model import CausalModel
    from services.draft.strategies.model import ModelSteps

_LOG = get_logger(__name__)
_TOKENIZER = "tokenizer.json"


def load_strategies(
    settings: DraftSettings, lookups: Lookups | None = None
) -> tuple[dict[str, Strategy], pb.GetDraftInfoResponse]:
    """Return the strategies by name and the draft's description; blocks.

    Raise CallerFault if model or tokenizer is unusable, or does not offer the default strategy.
    """
    lookups = lookups or Lookups()
    offered: dict[str, Strategy] = {names.NGRAM: NgramStrategy(lookups), names.NO_STRATEGY: NoneStrategy()}
    if settings.oracle_answers is not None:
        from services.draft.strategies.oracle import OracleStrategy  # noqa: PLC0415  # for tests alone

        offered[names.ORACLE] = OracleStrategy(settings.oracle_answers, settings.oracle_spoil)
    model = None if settings.model is None else _load_model(settings, settings.model)
    if model is not None:
        from services.draft.strategies.model import ModelSteps  # noqa: PLC0415  # imports torch

        offered |= _model_strategies(model, ModelSteps(model), lookups)
    features = model.features if model else None
    default = settings.default_strategy
    if features is not None and "default_strategy" not in settings.model_fields_set:
        default = names.FEATURES
    if default not in offered:
        raise UnsupportedModel(
            f"--default-strategy: must be one of {', '.join(sorted(offered))} with this draft, got {default}"
        )
    digest = draft_version(model.info.directory) if model else ""
    info = pb.GetDraftInfoResponse(
        model=model.info.name if model else "",
        tokenizer_hash=_tokenizer_hash(settings, model),
        strategies=sorted(offered),
        default_strategy=default,
        max_draft_tokens=settings.max_draft_tokens,
        vocab_size=model.info.vocab_size if model else 0,
        host=this_host(settings.thread_count, settings.device),
        feature_layers=features.layers if features else (),
        feature_size=features.size if features else 0,
        version=settings.version or digest,
        max_load_bytes=settings.max_load_bytes,
        weights_digest=digest,
    )
    return offered, info


def load_replacement(
    settings: DraftSettings, directory: Path, info: pb.GetDraftInfoResponse, lookups: Lookups
) -> dict[str, Strategy]:
    """Return the strategies of the trained draft in `directory`, which has proposed once; blocks.

    Raise CallerFault unless it can be served in place of the model that `info` describes.
    """
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # imports torch, as do these
    from services.draft.strategies.model import ModelSteps  # noqa: PLC0415
    from services.draft.strategies.probe import refuse_silent  # noqa: PLC0415

    _refuse_other_kind(resolve_model(str(directory)), info)
    model = _load_model(settings, str(directory))
    steps = ModelSteps(model)
    refuse_silent(steps, model)
    return _model_strategies(model, steps, lookups)


def _refuse_other_kind(directory: Path, info: pb.GetDraftInfoResponse) -> None:
    """Raise UnsupportedModel unless gateways may go on using what they know of the replica."""
    from galley.engine.load.draft_directory import draft_format  # noqa: PLC0415  # imports torch
    from galley.engine.load.module import load_config  # noqa: PLC0415

    config = load_config(directory)
    form = draft_format(config)
    if form is None:
        raise UnsupportedModel(f"{DRAFT_SECTION}: must be in config.json, as in that of a trained draft")
    layers = form.feature_layers
    for name, got, expected in (
        ("tokenizer_hash", form.tokenizer_hash, info.tokenizer_hash),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("feature_layers", list(layers), list(info.feature_layers)),
        ("hidden_size", config.hidden_size if layers else 0, info.feature_size),
    ):
        if got != expected:
            raise UnsupportedModel(f"{name}: must be {expected}, as of the present draft, got {got}")


def _model_strategies(model: CausalModel, steps: ModelSteps, lookups: Lookups) -> dict[str, Strategy]:
    from services.draft.strategies.hybrid import HybridStrategy  # noqa: PLC0415  # torch, as do these
    from services.draft.strategies.model import ModelStrategy  # noqa: PLC0415
    from services.draft.strategies.trees import ByWidth, TreeStrategy  # noqa: PLC0415

    # A draft that reads states does without where there are none.
    alone = names.MODEL if model.features is None else names.FEATURES
    return {
        alone: ByWidth(ModelStrategy(steps), TreeStrategy(steps)),
        names.HYBRID: ByWidth(HybridStrategy(lookups, steps), TreeStrategy(steps, lookups)),
    }


def draft_grammars(settings: DraftSettings, vocab_size: int) -> ReplicaGrammars | None:
    """Return what compiles the grammars of sessions; None for a draft that knows no tokenizer. Blocks.

    A `vocab_size` of 0 is that of the tokenizer.
    """
    if settings.model is None and settings.tokenizer is None:
        return None
    directory = _tokenizer_directory(settings)
    return load_grammars(directory, vocab_size, end_token_ids(directory))


def _tokenizer_directory(settings: DraftSettings) -> Path:
    if settings.model is None:
        files = (_TOKENIZER, CONFIG, *CONFIGS)
        directory = local_directory(str(settings.tokenizer), files)
        if (reason := foreign_file(directory, files)) is not None:
            raise UnsupportedModel(reason)
        return directory
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # imports torch

    own = resolve_model(settings.model)
    # A trained draft has only its target's.
    return own if (own / _TOKENIZER).is_file() else resolve_model(settings.target_model)


def _load_model(settings: DraftSettings, spec: str) -> CausalModel:
    limit_threads(settings.thread_count)
    from galley.engine.model import load_model  # noqa: PLC0415  # imports torch

    # All kept tokens, and of each session a partial block and its draft tokens.
    of_tokens = -(-settings.max_kv_tokens // BLOCK_TOKENS)
    of_session = 1 + -(-settings.max_draft_tokens // BLOCK_TOKENS)
    what = f"model: {spec} and KV of {settings.max_kv_tokens} tokens"
    with report_memory(what, "lower --max-kv-tokens or --max-sessions, or draft with a smaller model"):
        return load_model(
            spec,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.thread_count,
            kv_blocks=of_tokens + settings.max_sessions * of_session,
            target_model=settings.target_model,
        )


def _tokenizer_hash(settings: DraftSettings, model: CausalModel | None) -> str:
    if model is not None:
        return model.info.tokenizer_hash
    if settings.tokenizer is not None:
        return tokenizer_hash(local_directory(settings.tokenizer, (_TOKENIZER,)))
    _LOG.warning(
        "draft has no tokenizer hash; gateways refuse it",
        remedy="--model or --tokenizer",
    )
    return ""
