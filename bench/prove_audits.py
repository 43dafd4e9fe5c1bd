"""Prove that audits find planted faults and raise no false alarm: `make prove-audits`.

The services are real, in one process, with a model of random weights. First, targets have faults while they
serve a session: a flipped bit of a weight, overwritten KV, a wrong kernel. Logs are edited, with their
hashes. An audit must find the very tokens that another engine draws otherwise. Then sessions of all kinds
are served and audited beside each other, at two replicas and with drafts: no token may differ. Writes
bench/results/audits.json, and exits 1 if a fault stays hidden or an alarm is false.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from bench.harness import result_path, write_record
from bench.living.checks import Audits
from galley import AsyncClient, Speculation
from galley.client.audit import AuditReport, Verdict
from galley.client.errors import ResourceExhaustedError, UnavailableError
from galley.client.options import Retries
from galley.engine.model import CausalModel
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.tiny_model import save_tiny_model
from tests.fakes.world import Received, receive
from tests.integration.services.gateway.audit.faults import FAULTS, PROMPT, Faulty, Judge, rewrite, with_token
from tests.integration.services.gateway.real import Real, paged

EDITED = "a token of the log"
LENGTH = 60
STREAMS = 12
ROUNDS = 30
"""Answers of each stream before the services start anew: they keep their traces and steps in memory."""
TRIES = 10
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_p": 0.9, "top_k": 20},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"logit_bias": {7: 5.0}},
    {"logprobs": 3},
    {"speculation": Speculation(k=4)},
    {"speculation": Speculation(off=True)},
)


def main() -> int:
    """Run the proof; return 0 if it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5, help="faults of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens audited (default: %(default)s)")
    parser.add_argument(
        "--record", type=Path, default=result_path("audits"), help="file to write (default: %(default)s)"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a kill ends the store, too
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with TemporaryDirectory() as directory, running(VALKEY) as store:
        report = asyncio.run(prove(Path(directory), store, given.faults, given.tokens))
    write_record(given.record, report)
    print(report)
    return 0 if report["met"] else 1


async def prove(directory: Path, store: Server, faults: int, tokens: int) -> dict[str, Any]:
    tiny = save_tiny_model(directory / "tiny")
    judge = Judge(tiny)
    found = Counter[str]()
    for kind in (*FAULTS, EDITED):
        for number in range(faults):
            found[kind] += await find(directory, tiny, store, judge, kind, number)
    began_s = time.monotonic()
    audited = await audit_many(directory, tiny, store, tokens)
    return {
        "planted": faults * (len(FAULTS) + 1),
        "found": dict(found),
        "audits": audited.verdicts,
        "tokens": audited.tokens,
        "differing": audited.differing,
        "seconds": round(time.monotonic() - began_s, 1),
        "met": found.total() == faults * (len(FAULTS) + 1) and audited.sessions > 0 and audited.is_clean,
    }


async def find(directory: Path, tiny: Path, store: Server, judge: Judge, kind: str, number: int) -> bool:
    """Return True if an audit finds the fault, at exactly the tokens that the judge draws otherwise."""
    engines: list[Faulty] = []

    def make(model: CausalModel) -> Faulty:
        engines.append(Faulty(model, FAULTS[kind]))
        return engines[-1]

    sampling = {"temperature": 0.8 * (number % 2), "seed": number}
    options = {**sampling, "max_tokens": LENGTH, "speculation": Speculation(k=2)}
    engine = paged if kind == EDITED else make
    async with Real(directory, tiny, store.url, engines=[engine], drafts=True, credit=0) as real:
        stream = real.generate(PROMPT, **options)
        received = await receive(stream)
        if kind == EDITED:
            at = 10 * number % LENGTH
            await rewrite(store.url, stream.session_id, lambda stored: with_token(stored, at))
            received.tokens[at] ^= 1
        else:
            engines[0].repair()
        report = await real.gateway.client.audit(stream.session_id)
    return is_exact(report, received, judge.differing(received.tokens, sampling))


def is_exact(report: AuditReport, received: Received, differing: list[int]) -> bool:
    indexes = [difference.index for difference in report.differences]
    return (
        report.verdict is Verdict.DIFFERS
        and report.compared == len(received.tokens)
        and report.differing == len(differing) > 0
        and indexes == differing[: len(indexes)]
    )


async def audit_many(directory: Path, tiny: Path, store: Server, tokens: int) -> Audits:
    """Serve and audit sessions of all kinds until so many tokens were compared."""
    found, number = Audits(), 0
    given: dict[str, Any] = {"drafts": True, "max_sessions": 16 * STREAMS}
    while found.tokens < tokens:
        async with (
            Real(directory, tiny, store.url, engines=[paged, paged], **given) as real,
            AsyncClient(real.gateway.address, retries=Retries(start_patience_s=60)) as client,
        ):
            for _ in range(ROUNDS):
                sessions = (served_and_audited(client, each) for each in range(number, number + STREAMS))
                for report in await asyncio.gather(*sessions):
                    found.add(report)
                number += STREAMS
        print(
            f"{found.tokens:,} tokens of {number:,} sessions audited, {found.differing:,} differ",
            flush=True,
        )
    return found


async def served_and_audited(client: AsyncClient, number: int) -> AuditReport:
    prompt, kind = [*PROMPT[: 1 + number % 3], number % 101], KINDS[number % len(KINDS)]
    stream = client.stream(
        prompt, temperature=0.3 * (number % 4), seed=number, max_tokens=150, ignore_eos=True, **kind
    )
    await receive(stream)
    for _ in range(TRIES):
        try:
            return await client.audit(stream.session_id)
        except (ResourceExhaustedError, UnavailableError) as error:
            # All services share this process, and a busy machine makes them saturated.
            await asyncio.sleep(error.retry_after_s or 1.0)
    return await client.audit(stream.session_id)


if __name__ == "__main__":
    sys.exit(main())
