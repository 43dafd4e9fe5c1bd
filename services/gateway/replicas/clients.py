"""The connection to one replica: who serves there, and one stream for the requests of all sessions.

A request costs less on a stream than as a call (docs/decisions/007). It may have several responses, and
may be extended until the last of them. Whatever comes up while a message is being written goes into the next
message. Cancelling a request tells the replica. A stream that breaks fails its open requests, and the next
request opens a new stream. A stream whose TLS files have changed is outdated: after `reconnect` it serves
only the requests that it has.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from galley.common.logs import get_logger
from galley.common.shared_work import SharedWork
from galley.common.tls.channels import generation_of
from galley.common.wire.fields import varint
from galley.core.errors import GalleyError, Unavailable
from galley.core.features import FeatureForm
from galley.core.session.events import Replica
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.clock import SECOND
from services.gateway.replicas import messages
from services.gateway.replicas.delivery import DeliveryQueue
from services.gateway.replicas.states import sends_states

MEET_TIMEOUT_S = 1.0

RequestT = TypeVar("RequestT", pb.VerifyItem, pb.ProposeItem)
ResponseT = TypeVar("ResponseT", pb.VerifyAnswer, pb.ProposeAnswer)
ReceivedT_contra = TypeVar("ReceivedT_contra", pb.VerifyAnswer, pb.ProposeAnswer, contravariant=True)

MAX_MESSAGE_BYTES = 64 * 1024
"""Requests share a message up to this size, well below any replica's limit; a larger one goes alone."""

_ITEMS_KEY = b"\x0a"
"""The key of the field `items` on the wire: number 1, sized."""

MakeMessage: TypeAlias = Callable[[list[pb.ItemRef], list[pb.Extension]], Message]
HasMore: TypeAlias = Callable[[ResponseT], bool]
InfoT = TypeVar("InfoT")
FaultIn: TypeAlias = Callable[[InfoT], GalleyError | None]
"""Returns why the replica of a description is refused, or None."""

_log = get_logger(__name__)


class OpenCall(Protocol):
    def __call__(self) -> grpc.aio.StreamStreamCall[bytes, Any]: ...


def stream_of(channel: grpc.aio.Channel, method: str, response: type[Message]) -> OpenCall:
    """Return what opens a call of `method` whose requests are bytes."""
    return cast("OpenCall", channel.stream_stream(method, None, response.FromString))


class Receiver(Protocol[ReceivedT_contra]):
    """Take the responses to one request."""

    has_begun: bool
    """True if the session has had a response; the first ones overtake others."""

    def put(self, responses: Sequence[ReceivedT_contra]) -> None:
        """Take the next responses, all that have arrived by now."""

    def fail(self, error: Exception) -> None:
        """Take the error that ends the request: AioRpcError or Unavailable."""


