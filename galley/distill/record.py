"""Write the records beside a draft's weights: README.md for people, training.json for programs."""

from __future__ import annotations

from dataclasses import fields
from textwrap import fill
from typing import Any

from galley.common.config.defaults import DEFAULT_MODEL
from galley.distill.data.corpus import Corpus
from galley.distill.export import SHARPENING, write_json
from galley.distill.options import Options
from galley.distill.training.evaluation import ROUND_K, TEMPERATURE, Acceptance, as_table
from galley.distill.training.training import Progress

RECORD = "training.json"
_WIDTH = 110


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
        f"from its target's own answers: {train['conversations']} conversations with "
        f"{train['answer_tokens']} answer tokens, {train['greedy_answers']} of the answers greedy, "
        f"{options['scored']:.0%} of the others labelled by the target. Seen in training: "
        f"{record['answer_tokens_seen']} answer tokens ({record['epochs']} epochs) in {record['steps']} "
        f"steps, {record['training_s']} s on {options['threads']} thread(s). Layers and head were "
        "initialized from the target's; the embeddings are the target's and not in this directory. At the "
        f"end the logits were scaled by {SHARPENING:g}."
    )
    measured = (
        f"Acceptance on {record['held_out']['conversations']} held-out conversations; the draft was fed the "
        "target's answers. Greedy: share of draft tokens that are the target's, over greedy answers, and "
        f"tokens accepted a round of {ROUND_K}. Sampled: both sample at temperature {TEMPERATURE} with the "
        "same noise."
    )
    parts = [
        f"# A draft for {options['target']}",
        f"{options['layers']} layers, a head of at most {options['head']} tokens, int8 weights. Made by",
        f"    {command(options)}",
        fill(made, _WIDTH),
        fill(measured, _WIDTH),
        acceptance_table(record).rstrip(),
        "The weights are derived from the target's; its licence applies.",
    ]
    return "\n\n".join(parts) + "\n"


def acceptance_table(record: dict[str, Any]) -> str:
    """Return the acceptance by workload, in Markdown."""
    lines = ["| workload | tokens | greedy | accepted a round | sampled |", "|---|---|---|---|---|"]
    for name, one in record["acceptance"].items():
        lines.append(
            f"| {name} | {one['tokens']} | {one['greedy']:.3f} | {one['accepted_per_round']:.2f} "
            f"| {one['sampled']:.3f} |"
        )
    return "\n".join(lines) + "\n"
