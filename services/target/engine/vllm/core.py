"""vLLM's engine core in this process, driven one step at a time from the engine's thread.

A sequence is a request of vLLM that never ends by itself: stop tokens, lengths and credit are the caller's.
Between two steps the caller may name other sequences and other draft tokens for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

from galley.common.logs import get_logger
from galley.common.models.files import tokenizer_hash
from galley.core.errors import Broken, GalleyError, UnsupportedModel
from galley.core.records import PositionLogprobs
from galley.core.step import Draw, Sampled
from galley.engine.masking import without_early_end
from services.target.engine.protocol import EngineInfo
from services.target.engine.vllm.adapters import NO_ADAPTERS, Adapters
from services.target.engine.vllm.arguments import (
    check_version,
    engine_arguments,
    refuse_unknown,
    set_environment,
)
from services.target.engine.vllm.protocol import (
    CoreFacts,
    CoreLost,
    DroppedBlocks,
    NewSequence,
    SequenceStep,
    StoredBlocks,
)
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)
_LOST = "the engine core of vLLM has failed"
_USED = {
    "core": ("step", "preprocess_add_request", "add_request", "abort_requests", "collective_rpc", "shutdown"),
    "scheduler": (
        "requests",
        "running",
        "waiting",
        "kv_holding_waiting",
        "max_num_running_reqs",
        "get_grammar_bitmask",
    ),
    "scheduler.kv_cache_manager": ("allocate_slots", "block_pool", "num_kv_cache_groups"),
}


class VllmCore:
    """A `SteppedCore`. `on_loss` is called once, from any thread, when the core or a rank has failed."""

    def __init__(
        self, core: Any, info: EngineInfo, max_draft_tokens: int, adapters: Mapping[str, Any]
    ) -> None:
        """Take vLLM's core, and what it calls the adapters by name."""
        from vllm.distributed import kv_events  # noqa: PLC0415  # vLLM is optional, and slow to import

        self.info = info
        self.max_draft_tokens = max_draft_tokens
        self.on_loss: Callable[[], None] = lambda: None
        self._core = core
        self._scheduler = core.scheduler
        self._requests: dict[str, Any] = {}
        self._draws: dict[str, Draw] = {}
        self._is_lost = Lock()  # held for good once the core has failed
        self._adapters = adapters
        self._stored, self._removed = kv_events.BlockStored, kv_events.BlockRemoved

    @property
    def max_sequences(self) -> int:
        return int(self._scheduler.max_num_running_reqs)

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Return the processes of the ranks, in order; none if the only rank is this process."""
        return tuple(worker.proc.pid for worker in getattr(self._core.model_executor, "workers", ()))

    def add(self, sequence: NewSequence) -> None:
        """Add a sequence; it takes part in the steps that name it."""
        adapter = self._adapters[sequence.lora] if sequence.lora else None
        made = _vllm_request(sequence, self.info.context_window, adapter)
        request, wave = self._core.preprocess_add_request(made)
        self._core.add_request(request, wave)
        self._requests[sequence.id] = request
        self._draws[sequence.id] = sequence.draw

    def end(self, ids: Iterable[str]) -> None:
        known = [name for name in ids if self._requests.pop(name, None) is not None]
        for name in known:
            del self._draws[name]
        if known:
            self._core.abort_requests(known)

    def step(
        self, drafts: Mapping[str, tuple[int, ...]], constrained: Mapping[str, Draw] | None = None
    ) -> dict[str, SequenceStep]:
        """Run one step. Raise CoreLost if it fails, and then always: vLLM's state is undefined after that."""
        if self._is_lost.locked():
            raise CoreLost(_LOST)
        self._scheduler.drafts = drafts
        self._scheduler.constrained = constrained or {}
        try:
            outputs, _ = self._core.step()
        except Exception as error:
            self.lose(error)
            raise CoreLost(_LOST) from error
        drawn = {output.request_id: output for output in outputs[0].outputs} if 0 in outputs else {}
        return {name: self._step_of(name, drawn.get(name)) for name in drafts}

    def lose(self, cause: BaseException | None = None) -> None:
        """Make every further step raise CoreLost; `cause` is None if a rank was lost."""
        if self._is_lost.acquire(blocking=False):
            _LOG.error("engine core failed", error="a rank was lost" if cause is None else repr(cause))
            self.on_loss()

    def _step_of(self, name: str, output: Any) -> SequenceStep:
        request = self._requests[name]
        verified = len(self._scheduler.verified.get(name, ()))
        outcome = self._outcome(name, request, output)
        return SequenceStep(
            outcome=outcome,
            computed=min(request.num_computed_tokens, request.num_tokens - 1),
            cached=self._scheduler.cached.get(name, 0),
            rows=self._scheduler.scheduled.get(name, 0) - verified,
            verified=verified,
            is_cut=isinstance(outcome, Sampled) and len(outcome.tokens) < len(output.new_token_ids),
        )

    def _outcome(self, name: str, request: Any, output: Any) -> Sampled | GalleyError | None:
        failed: GalleyError | None = self._scheduler.unmasked.get(name)
        if failed is not None:
            return failed
        if output is not None and output.new_token_ids:
            drawn = Sampled(tuple(output.new_token_ids), self._logprobs(name, output.new_logprobs))
            draw = self._scheduler.constrained.get(name)
            return drawn if draw is None else without_early_end(draw, drawn)
        if request.is_finished():
            most = self.info.context_window - 1
            return Broken(f"sequence: must have at most {most} tokens, got {request.num_tokens}")
        if name not in self._scheduler.scheduled or request.is_prefill_chunk:
            return None
        return self._without_maximum(name, request)

    def _without_maximum(self, name: str, request: Any) -> Broken | None:
        """Return the error of a sequence whose logits have no finite maximum.

        On the CPU, NaN in the KV of a draft token reaches the rows before it, and later whoever gets its
        block. So the blocks are zeroed, and after draft tokens the sequence is computed again without.
        """
        blocks = self._scheduler.forget_blocks(request)
        self._core.collective_rpc("galley_zero", args=(blocks,))
        if name not in self._scheduler.verified:
            return Broken(f"logits for position {request.num_tokens}: must have a finite maximum")
        self._scheduler.recompute(request)
        return None

    def _logprobs(self, name: str, listed: Any) -> tuple[PositionLogprobs, ...]:
        count = self._draws[name].logprobs
        if listed is None or count is None:
            return ()
        top = min(count, self.info.vocab_size)
        rows = zip(listed.logprob_token_ids.tolist(), listed.logprobs.tolist(), strict=True)
        return tuple(
            PositionLogprobs(values[0], tuple(zip(ids[1 : 1 + top], values[1 : 1 + top], strict=True)))
            for ids, values in rows
        )

    def facts(self) -> CoreFacts:
        manager = self._scheduler.kv_cache_manager
        events, self._scheduler.kv_events = self._scheduler.kv_events, []
        return CoreFacts(
            used_blocks=self.info.kv_blocks - manager.block_pool.get_num_free_blocks(),
            events=[self._event(event) for event in events] if manager.num_kv_cache_groups == 1 else (),
        )

    def _event(self, event: Any) -> StoredBlocks | DroppedBlocks | None:
        if isinstance(event, self._stored):
            return StoredBlocks(
                tuple(event.block_hashes), event.parent_block_hash, event.token_ids, _salt(event)
            )
        return DroppedBlocks(tuple(event.block_hashes)) if isinstance(event, self._removed) else None

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks, which must be in no sequence."""
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """End the ranks and free their memory."""
        self._core.shutdown()


def _salt(event: Any) -> str:
    """Return the salt of an event, whose first block has the keys (adapter if any, salt if any)."""
    keys: Sequence[Any] = (event.extra_keys[0] if event.extra_keys else None) or ()
    return str(keys[-1]) if len(keys) > (event.lora_name is not None) else ""


def _vllm_request(sequence: NewSequence, max_tokens: int, adapter: Any) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415

    from services.target.engine.vllm.worker import DRAW  # noqa: PLC0415

    params = sequence.draw.params
    # A worker in another process gets it pickled, and keeps the tokens itself.
    draw = replace(
        sequence.draw,
        params=replace(params, logit_bias=dict(params.logit_bias)),
        history=(),
        draft_tokens=(),
        grammar=None,
    )
    return EngineCoreRequest(
        request_id=sequence.id,
        prompt_token_ids=list(sequence.tokens),
        mm_features=None,
        # vLLM's own sampling is not used.
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=sequence.draw.logprobs,
            extra_args={DRAW: draw},
        ),
        pooling_params=None,
        arrival_time=float(sequence.arrival_ns),
        lora_request=adapter,
        cache_salt=sequence.salt or None,
        data_parallel_rank=None,
        priority=-sequence.priority,
    )


def start(
    settings: TargetSettings,
    directory: Path,
    given: Mapping[str, object],
    adapters: Adapters = NO_ADAPTERS,
) -> VllmCore:
    """Start vLLM with the model in `directory`, not yet probed; blocks for seconds to minutes.

    `given` are the arguments of `--vllm-args`. Raise UnsupportedModel for a version or a model that cannot be
    served, and ValueError for arguments that vLLM refuses.
    """
    set_environment()
    import vllm  # noqa: PLC0415  # slow, and optional
    from vllm.config import KVEventsConfig  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
    from vllm.v1.executor import Executor  # noqa: PLC0415

    check_version(vllm.__version__)
    refuse_unknown(given, frozenset(field.name for field in fields(EngineArgs)))
    kind = current_platform.device_type
    if settings.device != kind:
        hint = "; choose the GPU by CUDA_VISIBLE_DEVICES" if settings.device.startswith(kind) else ""
        raise ValueError(f"device: must be {kind} with this build of vLLM, got {settings.device}{hint}")
    arguments = {"dtype": _dtype(settings)} | engine_arguments(settings, directory, given, adapters)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    lost: list[Callable[[], object]] = []
    with _without_llvmlite():
        config = EngineArgs(**arguments, kv_events_config=events).create_engine_config()
        _refuse_recurrent(config.model_config)
        core = EngineCore(
            config,
            Executor.get_class(config),
            log_stats=False,
            executor_fail_callback=lambda: [lose() for lose in lost],
        )
    try:
        _install(core)
        info = replace(_info(core, directory, settings), lora_adapters=tuple(adapters.directories))
        drafts = config.speculative_config.num_speculative_tokens
        made = VllmCore(core, info, drafts, _load_adapters(core, adapters))
    except BaseException:
        core.shutdown()
        raise
    lost.append(made.lose)
    return made


def _refuse_recurrent(model: Any) -> None:
    """Raise UnsupportedModel for a recurrent state: in a pause vLLM forgets the draft tokens in it."""
    if model.is_hybrid or model.is_attention_free:
        raise UnsupportedModel(
            f"{model.hf_config.model_type}: must keep no recurrent state (Mamba, linear attention); after "
            "accepted draft tokens vLLM loses its place when a sequence pauses"
        )


def _dtype(settings: TargetSettings) -> str:
    from galley.engine.load.module import parse_dtype  # noqa: PLC0415  # imports torch

    return str(parse_dtype(settings.dtype, settings.device)).removeprefix("torch.")


@contextmanager
def _without_llvmlite() -> Iterator[None]:
    """Hide a module whose attributes cannot be read: vLLM's CPU worker reads those of all modules."""
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


