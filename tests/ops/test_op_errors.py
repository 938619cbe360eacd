"""One table of wrong calls: every backend refuses them, with one message that names list and index."""

import math
import re

import pytest
import torch
from backends import COMPILED, PLAIN_OPS, refused, right_call
from optimizer_calls import ADAGRAD, ADAM, AMSGRAD, LAMB, MOMENTUM, SGD, make_call, on_optimizers

from ampctx.kernels import definitions, extension, ops


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


GAPS = "is not contiguous: its elements do not fill one block of memory"
LAYOUTS = "have different memory layouts"

F64, I32, I64 = torch.float64, torch.int32, torch.int64
F16, BF16, I16, F32 = torch.float16, torch.bfloat16, torch.int16, torch.float32


def on(device):
    return lambda *shape, dtype=F32: t(*shape, dtype=dtype, device=device)


def rows(op, *of_op):
    return [(op, wrong, message) for wrong, message in of_op]


def made(value, d):
    return value(d) if callable(value) else value


NO_FLAG = "expected float32 or int32"
GROWTH, BACKOFF = "is not a finite number of at least 1", "is not a number above 0 and at most 1"
LOW, HIGH = "is not a number from 0 to the largest fp32", "is not a number from the smallest normal fp32 up"
ERRORS = [
    *rows("multi_tensor_scale", ({"src": lambda d: [d(2), d(3)]}, "dst has 1 tensors, src has 2"),
        ({"src": lambda d: [d(2), d(2).to_sparse()], "dst": lambda d: [d(2), d(2)]}, "src[1] is not a strided tensor"),
        ({"src": lambda d: [d(2, dtype=I64)]}, "src[0] has dtype torch.int64, expected float32, float16"),
        ({"dst": lambda d: [d(2, dtype=torch.complex64)]},
            "dst[0] has dtype torch.complex64, expected float32, float16"),
        ({"src": lambda d: [d(2), d(2), d(2, dtype=BF16)], "dst": lambda d: [d(2)] * 3},
            "src[2] has dtype torch.bfloat16, src[0] has torch.float32"),
        ({"src": lambda d: [d(2), d(2)], "dst": lambda d: [d(2), d(2, dtype=F16)]},
            "dst[1] has dtype torch.float16, dst[0] has torch.float32"),
        ({"src": lambda d: [d(2), d(2, 7)], "dst": lambda d: [d(2), d(2, 8)]}, "dst[1] has 16 elements, src[1] has 14"),
        ({"src": lambda d: [d(2), d(0)], "dst": lambda d: [d(2), d(1)]}, "dst[1] has 1 elements, src[1] has 0"),
        ({"src": lambda d: [d(2), d(8)[::2]], "dst": lambda d: [d(2), d(4)]}, f"src[1] {GAPS}"),
        ({"src": lambda d: [d(2), d(4)], "dst": lambda d: [d(2), d(1).expand(4)]}, f"dst[1] {GAPS}"),
        ({"src": lambda d: [d(3, 4)], "dst": lambda d: [d(4, 3).t()]}, f"dst[0] and src[0] {LAYOUTS}"),
        ({"src": lambda d: [d(2, 3, 4, 5).to(memory_format=torch.channels_last)], "dst": lambda d: [d(2, 3, 4, 5)]},
            f"dst[0] and src[0] {LAYOUTS}"),
        ({"scale": lambda d: d(2)}, "scale has 2 elements, expected 1"),
        ({"scale": t((), dtype=I64)}, "scale has dtype torch.int64, expected float32 or float64"),
        ({"found_inf": lambda d: d(2)}, "found_inf has 2 elements, expected 1"),
        ({"found_inf": lambda d: d(1, dtype=F16)}, f"found_inf has dtype torch.float16, {NO_FLAG}"),
        ({"src": [], "dst": [], "found_inf": lambda d: d(1, dtype=I64)}, f"found_inf has dtype torch.int64, {NO_FLAG}"),
    ),
    *rows("multi_tensor_scale_clipped",
        ({"grad_norm": lambda d: d((), dtype=I32)}, "grad_norm has dtype torch.int32, expected float32"),
        ({"grad_norm": lambda d: d(2)}, "grad_norm has 2 elements, expected 1")),
    *rows("multi_tensor_axpby", ({"y": []}, "y has 0 tensors, x has 1"),
        ({"out": lambda d: [d(2)] * 3}, "out has 3 tensors, x has 1"),
        ({"out": lambda d: [d(5)]}, "out[0] has 5 elements, x[0] has 2"),
        ({"arg_to_check": 2}, "arg_to_check is 2, expected -1, 0 or 1"),
        ({"arg_to_check": -2}, "arg_to_check is -2, expected -1, 0 or 1"),
        ({"a": lambda d: d(3)}, "a has 3 elements, expected 1"),
        ({"b": t(1, dtype=F16)}, "b has dtype torch.float16, expected float32 or float64")),
    *((op, {"tensors": lambda d: [d(3), d(3, dtype=F16)]},
        "tensors[1] has dtype torch.float16, tensors[0] has torch.float32")
        for op in ("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")),
    ("multi_tensor_l2norm", {"found_inf": lambda d: d((), dtype=F64)}, "found_inf has dtype torch.float64"),
    ("multi_tensor_unscale_l2norm", {"inv_scale": t(2)}, "inv_scale has 2 elements, expected 1"),
    *((op, {name: wrong}, f"{name} {message}")
        for op in ("multi_tensor_scale_and_update", "multi_tensor_unscale_l2norm_and_update")
        for name, dtype in {"loss_scale": "float32", "growth_tracker": "int32", "hysteresis_tracker": "int32"}.items()
        for wrong, message in ((lambda d: d((), dtype=F64), f"has dtype torch.float64, expected {dtype}"),
            (lambda d, dtype=dtype: d(2, dtype=getattr(torch, dtype)), "has 2 elements, expected 1"))
    ),
    *rows("update_scale", ({"scale": lambda d: d(1, dtype=F64)}, "scale has dtype torch.float64, expected float32"),
        ({"growth_tracker": lambda d: d(1, dtype=I64)}, "growth_tracker has dtype torch.int64, expected int32"),
        ({"hysteresis_tracker": lambda d: d(1)}, "hysteresis_tracker has dtype torch.float32, expected int32"),
        ({"found_inf": lambda d: d(1, dtype=torch.bool)}, f"found_inf has dtype torch.bool, {NO_FLAG}"),
        ({"scale": lambda d: d(3)}, "scale has 3 elements, expected 1"),
        ({"growth_tracker": lambda d: d(0, dtype=I32)}, "growth_tracker has 0 elements, expected 1"),
        *(({"growth_factor": value}, f"growth_factor {GROWTH}") for value in (0.99, math.inf, math.nan)),
        *(({"backoff_factor": value}, f"backoff_factor {BACKOFF}") for value in (0.0, 1.5, math.nan)),
        *(({"min_scale": value}, f"min_scale {LOW}") for value in (-1.0, math.inf)),
        *(({"max_scale": value}, f"max_scale {HIGH}") for value in (0.0, math.nan)),
        *(({"hysteresis": n}, f"hysteresis is {n}, expected 0 to 2147483647") for n in (-1, 1 << 31))),
    *rows("block_factors", ({"scale": lambda d: d((), dtype=F64)}, "scale has dtype torch.float64, expected float32"),
        ({"scale": lambda d: d(3)}, "scale has 3 elements, expected 1")),
    *rows("count_skip", ({"counts": lambda d: d(6, dtype=I32)}, "counts has dtype torch.int32, expected float32"),
        ({"counts": lambda d: d(6, 2)[:, 0]}, "counts is not contiguous"),
        ({"slot": -1}, "slot is -1, counts has 6 elements"),
        ({"slot": 2}, "slot is 2, counts has 6 elements"),
        ({"counts": lambda d: d(1), "slot": 0}, "slot is 0, counts has 1 elements"),
        ({"found_inf": lambda d: d(2)}, "found_inf has 2 elements, expected 1"),
        ({"flag": lambda d: d((), dtype=F64)}, f"found_inf has dtype torch.float64, {NO_FLAG}"),
        ({"scale": lambda d: d((), dtype=F64)}, "scale has dtype torch.float64, expected float32")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    ERRORS,
    ids=[f"{op}-{i}-{message.split()[0]}" for i, (op, _, message) in enumerate(ERRORS)],
)
def test_refused(backend, op, wrong, message):
    given = {name: made(value, on(backend.device)) for name, value in {**right_call(backend, op), **wrong}.items()}
    tensors = [x for value in given.values() for x in (value if isinstance(value, list) else [value])]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor) and not x.is_sparse]
    before = [x.clone() for x in tensors]
    with refused(backend, op, message):
        getattr(backend.ops, op).default(*given.values())
    assert all(map(torch.equal, tensors, before)), "a refused call changed a tensor"


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_the_right_calls_are_accepted(backend, op):
    getattr(backend.ops, op).default(*right_call(backend, op).values())


