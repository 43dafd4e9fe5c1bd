"""Traces of typical requests, for tests of the terminal output and of the pages."""

from __future__ import annotations

from galley.core import names
from galley.trace.read.spans import Process
from tests.fakes.trace_builder import BEGAN_NS, OTHER_TARGET_AT, SESSION, TARGET, TARGET_AT, Scene, event, ns

NEIGHBOUR = "c0ffee00c0ffee00c0ffee00c0ffee00"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m\x07\u202e\n\"'&"
_WORDS = ("The", " old", " lighthouse", " stands", " on", " a", " cliff", " above", " the", " sea", ".", "\n")


def eventful() -> Scene:
    scene = Scene(skew_ms={TARGET: 12})
    neighbour = scene.request(session=NEIGHBOUR).round().end()
    request = scene.request(prompt=125).store("create", 3).store("claim", 1).idle(1)
    request.round(compute=48, kv_reused=96, accepted=0, text=_text(0, 1))
    shared = {"sessions": 2, "rows": 10, "draft_rows": 8, "queue_depth": 1}
    for number in range(8):
        accepted = (3, 1, 4, 0, 2, 4, 4, 1)[number]
        company = [neighbour.key] if number % 2 else []
        text = _text(number * 3, accepted + 1)
        request.round(
            draft=(0, 0, 6, 0)[number % 4],
            compute=27 + number % 3,
            accepted=accepted,
            batch=shared,
            company=company,
            calls=True,
            text=text,
        )
    request.round(draft=140, draft_compute_ns=ns(133), batch=shared, text=_text(5, 3))
    moved = event(
        names.SESSION_MOVED,
        request.at_ns + ns(60),
        pool="target",
        source=TARGET_AT,
        to=OTHER_TARGET_AT,
        reason="unavailable",
    )
    request.round(
        wire=70,
        compute=61,
        kv_reused=0,
        target=OTHER_TARGET_AT,
        events=[moved],
        batch={"rows": 150},
        text=_text(2, 3),
    )
    for _ in range(4):
        request.round(target=OTHER_TARGET_AT, batch={"ranks": (27, 26, 27)}, text=_text(1, 3))
    request.idle(190).event(names.CLIENT_STALLED, stalled_ns=ns(180))
    request.round(target=OTHER_TARGET_AT, text=_text(4, 3))
    request.round(commit=24, target=OTHER_TARGET_AT, text=_text(6, 3))
    request.attributes[names.CLIENT_STALLED_NS] = ns(180)
    request.end()
    return scene


def long(rounds: int = 120) -> Scene:
    scene = Scene()
    request = scene.request()
    for number in range(rounds):
        if number == rounds // 2:
            request.round(compute=144, batch={"sessions": 16, "rows": 71})
        else:
            request.round(accepted=number % 4)
    request.end()
    return scene


def resumed() -> Scene:
    scene = Scene()
    killed = scene.request().round().round()
    scene.request(
        at_ns=killed.at_ns + ns(1300),
        position=killed.position,
        resumed=True,
        continues=killed.key,
        process=Process("galley-gateway", "g2"),
    ).event(names.SESSION_RESUMED).idle(4).round(kv_reused=96).round().end(reason="length")
    return scene


_FREE_TEXTS = (names.WORKLOAD, names.GRAMMAR_KIND, names.ERROR_TYPE)


def hostile() -> Scene:
    scene = Scene(skew_ms={Process(HOSTILE, HOSTILE): 3})
    other = scene.request(session=HOSTILE * 2).round().end()
    reported = dict.fromkeys(("pool", "source", "to", "reason"), HOSTILE)
    moved = event(names.SESSION_MOVED, BEGAN_NS + 1, **reported)
    own = event(HOSTILE, BEGAN_NS + 2, have=HOSTILE)
    request = scene.request(session=SESSION, attributes=dict.fromkeys(_FREE_TEXTS, HOSTILE))
    request.round(
        target=HOSTILE,
        draft_replica=HOSTILE,
        round_strategy=HOSTILE,
        round_sources=(HOSTILE,),
        round_ranks=(HOSTILE,),
        round_overlap=HOSTILE,
        events=[moved, own],
        batch={},
        company=[other.key],
        text=[HOSTILE, "</span>", "\x00\x1b[2J"],
    )
    first = request.rounds[0]
    request.call(first, HOSTILE, Process(HOSTILE, HOSTILE), HOSTILE, first.start_ns, first.end_ns)
    request.operation = HOSTILE
    request.event(HOSTILE, reason=HOSTILE).end(error=HOSTILE, problem=HOSTILE, reason=HOSTILE)
    return scene


def _text(start: int, count: int) -> list[str]:
    return [_WORDS[(start + n) % len(_WORDS)] for n in range(count)]
