"""What the tests of the ops share: the family as a table, its formulas, and the error budget."""

import io
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilenorm
from tilenorm.ops import generated
from tilenorm.table import NORMS, OPS, OPTIONS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SLOW = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-6


class Form(NamedTuple):
    """A function of tilenorm's, and what it is called with beside tensors, shape and eps."""

    op: str
    options: dict = {}  # noqa: RUF012
    before: tuple[str, ...] = ()  # more tensors that have rows, after the input
    branch: tuple[str, ...] = ()  # what multiplies the input

    @property
    def other(self) -> str | None:
        """The argument of the input's shape, if it takes one."""
        if self.op.endswith("_add"):
            return "skip"
        return {"add": "residual", "gated": "gate"}.get(self.op.split("_")[0])

    @property
    def argument(self) -> str | None:
        """The public function's name for it."""
        return "residual" if self.other == "skip" else self.other

    @property
    def names(self) -> tuple[str, ...]:
        """Its tensors, in the order in which PyTorch's functions and tilenorm's ops take them."""
        first = ("input", *self.before, self.other, "weight", "bias")
        return (*filter(None, first), *self.branch)


FAMILY = {op: Form(op) for op in NORMS}
FAMILY["gated_rms_norm, gate first"] = Form("gated_rms_norm", {"norm_before_gate": False})
FAMILY["gated_layer_norm, gate first"] = Form("gated_layer_norm", {"norm_before_gate": False})
FAMILY["gated_rms_norm, sigmoid"] = Form("gated_rms_norm", {"activation": "sigmoid"})
# Calls with what few norms have. On a GPU, each form that is compiled costs half a second.
JOINED = {
    f"{op}, two residuals": Form(op, before=("addend",))
    for op in ("add_rms_norm", "add_layer_norm")
}
MASKED = {"dropout_scale": 1 / 0.9}
BRANCHED = {
    "add_rms_norm, masked": Form("add_rms_norm", MASKED, branch=("dropout_mask",)),
    "add_rms_norm, scaled": Form("add_rms_norm", branch=("layer_scale",)),
    "add_layer_norm, masked and scaled": Form(
        "add_layer_norm", MASKED, branch=("dropout_mask", "layer_scale")
    ),
}
CALLS = FAMILY | JOINED | BRANCHED
PARAMETERS = ("weight", "bias", "layer_scale")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# One of each kind, for tests whose other forms are slow and take the same ways.
FEW = ("rms_norm", "add_layer_norm", "gated_rms_norm, gate first", "add_rms_norm, two residuals")


def each(forms: dict[str, Form], quick=None):
    """Parametrises with forms. quick: the names of those that are not slow, else all."""
    marks = dict.fromkeys(forms if quick is None else quick, ())
    values = [pytest.param(f, id=n, marks=marks.get(n, SLOW)) for n, f in forms.items()]
    return pytest.mark.parametrize("form", values)


def slow(*cases) -> list:
    """Parameters of slow cases. A tuple has several parameters."""
    tuples = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*values, marks=SLOW) for values in tuples]


EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
EACH_JOINED, EACH_CALL, EACH_FORM = each(JOINED), each(CALLS), each(FAMILY)
LAYER, ADD = FAMILY["layer_norm"], FAMILY["add_rms_norm"]
RMS, GATED = FAMILY["rms_norm"], FAMILY["gated_rms_norm"]


def name_of(value: object) -> str | None:
    """A readable test id of a dtype or a shape."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
        return "x".join(map(str, value)) or "scalar"
    return None


def random(*shape: int, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    """Normal numbers, the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def tensors_of(
    form: Form,
    *shape: int,
    dtype=torch.float32,
    other=None,
    parameter=None,
    parameter_shape=None,
    dims=1,
    device="cpu",
) -> dict[str, Tensor]:
    """Every tensor that a form takes, by name. other, parameter: dtypes, else the input's.

    dims: how many dimensions are normalised.
    """
    other, parameter = other or dtype, parameter or dtype
    dtypes = {"input": dtype} | dict.fromkeys(PARAMETERS, parameter)
    sizes = dict.fromkeys(("weight", "bias"), parameter_shape or shape[-dims:])
    sizes["layer_scale"] = shape[-dims:]
    found = {
        name: random(*sizes.get(name, shape), dtype=dtypes.get(name, other), device=device, seed=i)
        for i, name in enumerate(form.names)
    }
    return {n: t > -1 if n == "dropout_mask" else t for n, t in found.items()}


def rows_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that have rows."""
    return {n: t for n, t in tensors.items() if n not in PARAMETERS}


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same memory, which require grad if they can."""
    return {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}


