"""Rank 0's part of a sharded replica: it meets the others, loads its shard, and says what all of them run."""

from __future__ import annotations

from collections.abc import Callable

from galley.engine.parallel.process_group import ProcessGroup, Store
from services.target.engine.paged import PagedEngine
from services.target.engine.protocol import TargetEngine
from services.target.loading import kv_blocks, load_engine
from services.target.ranks.rank import RankSpec, load_rank
from services.target.ranks.sharded import ShardedModel, agree
from services.target.settings import TargetSettings


class RankZero:
    """From `load` to `release`. Once a rank has gone `on_loss` is called, by the thread that runs passes."""

    def __init__(self, settings: TargetSettings, spec: RankSpec, on_loss: Callable[[], None]) -> None:
        self._settings = settings
        self._spec = spec
        self._on_loss = on_loss
        self._group: ProcessGroup | None = None
        self._model: ShardedModel | None = None

    def load(self, store: Store | None) -> TargetEngine:
        """Meet the others at `store` and load with them; blocks. With None there are no others.

        Raises RankLost if they do not come, UnsupportedModel where the model cannot be cut so.
        """
        if store is None:
            return load_engine(self._settings)
        from galley.engine.parallel.process_group import join  # noqa: PLC0415  # imports torch

        spec = self._spec
        group = self._group = join(0, spec.size, device=spec.device, store=store, timeout_s=spec.timeout_s)
        blocks = agree(group, group.rank, kv_blocks(self._settings, group))
        loaded = load_rank(spec, group, blocks)
        self._model = ShardedModel(loaded.model, group, self._on_loss)
        return PagedEngine(self._model, loaded.fingerprint, ranks=spec.size)

    def release(self) -> None:
        """Let the others end, and leave them; call after the last pass."""
        if self._model is not None:
            self._model.stop()
        if self._group is not None:
            self._group.close()
