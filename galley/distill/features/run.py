"""Train a draft that reads the target's states: collect, train, measure, write.

Each stage continues where an earlier run stopped.
"""

from __future__ import annotations

from textwrap import fill
from typing import Any

import torch

from galley.distill.data.material import refuse_sampled
from galley.distill.export import as_stored, write_draft
from galley.distill.features.collection import Collected, Collection, chosen, layers_of
from galley.distill.features.draft import FeatureDraft
from galley.distill.features.evaluation import (
    FEATURES,
    LOST,
    PRESENT,
    Guesses,
    Measured,
    as_table,
    guesses_of,
    measure,
    plain_guesses,
)
from galley.distill.features.loss import COUPLING
from galley.distill.features.training import DEPTHS, unrolled_loss
from galley.distill.job import Job, prepare
from galley.distill.options import Options
from galley.distill.run import command, record_of, train_draft, write_record
from galley.distill.training.evaluation import ROUND_K, Reports
from galley.distill.training.models import Llama
from galley.distill.work import CURVE, kept_lines

# Held-out tokens for each token that is trained on, at most.
_MEASURED_SHARE = 0.15
_WIDTH = 110


def distil_features(options: Options, reports: Reports) -> Measured:
    """Run all stages, write the draft directory and return the shares of draft tokens accepted.

    Raise InvalidField naming what cannot be used.
    """
    job = prepare(options, reports)
    student = _student(job)
    train = chosen(job.train, options.collected, options.seed)
    held_out = chosen(job.held_out, round(options.collected * _MEASURED_SHARE), options.seed)
    refuse_sampled("collected", held_out.temperature.tolist())
    target = job.target.whole(job.dtype)
    reports.stage("features", len(train))
    learned = Collection(options.work / "features", job.heads, student.after)
    learned.collect(train, target, reports.done)
    reports.stage("held-out", len(held_out))
    measured = Collection(options.work / "held-features", job.heads, student.after, with_outputs=True)
    measured.collect(held_out, target, reports.done)
    with learned.read(train) as collected, measured.read(held_out) as held:
        if not isinstance(job.start, FeatureDraft):
            student.level(collected.sample())
        loss_of = unrolled_loss(student, collected, options.seed, job.dtype)
        progress = train_draft(
            job, student, collected.corpus, loss_of, lambda now: {"loss": round(now.loss, 4)}
        )
        guesses = _guesses(job, as_stored(student), held)
        result = measure(held_out, held.outputs(), target.lm_head.weight, guesses, options.seed)
    write_draft(options.out, student, job.target, job.heads, options.target, student.after)
    record = record_of(options, train, held_out, progress) | {
        "feature_layers": list(student.after),
        "depths": DEPTHS,
        "coupling": COUPLING,
        "loss": kept_lines(options.work / CURVE),
        "acceptance": as_table(result),
    }
    write_record(options.out, record, _readme(record, result))
    return result


def _student(job: Job) -> FeatureDraft:
    """Return the draft before training: a feature draft to start from, or a plain one that learns to read."""
    if isinstance(job.start, FeatureDraft):
        return job.start
    plain = job.student()
    after = layers_of(job.target.shape.layers)
    draft = FeatureDraft(plain.shape, plain.embedding, len(job.heads), after)
    draft.load_state_dict(draft.state_dict() | plain.state_dict())
    return draft


def _guesses(job: Job, draft: FeatureDraft, held: Collected) -> dict[str, Guesses]:
    with torch.inference_mode():
        guesses = {
            FEATURES: guesses_of(draft, job.heads, held, job.dtype, known=True),
            LOST: guesses_of(draft, job.heads, held, job.dtype, known=False),
        }
        if job.present is not None:
            present, heads = job.present
            guesses[PRESENT] = _present(present, heads, held, job.dtype)
    return guesses


def _present(draft: Llama, heads: Any, held: Collected, dtype: torch.dtype) -> Guesses:
    if isinstance(draft, FeatureDraft):
        return guesses_of(draft, heads, held, dtype, known=draft.after == held.after)
    return plain_guesses(draft, heads, held.corpus, dtype)


def _readme(record: dict[str, Any], measured: Measured) -> list[str]:
    options, train, layers = record["options"], record["train"], record["feature_layers"]
    made = (
        f"At confirmed tokens it reads the target's states after layers {', '.join(map(str, layers))}, "
        "and its own where the target has none yet. The training data are "
        f"{train['conversations']} conversations with {train['answer_tokens']} answer tokens of the target's "
        f"own. The training saw {record['answer_tokens_seen']} answer tokens in {record['steps']} steps of "
        f"{record['depths']} draft tokens a place, which took {record['training_s']} s on "
        f"{options['threads']} thread(s)."
    )
    shares = (
        f"Shares of draft tokens that equal the target's on {record['held_out']['conversations']} held-out "
        f"conversations, by their number after the confirmed tokens, and the mean number accepted in a round "
        f"of {ROUND_K}. The draft was fed the target's answers. `{LOST}` is the same draft without the "
        "target's states."
    )
    return [
        f"# A draft that reads the states of {options['target']}",
        "A draft replica serves it by `--model DIRECTORY`. This command trains a version of it:",
        f"    {command(options)}",
        fill(made, _WIDTH),
        fill(shares, _WIDTH),
        _table(measured),
    ]


def _table(measured: Measured) -> str:
    lines = [
        "| temperature | draft | first | second | third | accepted a round |",
        "|---|---|---|---|---|---|",
    ]
    for temperature in measured[FEATURES]:
        for name, by_temperature in measured.items():
            one = by_temperature[temperature]["all"]
            first, second, third, *_ = one.by_depth
            lines.append(
                f"| {temperature} | {name} | {first:.3f} | {second:.3f} | {third:.3f} "
                f"| {one.accepted_per_round:.2f} |"
            )
    return "\n".join(lines)
