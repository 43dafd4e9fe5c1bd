"""Draw the requests of a soak from a seed: prompts, lengths, temperatures, speculation, ways to leave.

Half of the requests are of a fixed catalogue. Its answers are recorded by plain decoding before the load
begins, and every later answer is compared with these. The other half is sent once: its prompts begin with a
tag of their own, so that no cache has them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from galley.bench.workloads import mixed_workload
from galley.client.options import GenerateOptions, Message, Speculation
from galley.core.names import HYBRID, NGRAM

TEMPERATURES = (0.0, 0.7, 1.0)
_LENGTHS = (8, 24, 64, 160)
_PROMPTS_JOINED = (1, 1, 1, 4)
"""Fixed prompts that are joined: every fourth prompt is four of them, some hundred tokens."""
_SHARE_ONCE = 0.5
_SHARES = {"cancel": 0.1, "abort": 0.05, "resume": 0.15}
_LONGEST_AWAY_S = 1.0


class Manner(enum.StrEnum):
    """The ways in which a client treats its stream."""

    READ = "read"
    CANCEL = "cancel"
    ABORT = "abort"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `name` is its name in the catalogue, empty for a request made once."""

    name: str
    text: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool

    @property
    def prompt(self) -> list[Message]:
        """Return the text as a conversation."""
        return [Message("user", self.text)]

    def options(self, speculation: Speculation) -> GenerateOptions:
        """Return the client's options; speculation changes no token."""
        return GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            speculation=speculation,
            workload="soak",
        )


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, and its client, which leaves after `leave_after` tokens, for `away_s` if it resumes."""

    request: Request
    speculation: Speculation
    manner: Manner = Manner.READ
    leave_after: int = 0
    away_s: float = 0.0


def speculations(draft_model: bool) -> tuple[Speculation, ...]:
    """Return all modes of speculation; `hybrid` is among them only if the draft has a model."""
    modes = (Speculation(), Speculation(off=True), Speculation(k=4, strategy=NGRAM))
    return (*modes, Speculation(k=4, strategy=HYBRID)) if draft_model else modes


def catalogue(count: int, seed: int) -> list[Request]:
    """Return `count` requests, the same for the same seed."""
    chance = Random(seed)
    texts = [prompt.text for prompt in mixed_workload().prompts]
    return [_request(f"c{number}", number, texts, chance) for number in range(count)]


def _request(name: str, number: int, texts: Sequence[str], chance: Random) -> Request:
    joined = _PROMPTS_JOINED[number % len(_PROMPTS_JOINED)]
    return Request(
        name=name,
        text="\n\n".join(chance.choice(texts) for _ in range(joined)),
        max_tokens=chance.choice(_LENGTHS),
        temperature=chance.choice(TEMPERATURES),
        seed=chance.getrandbits(32),
        ignore_eos=bool(number % 2),
    )


class Mix:
    """An endless source of visits, the same for the same seed."""

    def __init__(self, known: Sequence[Request], modes: Sequence[Speculation], seed: int) -> None:
        self._known = known
        self._modes = modes
        self._chance = Random(seed)
        self._texts = [prompt.text for prompt in mixed_workload().prompts]
        self._drawn = 0

    def draw(self) -> Visit:
        """Return the next visit."""
        chance = self._chance
        self._drawn += 1
        request = chance.choice(self._known)
        if chance.random() < _SHARE_ONCE:
            request = self._once()
        manner = self._manner()
        leave_after = chance.randrange(request.max_tokens) if manner is not Manner.READ else 0
        away_s = chance.uniform(0, _LONGEST_AWAY_S) if manner is Manner.RESUME else 0.0
        return Visit(request, chance.choice(self._modes), manner, leave_after, away_s)

    def _once(self) -> Request:
        tag = f"({self._chance.getrandbits(48):012x}) "
        return _request("", self._drawn, [tag + text for text in self._texts], self._chance)

    def _manner(self) -> Manner:
        at, edge = self._chance.random(), 0.0
        for name, share in _SHARES.items():
            edge += share
            if at < edge:
                return Manner(name)
        return Manner.READ


class References:
    """The answers of the catalogue, once they are learnt."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[int, ...]] = {}

    def learn(self, name: str, answer: Sequence[int]) -> None:
        """Record the right answer."""
        self._answers[name] = tuple(answer)

    def agree(self, request: Request, tokens: Sequence[int], *, whole: bool) -> bool:
        """Return True if the tokens are the recorded answer, or its beginning unless `whole`.

        Without a recorded answer it checks the length only.
        """
        known = self._answers.get(request.name)
        if known is not None:
            return tuple(tokens) == (known if whole else known[: len(tokens)])
        if whole and request.ignore_eos:
            return len(tokens) == request.max_tokens
        return len(tokens) <= request.max_tokens
