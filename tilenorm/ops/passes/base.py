"""Pass: what runs. Eager calls, the torch.library ops and Inductor's code hold the same objects."""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ...launch.toolchain import CompileError
from ..pytorch.plain import Plain
from .reading import VECTOR_BYTES, shown_as, strided

MOST_CALLS = 256  # that differ in shapes or eps, for which a pass keeps what repeats them
NONE = 0  # the place of what is absent, see Gradients


class Served(NamedTuple):
    """What serves a pass. run: a function of (tensors, eps), of an implementation. failed: is told
    the CompileError of kernels that do not compile, and has another implementation serve.
    """

    run: Callable
    failed: Callable[[CompileError], None]


class Repeat(NamedTuple):
    """What repeats an earlier call of tensors of its shapes and dtypes: see Pass.repeated."""

    # What is allocated: the results, then scratch; None for what is absent.
    made: Sequence[tuple | None]
    cleared: Sequence[int]  # the places of what is zeroed
    # Of each result that a caller gets as another view: its place, the arguments of shown_as.
    shown: Sequence[tuple]
    strided: frozenset[int]  # the places of the tensors whose strides are those of that call
    index: int  # the device's
    results: int  # how many of what is made a caller gets
    empty: Callable[..., Tensor]  # allocates
    stream: Callable[[int], int]  # a function of the index
    launch: Callable[[int, Sequence[int]], bool]  # as driver.Repeated
    # The parts of `launch`: see driver.in_parts.
    idle: list
    write: Callable
    queue: Callable


class Copied(NamedTuple):
    """What repeats a call whose tensors at `places` the kernels do not read in place: the pass,
    with contiguous copies of them.
    """

    run: "Pass"
    eps: Any
    places: frozenset[int]

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
        places = self.places
        copied = [t.contiguous() if i in places else t for i, t in enumerate(tensors)]
        return self.run(tuple(copied), self.eps)

    def repeat(self, tensors: Sequence[Any]) -> Any:
        """What repeats the pass with the copies, or None."""
        return self.run.ready.get(self.run.key(tensors, self.eps, self.places))


