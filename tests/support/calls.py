"""What the tests of the ops share: the family as a table, and what calls should give."""

import io
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilenorm
from tilenorm.ops.torch_ops import inductor
from tilenorm.spec import NormSpec
from tilenorm.table import NORMS, OPS, OPTIONS

from . import oracle
from .tolerance import assert_close

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SLOW = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-6
TIMES = 1  # how often a call or a step is made; `pretended.by` replaces it


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


# The oracle's names of results and of gradients.
RESULTS = {"output": "y", "x": "dx", "residual": "dresidual", "addend": "dresidual"}
RESULTS |= {"gate": "dgate", "weight": "dw", "bias": "db", "layer_scale": "dlayer_scale"}
RESULTS |= {"mod_scale": "dscale", "mod_shift": "dshift", "mod_gate": "dmod_gate"}
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
EACH_JOINED, EACH_FORM = each(JOINED), each(FAMILY)
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


def tensors_of_op(op: str, dtype=torch.float32, lead=(2, 6), n=8) -> dict[str, Tensor]:
    """Every tensor that an op takes, but for a given scale. lead: the sizes before a row of n
    elements, or before the heads of a token, which are four, and two of a key.
    """
    batch, tokens = lead
    sizes = {"... n": (*lead, *[4] * OPS[op].rotated, n), "t k d": (*lead, 2, n)}
    sizes |= {"t? r": (tokens, n), "g n": (batch, tokens // 2, n), "[h] n": (n,), "n": (n,)}
    tensors = {}
    for seed, port in enumerate(OPS[op].takes):
        if port.dims == "t?":
            tensors[port.name] = torch.arange(tokens)
        elif port.dims in sizes:
            t = random(*sizes[port.dims], dtype=dtype, seed=seed)
            tensors[port.name] = t > -1 if port.like == "bool" else t
    return tensors


def rows_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that have rows."""
    return {n: t for n, t in tensors.items() if n not in PARAMETERS}


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same memory, which require grad if they can."""
    return {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}


def incoming_of(tensors: dict[str, Tensor], out_dtype=None) -> tuple[Tensor, ...]:
    """A gradient for each output. out_dtype: as in outputs_like."""
    return gradients_like(outputs_like(tensors, out_dtype))


def outputs_like(tensors: dict[str, Tensor], out_dtype=None) -> list[Tensor]:
    """A tensor of the shape and the dtype of each output. out_dtype: of the first one, if it has a
    dtype of its own.
    """
    first = "skip" if "skip" in tensors else "input"
    likes = [tensors[name] for name in (first, "residual") if name in tensors]
    return [likes[0].to(out_dtype or likes[0].dtype), *likes[1:]]


def gradients_like(likes: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        random(*like.shape, dtype=like.dtype, device=like.device, seed=10 + i)
        for i, like in enumerate(likes)
    )


def call(form: Form, tensors: dict[str, Tensor], dims=1, eps=EPS, **options) -> tuple[Tensor, ...]:
    """The outputs of tilenorm's function, called TIMES times."""
    for _ in range(TIMES):
        outputs = called(form, tensors, dims, eps, **options)
    return outputs


def called(form: Form, tensors: dict[str, Tensor], dims=1, eps=EPS, **options) -> tuple:
    given = {
        "normalized_shape": tensors["input"].shape[-dims:],
        "eps": eps,
        **arguments_of(tensors),
    }
    outputs = getattr(tilenorm, form.op)(**{**given, **form.options, **options})
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
    trained = {n: t for n, t in leaves.items() if t.requires_grad}
    function = called if function is call else function
    for _ in range(TIMES):
        outputs = function(form, leaves, **options)
        incoming = gradients_like(outputs) if incoming is None else incoming
        used = [(y, dy) for y, dy in zip(outputs, incoming, strict=True) if dy is not None]
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
    return row.in_order(tensors, (hidden, *values), [eps] * len(row.eps), save, backend)


def op_call(op: str, given: dict, hidden: int, **how) -> dict[str, Tensor]:
    """What an op of torch.ops.tilenorm returns, by name."""
    made = getattr(torch.ops.tilenorm, op)(*op_arguments(op, given, hidden, **how))
    return dict(zip([port.name for port in OPS[op].makes], made, strict=True))


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, str]:
    """By how much results differ that should have the same bits, by their names."""
    found = dict.fromkeys(a.keys() ^ b.keys(), "given by one alone")
    for name in a.keys() & b.keys():
        one, other = a[name], b[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found[name] = f"{one.dtype} {[*one.shape]}, not {other.dtype} {[*other.shape]}"
        elif not torch.equal(one, other):
            most = (one.double() - other.double()).abs().max()
            found[name] = f"{int((one != other).sum())} of {[*one.shape]}, by up to {most:.1e}"
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return not differing(a, b)


def before(form: Form, tensors: dict[str, Tensor]) -> Tensor:
    """What the last residual is added to, by PyTorch's operations, which round once each."""
    x, dtype = tensors["input"], tensors["input"].dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for name in form.branch:
        scale = form.options["dropout_scale"] if name == "dropout_mask" else 1.0
        x = (x.to(compute) * (tensors[name].to(compute) * scale)).to(dtype)
    return (x + tensors["addend"]).to(tensors["addend"].dtype) if "addend" in tensors else x


def by_pytorch(form: Form, tensors: dict[str, Tensor], eps=EPS) -> tuple[Tensor, ...]:
    """The outputs of a form whose gate has silu, by PyTorch's functions one after the other."""
    layer = "layer" in form.op
    norm = F.layer_norm if layer else F.rms_norm
    affine = [tensors.get(name) for name in ("weight", "bias")[: 1 + layer]]

    def normalized(x: Tensor) -> Tensor:
        return norm(x, x.shape[-1:], *affine, eps=eps)

    x, z = before(form, tensors), tensors.get(form.other)
    if form.other == "residual":
        return normalized(x + z), x + z
    if form.other == "skip":
        return (z + normalized(x),)
    if form.other == "gate":
        first = not form.options.get("norm_before_gate", True)
        return (normalized(x * F.silu(z)) if first else normalized(x) * F.silu(z),)
    return (normalized(x),)


def spec_of(form: Form, tensors: dict[str, Tensor], dims=1, **options) -> NormSpec:
    """The spec of a call."""
    options = {**form.options, **options}
    hidden = tensors["input"].shape[-dims:].numel()
    affine = [tensors[name].numel() for name in ("weight", "bias") if name in tensors]
    heads = max(affine, default=0) // hidden
    dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in by_role(form, tensors).items()}
    options["gate_first"] = not options.pop("norm_before_gate", True)
    out_dtype = options.pop("out_dtype", None) or tensors["input"].dtype
    if out_dtype != tensors["input"].dtype:
        options["out_dtype"] = str(out_dtype).removeprefix("torch.")
    options |= {"heads": heads if heads > 1 else 0, "dtype": dtypes.pop("x")}
    return NormSpec.of(form.op, hidden, **dtypes, **options)


def by_role(form: Form, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in a spec."""
    roles = {port.name: port.role for port in OPS[form.op].takes}
    return {roles.get(name, name): t for name, t in tensors.items()}


def expected_of(
    form: Form, tensors: dict[str, Tensor], incoming=None, dims=1, eps=EPS, **options
) -> dict[str, tuple[oracle.Truth, Tensor]]:
    """What `step` should give, by the oracle, and PyTorch's own results. Rows have elements."""
    spec, given = spec_of(form, tensors, dims, **options), by_role(form, tensors)
    likes = outputs_like(tensors, options.get("out_dtype"))
    results = dict(zip(("output", "sum"), likes, strict=False))
    incoming = gradients_like(likes) if incoming is None else incoming
    for name, like, gradient in zip(("dy", "dsum"), likes, incoming, strict=False):
        given[name] = torch.zeros_like(like) if gradient is None else gradient
    lead = (-1, spec.heads) if spec.heads else (-1,)
    shapes = dict.fromkeys(("weight", "bias"), lead[1:]) | {"layer_scale": ()}
    flat = {n: t.detach().reshape(*shapes.get(n, lead), spec.hidden) for n, t in given.items()}
    absent = dict.fromkeys(("residual", "gate", "weight", "bias", "dsum"))
    arguments = oracle.Arguments(**absent | flat, eps=eps)
    truths, own = oracle.norm(spec, arguments), oracle.torch_own(spec, arguments)
    truths["skip"], own["skip"] = oracle.Truth(*[flat["dy"].double()] * 2), flat["dy"]
    roles = dict(zip(tensors, by_role(form, tensors), strict=True))
    found = {}
    for name, like in (results | tensors).items():
        if (result := RESULTS.get(roles.get(name, name), name)) in truths:
            value, scale = (t.reshape(like.shape) for t in vars(truths[result]).values())
            mine = own[result].reshape(like.shape).to(like.dtype)
            found[name] = oracle.Truth(value, scale), mine
    return found


def compare(found: Iterable[Tensor], expected: Iterable[Tensor], bound: float) -> None:
    """Hold tensors to a part of the largest number of each."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        size = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=bound, atol=bound * size)


def assert_step(got: dict[str, Tensor], expected: dict, names=None) -> None:
    """Hold what `step` gave to the budget."""
    for name in names or expected:
        assert_close(name, got[name].detach(), *expected[name])


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
        return made_by_inductor(op, *arguments, **by_name)()

    return run


def made_by_inductor(op: str, *arguments, **by_name) -> Callable:
    """A call of an op, as Inductor's generated code makes it when it is loaded."""
    schema = getattr(torch.ops.tilenorm, op).default._schema.arguments
    given = {a.name: a.default_value for a in schema}
    given |= dict(zip(given, arguments, strict=False)) | by_name
    tensors = [a.name for a in schema if "Tensor" in str(a.type)]
    taken = inductor.tensors_of(op, [name for name in tensors if given[name] is not None])
    options = {name: value for name, value in given.items() if name not in tensors}
    return partial(inductor.bind(op, taken, **options), *[given[name] for name in taken])