def replaced(name, make, index=None):
    """Puts another list, or another tensor at one index, into a call."""

    def change(call, d):
        if index is None:
            call.lists[name] = make(d)
        else:
            call[name][index] = make(d)

    return change


def option(name, make):
    return lambda call, d: call.options.update({name: make(d)})


# (optimizer, what is wrong, message, write back, type of params); the calls have tensors of 2 and 12 elements.
AS_IT_IS = lambda call, d: None  # noqa: E731
STEP_ERRORS = [
    (ADAM, replaced("params", lambda d: [d(2)]), "params has 1 tensors, grads has 2"),
    (SGD, replaced("params", lambda d: d(3), 1), "params[1] has 3 elements, grads[1]"),
    (ADAGRAD, replaced("params", lambda d: [d(2, dtype=I16), d(12, dtype=I16)]),
        "params[0] has dtype torch.int16, expected float32, float16"),
    (MOMENTUM, replaced("grads", lambda d: d(12, dtype=F16), 1),
        "grads[1] has dtype torch.float16, grads[0] has torch.float32"),
    (AMSGRAD, replaced("max_exp_avg_sqs", lambda d: [d(2)]), "max_exp_avg_sqs has 1 tensors, grads has 2"),
    (MOMENTUM, replaced("momentum_buffers", lambda d: [d(2)] * 3), "momentum_buffers has 3 tensors, grads has 2"),
    (ADAM, replaced("exp_avgs", lambda d: d(4, 3).t(), 1), "exp_avgs[1] and grads[1] have different memory layouts"),
    (ADAM, replaced("exp_avg_sqs", lambda d: d(24)[::2], 1), f"exp_avg_sqs[1] {GAPS}"),
    (ADAM, option("write_back", lambda d: -1), "write_back is -1, expected 0 to 4"),
    (SGD, option("write_back", lambda d: 5), "write_back is 5, expected 0 to 4"),
    (ADAM, replaced("extras", lambda d: [d(2)]), "extras has 1 tensors, expected none to go with this write_back"),
    (SGD, replaced("extras", lambda d: [d(2), d(12)]),
        "extras has 2 tensors, expected none to go with this write_back", "stochastic", BF16),
    (ADAM, replaced("extras", lambda d: d(3, dtype=F16), 1), "extras[1] has 3 elements", "copy"),
    (ADAM, replaced("extras", lambda d: d(4, 3, dtype=F16).t(), 1),
        "extras[1] and grads[1] have different memory layouts", "copy"),
    (MOMENTUM, replaced("extras", lambda d: [d(2, dtype=I16), d(12, dtype=I16)]),
        "extras[0] has dtype torch.int16, expected float32, float16", "copy"),
    (ADAM, replaced("extras", lambda d: [d(2), d(12)]),
        "extras[0] has dtype torch.float32, expected int16", "split", BF16),
    (ADAM, AS_IT_IS, "params[0] has dtype torch.float32, expected bfloat16 to go with remainders", "split"),
    (ADAGRAD, AS_IT_IS,
        "params[0] has dtype torch.float32, expected float16 or bfloat16 to go with compensations", "kahan"),
    (ADAM, replaced("extras", lambda d: [d(2, dtype=BF16), d(12, dtype=BF16)]),
        "extras[0] has dtype torch.bfloat16, params[0] has torch.float16", "kahan", F16),
    (SGD, replaced("steps", lambda d: [d(1)]), "steps has 1 tensors, grads has 2"),
    (ADAM, replaced("steps", lambda d: []), "steps has 0 tensors, grads has 2"),
    (ADAM, replaced("steps", lambda d: d(2), 1), "steps[1] has 2 elements, expected"),
    (ADAGRAD, replaced("steps", lambda d: d(1, dtype=I64), 0), "steps[0] has dtype torch.int64, expected float32"),
    (LAMB, option("global_grad_norm", lambda d: d(2)), "global_grad_norm has 2 elements, expected 1"),
    (LAMB, option("global_grad_norm", lambda d: t(1, dtype=I64)),
        "global_grad_norm has dtype torch.int64, expected float32 or float64"),
    (ADAM, replaced("skips", lambda d: [d(())] * 3), "skips has 3 tensors, expected none or 5"),
    (ADAM, replaced("skips", lambda d: [d((), dtype=I32)] * 5), "skips[0] has dtype torch.int32, expected float32"),
    (ADAM, replaced("skips", lambda d: [d(())] * 4 + [d(2)]), "skips[4] has 2 elements, expected 1"),
    (ADAM, option("table", lambda d: t(5)), "table has dtype torch.float32, expected float64"),
    (ADAM, option("table", lambda d: t(5, dtype=F64)), "rows has 0 elements, the table 5"),
    (ADAM, option("rows", lambda d: t(2, dtype=I32)), "rows has dtype torch.int32, expected int64"),
    (ADAM, lambda call, d: call.options.update(table=t(10, dtype=F64), rows=torch.tensor([0, 2])), "rows has 2, the"),
    (ADAM, option("grad_norm", lambda d: d(2)), "grad_norm has 2 elements, expected 1"),
    (ADAM, option("grad_norm", lambda d: d((), dtype=I32)), "grad_norm has dtype torch.int32, expected float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    "row", STEP_ERRORS, ids=[f"{i}-{row[0].name}-{row[2].split()[0]}" for i, row in enumerate(STEP_ERRORS)]
)
def test_optimizer_steps(backend, row):
    optimizer, change, message, *how = row
    write_back, param = [*how, *("nearest", F32)[len(how) :]]
    call = make_call(backend, optimizer, [(2,), (3, 4)], param=param, write_back=write_back)
    change(call, on(backend.device))
    before = call.clone()
    with refused(backend, optimizer.op, message):
        call.run(backend)
    call.assert_same(before)


SCALAR_ERRORS = {
    "flag-dtype": ({"found_inf": (1, F64)}, "found_inf has dtype torch.float64, expected float32 or int32"),
    "flag-elements": ({"found_inf": (2, F32)}, "found_inf has 2 elements, expected 1"),
    "inv-scale": ({"inv_scale": (3, F32)}, "inv_scale has 3 elements, expected 1"),
    "lr-dtype": ({"lr": (1, F16)}, "lr has dtype torch.float16, expected float32"),
}


@pytest.mark.parametrize(("wrong", "message"), SCALAR_ERRORS.values(), ids=SCALAR_ERRORS.keys())
@on_optimizers
def test_scalars_of_optimizer_steps(backend, optimizer, wrong, message):
    scalars = {name: t(shape, dtype=dtype, device=backend.device) for name, (shape, dtype) in wrong.items()}
    for sizes in ([2, 3], []):
        with refused(backend, optimizer.op, message):
            make_call(backend, optimizer, sizes).run(backend, **scalars)


def cut_off(d, elements):
    """A view into a storage that was made smaller since, by one element: it has the bytes, and not behind the view."""
    whole = d(elements + 1)
    view = whole[1:]
    whole.untyped_storage().resize_(elements * whole.element_size())
    return view


@on_optimizers
def test_what_reaches_beyond_its_storage(backend, optimizer):
    d, message = on(backend.device), "has no memory: its storage has been freed or made smaller"
    names = [name for name in make_call(backend, optimizer, [2, 3]).lists if name != "extras"]
    for name in names:
        call = make_call(backend, optimizer, [2, 3])
        if call[name]:
            call[name][1] = cut_off(d, call[name][1].numel())
            with refused(backend, optimizer.op, f"{name}[1] {message}"):
                call.run(backend)
    for name in ("found_inf", "inv_scale", "lr"):
        with refused(backend, optimizer.op, f"{name} {message}"):
            make_call(backend, optimizer, [2, 3]).run(backend, **{name: cut_off(d, 1)})


# --- devices: without a GPU, tensors of the meta device, sent to the CPU kernel by a stand-in for the meta kernel ----

TO_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # no public way names the kernel to run


@pytest.fixture(scope="module", params=["cpu", "reference"])
def mixed_devices(request):
    namespace = f"ampctx_mixed_{request.param}"
    library = torch.library.Library(namespace, "DEF")
    for schema in definitions.SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        op = getattr(getattr(torch.ops, namespace), name).default
        library.impl(name, lambda *args, op=op: op.redispatch(TO_CPU, *args), "Meta")
        if request.param == "reference":
            library.impl(name, definitions.FALLBACKS[name], "CPU")
    if request.param == "cpu":
        library.define("read(Tensor[] tensors) -> ()")
        assert extension.load(namespace, definitions.define).loaded
    yield getattr(torch.ops, namespace)
    library._destroy()


def on_meta(name, first):
    """As the kernels and as the fallback say it."""
    return rf"{re.escape(name)} is on meta, ({re.escape(first)} is on|expected) cpu"


def test_lists_on_two_devices(mixed_devices):
    one, there, meta = t(()), t((), device="meta"), t(2, device="meta")
    for name, first, *given in (
        ("src[1]", "src[0]", [t(2), meta], [t(2), t(2)], one, one),
        ("dst[0]", "src[0]", [t(2)], [meta], one, one),
        ("found_inf", "src[0]", [t(2)], [t(2)], there, one),
        ("scale", "src[0]", [t(2)], [t(2)], one, there),
        ("scale", "found_inf", [], [], one, there),
    ):
        with pytest.raises(RuntimeError, match=on_meta(name, first)):
            mixed_devices.multi_tensor_scale.default(*given)


@on_optimizers
def test_optimizer_steps_on_two_devices(mixed_devices, optimizer):
    def call(**wrong):
        call, one = make_call(COMPILED, optimizer, [2, 3], write_back="copy"), t(())
        for name in wrong.keys() & call.lists.keys():
            call[name][1] = wrong[name]
        call.options |= {name: wrong[name] for name in wrong.keys() & call.options.keys()}
        scalars = [wrong.get(name, one) for name in ("found_inf", "inv_scale", "lr")]
        getattr(mixed_devices, optimizer.op).default(*call.arguments(*scalars))

    meta = t(3, device="meta")
    for name in ("params", *optimizer.states):
        with pytest.raises(RuntimeError, match=on_meta(f"{name}[1]", "grads[0]")):
            call(**{name: meta})
    with pytest.raises(RuntimeError, match=on_meta("extras[1]", "grads[0]")):
        call(extras=meta.half())
    with pytest.raises(RuntimeError, match=on_meta("steps[1]", "grads[0]")):
        call(steps=meta[0])
    for name in ("found_inf", "inv_scale", "lr", *({"global_grad_norm"} & optimizer.options.keys())):
        with pytest.raises(RuntimeError, match=on_meta(f"{name}", "grads[0]")):
            call(**{name: meta[0]})


def test_update_scale_on_two_devices(mixed_devices):
    tensors = [t(1), t(1, dtype=I32), t(1, dtype=I32), t(1)]
    for place, name in enumerate(["growth_tracker", "hysteresis_tracker", "found_inf"], start=1):
        wrong = [*tensors]
        wrong[place] = tensors[place].to("meta")
        with pytest.raises(RuntimeError, match=on_meta(f"update_scale: {name}", "scale")):
            mixed_devices.update_scale.default(*wrong, 2.0, 0.5, 1, 1, 0.0, 1e9)


@pytest.mark.cuda
def test_lists_on_cpu_and_cuda():
    cpu, cuda, one = [t(2)], [t(2, device="cuda")], t(())
    flags = {"cpu": t(()), "cuda": t((), device="cuda")}
    for message, *given in (
        ("dst[0] is on cpu, src[0] is on cuda:0", cuda, cpu, flags["cuda"], one),
        ("found_inf is on cpu, src[0] is on cuda:0", cuda, cuda, flags["cpu"], one),
        ("found_inf is on cuda:0, src[0] is on cpu", cpu, cpu, flags["cuda"], one),
        ("scale is on cuda:0, src[0] is on cpu", cpu, cpu, flags["cpu"], flags["cuda"]),
        (
            "scale has dtype torch.float64, expected float32 on cuda:0",
            cuda,
            cuda,
            flags["cuda"],
            t((), dtype=F64).cuda(),
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            COMPILED.ops.multi_tensor_scale.default(*given)


def test_the_last_of_thousands_is_checked():
    """More tensors than one thread's share."""
    tensors = [torch.full((3,), float(i)) for i in range(3000)]
    ops.multi_tensor_scale(tensors, tensors, torch.zeros(()), 2.0)
    assert [t[0].item() for t in tensors] == [2.0 * i for i in range(3000)]
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: dst\[2999\] has 2 elements, src\[2999\] has 3"):
        ops.multi_tensor_scale(tensors, [*tensors[:-1], torch.zeros(2)], torch.zeros(()), 2.0)
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: src\[2999\] has dtype torch.float64, src\[0\] has"):
        ops.multi_tensor_scale([*tensors[:-1], torch.zeros(3).double()], tensors, torch.zeros(()), 2.0)
    tensors[7].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: src\[7\] has no memory"):
        ops.multi_tensor_scale(tensors, tensors, torch.zeros(()), 2.0)
    assert tensors[0][0] == 0
    assert tensors[2999][0] == 2.0 * 2999