class Pass:
    """One direction of one norm, or of a chain of norms, on a device.

    It is called with the tensors that it reads, in one tuple, and eps. A forward pass reads the
    tensors that the op takes, and returns those that the op makes. A backward pass reads (dy, dsum,
    *the tensors of NormSpec.kernel_reads, *the terms of dy behind the first), and returns the
    gradients in the order of Needs.gradients, and behind them y if the needs ask for it. What is
    absent is None.

    The kernels' functions tell what repeats their launches: see cutile.Kernels. A pass keeps that
    by the shapes of a call and its eps, in `ready`, and this is the only memo of a launch.
    """

    __slots__ = ("_find", "_served", "by_strides", "grouped", "input", "like", "ready")

    def __init__(self, find: Callable[[], Served]):
        """find: finds what serves, when the pass is first called and after each reset."""
        self._find = find
        self.reset()

    def reset(self) -> None:
        """Have the implementation that serves be found anew."""
        self._served: Served | None = None
        self.input, self.like, self.grouped = 0, 0, ()
        self.by_strides = False  # whether a key may have more than the shapes and eps
        self.ready: dict[tuple, Callable | None] = {}

    def key(self, tensors: Sequence[Tensor], eps: Any, copied: Collection[int] = ()) -> tuple:
        """What calls have in common that the same launches repeat: the shapes of the input and of
        a parameter, and the shapes and strides of what the kernels read wherever it lies, and of
        what is not contiguous. copied: the places of what is copied before.
        """
        key = tensors[self.input].shape, tensors[self.like].shape, eps
        for place in strided(tensors, self.grouped):
            if place not in copied:
                key = *key, place, tensors[place].shape, tensors[place].stride()
        return key

    def __call__(self, tensors: Sequence[Any], eps: Any) -> Sequence[Tensor | None]:
        results = self.repeated(tensors, eps)
        return self.cold(tensors, eps) if results is None else results

    def repeated(self, tensors: Sequence[Any], eps: Any) -> Sequence[Tensor | None] | None:
        """The same by the launches of an earlier call; None, and nothing that counts is done, where
        there is none, or where the tensors lie otherwise.

        In a step of a model this code has left the caches of the CPU when it runs: on the host of
        an H100 it took 8 times as long as in a loop. So it is one function, and its callers call
        it and `cold` in place of the pass.
        """
        if not self.ready:
            return None
        key = tensors[self.input].shape, tensors[self.like].shape, eps
        repeat: Any = self.ready.get(self.key(tensors, eps) if self.by_strides else key)
        if type(repeat) is not Repeat:  # the extension's function, or nothing
            return repeat and repeat(tensors)
        fresh, cleared, shown, apart, index, results = repeat[:6]
        empty, stream, launch, idle, write, queue = repeat[6:]
        starts, every = [], 0
        for place, tensor in enumerate(tensors):
            if tensor is None:
                starts.append(0)
            elif tensor.is_contiguous() or place in apart:
                start = tensor.data_ptr()
                starts.append(start)
                every |= start
            else:
                return None
        if every % VECTOR_BYTES:
            return None
        fresh_tensors: list = []
        for how in fresh:
            if how is None:
                fresh_tensors.append(None)
                starts.append(0)
            else:
                tensor = empty(*how)
                fresh_tensors.append(tensor)
                starts.append(tensor.data_ptr())
        for place in cleared:
            fresh_tensors[place].zero_()
        if tensor.get_device() != index:  # the last one made: another device is the current one
            return None
        failed = not idle
        if idle:
            copy = idle.pop()
            write(copy[0], 0, *starts)
            number = stream(index)
            for config, at, function, arguments in copy[1]:
                config.stream = number
                failed = failed or queue(at, function, arguments, None)
            idle.append(copy)
        if failed and not launch(stream(index), starts):
            return None
        for place, *how in shown:
            fresh_tensors[place] = shown_as(fresh_tensors[place], *how)
        return tuple(fresh_tensors[:results])

    def cold(self, tensors: Sequence[Tensor | None], eps: Any) -> Sequence[Tensor | None]:
        """The same by the implementation's function. What repeats a call is prepared when it comes
        the second time: most shapes of inputs that differ in every call are met once.
        """
        served = self._served or self._first()
        try:
            if not hasattr(served.run, "prepared"):
                return served.run(tensors, eps)
            key, ready = self.key(tensors, eps), self.ready
            if ready.get(key, served) is None:
                results, repeat = served.run.prepared(tensors, eps)
                if isinstance(repeat, frozenset):
                    repeat = Copied(self, eps, repeat)
                ready[key] = repeat
                if repeat is not None and strided(tensors, self.grouped):
                    self.by_strides = True
                return results
            if len(ready) < MOST_CALLS:
                ready.setdefault(key, None)
            return served.run(tensors, eps)
        except CompileError as error:
            served.failed(error)
        return self(tensors, eps)

    def _first(self) -> Served:
        served = self._find()
        for name in ("input", "like", "grouped"):
            setattr(self, name, getattr(served.run, name, getattr(self, name)))
        self.by_strides = bool(self.grouped)
        self._served = served
        return served


class Gradients:
    """The passes that make the gradients that are asked for, of the gradients that arrive.

    Places count None first, then the gradients of the op's results, what autograd has saved, and
    what each pass makes. passes: each with the places of what it reads, and the place of its eps
    among those of the op, None where the op has one eps. gives: the place of the gradient of each
    tensor that the op takes.
    """

    def __init__(
        self, passes: Sequence[tuple[Pass, tuple[int, ...], int | None]], gives: Sequence[int]
    ):
        self.passes, self.gives, self.plain = tuple(passes), tuple(gives), Plain()
        self._each = [(run, itemgetter(*reads), which_eps) for run, reads, which_eps in passes]
        # With None in front, as autograd's Function returns it.
        self._take: Callable[[Sequence], tuple] = itemgetter(NONE, *gives)

    def __call__(self, grads: Sequence, saved: Sequence, eps: Any, every: Any = None) -> tuple:
        """None and the gradients. every: a list, which gets what stands at each place."""
        every = [] if every is None else every
        every += None, *grads, *saved
        for run, read, which_eps in self._each:
            tensors, of = read(every), eps if which_eps is None else eps[which_eps]
            if (results := run.repeated(tensors, of)) is None:
                results = run.cold(tensors, of)
            every += results
        return self._take(every)