def _install(core: Any) -> None:
    """Put Galley's draw into every rank. Raise UnsupportedModel, with the names, if vLLM lacks any."""
    parts: dict[str, Any] = {
        "core": core,
        "scheduler": core.scheduler,
        "scheduler.kv_cache_manager": core.scheduler.kv_cache_manager,
    }
    missing = [
        f"{part}.{name}" for part, names in _USED.items() for name in names if not hasattr(parts[part], name)
    ]
    if not missing:
        missing = sorted({name for names in core.collective_rpc("galley_install") for name in names})
    if missing:
        raise UnsupportedModel(f"vllm: must have {', '.join(missing)}, which this version or model lacks")


def _load_adapters(core: Any, adapters: Adapters) -> dict[str, Any]:
    """Load the adapters into every rank, since vLLM would do so in a step; return its name of each.

    Raise UnsupportedModel.
    """
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    loaded: dict[str, Any] = {}
    for number, (name, directory) in enumerate(adapters.directories.items(), 1):
        loaded[name] = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        try:
            core.add_lora(loaded[name])
        except Exception as error:
            raise UnsupportedModel(f"lora_adapters: {name}: {error}") from error
    return loaded


def _info(core: Any, directory: Path, settings: TargetSettings) -> EngineInfo:
    from galley.common.models.files import model_name  # noqa: PLC0415
    from galley.engine.load.module import eos_token_ids  # noqa: PLC0415

    config = core.vllm_config
    model = config.model_config
    blocks = config.cache_config.num_gpu_blocks - 1  # one is vLLM's own
    return EngineInfo(
        model=model_name(settings.model),
        tokenizer_hash=tokenizer_hash(directory),
        context_window=min(model.max_model_len, blocks * core.scheduler.block_size),
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_token_ids(directory, model.hf_text_config),
        fingerprint="",
        deterministic=False,
        dtype=str(model.dtype).removeprefix("torch."),
        device=settings.device,
        ranks=config.parallel_config.world_size,
        kv_block_tokens=core.scheduler.block_size,
        kv_blocks=blocks,
        directory=directory,
    )
