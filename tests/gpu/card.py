"""A CUDA device that is not there: tensors that say `cuda` and have their numbers on the processor.

Code runs as on a card (`x.is_cuda` is true), computes real numbers, and is refused what a card
refuses. In `captured` parts it is also refused what a CUDA graph cannot hold, and a `Tape` runs
them again as a graph would: with the same memory and with the host's numbers of that time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from llmcli.decoder.steps import GraphRecorder
from llmcli.kernels import native
from llmcli.ops import on_card

KERNELS = on_card.kernels  # Triton's, which need a card
aten = torch.ops.aten
PARTS = torch._C.DispatchKey.CompositeImplicitAutograd
# they have no parts: which kernel computes it is chosen from the device
WHOLE = {aten.scaled_dot_product_attention.default, aten.rms_norm.default}
# nothing is launched for them, as for views
ALLOCATES = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.detach, aten._unsafe_view, aten.lift_fresh,
}
# their results have shapes that depend on numbers
BY_NUMBERS = {
    aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten.unique_dim, aten._unique,
    aten._unique2, aten.unique_consecutive, aten.bincount, aten.argwhere,
}  # fmt: skip


class Refused(AssertionError):
    """What a card, or the capture of a graph, would not have taken."""


def _let_indexing_through() -> None:
    """PyTorch's indexing asks the device's guard, which processor builds have none of for CUDA.

    That of the meta device does nothing, as one for a card that is not there should.
    """
    cuda, meta = 1, 14  # `enum DeviceType` of c10
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * 24).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[cuda] is None or not torch.cuda.is_available():
        guards[cuda] = guards[meta]


class OnCard(Tensor):
    """Its numbers are in `here`."""

    here: Tensor

    @staticmethod
    def __new__(cls, here):
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device="cuda:0",
        )  # fmt: skip
        made.here = here
        return made

    def __repr__(self):
        return f"OnCard({self.here})"

    def tolist(self):
        return self.cpu().tolist()  # PyTorch has it for its own tensors alone

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise Refused(f"{func} is called where the card is not")


def _wide(func):
    """Products of 16 bits with float32 results, which PyTorch has on CUDA alone."""

    def product(x, y, dtype):
        return func(x.to(dtype), y.to(dtype))

    return product


INSTEAD = {aten.mm.dtype: _wide(torch.mm), aten.bmm.dtype: _wide(torch.bmm)}


class Tape:
    """A graph: what was computed while it was recorded, to be computed again into that memory."""

    def __init__(self):
        self.calls = []

    def add(self, run, args, kwargs, outs):
        """Results that lie in an argument's memory are there again by themselves."""
        given = filter(_is, _leaves((args, tuple(kwargs.values()))))
        inside = {x.untyped_storage().data_ptr() for x in given}
        fresh = [not _is(x) or x.untyped_storage().data_ptr() not in inside for x in outs]
        self.calls.append((run, args, kwargs, outs, fresh))

    def forget(self):
        """The numbers, so that what a replay does not compute is seen."""
        for *_, outs, fresh in self.calls:
            for out, new in zip(outs, fresh, strict=True):
                if new and _is(out) and out.numel():
                    out.fill_(torch.nan if out.is_floating_point() else 0)

    def replay(self):
        """As `torch.cuda.CUDAGraph`."""
        with torch.inference_mode():
            for run, args, kwargs, outs, fresh in self.calls:
                again = _leaves(run(*args, **kwargs))
                for out, new, one in zip(outs, fresh, again, strict=True):
                    if new and _is(out):
                        out.copy_(one)


class CardRecorder(GraphRecorder):
    """Captures on that device."""

    def __init__(self, capture):
        super().__init__(torch.device("cuda:0"))
        self.capture = capture

    def busy(self):
        return False


