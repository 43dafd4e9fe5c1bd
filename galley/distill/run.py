"""A distillation from beginning to end; each stage continues where an earlier run stopped.

Answers, labels, checkpoints and measurements are kept in the folder `work`; the draft directory is written
last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from galley.common.models.files import DEFAULT_MODEL
from galley.distill.data.corpus import Corpus
from galley.distill.export import SHARPENING, as_stored, sharpened, write_draft
from galley.distill.job import Job, prepare
from galley.distill.options import Options
from galley.distill.training.evaluation import (
    ROUND_K,
    TEMPERATURE,
    Acceptance,
    Reports,
    as_table,
    evaluate,
    reference_of,
)
from galley.distill.training.models import Llama
from galley.distill.training.training import (
    Labels,
    LossOf,
    Progress,
    Training,
    hard_labels,
    head_rows,
    label_loss,
    score,
    with_scored,
)
from galley.distill.work import CHECKPOINT, CURVE, kept_lines, write_json

RECORD = "training.json"
_WIDTH = 110
_MEASURES = {"greedy": "greedy: share of draft tokens accepted", "sampled": "sampled with the same noise"}


@dataclass(frozen=True, slots=True)
class Distilled:
    """Acceptance by workload of the draft and of the one it is compared with; `curve`: during training."""

    acceptance: dict[str, Acceptance]
    against: dict[str, Acceptance] | None
    curve: list[dict[str, Any]]


def distil(options: Options, reports: Reports) -> Distilled:
    """Run all stages and write the draft directory. Raise InvalidField naming what cannot be used."""
    job = prepare(options, reports)
    labels = _labelled(job)
    measure = _measurer(job)
    student = job.student()

    def measured(now: Progress) -> dict[str, Any]:
        acceptance = measure(student, job.heads)
        reports.measured(now.seen, acceptance)
        return {"acceptance": as_table(acceptance)}

    loss_of = label_loss(student, labels, options.hardness, job.dtype)
    progress = train_draft(job, student, job.train, loss_of, measured)
    draft = sharpened(student)
    acceptance = measure(as_stored(draft), job.heads)
    against = None if job.present is None else measure(*job.present)
    write_draft(options.out, draft, job.target, job.heads, options.target)
    # If a point was measured twice, the last measurement counts.
    points = {point["seen"]: point for point in kept_lines(options.work / CURVE)}
    curve = [point for _, point in sorted(points.items())]
    record = record_of(options, job.train, job.held_out, progress)
    record["epochs"] = round(progress.seen / record["train"]["answer_tokens"], 2)
    record["acceptance"] = as_table(acceptance)
    if against is not None:
        record["acceptance_of_present_draft"] = as_table(against)
    write_record(options.out, record, _readme(record))
    return Distilled(acceptance, against, curve)


def _labelled(job: Job) -> Labels:
    """Return the answers' own tokens, and for a share of the sampled answers the target's distribution.

    Each token of a greedy answer is already the likeliest.
    """
    options, train = job.options, job.train
    labels = hard_labels(train, head_rows(job.heads, job.target.vocab))
    drawn = np.flatnonzero(train.temperature > 0)
    chosen = np.random.default_rng(options.seed).permutation(drawn)[: round(options.scored * len(drawn))]
    if not len(chosen):
        return labels
    job.reports.stage("labels", len(chosen))
    shards = options.work / "labels"
    score(train, chosen, job.target.whole(job.dtype), job.heads, shards, job.reports.done)
    return with_scored(labels, shards)


def _measurer(job: Job) -> Callable[[Llama, NDArray[np.int64]], dict[str, Acceptance]]:
    """Return a function that measures drafts on the held-out answers; runs the target over them once."""
    job.reports.stage("held-out", len(job.held_out))
    reference = reference_of(job.held_out, job.target.whole(job.dtype), job.reports.done)
    return lambda draft, heads: evaluate(job.held_out, reference, draft, heads, job.options.seed)


def train_draft(
    job: Job,
    student: nn.Module,
    corpus: Corpus,
    loss_of: LossOf,
    measure: Callable[[Progress], dict[str, Any]],
) -> Progress:
    """Train from the checkpoint, if there is one, to the end.

    Each measurement becomes a line of the curve, and is followed by a checkpoint.
    """
    options = job.options
    checkpoint, curve = options.work / CHECKPOINT, options.work / CURVE
    training = Training(student, job.schedule)
    kept_lines(curve)  # drops a line cut off by a kill
    job.reports.stage("training", options.tokens)
    if checkpoint.exists():
        training.load(checkpoint, job.identity)
    stored_at = time.monotonic()

    def keep(now: Progress) -> None:
        nonlocal stored_at
        job.reports.done(now.seen, f"loss {now.loss:.3f}")
        every, before = options.evaluate_every, now.seen - now.batch_rows
        if now.seen >= options.tokens or now.seen // every > before // every:
            line = json.dumps({"seen": now.seen} | measure(now))
            with curve.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        elif time.monotonic() - stored_at < options.checkpoint_s:
            return
        training.save(checkpoint, job.identity)
        stored_at = time.monotonic()

    training.run(corpus, loss_of, keep)
    return training.progress


def record_of(options: Options, train: Corpus, held_out: Corpus, progress: Progress) -> dict[str, Any]:
    """Return what the record of every run says."""
    return {
        "options": options.as_dict(),
        "train": _counted(train),
        "held_out": _counted(held_out),
        "steps": progress.step,
        "answer_tokens_seen": progress.seen,
        "training_s": round(progress.train_s),
    }


def write_record(out: Path, record: dict[str, Any], readme: Sequence[str]) -> None:
    """Write README.md and training.json into the draft directory; `readme` are its paragraphs."""
    write_json(out / RECORD, record)
    licence = "The weights are derived from the target's; its licence applies."
    (out / "README.md").write_text("\n\n".join([*readme, licence]) + "\n", encoding="utf-8")


def _counted(corpus: Corpus) -> dict[str, int]:
    return {
        "conversations": len(corpus),
        "answer_tokens": int(corpus.answer_len.sum()),
        "greedy_answers": int((corpus.temperature == 0).sum()),
    }


def command(options: dict[str, Any]) -> str:
    """Return the command line of a run's options, without those at their defaults."""
    usual = {one.name: one.default for one in fields(Options)} | {"target": DEFAULT_MODEL}
    words = ["galley distill DIR"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [f"{flag} {one}" for one in value]
        elif value != usual[name]:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _readme(record: dict[str, Any]) -> list[str]:
    options, train = record["options"], record["train"]
    made = (
        f"The training data are the target's own answers: {train['conversations']} conversations with "
        f"{train['answer_tokens']} answer tokens. {train['greedy_answers']} answers are greedy; the target "
        f"labelled {options['scored']:.0%} of the others. The training saw {record['answer_tokens_seen']} "
        f"answer tokens ({record['epochs']} epochs) in {record['steps']} steps, which took "
        f"{record['training_s']} s on {options['threads']} thread(s). Layers and head were initialized from "
        "the target's. The draft uses the target's embeddings, which are not stored here. At the end the "
        f"logits were scaled by {SHARPENING:g}."
    )
    measured = (
        f"Acceptance on {record['held_out']['conversations']} held-out conversations; the draft was fed the "
        "target's answers. Greedy is the share of draft tokens that equal the target's, over greedy answers. "
        f"The next column is the mean number of draft tokens accepted in a round of {ROUND_K}. Sampled is "
        f"the share over all answers if both sample at temperature {TEMPERATURE} with the same noise."
    )
    size = f"It has {options['layers']} layers and a head of at most {options['head']} tokens, in int8."
    return [
        f"# A draft model for {options['target']}",
        f"{size} This command trains a version of it:",
        f"    {command(options)}",
        fill(made, _WIDTH),
        fill(measured, _WIDTH),
        _acceptance_table(record),
    ]


def _acceptance_table(record: dict[str, Any]) -> str:
    lines = ["| workload | tokens | greedy | accepted a round | sampled |", "|---|---|---|---|---|"]
    for name, one in record["acceptance"].items():
        lines.append(
            f"| {name} | {one['tokens']} | {one['greedy']:.3f} | {one['accepted_per_round']:.2f} "
            f"| {one['sampled']:.3f} |"
        )
    return "\n".join(lines)


def plot(path: Path, curve: Sequence[dict[str, Any]], against: dict[str, Acceptance] | None) -> None:
    """Draw acceptance over tokens seen into a PNG, a line a workload; the present draft is dashed.

    Raise ImportError without matplotlib, which comes with the extra `all`, or OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    seen = [point["seen"] / 1e6 for point in curve]
    for axes, (measure, title) in zip(figure.subplots(1, 2), _MEASURES.items(), strict=True):
        for name in curve[-1]["acceptance"]:
            shares = [point["acceptance"][name][measure] for point in curve]
            (line,) = axes.plot(seen, shares, marker="o", markersize=3, label=name)
            if against is not None and name in against:
                axes.axhline(getattr(against[name], measure), color=line.get_color(), linestyle="--")
        axes.set(title=title, xlabel="million answer tokens seen", ylim=(0, 1))
    axes.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=110)
