"""The CPU kernels of attention over pages (docs/cpu-kernels.md).

Each row is computed by itself, in an order that depends on its position alone; `ops` says why rows computed
side by side do not change one another's bits. Arrays are C-contiguous; "stored" ones hold the model's dtype,
bfloat16 as uint16.
"""

# ruff: noqa: PLR0913, PLR0917  # kernels take arrays and sizes, not objects

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from galley.engine.cpu.kernels.openmp import shared
from galley.engine.cpu.kernels.ops import (
    LANES,
    TILE_ROWS,
    exp32,
    helper,
    multiply,
    multiply_onto,
    narrow,
    raise_lanes,
    weigh_lanes,
    widen,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# The model's dtype.
Stored = NDArray[Any]

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_LOWEST = np.float32(-np.inf)


@helper
def _score(
    queries: Floats,
    query_at: int,
    heads: int,
    keys: Stored,
    key_at: int,
    ahead_at: int,
    dim: int,
    scores: Floats,
    score_at: int,
    width: int,
) -> None:
    """Compute scores[m, 0:32] = queries[m] . keys[:, 0:32] for m < heads; `queries` lie `dim` apart.

    Here and below, the data at `ahead_at` is used next and prefetched.
    """
    done = 0
    while done < heads:
        rows = min(TILE_ROWS, heads - done)
        multiply(
            rows, queries, query_at + done * dim, dim, keys, key_at, LANES, ahead_at, dim,
            scores, score_at + done * width, width,
        )  # fmt: skip
        done += rows


@helper
def _gather(
    scores: Floats,
    score_at: int,
    width: int,
    heads: int,
    steps: int,
    values: Stored,
    value_at: int,
    ahead_at: int,
    dim: int,
    sums: Floats,
    sum_at: int,
) -> None:
    """Compute sums[m] += sum over j < steps of scores[m, j] * values[j], for m < heads."""
    done = 0
    while done < heads:
        rows = min(TILE_ROWS, heads - done)
        for column in range(0, dim, LANES):
            multiply_onto(
                rows, scores, score_at + done * width, width, values, value_at + column, dim,
                ahead_at + column, steps, sums, sum_at + done * dim + column, dim,
            )  # fmt: skip
        done += rows


@helper
def _cap(scores: Floats, first: int, last: int, softcap: np.float32) -> None:
    """Compute softcap * tanh(score / softcap) of scores[first:last] (Gemma 2, arXiv 2408.00118, sec. 2)."""
    for i in range(first, last):
        scores[i] = softcap * (_ONE - _TWO / (exp32(_TWO * scores[i] / softcap) + _ONE))


@helper
def _weigh(scores: Floats, at: int, first: int, last: int, softcap: np.float32, lanes: Floats) -> np.float32:
    """Replace scores[at + first : at + last] by e**(score - max), the rest by 0; return the sum."""
    end = (last + LANES - 1) // LANES * LANES
    for i in range(first):
        scores[at + i] = _LOWEST
    for i in range(last, end):
        scores[at + i] = _LOWEST
    if softcap > _ZERO:
        _cap(scores, at + first, at + last, softcap)
    for i in range(LANES):
        lanes[i] = scores[at + i]
    for block in range(at + LANES, at + end, LANES):
        raise_lanes(lanes, scores, block)
    top = _LOWEST
    for i in range(LANES):
        top = max(top, lanes[i])
    for i in range(LANES):
        lanes[i] = _ZERO
    for block in range(at, at + end, LANES):
        weigh_lanes(lanes, scores, block, top)
    total = _ZERO
    for i in range(LANES):
        total += lanes[i]
    return total


@helper
def _first_seen(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


@helper
def _add_values(
    scores: Floats,
    width: int,
    values: Stored,
    value_at: int,
    ahead_at: int,
    dim: int,
    group: int,
    rows: tuple[int, int],
    spans: Ints,
    latest: int,
    block: int,
    column: int,
    sums: Floats,
) -> None:
    """Add one block's weighted values to the sums of rows [rows[0], rows[1]).

    Row r attends to positions [spans[r, 0], spans[r, 1]), of which none begins after `latest`. Positions that
    all rows attend to are computed together, the ends row by row. Each row adds its keys in order.
    """
    start = block * LANES
    first, last = rows
    low = max(0, latest - start)
    high = min(LANES, spans[first, 1] - start)
    if high <= low:
        low = high = LANES
    for part in range(3):
        for r in range(first, last):
            begin, end, taken = max(0, spans[r, 0] - start), min(LANES, spans[r, 1] - start), 1
            if part == 0:
                end = min(end, low)
            elif part == 1:
                begin, end, taken = low, high, last - first if r == first else 0
            else:
                begin = high
            if taken and begin < end:
                _gather(
                    scores, r * group * width + column + begin, width, taken * group, end - begin,
                    values, value_at + begin * dim, ahead_at + begin * dim, dim, sums, r * group * dim,
                )  # fmt: skip


@helper
def _block_at(tables: Ints, at: int, kv_heads: int, head: int, numbers: int) -> int:
    place: int = (tables[at] * kv_heads + head) * numbers
    return place


@helper
def _run_of(slots: Ints, at: int, last: int) -> int:
    """Return how many of slots[at:last] follow one another within a block."""
    count = 1
    while at + count < last and slots[at + count] == slots[at] + count and slots[at + count] % LANES > 0:
        count += 1
    return count


@helper
def _set_spans(spans: Ints, rows: int, slot: int, window: int, paths: Ints, line: int) -> tuple[int, int]:
    """Set spans[r] to row r's first position and the end of its slots; return the first and last position.

    Here and below, `line` is that of the tile's first row in `paths`, or negative for a tile without paths.
    """
    for r in range(rows):
        spans[r, 0] = _first_seen(slot + r, window)
        spans[r, 1] = slot + r + 1
    first, latest = spans[0, 0], spans[rows - 1, 0]
    for r in range(rows if line >= 0 else 0):
        if paths[line + r, 1] > 0:
            spans[r, 0] = _first_seen(paths[line + r, 0] + paths[line + r, 1] - 1, window)
        first, latest = min(first, spans[r, 0]), max(latest, spans[r, 0])
    return first, latest


@helper
def _order_scores(
    scores: Floats, width: int, group: int, rows: int, base: int, paths: Ints, line: int, spans: Ints
) -> None:
    """Move the scores of the nodes that each row sees from slots to positions; set spans[r, 1] to their end.

    Slots along a path ascend and are never before their positions, so no score is overwritten before its
    move. Column 0 of a row of scores is position `base`.
    """
    for r in range(rows if line >= 0 else 0):
        root, count = paths[line + r, 0], paths[line + r, 1]
        for k in range(max(0, spans[r, 0] - root), count):
            for m in range(r * group, (r + 1) * group):
                scores[m * width + root + k - base] = scores[m * width + paths[line + r, 2 + k] - base]
        if count > 0:
            spans[r, 1] = root + count


@helper
def _end_at_root(spans: Ints, rows: int, paths: Ints, line: int) -> None:
    for r in range(rows if line >= 0 else 0):
        spans[r, 1] = min(spans[r, 1], paths[line + r, 0])


@helper
def _add_nodes(
    scores: Floats,
    width: int,
    group: int,
    rows: int,
    base: int,
    values: Stored,
    tables: Ints,
    table: int,
    kv_heads: int,
    head: int,
    dim: int,
    paths: Ints,
    line: int,
    spans: Ints,
    sums: Floats,
) -> None:
    """Add the weighted values of the nodes that each row sees, in order of position, from their slots."""
    for r in range(rows if line >= 0 else 0):
        root, count = paths[line + r, 0], paths[line + r, 1]
        slots = paths[line + r, 2:]
        k = max(0, spans[r, 0] - root)
        while k < count:
            run = _run_of(slots, k, count)
            block, slot = slots[k] // LANES, slots[k] % LANES
            at = _block_at(tables, table + block, kv_heads, head, LANES * dim) + slot * dim
            _gather(
                scores, r * group * width + root + k - base, width, group, run, values, at, at, dim,
                sums, r * group * dim,
            )  # fmt: skip
            k += run


@helper
def _rows_of_block(spans: Ints, rows: int, block: int) -> tuple[int, int]:
    """Return the rows [first, last) of a tile that attend to something in this block."""
    first, last = 0, rows
    while first < rows and spans[first, 1] <= block * LANES:
        first += 1
    while last > first and spans[last - 1, 0] >= (block + 1) * LANES:
        last -= 1
    return first, last


@shared
def _attend(
    thread: int,
    first_task: int,
    last_task: int,
    queries: Floats,
    keys: Stored,
    values: Stored,
    tables: Ints,
    tiles: Ints,
    paths: Ints,
    window: int,
    softcap: np.float32,
    all_scores: Floats,
    all_sums: Floats,
    all_spans: Ints,
    out: Stored,
) -> None:
    scores, sums, spans = all_scores[thread], all_sums[thread], all_spans[thread]
    kv_heads, _, group, key_dim = queries.shape
    all_rows = queries.shape[1]
    value_width, value_dim = values.shape[3], out.shape[3]
    width = scores.shape[1]
    flat_queries, flat_scores, flat_sums = queries.reshape(-1), scores.reshape(-1), sums.reshape(-1)
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    lanes = np.empty(LANES, np.float32)
    key_numbers, value_numbers = key_dim * LANES, LANES * value_width
    for task in range(first_task, last_task):
        head = task % kv_heads
        row, rows, slot, table, line = tiles[task // kv_heads]
        first, latest = _set_spans(spans, rows, slot, window, paths, line)
        first_block = first // LANES
        last_block = (spans[rows - 1, 1] - 1) // LANES
        for block in range(first_block, last_block + 1):
            near, far = _rows_of_block(spans, rows, block)
            after = min(block + 1, last_block)
            _score(
                flat_queries, ((head * all_rows + row + near) * group) * key_dim, (far - near) * group,
                flat_keys, _block_at(tables, table + block, kv_heads, head, key_numbers),
                _block_at(tables, table + after, kv_heads, head, key_numbers), key_dim,
                flat_scores, near * group * width + (block - first_block) * LANES, width,
            )  # fmt: skip
        _order_scores(flat_scores, width, group, rows, first_block * LANES, paths, line, spans)
        for m in range(rows * group):
            skipped = spans[m // group, 0] // LANES - first_block
            base = (first_block + skipped) * LANES
            total = _weigh(
                flat_scores, m * width + skipped * LANES, spans[m // group, 0] - base,
                spans[m // group, 1] - base, softcap, lanes,
            )  # fmt: skip
            for d in range(value_width):
                sums[m, d] = _ZERO
            scores[m, width - 1] = total
        _end_at_root(spans, rows, paths, line)
        last_block = (spans[rows - 1, 1] - 1) // LANES
        for block in range(first_block, last_block + 1):
            near, far = _rows_of_block(spans, rows, block)
            after = min(block + 1, last_block)
            _add_values(
                flat_scores, width,
                flat_values, _block_at(tables, table + block, kv_heads, head, value_numbers),
                _block_at(tables, table + after, kv_heads, head, value_numbers), value_width, group,
                (near, far), spans, latest if line >= 0 else spans[far - 1, 0],
                block, (block - first_block) * LANES, flat_sums,
            )  # fmt: skip
        _add_nodes(
            flat_scores, width, group, rows, first_block * LANES, flat_values, tables, table, kv_heads,
            head, value_width, paths, line, spans, flat_sums,
        )  # fmt: skip
        for m in range(rows * group):
            r, g = m // group, m % group
            share = _ONE / scores[m, width - 1]
            for d in range(value_dim):
                out[row + r, head, g, d] = narrow(sums[m, d] * share, out[0, 0, 0, 0])


def attend(
    threads: int,
    tasks: int,
    queries: Floats,
    keys: Stored,
    values: Stored,
    tables: Ints,
    tiles: Ints,
    paths: Ints,
    window: int,
    softcap: np.float32,
    scores: Floats,
    sums: Floats,
    spans: Ints,
    out: Stored,
) -> None:
    """Compute attention of all tasks: task t is KV head t % kv_heads of tile t // kv_heads.

    queries: float32 [kv_heads, rows, group, key_dim], scaled. keys: stored [blocks, kv_heads, key_dim, 32];
    values: stored [blocks, kv_heads, 32, value_width]. tiles: int64 [tiles, 5] and paths as in `Pages`.
    window: keys that a query sees, 0: all. softcap: 0: none. Work space: scores: float32 [threads, rows of a
    tile * group, keys]; sums: float32 [threads, the same rows, value_width]; spans: int64 [threads, rows of a
    tile, 2]. out: stored [rows, kv_heads, group, value_dim].
    """
    _attend(
        threads, tasks, queries, keys, values, tables, tiles, paths, window, softcap, scores, sums, spans, out
    )  # fmt: skip


def store(
    query: Stored,
    key: Stored,
    value: Stored,
    scale: np.float32,
    places: Ints,
    queries: Floats,
    keys: Stored,
    values: Stored,
) -> None:
    """Scale the queries into float32, and write keys and values into the pool.

    query: stored [rows, heads, key_dim]; key, value: stored [rows, kv_heads, ...]; places: int64 [rows, 2]:
    block and slot of each row; queries, keys, values as in `attend`.
    """
    kv_heads, rows, group, dim = queries.shape
    for row in range(rows):
        block, slot = places[row]
        for head in range(kv_heads):
            for g in range(group):
                for d in range(dim):
                    queries[head, row, g, d] = widen(query[row, head * group + g, d]) * scale
            for d in range(dim):
                keys[block, head, d, slot] = key[row, head, d]
            for d in range(value.shape[2]):
                values[block, head, slot, d] = value[row, head, d]