class Card(TorchDispatchMode):
    """While it is active there is a CUDA device, for tensors that are made there.

    `float64`: whether captured steps may have any. `calls` are those of the last captured part, of
    which `launches` are kernels. It has no kernels but stand-ins that a test has put in their
    place.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        """Nothing is compiled here; to see to that at each operation takes a fifth longer."""
        return False

    def __init__(self, *, float64=True):
        super().__init__()
        _let_indexing_through()
        self.float64 = float64
        self.calls = self.launches = None
        self.tapes = []
        self._tape = None
        self._queues = False

    def __enter__(self):
        self._start = torch.cuda._lazy_init
        torch.cuda._lazy_init = lambda: None  # CUDA needs no start
        # `torch.tensor` makes a tensor of the host first, which comes here to be copied
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._triton = native._groups, native.TRITON_STATE
        native._groups = lambda: "off" if on_card.kernels is KERNELS else native.GROUPS
        native.TRITON_STATE = native.TritonState()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.cuda._lazy_init = self._start
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        native._groups, native.TRITON_STATE = self._triton

    @contextmanager
    def captured(self) -> Iterator[Tape]:
        """What is computed in it must be what a graph can hold."""
        self.calls, self.launches, self._tape = [], [], Tape()
        try:
            yield self._tape
        finally:
            self._tape = None

    @contextmanager
    def queued(self, on=True) -> Iterator[None]:
        """What is computed in it must not make the host wait for the device."""
        before, self._queues = self._queues, on
        try:
            yield
        finally:
            self._queues = before

    def waiting(self):
        """Within `queued`: what may wait."""
        return self.queued(False)

    def put(self, decoder, first):
        """Its steps are captured here, with buckets of `first` slots and more."""
        decoder.first_bucket = first
        if decoder.steps.recorder is not None:
            decoder.steps.recorder = CardRecorder(self.capture)
        return decoder

    def capture(self, step, undo, pool):
        """As that of `GraphRecorder`: what is captured has no effect before it is replayed."""
        with self.waiting():
            step()
            undo()
            with self.captured() as tape:
                out = step()
            undo()
            tape.forget()
        self.tapes.append(tape)
        return tape, out, pool

    def kernel(self, run, launches=1):
        """`run`, made of PyTorch's operations, as if it were that many launches."""

        def call(*args, **kwargs):
            given = [*args, *kwargs.values()]
            known = {id(x.here): x for x in _leaves(given) if isinstance(x, OnCard)}
            args, kwargs = _mapped(_here, args), {k: _mapped(_here, v) for k, v in kwargs.items()}
            made = run(*args, **kwargs)
            if self._tape is not None:
                self._tape.add(run, args, kwargs, _leaves(made))
                self.calls.append((run.__name__, *map(_said, _leaves([*given, made]))))
                self.launches += [run.__name__] * launches
            return _mapped(lambda x: _wrapped(x, known), made)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _has_parts(func):
            _push_mode(self)  # in inference mode, operations come here whole
            try:
                return func._op_dk(PARTS, *args, **kwargs)
            finally:
                _pop_mode()
        given = [x for x in _leaves((args, tuple(kwargs.values()))) if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, OnCard)]
        device = kwargs.get("device")
        # `meta`: what the borrowed guard says where a device comes without its number
        to_card = device is not None and torch.device(device).type in ("cuda", "meta")
        if not there and not to_card:
            return func(*args, **kwargs)
        self._check(func, args, kwargs, given, there, device, to_card)
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        leaves_card = device is not None and not to_card
        plain_args, plain = _mapped(_here, args), {k: _mapped(_here, v) for k, v in kwargs.items()}
        run = INSTEAD.get(func, func)
        made = run(*plain_args, **plain)
        if self._tape is not None and func is not aten.detach.default:
            self._note(func, run, args, kwargs, plain_args, plain, made)
        if leaves_card:
            return made.clone()
        known = {id(x.here): x for x in there}
        return _mapped(lambda x: _wrapped(x, known) if _is(x) else x, made)

    def _check(self, func, args, kwargs, given, there, device, to_card):
        """Raises Refused."""
        packet = func.overloadpacket
        hosts = [x for x in given if not isinstance(x, OnCard)]
        moves = packet in (aten._to_copy, aten.copy_)
        if there and not moves and any(x.ndim for x in hosts):
            shapes = [list(x.shape) for x in hosts if x.ndim]
            raise Refused(f"{func} is given tensors of two devices: {shapes} of the host")
        if self._queues and moves:
            if kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:] == (True,)):
                return
            leaves = device is not None and not to_card
            if leaves or any(x.ndim for x in hosts):
                raise Refused(f"{func}: the host waits for a copy")
            return
        if self._tape is None and not self._queues:
            return
        if packet in (aten._local_scalar_dense, aten.equal, aten.is_nonzero):
            raise Refused(f"{func}: the host reads a number of the device")
        if device is not None and there and not to_card:
            raise Refused(f"{func}: the host copies numbers of the device")
        if moves and hosts:
            raise Refused(f"{func}: a tensor of the host is copied, {list(hosts[0].shape)}")
        if packet in BY_NUMBERS or func is aten.repeat_interleave.Tensor:
            raise Refused(f"{func}: its shape depends on numbers")
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index) and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            raise Refused(f"{func}: a mask as an index: its shape depends on numbers")

    def _note(self, func, run, args, kwargs, plain_args, plain, made):
        outs = _leaves(made)
        for x in outs:
            if _is(x) and x.dtype == torch.float64 and not self.float64:
                raise Refused(f"{func} makes float64 on the device")
        self._tape.add(run, plain_args, plain, outs)
        if not func.is_view and func.overloadpacket not in ALLOCATES:
            self.launches.append(str(func))
        self.calls.append((str(func), *map(_said, _leaves((args, tuple(kwargs.values()), outs)))))


@cache
def _has_parts(func):
    return func not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), PARTS)


def _leaves(x):
    """Of lists in lists, which is all that operations have."""
    if not isinstance(x, list | tuple):
        return [x]
    found = []
    for one in x:
        if isinstance(one, list | tuple):
            found += _leaves(one)
        else:
            found.append(one)
    return found


def _mapped(f, x):
    return type(x)([_mapped(f, one) for one in x]) if isinstance(x, list | tuple) else f(x)


def _is(x):
    return isinstance(x, Tensor)


def _wrapped(x, known):
    return known[id(x)] if id(x) in known else OnCard(x)


def _here(x):
    if isinstance(x, OnCard):
        return x.here
    return x.clone() if _is(x) else x  # a number of the host is that of this moment


def _said(x):
    """What two steps have in common: all but numbers on the device."""
    if not _is(x):
        return x
    if not isinstance(x, OnCard) and x.ndim == 0:
        return str(x.dtype), "number" if x.device.type == "cuda" else repr(x)
    return str(x.dtype), tuple(x.shape), x.stride(), x.storage_offset()