class OpenRequest(Generic[ResponseT]):
    """One request that was sent, or waits for the stream to accept it."""

    def __init__(
        self,
        connection: _Connection[Any, ResponseT],
        ref: pb.ItemRef,
        receiver: Receiver[ResponseT],
        turns: DeliveryQueue,
    ) -> None:
        self.has_begun = receiver.has_begun
        self._turns = turns
        self._is_waiting = False
        """True while it waits for its turn to be delivered."""
        self._connection: _Connection[Any, ResponseT] = connection
        self._ref = ref
        self._receiver: Receiver[ResponseT] | None = receiver
        self._arrived: list[ResponseT] = []
        self._error: Exception | None = None

    @property
    def has_response(self) -> bool:
        """Return True if a response has arrived that was not delivered yet."""
        return bool(self._arrived)

    def extend(self, extension: pb.Extension) -> None:
        """Send `extension` if the request is still open; set its session and request ids here."""
        extension.session_id, extension.request_id = self._ref.session_id, self._ref.request_id
        self._connection.extend(extension)

    def cancel(self) -> None:
        """Give the request up, unless it has ended; nothing is delivered afterwards."""
        self._receiver = None
        self._connection.cancel(self._ref)

    def arrived(self, response: ResponseT) -> None:
        self._arrived.append(response)
        self._await_turn()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._await_turn()

    def _await_turn(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._turns.add(self)

    def deliver(self) -> int:
        """Give the receiver what has arrived, and then the error; return how many responses that were."""
        self._is_waiting = False
        responses, self._arrived = self._arrived, []
        self.has_begun = True
        if responses and self._receiver is not None:
            self._receiver.put(responses)
        if self._error is not None and self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.fail(self._error)
        return len(responses)


class OnlyResponse(Generic[ResponseT]):
    """Receive the only response of a request; if it `has_begun`, after those of requests that have not."""

    def __init__(self, *, has_begun: bool = False) -> None:
        self.has_begun = has_begun
        self.future: asyncio.Future[ResponseT] = asyncio.get_running_loop().create_future()

    def put(self, responses: Sequence[ResponseT]) -> None:
        if not self.future.done():
            self.future.set_result(responses[0])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class RequestStream(Generic[RequestT, ResponseT]):
    """The stream to one replica; it is opened when first needed."""

    def __init__(
        self,
        open_call: OpenCall,
        message: MakeMessage,
        has_more: HasMore[ResponseT] = lambda _: False,
        generation: Callable[[], int] = lambda: 0,
        turns: DeliveryQueue | None = None,
    ) -> None:
        """`open_call` opens a call that takes bytes: requests and what `message` builds are joined.

        `message` builds a message of references to cancelled requests, and extensions.

        `has_more` returns True for a response that is not the last of its request. `generation` returns
        another number once a new call would use another connection. `turns` is shared with other streams.
        """
        self._open_call = open_call
        self._message = message
        self._has_more: HasMore[ResponseT] = has_more
        self._generation = generation
        self._turns = turns or DeliveryQueue()
        self._generation_of_current = 0
        self._ids = itertools.count(1)
        self._current: _Connection[RequestT, ResponseT] | None = None
        self._retired: list[_Connection[RequestT, ResponseT]] = []

    @property
    def is_broken(self) -> bool:
        """Return True if the stream has ended since it was opened: another process may serve the next one."""
        return self._current is not None and self._current.is_broken

    @property
    def is_outdated(self) -> bool:
        """Return True if a new stream would use another connection."""
        return self._current is not None and self._generation() != self._generation_of_current

    def reconnect(self) -> None:
        """Let the next request open a new stream; the present one ends after its last response."""
        current, self._current = self._current, None
        self._retired = [connection for connection in self._retired if not connection.is_broken]
        if current is not None and not current.is_broken:
            self._retired.append(current)
            current.retire()

    def open(self, request: RequestT, receiver: Receiver[ResponseT]) -> OpenRequest[ResponseT]:
        """Set the `request_id` of `request`, queue it for sending, and return the open request.

        `receiver` gets the responses, never before this returns. Raise Unavailable if the replica was dropped
        meanwhile.
        """
        request.slice.request_id = next(self._ids)
        connection = self._current
        if connection is None or connection.is_broken:
            self._generation_of_current = self._generation()
            connection = self._current = _Connection(
                self._opened(), self._message, self._has_more, self._turns
            )
        return connection.open(request, receiver)

    def _opened(self) -> grpc.aio.StreamStreamCall[bytes, Any]:
        try:
            return self._open_call()
        except grpc.aio.UsageError as error:
            raise Unavailable("the channel to the replica was closed") from error

    async def send(self, request: RequestT) -> ResponseT:
        """Send `request` and return its only response; cancel the request if this call is cancelled.

        Raise AioRpcError or Unavailable.
        """
        only: OnlyResponse[ResponseT] = OnlyResponse()
        opened = self.open(request, only)
        try:
            return await only.future
        finally:
            opened.cancel()

    async def close(self) -> None:
        """End the stream; open requests fail."""
        connections = [*self._retired, self._current]
        self._retired = []
        for connection in connections:
            if connection is not None:
                await connection.close()


class _Connection(Generic[RequestT, ResponseT]):
    """One call that carries the stream, until it breaks or is retired."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[bytes, Any],
        message: MakeMessage,
        has_more: HasMore[ResponseT],
        turns: DeliveryQueue,
    ) -> None:
        self.is_broken = False
        self._turns = turns
        self._is_retired = False
        self._call = call
        self._message = message
        self._has_more: HasMore[ResponseT] = has_more
        self._open: dict[int, OpenRequest[ResponseT]] = {}
        self._unsent: dict[int, bytes] = {}
        """Requests by their ids, as they are sent: encoding those with long prompts takes some ms each."""
        self._cancelled: list[pb.ItemRef] = []
        self._extensions: list[pb.Extension] = []
        self._work = asyncio.Event()
        # The tasks must not run in the context of the first session, which has its own span and log fields.
        background = Context()
        self._tasks = [
            asyncio.create_task(work, context=background.copy()) for work in (self._write(), self._read())
        ]

    def open(self, request: RequestT, receiver: Receiver[ResponseT]) -> OpenRequest[ResponseT]:
        request_id = request.slice.request_id
        ref = pb.ItemRef(session_id=request.slice.session_id, request_id=request_id)
        opened = OpenRequest(self, ref, receiver, self._turns)
        self._open[request_id] = opened
        self._unsent[request_id] = request.SerializeToString()
        self._work.set()
        return opened

    def extend(self, extension: pb.Extension) -> None:
        if extension.request_id in self._open:
            self._extensions.append(extension)
            self._work.set()

    def cancel(self, ref: pb.ItemRef) -> None:
        if self._open.pop(ref.request_id, None) is not None:
            self._cancelled.append(ref)
            self._work.set()

    def retire(self) -> None:
        """Half-close the call once all its requests have their last response."""
        self._is_retired = True
        self._work.set()

    async def close(self) -> None:
        self._break(Unavailable("the gateway closed its connection to the replica"))
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while self._unsent or self._cancelled or self._extensions:
                    await self._call.write(self._next_message())
                if self._is_retired and not self._open:
                    await self._call.done_writing()
                    return
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                self._call.cancel()  # if it has not ended already; the reader learns the reason
                return
            except Exception as error:  # noqa: BLE001  # the requests must not wait for ever
                _log.error("stream to a replica failed", exc_info=error)
                self._break(Unavailable("the gateway's stream to the replica has failed"))
                self._call.cancel()
                return

    def _next_message(self) -> bytes:
        requests: list[bytes] = self._next_requests()
        cancelled, self._cancelled = self._cancelled, []
        rest = self._message(cancelled, self._next_extensions()).SerializeToString()
        return b"".join((*requests, rest))

    def _next_requests(self) -> list[bytes]:
        """Take the requests of the next message: those not cancelled, within MAX_MESSAGE_BYTES.

        Return each as a field of the message.
        """
        requests: list[bytes] = []
        size = 0
        for request_id, request in list(self._unsent.items()):
            if request_id in self._open:
                size += len(request)
                if requests and size > MAX_MESSAGE_BYTES:
                    break
                requests.append(_ITEMS_KEY + varint(len(request)) + request)
            del self._unsent[request_id]
        return requests

    def _next_extensions(self) -> list[pb.Extension]:
        """Take the extensions of open requests that were sent, or go into the same message."""
        due = [extension for extension in self._extensions if extension.request_id in self._open]
        self._extensions = [extension for extension in due if extension.request_id in self._unsent]
        return [extension for extension in due if extension.request_id not in self._unsent]

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for response in message.answers:
                    self._arrive(response)
        except grpc.aio.AioRpcError as error:
            self._break(error)
        finally:
            self._break(Unavailable("the stream to the replica has ended"))
            self._tasks[0].cancel()

    def _arrive(self, response: ResponseT) -> None:
        """Queue a response; drop it if its request was cancelled or has had its last one."""
        request_id = response.request_id
        opened = self._open.get(request_id)
        if opened is None:
            return
        if not self._has_more(response):
            del self._open[request_id]
            if self._is_retired:
                self._work.set()
        opened.arrived(response)

    def _break(self, error: Exception) -> None:
        self.is_broken = True
        failed, self._open = self._open, {}
        for opened in failed.values():
            opened.failed(error)


class ReplicaClient(RequestStream[RequestT, ResponseT], ABC):
    """The connection to one address; a subclass has the description from the last `meet` as `info`."""

    address: str
    info: Any
    _met: Replica | None = None
    _fault_in: FaultIn[Any]

    @property
    def replica(self) -> Replica | None:
        return self._met

    async def meet(self, timeout_s: float) -> None:
        """Ask the replica for its description.

        Raise grpc.aio.AioRpcError if it does not respond in time, Unavailable if its connection was closed,
        or the reason for which it is refused.
        """
        was_outdated = self.is_outdated
        try:
            info = await self._describe(timeout_s)
        except grpc.aio.UsageError as error:
            raise Unavailable(f"the connection to {self.address} was closed") from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # A channel that is closed cancels its calls, not the tasks that await them.
            raise Unavailable(f"the connection to {self.address} was closed") from None
        if (fault := self._fault_in(info)) is not None:
            raise fault
        if self.is_broken or (was_outdated and self.is_outdated):  # no concurrent call has met it meanwhile
            self.reconnect()
        self.info = info
        self._met = Replica(self.address, info.incarnation)

    @abstractmethod
    async def _describe(self, timeout_s: float) -> Any:
        """Return the replica's description. Raise grpc.aio.AioRpcError."""

    def lost(self) -> None:
        """Meet again before the next request: another process may serve there."""
        self._met = None


def _ignores_grammar(part: pb.SessionSlice, kinds: Sequence[str]) -> bool:
    """Return True if a slice has a grammar, and its target none of that kind; later slices bring a hash."""
    kind = part.structured_output.WhichOneof("kind")
    return bool(part.grammar_hash) and (kind not in kinds if kind else not kinds)


class TargetClient(ReplicaClient[pb.VerifyItem, pb.VerifyAnswer]):
    info: pb.GetTargetInfoResponse

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        fault_in: FaultIn[pb.GetTargetInfoResponse],
        on_met: Callable[[], None],
        turns: DeliveryQueue | None = None,
    ) -> None:
        """`on_met` is called when a request had to meet the target first."""
        self._stub = rpc.TargetStub(channel)
        super().__init__(
            stream_of(channel, "/galley.v1.Target/VerifyStream", pb.VerifyStreamResponse),
            lambda cancelled, extensions: pb.VerifyStreamRequest(cancelled=cancelled, extensions=extensions),
            messages.has_more,
            generation_of(channel),
            turns,
        )
        self.address, self.info = address, pb.GetTargetInfoResponse()
        self._fault_in = fault_in
        self._on_met = on_met
        self._closes = 0
        # Outside the context of the session that happens to be first, which has a span and log fields.
        self._meeting = SharedWork(lambda: asyncio.create_task(self._meet_again(), context=Context()))

    async def _describe(self, timeout_s: float) -> pb.GetTargetInfoResponse:
        return await self._stub.GetTargetInfo(pb.GetTargetInfoRequest(), timeout=timeout_s)

    async def verify(
        self, item: pb.VerifyItem, receiver: Receiver[pb.VerifyAnswer], form: FeatureForm | None = None
    ) -> OpenRequest[pb.VerifyAnswer]:
        """Send a request, after `meet` if the process at the address is not known; return the open request.

        `receiver` gets the responses, with states of this `form` if the target sends those. Raise like
        `meet`, or Unavailable if closed meanwhile, or if the target would ignore the grammar of the request.
        """
        if self.is_broken:
            self.lost()  # no request was open to notice
        if self._met is None or self.is_outdated:
            closes = self._closes
            await self._meet_within(item.slice.remaining_ns / SECOND)
            if self._closes != closes:  # a stream that is opened now would never be closed
                raise Unavailable(f"the connection to the target at {self.address} was closed")
        if _ignores_grammar(item.slice, self.info.grammar_kinds):  # an earlier version came up there
            raise Unavailable(f"the target at {self.address} does not decode by this grammar")
        if item.parents and not self.info.trees:
            messages.without_tree(item)
        if form is not None and sends_states(self.info, form):
            item.want_features = True
            item.feature_layers.extend(form.layers)
        return self.open(item, receiver)

    async def _meet_within(self, remaining_s: float) -> None:
        """Meet the target with the other requests that wait for it; `remaining_s` is 0 for no deadline."""
        try:
            async with asyncio.timeout(remaining_s or None):
                await self._meeting.done()
        except TimeoutError as error:
            raise Unavailable(f"the target at {self.address} has not described itself in time") from error

    async def _meet_again(self) -> None:
        # A silent target must not keep requests from another one, even if they have more time.
        await self.meet(MEET_TIMEOUT_S)
        self._on_met()

    async def close(self) -> None:
        """End the stream, and fail requests that wait for `meet`; later ones may open it again."""
        self._closes += 1
        await super().close()


class DraftClient(ReplicaClient[pb.ProposeItem, pb.ProposeAnswer]):
    """The connection to one draft; send requests only while `replica` is not None."""

    info: pb.GetDraftInfoResponse

    def __init__(
        self, channel: grpc.aio.Channel, address: str, fault_in: FaultIn[pb.GetDraftInfoResponse]
    ) -> None:
        self._stub = rpc.DraftStub(channel)
        super().__init__(
            stream_of(channel, "/galley.v1.Draft/ProposeStream", pb.ProposeStreamResponse),
            lambda cancelled, _: pb.ProposeStreamRequest(cancelled=cancelled),
            generation=generation_of(channel),
        )
        self.address, self.info = address, pb.GetDraftInfoResponse()
        self._fault_in = fault_in

    @property
    def replica(self) -> Replica | None:
        return None if self.is_broken else super().replica

    async def _describe(self, timeout_s: float) -> pb.GetDraftInfoResponse:
        return await self._stub.GetDraftInfo(pb.GetDraftInfoRequest(), timeout=timeout_s)

    async def close(self) -> None:
        self.lost()
        await super().close()
