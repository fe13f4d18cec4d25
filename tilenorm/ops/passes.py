"""Pass: what runs. Eager calls, the torch.library ops and Inductor's code hold the same objects."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..launch.toolchain import CompileError
from .direct import Plain

MOST_CALLS = 256  # that differ in shapes or eps, for which a pass keeps what repeats them
NONE = 0  # the place of what is absent, see Gradients


class Served(NamedTuple):
    """What serves a pass. run: a function of (tensors, eps), of an implementation. failed: is told
    the CompileError of kernels that do not compile, and has another implementation serve.
    """

    run: Callable
    failed: Callable[[CompileError], None]


class Pass:
    """One direction of one norm, or of a chain of norms, on a device.

    It is called with the tensors that it reads, in one tuple, and eps. A forward pass reads the
    tensors that the op takes, and returns those that the op makes. A backward pass reads (dy, dsum,
    *the tensors of NormSpec.kept, *the terms of dy behind the first), and returns the gradients in
    the order of Needs.gradients, and behind them y if the needs ask for it. What is absent is None.

    The kernels' functions tell what repeats their launches: see cutile.Kernels. A pass keeps that
    by the shapes of a call and its eps, in `ready`, and this is the only memo of a launch.
    """

    __slots__ = ("_find", "_served", "grouped", "input", "like", "ready")

    def __init__(self, find: Callable[[], Served]):
        """find: finds what serves, when the pass is first called and after each reset."""
        self._find = find
        self.reset()

    def reset(self) -> None:
        """Have the implementation that serves be found anew."""
        self._served: Served | None = None
        self.input, self.like, self.grouped = 0, 0, ()
        self.ready: dict[tuple, Callable | None] = {}

    def key(self, tensors: Sequence[Tensor], eps: Any) -> tuple:
        """What calls have in common that the same launches repeat: the shapes of the input and of
        a parameter, and the shapes and strides of what the kernels read wherever it lies.
        """
        key = tensors[self.input].shape, tensors[self.like].shape, eps
        for place in self.grouped:
            tensor = tensors[place]
            key = *key, tensor.shape, tensor.stride()
        return key

    def __call__(self, tensors: Sequence[Any], eps: Any) -> Sequence[Tensor | None]:
        # What `repeated` does, without calling it: in a step of a model a call takes microseconds.
        if self.ready:
            key = tensors[self.input].shape, tensors[self.like].shape, eps
            repeat: Any = self.ready.get(self.key(tensors, eps) if self.grouped else key)
            if repeat is not None and (made := repeat(tensors)) is not None:
                return made
        return self.cold(tensors, eps)

    def repeated(self, tensors: Sequence[Any], eps: Any) -> Sequence[Tensor | None] | None:
        """The same by the launches of an earlier call; None, and nothing done, where there is none
        or the tensors lie otherwise.
        """
        repeat = self.ready.get(self.key(tensors, eps)) if self.ready else None
        return repeat and repeat(tensors)

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
                made, ready[key] = served.run.prepared(tensors, eps)
                return made
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
        self._served = served
        return served


class Gradients:
    """The passes that make the gradients that are asked for, of the gradients that arrive.

    Places count None first, then the gradients of the op's results, what autograd has saved, and
    what each pass makes. passes: each with the places of what it reads, and its eps' place among
    those of the op. gives: the place of the gradient of each tensor that the op takes.
    """

    def __init__(self, passes: Sequence[tuple[Pass, tuple[int, ...], int]], gives: Sequence[int]):
        self.passes, self.gives, self.plain = tuple(passes), tuple(gives), Plain()
        self._each = [(run, itemgetter(*reads), own) for run, reads, own in passes]
        self.take: Callable[[Sequence], tuple] = itemgetter(*gives)

    def __call__(self, grads: Sequence, saved: Sequence, eps: Sequence[float]) -> tuple:
        return self.take(self.every(grads, saved, eps))

    def every(self, grads: Sequence, saved: Sequence, eps: Sequence[float]) -> list:
        """What stands at each place, once the passes have run."""
        every = [None, *grads, *saved]
        for run, read, own in self._each:
            every += run(read(every), eps[own])
        return every