def incoming_of(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """A gradient for each output."""
    first = "skip" if "skip" in tensors else "input"
    likes = [tensors[name] for name in (first, "residual") if name in tensors]
    return tuple(
        random(*like.shape, dtype=like.dtype, device=like.device, seed=10 + i)
        for i, like in enumerate(likes)
    )


def call(form: Form, tensors: dict[str, Tensor], dims=1, eps=EPS, **options) -> tuple[Tensor, ...]:
    """The outputs of tilenorm's function."""
    shape = tensors["input"].shape[-dims:]
    options = {**form.options, **options}
    given = arguments_of(tensors)
    outputs = getattr(tilenorm, form.op)(**given, normalized_shape=shape, eps=eps, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def arguments_of(tensors: dict[str, Tensor]) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """The arguments of the public function."""
    given = dict(tensors)
    if "addend" in given:
        given["residual"] = (given.pop("addend"), given["residual"])
    if "skip" in given:
        given["residual"] = given.pop("skip")
    return given


def arguments_by_port(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of the op's schema."""
    return {"residual" if n == "skip" else n: t for n, t in tensors.items()}


def step(
    form: Form, tensors: dict[str, Tensor], incoming=None, asked=None, function=call, **options
) -> dict[str, Tensor]:
    """Outputs, and gradients under the names of what they are of.

    incoming: a gradient for each output, or None for one that is not used. asked: the names of what
    requires grad, else all. function: as call, compiled say.
    """
    leaves = leaves_of(tensors)
    for name in leaves.keys() - (tensors.keys() if asked is None else asked):
        leaves[name].requires_grad_(False)
    outputs = function(form, leaves, **options)
    incoming = incoming_of(tensors) if incoming is None else incoming
    used = [(y, dy) for y, dy in zip(outputs, incoming, strict=True) if dy is not None]
    trained = {n: t for n, t in leaves.items() if t.requires_grad}
    given, dys = zip(*used, strict=True)
    grads = torch.autograd.grad(given, [*trained.values()], dys, allow_unused=True)
    results = dict(zip(("output", "sum"), (y.detach() for y in outputs), strict=False))
    return results | {n: g for n, g in zip(trained, grads, strict=True) if g is not None}


def op_arguments(
    op: str, given: dict, hidden: int, save: bool = True, eps: float = EPS, backend=None, **options
) -> tuple:
    """The arguments of an op of torch.ops.tilenorm. given: tensors by the names of its schema."""
    row = OPS[op]
    values = [options.get(name, OPTIONS[name].default) for name in row.options]
    tensors = [given.get(port.name) for port in row.takes]
    return *tensors, hidden, *values, *[eps] * len(row.eps), save, backend


def op_call(op: str, given: dict, hidden: int, **how) -> dict[str, Tensor]:
    """What an op of torch.ops.tilenorm returns, by name."""
    made = getattr(torch.ops.tilenorm, op)(*op_arguments(op, given, hidden, **how))
    return dict(zip([port.name for port in OPS[op].makes], made, strict=True))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def definition(layer: bool, x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """x̂, one operation after the other."""
    x = x - x.mean(dims, keepdim=True) if layer else x
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def pytorch(layer: bool, x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """x̂ by PyTorch's own function."""
    return (F.layer_norm if layer else F.rms_norm)(x, x.shape[dims[0] :], eps=eps)


class Expected(NamedTuple):
    """The formula in float64; the same with PyTorch's functions in float32, or in float64 for a
    float64 input; and for each element the size of the terms that cancel in it, if any do.
    """

    exact: Tensor
    peer: Tensor
    terms: Tensor | None = None


def expected_of(
    form: Form,
    tensors: dict[str, Tensor],
    incoming=None,
    dims=1,
    eps=EPS,
    offset=0.0,
    norm_before_gate=True,
) -> dict[str, Expected]:
    """What `step` should give, derivatives by autograd, on the CPU."""
    norm_before_gate = form.options.get("norm_before_gate", norm_before_gate)
    act = torch.sigmoid if form.options.get("activation") == "sigmoid" else F.silu
    incoming = incoming_of(tensors) if incoming is None else incoming
    given = {n: t.detach().cpu() for n, t in tensors.items()}
    axes = tuple(range(-dims, 0))

    def factors(t):
        scale = form.options.get("dropout_scale", 1.0)
        return [t[n] * (scale if n == "dropout_mask" else 1) for n in form.branch]

    def run(normalize, dtype):
        t = {n: x.to(dtype) for n, x in given.items()}
        of = {n: t[n].requires_grad_() for n in t if n != "dropout_mask"}
        x, z, w, b = (t.get(name) for name in ("input", "gate", "weight", "bias"))
        outputs = {}
        if "residual" in t:
            rounded = given["input"]
            for factor in factors(t):
                rounded = (rounded.to(dtype) * factor.detach()).to(rounded.dtype)
                x = x * factor
            for other in ("addend", "residual"):
                if other in t:
                    rounded = (rounded + given[other]).to(given[other].dtype)
                    x = x + t[other]
            x = outputs["sum"] = x + (rounded.to(dtype) - x).detach()
        u = x if z is None or norm_before_gate else x * act(z)
        x_hat = normalize("layer" in form.op, u, axes, eps)
        y = x_hat if w is None else x_hat * (w + offset)
        y = y if b is None else y + b
        y = y if z is None or not norm_before_gate else y * act(z)
        if "skip" in t:
            y = t["skip"] + y + (y.detach().to(given["input"].dtype).to(dtype) - y.detach())
        outputs = {"output": y, **outputs}
        pairs = zip(outputs.values(), incoming, strict=True)
        used = [(y, dy.detach().cpu().to(dtype)) for y, dy in pairs if dy is not None]
        ys, dys = zip(*used, strict=True)
        g, *grads = torch.autograd.grad(ys, (x_hat, *of.values()), dys, allow_unused=True)
        found = outputs | {n: d for n, d in zip(of, grads, strict=True) if d is not None}
        return {n: v.detach() for n, v in found.items()}, g, u.detach(), t

    exact, g, u, t = run(definition, torch.float64)
    double = any(x.dtype == torch.float64 for x in given.values())
    peer = run(pytorch, torch.float64 if double else torch.float32)[0]
    terms = {}
    if g is not None and u.numel():
        u = u - u.mean(axes, keepdim=True) if "layer" in form.op else u
        rstd = (u.square().mean(axes, keepdim=True) + eps).rsqrt()
        size = (g.abs().amax(axes, keepdim=True) * rstd).expand(u.shape)
        if "gate" in t and not norm_before_gate:
            terms["gate"] = size * t["input"].detach().abs()
            size = size * act(t["gate"].detach()).abs()
        if "residual" in t and incoming[1] is not None:
            size = size + incoming[1].detach().cpu().double().abs()
        terms["input"] = terms["residual"] = terms["addend"] = size
        for factor in factors(t):
            terms["input"] = terms["input"] * factor.detach().abs()
    return {n: Expected(exact[n], peer[n], terms.get(n)) for n in exact}


def assert_step(got: dict[str, Tensor], expected: dict[str, Expected], names=None) -> None:
    """Hold what `step` gave to the budget."""
    for name in names or expected:
        summed = name in PARAMETERS
        rows = max(1, expected["output"].exact.numel() // max(1, got[name].numel()))
        assert_within(name, got[name], *expected[name], rows=rows if summed else 1)


def assert_within(
    name: str, got: Tensor, exact: Tensor, peer: Tensor | None = None, terms=None, *, rows: int = 1
) -> None:
    """Hold the error budget: a unit in the last place and the rounding of float32 sums, or twice
    the error of `peer`, PyTorch's own result, whichever is larger.

    rows: how many were added up. terms: the size of what cancels, where that is not the result's.
    """
    got64, exact = got.detach().cpu().double(), exact.double()
    compute = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    scale = exact.abs().max() if exact.numel() else torch.tensor(0.0)
    scale = scale if terms is None else terms
    unit = torch.finfo(got.dtype)
    allowed = unit.eps * exact.abs() + 8 * rows**0.5 * compute * scale + unit.tiny * unit.eps
    if peer is not None and peer.numel():
        own = (peer.detach().cpu().to(got.dtype).double() - exact).abs().max()
        allowed = torch.maximum(allowed, 2 * own)
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, not {exact.shape}"
    wrong = ~((got64 - exact).abs() <= allowed)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.numel()} beyond the budget, the first at {at}:"
            f" got {got64[at]:.9g}, expected {exact[at]:.9g} ± {allowed[at]:.2g}"
        )


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def messages(told: list) -> list[str]:
    """Of warnings, why the reference runs."""
    return [str(w.message) for w in told if w.category is tilenorm.ReferenceWarning]


def by_inductor(op: str) -> Callable:
    """A function of an op's arguments that calls what Inductor's generated code calls."""

    def run(*arguments, **by_name):
        schema = getattr(torch.ops.tilenorm, op).default._schema.arguments
        given = {a.name: a.default_value for a in schema}
        given |= dict(zip(given, arguments, strict=False)) | by_name
        tensors = [a.name for a in schema if "Tensor" in str(a.type)]
        taken = generated.tensors_of(op, [name for name in tensors if given[name] is not None])
        options = {name: value for name, value in given.items() if name not in tensors}
        return generated.bind(op, taken, **options)(*[given[name] for name in taken])

    return run
