"""Write the records of a training: README.md and training.json beside the draft, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any

from galley.common.models.files import DEFAULT_MODEL
from galley.distill.data.corpus import Corpus
from galley.distill.export import SHARPENING
from galley.distill.options import Options
from galley.distill.training.evaluation import ROUND_K, TEMPERATURE, Acceptance, as_table
from galley.distill.training.training import Progress
from galley.distill.work import write_json

RECORD = "training.json"
_WIDTH = 110
_MEASURES = {"greedy": "greedy: share of draft tokens accepted", "sampled": "sampled with the same noise"}


def write_record(
    options: Options,
    progress: Progress,
    corpora: tuple[Corpus, Corpus],
    acceptance: dict[str, Acceptance],
    against: dict[str, Acceptance] | None,
) -> None:
    """Write README.md and training.json into the draft directory; `corpora` are training and held-out."""
    train, held_out = map(_counted, corpora)
    record: dict[str, Any] = {
        "options": options.as_dict(),
        "train": train,
        "held_out": held_out,
        "steps": progress.step,
        "answer_tokens_seen": progress.seen,
        "epochs": round(progress.seen / train["answer_tokens"], 2),
        "training_s": round(progress.train_s),
        "acceptance": as_table(acceptance),
    }
    if against is not None:
        record["acceptance_of_present_draft"] = as_table(against)
    write_json(options.out / RECORD, record)
    (options.out / "README.md").write_text(_readme(record), encoding="utf-8")


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
        if isinstance(value, list):
            words += [f"{flag} {one}" for one in value]
        elif value != usual[name]:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _readme(record: dict[str, Any]) -> str:
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
    parts = [
        f"# A draft model for {options['target']}",
        f"{size} This command trains a version of it:",
        f"    {command(options)}",
        fill(made, _WIDTH),
        fill(measured, _WIDTH),
        acceptance_table(record),
        "The weights are derived from the target's; its licence applies.",
    ]
    return "\n\n".join(parts) + "\n"


def acceptance_table(record: dict[str, Any]) -> str:
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
