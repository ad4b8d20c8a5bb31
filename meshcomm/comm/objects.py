"""Python objects along dims: the ranks compare sizes and options, then send bytes. Pickle is opt-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER
from meshcomm.comm.checks import OWN_TAGS, check_answered, check_coord, check_other, check_tag
from meshcomm.comm.codec import HEADER_BYTES, decode, encode
from meshcomm.comm.communicator import Communicator, CommunicatorCache
from meshcomm.comm.request import Options
from meshcomm.errors import LayoutError, ObjectError
from meshcomm.layout import Dims
from meshcomm.layout.sizes import fold
from meshcomm.transport.torch_private import outside_graphs, without_modes

MAX_BYTES: Final = 64 << 20

_ROOTS: Final = {"broadcast": "src", "gather": "dst", "scatter": "src", "send": "dst", "recv": "src"}
_OFFER_BYTES: Final = 1024


class _Offer(NamedTuple):
    """What each rank tells the others before it sends any object bytes, as JSON of a fixed length.

    size: bytes in the rank's object; 0 if it sends nothing. In a scatter: bytes in the largest object, for coord `target`.
    failed: why the object cannot be sent, as (what, expected, hint). cap: the rank's max_bytes.
    """

    call: str
    size: int
    target: int | None
    failed: tuple[str, str | None, str | None] | None
    cap: int
    pickle: bool


@outside_graphs
@final
class Objects:
    """`mesh.objects`: broadcast, all_gather, gather, scatter, send and recv of Python objects along dims.

    Supported types: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
    frozenset, torch.Size, torch.dtype, NumPy arrays and scalars, and tensors. Every rank, including the
    sender, gets new memory. Tensors arrive dense, on the receiver's mesh device and without
    gradients. An object that occurs twice arrives as one object. No code from the message is executed.

    With `pickle=True` on every rank of the call, any picklable object can be sent. Unpickling executes
    code from the message: use it only if you trust every sender.

    max_bytes: limit on the encoded size of one object. The smallest value in the group applies.

    All ranks of the group raise the same ObjectError if one rank's object cannot be sent or exceeds the
    limit, or if ranks disagree on `pickle`. In this case no object bytes have been sent, and the group stays
    usable. The same applies if one rank makes a different call or names a different root. During the first calls
    in a group, such a difference raises CallMismatchError instead.

    Peers and roots are coords.

    In a dry run, `all_gather` and `gather` assume that every other rank passes this rank's object. A call
    whose object exists only on another rank raises an error.
    """

    def __init__(self, directory: CommunicatorCache, device: torch.device, is_fake: bool = False) -> None:
        self._at = directory
        self._device = device
        self._is_fake = is_fake

    def broadcast(
        self, dims: Dims, obj: Any, src: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """Return the object of coord `src`. Objects on other ranks are ignored.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError if src is not a coord.
        """
        call = self._call(dims, "broadcast", src, pickle, max_bytes)
        if self._is_fake:
            if call.comm.coord != src:
                self._nobody(call)
            return self._own_of(call, obj)
        with call.begun() as (comm, moves):
            mine, sizes = call.agree(comm, lambda: [obj] if comm.coord == src else [], moves)
            data = comm.collective(BROADCAST, mine[0] if mine else call.blank(sizes[src]), root=src)
        return call.decoded(data)

    def all_gather(
        self, dims: Dims, obj: Any, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any]:
        """Return every rank's object, in coord order. Sizes may differ.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`.
        """
        return self._gathered(self._call(dims, "all_gather", -1, pickle, max_bytes), obj)

    def gather(
        self, dims: Dims, obj: Any, dst: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any] | None:
        """Return every rank's object, in coord order, on coord `dst`; None on other ranks.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError if dst is not a coord.
        """
        call = self._call(dims, "gather", dst, pickle, max_bytes)
        objects = self._gathered(call, obj)
        return objects if call.comm.coord == dst else None

    def scatter(
        self,
        dims: Dims,
        objs: Sequence[Any] | None,
        src: int,
        *,
        pickle: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Any:
        """Send object c of the list on coord `src` to coord c. Lists on other ranks are ignored.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`, also if the length of the list is not the
                   size of `dims`; LayoutError if src is not a coord.
        """
        call = self._call(dims, "scatter", src, pickle, max_bytes)
        if self._is_fake and call.comm.coord == src:
            return self._own_of(call, _one_each(objs, call.comm.size)[src], call.comm.size)
        if self._is_fake:
            self._nobody(call)
        with call.begun() as (comm, moves):
            mine, _ = call.agree(comm, lambda: _one_each(objs, comm.size) if comm.coord == src else [], moves)
            sizes = [message.numel() for message in mine] or [0] * comm.size
            own = comm.collective(
                ALL_TO_ALL,
                torch.cat(mine) if mine else call.blank(0),
                options=Options(input_split_sizes=sizes),
            )
        return call.decoded(own)

    def send(
        self,
        dims: Dims,
        obj: Any,
        dst: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Send `obj` to coord `dst`, which must call `recv`, and return once the receiver accepts the object.

        If two ranks send to each other before either receives, both raise.

        tag:    a send matches only a receive with the same tag (Gloo; NCCL matches by order). On Gloo, tensors
                and objects never match each other.
        Raises: ObjectError, on both ranks; LayoutError if dst is not a coord.
        """
        call = self._call(dims, "send", dst, pickle, max_bytes, tag)
        if self._is_fake:
            self._own_of(call, obj, group=False)
            return
        mine = call.encoded(lambda: [obj])
        coord, tag = call.comm.coord, OWN_TAGS + tag
        with call.begun(group=False) as (comm, moves):
            # If the other rank sends too, each rank's offer is received as the answer to the other's.
            if comm.messages.ordered:
                answers = [call.swapped(comm, dst, tag)]
            else:
                sending = comm.messages.send(call.packed(), dst, tag, async_op=True)
                answers = []
                if call.offer.failed is None:
                    came = comm.messages.recv(call.blank(_OFFER_BYTES), dst, tag)
                    answers = [call.read(dst, call.arrived(came))]
                sending.wait()
            call.compare_offers([(coord, call.offer), *answers], pair=True)
            moves(call.offer.size)
            comm.messages.send(mine[0], dst, tag)

    def recv(
        self, dims: Dims, src: int, tag: int = 0, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """Return the object that coord `src` sends.

        Raises: ObjectError, on both ranks; LayoutError if src is not a coord.
        """
        call = self._call(dims, "recv", src, pickle, max_bytes, tag)
        coord, tag = call.comm.coord, OWN_TAGS + tag
        if self._is_fake:
            self._nobody(call)
        with call.begun(group=False) as (comm, moves):
            if comm.messages.ordered:
                offer = call.swapped(comm, src, tag)[1]
            else:
                came = comm.messages.recv(call.blank(_OFFER_BYTES), src, tag)
                offer = call.read(src, call.arrived(came))[1]
                if offer.failed is None:
                    comm.messages.send(call.packed(), src, tag)
            call.compare_offers([(src, offer), (coord, call.offer)], pair=True)
            moves(offer.size)
            data = comm.messages.recv(call.blank(offer.size), src, tag)
        return call.decoded(data)

    def _call(self, dims: Dims, name: str, root: int, pickle: bool, max_bytes: int, tag: int = 0) -> _Call:
        comm = self._at.along(dims)
        check_tag(tag, lambda: comm.where(f"objects.{name}"))
        return _Call(comm, name, root, _Offer("", 0, None, None, max_bytes, bool(pickle)), self._device)

    def _gathered(self, call: _Call, obj: Any) -> list[Any]:
        """Return every rank's object; [] on ranks other than the root, if there is one."""
        if self._is_fake:
            return [self._own_of(call, obj, call.comm.size)] * call.comm.size
        with call.begun() as (comm, moves):
            mine, sizes = call.agree(comm, lambda: [obj], moves)
            parts = _gathered_bytes(comm, mine[0], sizes, call.root)
        return [call.decoded(part) for part in parts]

    def _own_of(self, call: _Call, obj: Any, copies: int = 1, group: bool = True) -> Any:
        """Return this rank's object as the result of a call in a simulated world. The call is counted like any other."""
        with (
            call.begun(group) as (_, moves),
            without_modes(),
        ):
            sizes = [encoded.numel() for encoded in call.encoded(lambda: [obj])]
            call.compare_offers([(call.comm.coord, call.offer)])
            moves(copies * sum(sizes))
        return obj

    def _nobody(self, call: _Call) -> None:
        hint = "an object that each rank creates, if mesh.is_fake is True"
        check_answered(call.comm.transport.name, "the object", call.where, hint)


@final
class _Call:
    """One call along one communicator: its checked arguments, and the properties on which the ranks must agree.

    root:  the coord that the call names: src, dst, or the peer; -1 if there is none.
    offer: this rank's offer.
    """

    def __init__(self, comm: Communicator, call: str, root: int, offer: _Offer, device: torch.device) -> None:
        self.comm = comm
        self.name = call
        self.root = root
        self.where = comm.where(f"objects.{call}")
        self._device = device
        # In host memory if the backend supports it, so that no accelerator is touched.
        self._carrier = torch.device("cpu") if "cpu" in comm.transport.kinds else device
        if call in _ROOTS:
            check_coord(root, comm.size, _ROOTS[call], lambda: self.where)
        if call in ("send", "recv"):
            check_other(root, comm.coord, _ROOTS[call], lambda: self.where)
        if type(offer.cap) is not int or not HEADER_BYTES <= offer.cap <= 1 << 62:
            raise LayoutError(
                f"{self.where}: max_bytes={offer.cap!r}",
                given=f"max_bytes={offer.cap!r}",
                expected=f"an integer from {HEADER_BYTES} to {1 << 62}",
                hint="leave max_bytes out",
            )
        name = f"{call}, {_ROOTS[call]}={root}" if call in ("broadcast", "gather", "scatter") else call
        self.offer = offer._replace(call=name)
        self._cause: Exception | None = None

    def begun(self, group: bool = True) -> AbstractContextManager[tuple[Communicator, Callable[[int], None]]]:
        """Return the call's context manager. group: whether every rank of the group makes it; see `Communicator.named`."""
        facts = {_ROOTS[self.name]: self.root} if group and self.root >= 0 else {}
        return self.comm.named(f"objects.{self.name}", group, self.root if group else -1, facts)

    def blank(self, nbytes: int) -> Tensor:
        """Return memory to receive into."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._carrier)

    def decoded(self, data: Tensor) -> Any:
        """Return the object decoded from received bytes."""
        try:
            return decode(data, self._device, self.offer.pickle)
        finally:
            self.comm.confirm(f"objects.{self.name}")

    def encoded(self, make: Callable[[], Sequence[Any]]) -> list[Tensor]:
        """Return this rank's objects as bytes. If they cannot be encoded, return [] and store the reason in the offer."""
        which = ""
        messages = []
        try:
            for coord, obj in enumerate(make()):
                which = f"for coord {coord}: " if self.offer.call.startswith("scatter") else ""
                messages.append(encode(obj, self.offer.pickle).to(self._carrier))
        except Exception as error:  # other ranks must be told, whatever the error is
            self._cause = error
            object_error = ObjectError(
                f"{type(error).__name__}: {error}", expected="an object that can be read"
            )
            object_error = error if isinstance(error, ObjectError) else object_error
            self.offer = self.offer._replace(
                failed=(which + object_error.what, object_error.expected, object_error.hint)
            )
            return []
        sizes = [message.numel() for message in messages]
        size = max(sizes, default=0)
        target = sizes.index(size) if which else None
        self.offer = self.offer._replace(size=size, target=target)
        return messages

    def packed(self) -> Tensor:
        """Return the offer as a uint8 tensor of fixed length."""
        offer = self.offer
        while len(text := json.dumps(offer).encode()) > _OFFER_BYTES:
            assert offer.failed is not None
            what, expected, hint = offer.failed
            offer = offer._replace(failed=(what[: len(what) * 3 // 4], expected, hint))
        data = bytearray(text.ljust(_OFFER_BYTES))
        return torch.frombuffer(data, dtype=torch.uint8).to(self._carrier)

    def arrived(self, data: Tensor) -> Tensor:
        """Return received bytes in host memory. Raises RankLost if the bytes may come from a dropped call."""
        on_host = data.cpu()
        self.comm.confirm(f"objects.{self.name}")
        return on_host

    def read(self, coord: int, data: Tensor) -> tuple[int, _Offer]:
        """Return the offer of a coord. Raises ObjectError for bytes that are not an offer."""
        try:
            offer = _Offer(*json.loads(data.numpy().tobytes()))
            if [type(field) for field in (offer.call, offer.size, offer.cap)] == [str, int, int]:
                return coord, offer
        except (ValueError, TypeError, RecursionError):
            pass
        raise ObjectError(
            f"{self.where}: the data from coord {coord} is not an object",
            given="bytes from another call or another version of meshcomm",
            expected="the same call on every rank",
            hint="check the order of calls on those ranks",
        )

    def swapped(self, comm: Communicator, peer: int, tag: int) -> tuple[int, _Offer]:
        """Exchange offers with a coord in one call, on backends whose messages wait for one another."""
        offer_of_peer = self.blank(_OFFER_BYTES)
        comm.messages.exchange(sends=[(self.packed(), peer, tag)], recvs=[(offer_of_peer, peer, tag)])
        return self.read(peer, self.arrived(offer_of_peer))

    def agree(
        self, comm: Communicator, make: Callable[[], Sequence[Any]], moves: Callable[[int], None]
    ) -> tuple[list[Tensor], list[int]]:
        """Return this rank's objects as bytes, and every rank's size. If the call cannot continue, raise on every rank."""
        mine = self.encoded(make)
        table = self.arrived(comm.collective(ALL_GATHER, self.packed())).view(comm.size, -1)
        try:
            offers = [self.read(coord, data) for coord, data in enumerate(table)]
            self.compare_offers(offers)
        except ObjectError:
            self.comm.recorder.refuse()
            raise
        sizes = [offer.size for _, offer in offers]
        # In a scatter, ranks know only the size of the source's largest part, so all parts are padded to it.
        moves(sum(sizes) * (1 if offers[0][1].target is None else comm.size))
        return mine, sizes

    def compare_offers(self, offers: list[tuple[int, _Offer]], pair: bool = False) -> None:
        """Raise the same ObjectError on all ranks if the call cannot continue. offers: (coord, offer) pairs.

        pair: whether the call is a send and its matching recv.
        """
        failed = {coord: offer.failed for coord, offer in offers if offer.failed is not None}
        calls = _by_coord((offer.call, coord) for coord, offer in offers)
        pickles = _by_coord((f"pickle={bool(offer.pickle)}", coord) for coord, offer in offers)
        cap = min(offer.cap for _, offer in offers)
        over = {coord: offer for coord, offer in offers if not 0 <= offer.size <= cap}
        if len(calls) != (2 if pair else 1) and not (pair and failed):
            self._refuse(
                "the ranks made different calls",
                "; ".join(f"{coords}: {call}" for call, coords in calls.items()),
                "a recv for each send" if pair else "the same call with the same root on every rank",
                "check the order of calls on those ranks",
            )
        if len(pickles) > 1:
            self._refuse(
                "the ranks disagree on pickle",
                "; ".join(f"{pickles[protocol]}: {protocol}" for protocol in sorted(pickles, reverse=True)),
                "the same on every rank; a pickle can run any code on its receivers",
                "pickle=True on every rank if every sender is trusted, or on none",
            )
        if failed:
            _, expected, hint = next(iter(failed.values()))
            reasons = "\n".join(f"coord {coord}: {failure[0]}" for coord, failure in failed.items())
            self._refuse(f"the object of {_coords(failed)} cannot be sent", reasons, expected, hint)
        if over:
            places = {
                coord: f"coord {coord}{'' if offer.target is None else f', for coord {offer.target}'}"
                for coord, offer in over.items()
            }
            self._refuse(
                f"the object of {_coords(over)} is over the size cap",
                "\n".join(f"{places[coord]}: {offer.size:,} bytes" for coord, offer in over.items()),
                f"at most {cap:,} bytes each, the max_bytes of "
                + _coords([coord for coord, offer in offers if offer.cap == cap]),
                "a larger max_bytes on every rank; or send large tensors as tensors",
            )

    def _refuse(self, what: str, given: str, expected: str | None, hint: str | None) -> NoReturn:
        error = ObjectError(f"{self.where}: {what}", given=given, expected=expected, hint=hint)
        raise error from self._cause


def _gathered_bytes(comm: Communicator, mine: Tensor, sizes: list[int], root: int) -> list[Tensor]:
    """Return every rank's bytes in coord order: on coord `root`, or on all ranks if it is -1."""
    longest = max(sizes)
    # Padding to the longest object may at most double the data to move and store.
    even = longest * comm.size <= max(2 * sum(sizes), 1 << 16)
    x = pad(mine, (0, longest - mine.numel())) if even else mine
    row = ALL_GATHER if root < 0 else GATHER
    gathered = comm.collective(row, x, root=root, options=None if even else Options(uneven=True))
    if gathered is None:
        return []
    parts = gathered.split([longest] * comm.size if even else sizes)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _one_each(objs: Any, size: int) -> Sequence[Any]:
    if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes)):
        raise ObjectError(
            f"objs is of type {type(objs).__name__}",
            expected=f"a list of {size} objects, one for each coord",
            hint="None on the other ranks only",
        )
    if len(objs) != size:
        raise ObjectError(
            f"objs has {len(objs)} elements",
            expected=f"{size}, one for each coord",
            hint="None for a coord that gets nothing",
        )
    return objs


def _by_coord(pairs: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the coords that sent each distinct text."""
    coords_of: dict[str, list[int]] = {}
    for text, coord in pairs:
        coords_of.setdefault(text, []).append(coord)
    return {text: _coords(coords) for text, coords in coords_of.items()}


def _coords(coords: Collection[int]) -> str:
    return f"coord {min(coords)}" if len(coords) == 1 else f"coords {fold(sorted(coords))}"
