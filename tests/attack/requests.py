"""Valid requests for every RPC of every port, which the fuzzer mutates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from galley.core.admission.attempts import ATTEMPT_KEY, Attempt
from galley.core.content import prefix_hash
from galley.core.names import FORCE_KEY, FORCE_VALUE
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.attack.stack import HEALTH, SERVICES
from tests.fakes.truth import VOCAB, true_next

T = TypeVar("T")

_SESSIONS, _MAX_TOKENS = 12, 400
_SERVED = ("", "galley.v1.Generation", "galley.v1.Target", "none")


@dataclass
class Known:
    ids: list[str] = field(default_factory=lambda: ["0" * 32])
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def learn(self, session_id: str) -> None:
        self.ids = [*self.ids[-20:], session_id]


@dataclass(frozen=True)
class Rpc:
    service: str
    method: MethodDescriptor
    make: Callable[[Random, Known], Message]
    share: int

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    @property
    def name(self) -> str:
        return f"{self.service} {self.method.name}"

    def read(self, data: bytes) -> Message:
        response: Message = GetMessageClass(self.method.output_type).FromString(data)
        return response


def rpcs() -> list[Rpc]:
    results = []
    for (service, full_name), makers in _MAKERS.items():
        methods = descriptor_pool.Default().FindServiceByName(full_name).methods_by_name
        missing = set(methods) - set(makers)
        assert not missing, f"{full_name}: no requests for {missing}"
        results += [Rpc(service, methods[name], make, share) for name, (make, share) in makers.items()]
    return results


def some_metadata(random: Random) -> list[tuple[str, str | bytes]]:
    if random.random() < 0.8:
        return []
    choices: list[tuple[str, str | bytes]] = [
        ("traceparent", _traceparent(random)),
        ("traceparent", "00-" + "0" * 60),
        ("traceparent", "x" * random.choice((1, 55, 500))),
        ("tracestate", "a=b," * random.choice((1, 40))),
        ("baggage", "k=v"),
        (FORCE_KEY, FORCE_VALUE),
        (ATTEMPT_KEY, str(Attempt(b"stream", random.randrange(9)))),
        (ATTEMPT_KEY, "x" * random.choice((0, 1, 300))),
        ("x-noise-bin", random.randbytes(random.choice((0, 1, 100)))),
        ("x-noise", "%00\\" * 10),
    ]
    return random.choices(choices, k=random.choice((1, 1, 3)))


def _generate(random: Random, known: Known) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        max_tokens=random.randint(1, 16),
        ignore_eos=random.random() < 0.5,
        sampling=_sampling(random),
        speculation=pb.Speculation(mode=random.choice(pb.Speculation.Mode.values()), k=random.randrange(9)),
        stop=random.sample(["x", "\n", "the end"], random.randrange(3)),
        stop_token_ids=[random.randrange(VOCAB) for _ in range(random.randrange(3))],
        workload=random.choice(("", "chat", f"w{random.randrange(100)}")),
        continue_without_client=random.random() < 0.05,
    )
    kind = random.randrange(3)
    if kind == 0:
        request.text = random.choice(("hello", "a b c " * 20, "😀"))
    elif kind == 1:
        for _ in range(random.randint(1, 3)):
            request.messages.messages.add(role="user", content="hello")
    else:
        request.token_ids.ids.extend(_tokens(random, random.randint(1, 40)))
    if random.random() < 0.3:
        request.logprobs = random.randrange(5)
    if random.random() < 0.3:
        request.idempotency_key = f"key-{random.randrange(50)}"
    return request


def _sampling(random: Random) -> pb.SamplingParams:
    sampling = pb.SamplingParams(
        temperature=random.choice((0.0, 0.7, 1.0)),
        top_p=random.choice((0.9, 1.0)),
        seed=random.getrandbits(64),
    )
    if random.random() < 0.2:
        sampling.logit_bias.update({random.randrange(VOCAB): random.uniform(-100, 100) for _ in range(3)})
    return sampling


def _resume(random: Random, known: Known) -> pb.ResumeRequest:
    seen = random.choice((b"", b"", random.randbytes(16)))
    return pb.ResumeRequest(
        session_id=random.choice(known.ids), next_index=random.randrange(4), seen_hash=seen
    )


def _slice(random: Random, known: Known) -> pb.SessionSlice:
    name = f"s{random.randrange(_SESSIONS)}"
    tokens = known.tokens.get(name, [])
    if not tokens or len(tokens) > _MAX_TOKENS or random.random() < 0.2:
        tokens = _tokens(random, random.randint(1, 40))
        start = 0
    else:
        start = random.randint(0, len(tokens) - 1)
        for _ in range(random.randint(1, 4)):
            tokens = [*tokens, true_next(tokens, 7)]
    known.tokens[name] = tokens
    return pb.SessionSlice(
        session_id=name,
        request_id=random.randrange(1, 1000),
        start=start,
        tokens=tokens[start:],
        prefix_hash=prefix_hash(tokens[:start]),
        prompt_len=1,
        max_position=len(tokens) + random.randint(1, 30),
        sampling=pb.SamplingParams(temperature=0.0, seed=7),
        remaining_ns=random.choice((0, 0, 10**6, 10**9)),
        priority=random.choice((0, 0, -1, 5)),
        tenant_salt=random.choice((b"", b"salt")),
        traceparent=random.choice(("", "", _traceparent(random))),
    )


def _verify_item(random: Random, known: Known) -> pb.VerifyItem:
    part = _slice(random, known)
    drafts = _tokens(random, random.randrange(6))
    item = pb.VerifyItem(
        slice=part,
        draft_tokens=drafts,
        survival=[0.5] * len(drafts) if random.random() < 0.5 else [],
        parents=_parents(random, len(drafts)),
        credit=random.choice((0, 0, 4, 32)),
        hint_due=random.random() < 0.2,
        max_verified=random.randrange(3),
    )
    if random.random() < 0.2:
        item.logprobs = random.randrange(4)
    if random.random() < 0.3:
        item.want_features = True
        item.feature_layers.extend(sorted(random.sample(range(1, 10), random.randrange(1, 5))))
    return item


def _parents(random: Random, count: int) -> list[int]:
    """Return parents of a chain, of a tree, or of none: cyclic, out of range, or too many."""
    match random.randrange(4):
        case 0:
            return [random.randint(-1, node - 1) for node in range(count)]
        case 1:
            return [random.randint(-(2**31), 2**31 - 1) for _ in range(random.randint(1, count + 1))]
        case 2:
            return [random.randint(-1, count) for _ in range(count + random.randint(0, 1))]
    return []


def _verify_stream(random: Random, known: Known) -> pb.VerifyStreamRequest:
    items = _several(_verify_item, random, known)
    request = pb.VerifyStreamRequest(items=items)
    for part in (item.slice for item in items):
        name = {"session_id": part.session_id, "request_id": part.request_id}
        if random.random() < 0.2:
            request.cancelled.add(**name)
        if random.random() < 0.4:
            position, tokens = part.start + len(part.tokens), known.tokens[part.session_id]
            hint = pb.Hint(
                position=position,
                prefix_hash=prefix_hash(tokens),
                draft_tokens=_tokens(random, 4),
                survival=[0.8, 0.5, 0.2, 0.1],
                parents=_parents(random, 4),
            )
            request.extensions.add(
                **name, limit=position + random.randrange(20), hint=hint, hint_due=random.random() < 0.3
            )
    return request


def _propose_item(random: Random, known: Known) -> pb.ProposeItem:
    return pb.ProposeItem(
        slice=_slice(random, known),
        k=random.randrange(17),
        strategy=random.choice(("", "ngram", "none")),
        workload=random.choice(("", "chat")),
        ahead=random.choice((0, 0, 1)),
        width=random.choice((0, 1, 2, 8, 2**32 - 1)),
    )


def _propose_stream(random: Random, known: Known) -> pb.ProposeStreamRequest:
    items = _several(_propose_item, random, known)
    request = pb.ProposeStreamRequest(items=items)
    if random.random() < 0.2:
        request.cancelled.add(session_id=items[0].slice.session_id, request_id=items[0].slice.request_id)
    return request


def _load_draft(random: Random, known: Known) -> pb.LoadDraftRequest:
    if random.random() < 0.5:
        return pb.LoadDraftRequest(data=random.randbytes(random.randint(0, 64)))
    files = [
        pb.DraftFile(name=name, size=random.choice((0, 1, 2**64 - 1)), digest=random.randbytes(16))
        for name in ("config.json", random.choice(("model.safetensors", "../x", "")))
    ]
    return pb.LoadDraftRequest(draft=pb.DraftFiles(files=files, version=random.choice(("", "v", "/"))))


def _several(make: Callable[[Random, Known], T], random: Random, known: Known) -> list[T]:
    return [make(random, known) for _ in range(random.randint(1, 4))]


def _export(random: Random, known: Known) -> otlp.ExportTraceServiceRequest:
    request = otlp.ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "fuzzer"
    scope = resource.scope_spans.add()
    for _ in range(random.randint(1, 8)):
        span = scope.spans.add(
            trace_id=random.randbytes(16),
            span_id=random.randbytes(8),
            parent_span_id=random.choice((b"", random.randbytes(8))),
            name="span",
            start_time_unix_nano=random.getrandbits(60),
            end_time_unix_nano=random.getrandbits(60),
        )
        value = span.attributes.add(key="a").value
        value.array_value.values.add().kvlist_value.values.add(key="b").value.double_value = 0.5
        span.events.add(name="event", time_unix_nano=1).attributes.add(key="e").value.bool_value = True
        span.links.add(trace_id=random.randbytes(16), span_id=random.randbytes(8))
    return request


def _health(random: Random, known: Known) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=random.choice(_SERVED))


def _reflect(random: Random, known: Known) -> reflection_pb2.ServerReflectionRequest:
    make = reflection_pb2.ServerReflectionRequest
    extension = reflection_pb2.ExtensionRequest(containing_type="galley.v1.VerifyItem", extension_number=1)
    requests = [
        make(file_by_filename="galley/v1/galley.proto"),
        make(file_containing_symbol=random.choice(_SERVED)),
        make(file_containing_extension=extension),
        make(all_extension_numbers_of_type="galley.v1.VerifyItem"),
        make(list_services=""),
    ]
    return random.choice(requests)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(256) for _ in range(count)]


def _traceparent(random: Random) -> str:
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-0{random.randrange(2)}"


_Maker = tuple["Callable[[Random, Known], Message]", int]
_HEALTH: dict[str, _Maker] = {"Check": (_health, 1), "Watch": (_health, 1), "List": (_health, 1)}
_REFLECTION: dict[str, _Maker] = {"ServerReflectionInfo": (_reflect, 1)}
_MAKERS: dict[tuple[str, str], dict[str, _Maker]] = {
    ("gateway", "galley.v1.Generation"): {
        "Generate": (_generate, 14),
        "Resume": (_resume, 6),
        "Abort": (lambda random, known: pb.AbortRequest(session_id=random.choice(known.ids)), 4),
        "Audit": (lambda random, known: pb.AuditRequest(session_id=random.choice(known.ids)), 4),
        "GetAuditCounts": (lambda random, known: pb.GetAuditCountsRequest(), 1),
        "GetModelInfo": (lambda random, known: pb.GetModelInfoRequest(), 2),
    },
    ("target", "galley.v1.Target"): {
        "Verify": (lambda r, known: pb.VerifyRequest(items=_several(_verify_item, r, known)), 14),
        "VerifyStream": (_verify_stream, 14),
        "GetTargetInfo": (lambda random, known: pb.GetTargetInfoRequest(), 1),
    },
    ("draft", "galley.v1.Draft"): {
        "Propose": (lambda r, known: pb.ProposeRequest(items=_several(_propose_item, r, known)), 12),
        "ProposeStream": (_propose_stream, 12),
        "GetDraftInfo": (lambda random, known: pb.GetDraftInfoRequest(), 1),
        "LoadDraft": (_load_draft, 2),
    },
    ("collector", "opentelemetry.proto.collector.trace.v1.TraceService"): {"Export": (_export, 12)},
    **{(service, "grpc.health.v1.Health"): _HEALTH for service in (*SERVICES, HEALTH)},
    **{(service, "grpc.reflection.v1alpha.ServerReflection"): _REFLECTION for service in SERVICES},
}
