"""How the events of a stream are shown: as text for people, as JSON lines for machines."""

from __future__ import annotations

import sys
from typing import Protocol

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.style import Style
from rich.text import Text

from galley.common.printable import printable
from galley.pb.galley.v1 import galley_pb2 as pb

DRAFT_COLOUR = "green"


class View(Protocol):
    """Is shown each event of a stream."""

    def show(self, event: pb.StreamEvent) -> None:
        """Show it."""

    def close(self) -> None:
        """No event follows."""


class JsonView:
    """One line an event, in the proto's JSON mapping with its field names; 64-bit numbers are strings."""

    def show(self, event: pb.StreamEvent) -> None:
        """Write it."""
        sys.stdout.write(MessageToJson(event, preserving_proto_field_name=True, indent=None) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing is held back."""


class TextView:
    """The text alone, exactly; a terminal is not sent control characters."""

    def __init__(self, console: Console) -> None:
        self._plain = console.is_terminal
        self._last = "\n"

    def show(self, event: pb.StreamEvent) -> None:
        """Write what the event adds to the text."""
        if text := event.chunk.text:
            sys.stdout.write(printable(text) if self._plain else text)
            sys.stdout.flush()
            self._last = text[-1]

    def close(self) -> None:
        """End the line on a terminal."""
        if self._plain and self._last != "\n":
            sys.stdout.write("\n")


class OriginView:
    """The text, with what the draft proposed told apart.

    It is green; underlined on a terminal without colours; in brackets elsewhere.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._brackets = not console.is_terminal
        self._inside = False
        self._style = draft_style(console)

    def show(self, event: pb.StreamEvent) -> None:
        """Write what the event adds; all tokens of a chunk have one origin."""
        if not event.chunk.text:
            return
        from_draft = any(event.chunk.from_draft)
        if self._brackets:
            self._turn(from_draft)
        self._write(printable(event.chunk.text), self._style if from_draft else Style())

    def close(self) -> None:
        """Close what is open, end the line."""
        if self._brackets:
            self._turn(False)
        self._write("\n", Style())

    def _turn(self, inside: bool) -> None:
        if inside != self._inside:
            self._write("[" if inside else "]", Style())
            self._inside = inside

    def _write(self, text: str, style: Style) -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)


def draft_style(console: Console) -> Style:
    """Of tokens that the draft proposed."""
    return Style(underline=True) if console.no_color else Style(color=DRAFT_COLOUR)


def legend(console: Console) -> Text:
    """Explains OriginView."""
    if not console.is_terminal:
        return Text("[in brackets]: proposed by the draft; the rest: supplied by the target")
    return Text.assemble(("proposed by the draft", draft_style(console)), " · supplied by the target")


def reason(finished: pb.Finished) -> str:
    """Why an answer ended, in words."""
    match finished.WhichOneof("matched_stop"):
        case "stop":
            return f"stop string {finished.stop!r}"
        case "stop_token_id":
            return f"stop token {finished.stop_token_id}"
        case _:
            return pb.Finished.Reason.Name(finished.reason).removeprefix("REASON_").lower()


def mean_acceptance_length(stats: pb.SpeculationStats) -> float:
    """1 + accepted / rounds: tokens confirmed a round, where nothing is cut."""
    return 1 + stats.accepted / stats.rounds if stats.rounds else 0.0


def summary_line(session_id: str, finished: pb.Finished) -> str:
    """One line about a finished stream."""
    stats, usage = finished.speculation, finished.usage
    return (
        f"session {session_id} · {usage.prompt_tokens} + {usage.output_tokens} tokens · "
        f"{stats.rounds} rounds · "
        f"mean acceptance length {mean_acceptance_length(stats):.2f} · ended by {reason(finished)}"
    )
