"""One table of wrong calls: every backend refuses them, with one message that names list and index."""

import math
import re

import pytest
import torch
from backends import COMPILED
from optimizer_calls import (
    ADAGRAD,
    ADAM,
    AMSGRAD,
    LAMB,
    LARC,
    MOMENTUM,
    NOVOGRAD,
    OPTIMIZERS,
    SGD,
    make_call,
    on_optimizers,
)

from ampctx.kernels import definitions, extension


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


GAPS = "is not contiguous: its elements do not fill one block of memory"
F64, I32, I64 = torch.float64, torch.int32, torch.int64

# (op, arguments without found_inf, message). `d` makes a tensor on the backend's device.
SCALE_ERRORS = {
    "lengths": (lambda d: ([d(2), d(3)], [d(2)]), "dst has 1 tensors, src has 2"),
    "sparse": (
        lambda d: ([d(2), d(2).to_sparse()], [d(2), d(2)]),
        "src[1] is not a strided tensor",
    ),
    "dtype": (
        lambda d: ([d(2, dtype=I64)], [d(2)]),
        "src[0] has dtype torch.int64, expected float32, float16",
    ),
    "complex": (
        lambda d: ([d(2)], [d(2, dtype=torch.complex64)]),
        "dst[0] has dtype torch.complex64, expected float32, float16",
    ),
    "mixed-dtypes": (
        lambda d: ([d(2), d(2), d(2, dtype=torch.bfloat16)], [d(2)] * 3),
        "src[2] has dtype torch.bfloat16, src[0] has torch.float32",
    ),
    "mixed-dtypes-in-dst": (
        lambda d: ([d(2), d(2)], [d(2), d(2, dtype=torch.float16)]),
        "dst[1] has dtype torch.float16, dst[0] has torch.float32",
    ),
    "numel": (
        lambda d: ([d(2), d(2, 7)], [d(2), d(2, 8)]),
        "dst[1] has 16 elements, src[1] has 14",
    ),
    "numel-of-an-empty": (
        lambda d: ([d(2), d(0)], [d(2), d(1)]),
        "dst[1] has 1 elements, src[1] has 0",
    ),
    "gaps": (lambda d: ([d(2), d(8)[::2]], [d(2), d(4)]), f"src[1] {GAPS}"),
    "expanded": (lambda d: ([d(2), d(4)], [d(2), d(1).expand(4)]), f"dst[1] {GAPS}"),
    "layouts": (
        lambda d: ([d(3, 4)], [d(4, 3).t()]),
        "dst[0] and src[0] have different memory layouts",
    ),
    "channels-last": (
        lambda d: ([d(2, 3, 4, 5).to(memory_format=torch.channels_last)], [d(2, 3, 4, 5)]),
        "dst[0] and src[0] have different memory layouts",
    ),
    "factor-elements": (
        lambda d: ([d(2)], [d(2)], {"scale": d(2)}),
        "scale has 2 elements, expected 1",
    ),
    "factor-dtype": (
        lambda d: ([d(2)], [d(2)], {"scale": t((), dtype=I64)}),
        "scale has dtype torch.int64, expected float32 or float64",
    ),
    "flag-elements": (
        lambda d: ([d(2)], [d(2)], {"found_inf": d(2)}),
        "found_inf has 2 elements, expected 1",
    ),
    "flag-dtype": (
        lambda d: ([d(2)], [d(2)], {"found_inf": d(1, dtype=torch.float16)}),
        "found_inf has dtype torch.float16, expected float32 or int32",
    ),
    "flag-dtype-without-tensors": (
        lambda d: ([], [], {"found_inf": d(1, dtype=I64)}),
        "found_inf has dtype torch.int64, expected float32 or int32",
    ),
}


def on(device):
    return lambda *shape, dtype=torch.float32: t(*shape, dtype=dtype, device=device)


def match(op, message):
    return re.escape(f"{op}: {message}")


@pytest.mark.parametrize(("call", "message"), SCALE_ERRORS.values(), ids=SCALE_ERRORS.keys())
def test_multi_tensor_scale(backend, call, message):
    src, dst, *others = call(on(backend.device))
    arguments = {"found_inf": backend.flag(), "scale": torch.tensor(2.0), **(others[0] if others else {})}
    before = [d.clone() for d in dst]
    with pytest.raises(RuntimeError, match=match("multi_tensor_scale", message)):
        backend.ops.multi_tensor_scale.default(src, dst, arguments["found_inf"], arguments["scale"])
    assert all(torch.equal(d, b) for d, b in zip(dst, before, strict=True)), "a refused call changed a tensor"


AXPBY_ERRORS = {
    "length-of-y": (lambda d: ([d(2)], [], [d(2)], {}), "y has 0 tensors, x has 1"),
    "length-of-out": (lambda d: ([d(2)], [d(2)], [d(2)] * 3, {}), "out has 3 tensors, x has 1"),
    "numel": (lambda d: ([d(2)], [d(2)], [d(5)], {}), "out[0] has 5 elements, x[0] has 2"),
    "arg-to-check": (
        lambda d: ([d(2)], [d(2)], [d(2)], {"arg_to_check": 2}),
        "arg_to_check is 2, expected -1, 0 or 1",
    ),
    "arg-to-check-below": (
        lambda d: ([d(2)], [d(2)], [d(2)], {"arg_to_check": -2}),
        "arg_to_check is -2, expected -1, 0 or 1",
    ),
    "a": (lambda d: ([d(2)], [d(2)], [d(2)], {"a": d(3)}), "a has 3 elements, expected 1"),
    "b": (
        lambda d: ([d(2)], [d(2)], [d(2)], {"b": t(1, dtype=torch.float16)}),
        "b has dtype torch.float16, expected float32 or float64",
    ),
}


@pytest.mark.parametrize(("call", "message"), AXPBY_ERRORS.values(), ids=AXPBY_ERRORS.keys())
def test_multi_tensor_axpby(backend, call, message):
    x, y, out, others = call(on(backend.device))
    arguments = {"a": torch.tensor(1.0), "b": torch.tensor(1.0), "arg_to_check": -1, **others}
    with pytest.raises(RuntimeError, match=match("multi_tensor_axpby", message)):
        backend.ops.multi_tensor_axpby.default(x, y, out, backend.flag(), *arguments.values())


def test_multi_tensor_l2norm(backend):
    wrong = [on(backend.device)(3), on(backend.device)(3, dtype=torch.float16)]
    message = "tensors[1] has dtype torch.float16, tensors[0] has torch.float32"
    with pytest.raises(RuntimeError, match=match("multi_tensor_l2norm", message)):
        backend.l2norm(wrong, backend.flag())
    with pytest.raises(RuntimeError, match=match("multi_tensor_unscale_l2norm", message)):
        backend.l2norm(wrong, backend.flag(), 2.0)
    with pytest.raises(
        RuntimeError, match=match("multi_tensor_unscale_l2norm", "inv_scale has 2 elements, expected 1")
    ):
        backend.l2norm(wrong[:1], backend.flag(), torch.ones(2))
    with pytest.raises(RuntimeError, match=match("multi_tensor_l2norm", "found_inf has dtype torch.float64")):
        backend.l2norm(wrong[:1], backend.flag(dtype=F64))


UPDATE_ERRORS = {
    "scale-dtype": (("scale", F64, 1), "scale has dtype torch.float64, expected float32"),
    "growth-dtype": (("growth", I64, 1), "growth_tracker has dtype torch.int64, expected int32"),
    "hysteresis-dtype": (
        ("hysteresis", torch.float32, 1),
        "hysteresis_tracker has dtype torch.float32, expected int32",
    ),
    "flag-dtype": (("found_inf", torch.bool, 1), "found_inf has dtype torch.bool, expected float32 or int32"),
    "scale-elements": (("scale", torch.float32, 3), "scale has 3 elements, expected 1"),
    "growth-elements": (("growth", I32, 0), "growth_tracker has 0 elements, expected 1"),
}


RULE_ERRORS = {
    "growth-below-1": ({"growth_factor": 0.99}, "growth_factor is not a finite number of at least 1"),
    "growth-inf": ({"growth_factor": math.inf}, "growth_factor is not a finite number of at least 1"),
    "growth-nan": ({"growth_factor": math.nan}, "growth_factor is not a finite number of at least 1"),
    "backoff-0": ({"backoff_factor": 0.0}, "backoff_factor is not a number above 0 and at most 1"),
    "backoff-above-1": ({"backoff_factor": 1.5}, "backoff_factor is not a number above 0 and at most 1"),
    "backoff-nan": ({"backoff_factor": math.nan}, "backoff_factor is not a number above 0 and at most 1"),
    "min-below-0": ({"min_scale": -1.0}, "min_scale is not a number from 0 to the largest fp32"),
    "min-inf": ({"min_scale": math.inf}, "min_scale is not a number from 0 to the largest fp32"),
    "max-0": ({"max_scale": 0.0}, "max_scale is not a number from the smallest normal fp32 up"),
    "max-nan": ({"max_scale": math.nan}, "max_scale is not a number from the smallest normal fp32 up"),
    "hysteresis-below-0": ({"hysteresis": -1}, "hysteresis is -1, expected 0 to 2147483647"),
    "hysteresis-beyond-int32": ({"hysteresis": 1 << 31}, "hysteresis is 2147483648, expected 0 to 2147483647"),
}


@pytest.mark.parametrize(("wrong", "message"), RULE_ERRORS.values(), ids=RULE_ERRORS.keys())
def test_rule_of_update_scale(backend, wrong, message):
    state = [t((), device=backend.device), *(t((), dtype=I32, device=backend.device) for _ in range(2))]
    with pytest.raises(RuntimeError, match=match("update_scale", message)):
        backend.update_scale(*state, backend.flag(1), **wrong)
    assert [s.item() for s in state] == [1, 1, 1]


@pytest.mark.parametrize(("wrong", "message"), UPDATE_ERRORS.values(), ids=UPDATE_ERRORS.keys())
def test_update_scale(backend, wrong, message):
    dtypes = {"scale": torch.float32, "growth": I32, "hysteresis": I32, "found_inf": torch.float32}
    tensors = {name: t(1, dtype=dtype, device=backend.device) for name, dtype in dtypes.items()}
    name, dtype, elements = wrong
    tensors[name] = t(elements, dtype=dtype, device=backend.device)
    with pytest.raises(RuntimeError, match=match("update_scale", message)):
        backend.update_scale(*tensors.values())


def test_block_factors(backend):
    with pytest.raises(RuntimeError, match=match("block_factors", "scale has dtype torch.float64, expected float32")):
        backend.block_factors(t((), dtype=torch.float64, device=backend.device))
    with pytest.raises(RuntimeError, match=match("block_factors", "scale has 3 elements, expected 1")):
        backend.block_factors(t(3, device=backend.device))


def test_scale_clipped(backend):
    op, norm, two = "multi_tensor_scale_clipped", t((), device=backend.device), t(2, device=backend.device)
    lists = [t(3, device=backend.device)], [t(3, device=backend.device)], backend.flag()
    with pytest.raises(RuntimeError, match=match(op, "grad_norm has dtype torch.int32, expected float32")):
        backend.scale_clipped(*lists, 1.0, norm.int(), 1.0)
    with pytest.raises(RuntimeError, match=match(op, "grad_norm has 2 elements, expected 1")):
        backend.scale_clipped(*lists, 1.0, two, 1.0)
    with pytest.raises(RuntimeError, match=match(op, "scale has 2 elements, expected 1")):
        backend.scale_clipped(*lists, two, norm, 1.0)
    with pytest.raises(RuntimeError, match=match(op, "dst[0] has 2 elements, src[0] has 3")):
        backend.scale_clipped(lists[0], [two], lists[2], 1.0, norm, 1.0)


SKIP_ERRORS = {
    "counts-dtype": ({"counts": t(6, dtype=I32)}, "counts has dtype torch.int32, expected float32"),
    "counts-layout": ({"counts": t(6, 2)[:, 0]}, "counts is not contiguous"),
    "slot-below-0": ({"slot": -1}, "slot is -1, counts has 6 elements"),
    "slot-too-large": ({"slot": 2}, "slot is 2, counts has 6 elements"),
    "no-slots": ({"counts": t(1), "slot": 0}, "slot is 0, counts has 1 elements"),
    "found_inf": ({"found_inf": t(2)}, "found_inf has 2 elements, expected 1"),
    "flag": ({"flag": t((), dtype=torch.float64)}, "found_inf has dtype torch.float64, expected float32 or int32"),
    "scale": ({"scale": t((), dtype=torch.float64)}, "scale has dtype torch.float64, expected float32"),
}


@pytest.mark.parametrize(("wrong", "message"), SKIP_ERRORS.values(), ids=SKIP_ERRORS.keys())
def test_count_skip(backend, wrong, message):
    right = {"counts": t(6), "found_inf": t(()), "flag": t(()), "scale": t(()), "slot": 1, "is_first": True}
    given = [v.to(backend.device) if isinstance(v, torch.Tensor) else v for v in {**right, **wrong}.values()]
    with pytest.raises(RuntimeError, match=match("count_skip", message)):
        backend.count_skip(*given)


def replaced(name, make, index=None):
    """Puts another list, or another tensor at one index, into a call."""

    def change(call, d):
        if index is None:
            call.lists[name] = make(d)
        else:
            call[name][index] = make(d)

    return change


F16, BF16, I16, F32 = torch.float16, torch.bfloat16, torch.int16, torch.float32
# (optimizer, write back, type of params, what is wrong, message); the calls have tensors of 2 and 12 elements.
STEP_ERRORS = {
    "params-length": (ADAM, "nearest", F32, replaced("params", lambda d: [d(2)]), "params has 1 tensors, grads has 2"),
    "params-numel": (SGD, "nearest", F32, replaced("params", lambda d: d(3), 1), "params[1] has 3 elements, grads[1]"),
    "params-dtype": (
        ADAGRAD, "nearest", F32, replaced("params", lambda d: [d(2, dtype=I16), d(12, dtype=I16)]),
        "params[0] has dtype torch.int16, expected float32, float16",
    ),
    "grads-mixed": (
        MOMENTUM, "nearest", F32, replaced("grads", lambda d: d(12, dtype=F16), 1),
        "grads[1] has dtype torch.float16, grads[0] has torch.float32",
    ),
    "state-length": (
        ADAGRAD, "nearest", F32, replaced("sums", lambda d: []), "sums has 0 tensors, grads has 2",
    ),
    "state-that-may-be-empty": (
        AMSGRAD, "nearest", F32, replaced("max_exp_avg_sqs", lambda d: [d(2)]),
        "max_exp_avg_sqs has 1 tensors, grads has 2",
    ),
    "buffers-length": (
        MOMENTUM, "nearest", F32, replaced("momentum_buffers", lambda d: [d(2)] * 3),
        "momentum_buffers has 3 tensors, grads has 2",
    ),
    "state-layout": (
        ADAM, "nearest", F32, replaced("exp_avgs", lambda d: d(4, 3).t(), 1),
        "exp_avgs[1] and grads[1] have different memory layouts",
    ),
    "state-gaps": (ADAM, "nearest", F32, replaced("exp_avg_sqs", lambda d: d(24)[::2], 1), f"exp_avg_sqs[1] {GAPS}"),
    "write-back-below": (
        ADAM, "nearest", F32, lambda call, d: call.options.update(write_back=-1), "write_back is -1, expected 0 to 4",
    ),
    "write-back-above": (
        SGD, "nearest", F32, lambda call, d: call.options.update(write_back=5), "write_back is 5, expected 0 to 4",
    ),
    "extras-with-nearest": (
        ADAM, "nearest", F32, replaced("extras", lambda d: [d(2)]),
        "extras has 1 tensors, expected none to go with this write_back",
    ),
    "extras-with-stochastic": (
        SGD, "stochastic", BF16, replaced("extras", lambda d: [d(2), d(12)]),
        "extras has 2 tensors, expected none to go with this write_back",
    ),
    "extras-missing": (ADAGRAD, "copy", F32, replaced("extras", lambda d: []), "extras has 0 tensors, grads has 2"),
    "extras-numel": (ADAM, "copy", F32, replaced("extras", lambda d: d(3, dtype=F16), 1), "extras[1] has 3 elements"),
    "extras-layout": (
        ADAM, "copy", F32, replaced("extras", lambda d: d(4, 3, dtype=F16).t(), 1),
        "extras[1] and grads[1] have different memory layouts",
    ),
    "copies-in-int16": (
        MOMENTUM, "copy", F32, replaced("extras", lambda d: [d(2, dtype=I16), d(12, dtype=I16)]),
        "extras[0] has dtype torch.int16, expected float32, float16",
    ),
    "remainders-not-int16": (
        ADAM, "split", BF16, replaced("extras", lambda d: [d(2), d(12)]),
        "extras[0] has dtype torch.float32, expected int16",
    ),
    "remainders-of-fp32": (
        ADAM, "split", F32, lambda call, d: None,
        "params[0] has dtype torch.float32, expected bfloat16 to go with remainders",
    ),
    "remainders-of-fp16": (
        SGD, "split", F16, lambda call, d: None,
        "params[0] has dtype torch.float16, expected bfloat16 to go with remainders",
    ),
    "compensations-of-fp32": (
        ADAGRAD, "kahan", F32, lambda call, d: None,
        "params[0] has dtype torch.float32, expected float16 or bfloat16 to go with compensations",
    ),
    "compensations-of-another-type": (
        ADAM, "kahan", F16, replaced("extras", lambda d: [d(2, dtype=BF16), d(12, dtype=BF16)]),
        "extras[0] has dtype torch.bfloat16, params[0] has torch.float16",
    ),
    "steps-length": (SGD, "nearest", F32, replaced("steps", lambda d: [d(1)]), "steps has 1 tensors, grads has 2"),
    "steps-missing": (ADAM, "nearest", F32, replaced("steps", lambda d: []), "steps has 0 tensors, grads has 2"),
    "steps-elements": (ADAM, "nearest", F32, replaced("steps", lambda d: d(2), 1), "steps[1] has 2 elements, expected"),
    "steps-dtype": (
        ADAGRAD, "nearest", F32, replaced("steps", lambda d: d(1, dtype=I64), 0),
        "steps[0] has dtype torch.int64, expected float32",
    ),
    "lamb-state-numel": (
        LAMB, "nearest", F32, replaced("exp_avg_sqs", lambda d: d(7), 1), "exp_avg_sqs[1] has 7 elements, grads[1]",
    ),
    "lamb-state-missing": (
        LAMB, "nearest", F32, replaced("exp_avg_sqs", lambda d: []), "exp_avg_sqs has 0 tensors, grads has 2",
    ),
    "lamb-remainders": (
        LAMB, "split", BF16, replaced("extras", lambda d: [d(2), d(12)]),
        "extras[0] has dtype torch.float32, expected int16",
    ),
    "global-norm-elements": (
        LAMB, "nearest", F32, lambda call, d: call.options.update(global_grad_norm=d(2)),
        "global_grad_norm has 2 elements, expected 1",
    ),
    "global-norm-dtype": (
        LAMB, "nearest", F32, lambda call, d: call.options.update(global_grad_norm=t(1, dtype=I64)),
        "global_grad_norm has dtype torch.int64, expected float32 or float64",
    ),
    "novograd-state-layout": (
        NOVOGRAD, "nearest", F32, replaced("exp_avgs", lambda d: d(4, 3).t(), 1),
        "exp_avgs[1] and grads[1] have different memory layouts",
    ),
    "norms-length": (
        NOVOGRAD, "nearest", F32, replaced("exp_avg_sqs", lambda d: [d(1)]), "exp_avg_sqs has 1 tensors, grads has 2",
    ),
    "norms-elements": (
        NOVOGRAD, "nearest", F32, replaced("exp_avg_sqs", lambda d: d(12), 1),
        "exp_avg_sqs[1] has 12 elements, expected 1",
    ),
    "norms-dtype": (
        NOVOGRAD, "nearest", F32, replaced("exp_avg_sqs", lambda d: d(1, dtype=F16), 0),
        "exp_avg_sqs[0] has dtype torch.float16, expected float32",
    ),
    "novograd-write-back": (
        NOVOGRAD, "nearest", F32, lambda call, d: call.options.update(write_back=7), "write_back is 7, expected 0 to 4",
    ),
    "larc-length": (LARC, "nearest", F32, replaced("params", lambda d: [d(2)]), "params has 1 tensors, grads has 2"),
    "larc-numel": (LARC, "nearest", F32, replaced("params", lambda d: d(3), 1), "params[1] has 3 elements, grads[1]"),
    "larc-layout": (
        LARC, "nearest", F32, replaced("params", lambda d: d(4, 3).t(), 1),
        "params[1] and grads[1] have different memory layouts",
    ),
    "larc-dtype": (
        LARC, "nearest", F32, replaced("params", lambda d: [d(2, dtype=I16), d(12, dtype=I16)]),
        "params[0] has dtype torch.int16, expected float32, float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "write_back", "param", "change", "message"), STEP_ERRORS.values(), ids=STEP_ERRORS.keys()
)
def test_optimizer_steps(backend, optimizer, write_back, param, change, message):
    call = make_call(backend, optimizer, [(2,), (3, 4)], param=param, write_back=write_back)
    change(call, on(backend.device))
    before = call.clone()
    with pytest.raises(RuntimeError, match=match(optimizer.op, message)):
        call.run(backend)
    call.assert_same(before)


on_all = pytest.mark.parametrize("optimizer", [*OPTIMIZERS, LARC], ids=lambda o: o.name)
SCALAR_ERRORS = {
    "flag-dtype": ({"found_inf": (1, F64)}, "found_inf has dtype torch.float64, expected float32 or int32"),
    "flag-elements": ({"found_inf": (2, F32)}, "found_inf has 2 elements, expected 1"),
    "inv-scale": ({"inv_scale": (3, F32)}, "inv_scale has 3 elements, expected 1"),
    "lr-dtype": ({"lr": (1, F16)}, "lr has dtype torch.float16, expected float32"),
}


@pytest.mark.parametrize(("wrong", "message"), SCALAR_ERRORS.values(), ids=SCALAR_ERRORS.keys())
@on_all
def test_scalars_of_optimizer_steps(backend, optimizer, wrong, message):
    scalars = {name: t(shape, dtype=dtype, device=backend.device) for name, (shape, dtype) in wrong.items()}
    for sizes in ([2, 3], []):
        with pytest.raises(RuntimeError, match=match(optimizer.op, message)):
            make_call(backend, optimizer, sizes).run(backend, **scalars)


def test_the_first_thing_that_is_wrong_is_the_same_on_every_backend(backend):
    """Lists, step counts, scalars, and then what an op has of its own."""
    d = on(backend.device)
    call = make_call(backend, NOVOGRAD, [2, 3])
    call.lists["exp_avg_sqs"] = [d(2)]
    with pytest.raises(RuntimeError, match=match(NOVOGRAD.op, "inv_scale has 3 elements, expected 1")):
        call.run(backend, inv_scale=d(3))
    call.lists["steps"] = [d(2), d(1)]
    with pytest.raises(RuntimeError, match=match(NOVOGRAD.op, "steps[0] has 2 elements, expected 1")):
        call.run(backend, inv_scale=d(3))
    call = make_call(backend, LAMB, [2, 3], global_grad_norm=d(2))
    with pytest.raises(RuntimeError, match=match(LAMB.op, "lr has 3 elements, expected 1")):
        call.run(backend, lr=d(3))


def cut_off(d, elements):
    """A view into a storage that was made smaller since, by one element: it has the bytes, and not behind the view."""
    whole = d(elements + 1)
    view = whole[1:]
    whole.untyped_storage().resize_(elements * whole.element_size())
    return view


@on_all
def test_what_reaches_beyond_its_storage(backend, optimizer):
    d, message = on(backend.device), "has no memory: its storage has been freed or made smaller"
    names = [name for name in make_call(backend, optimizer, [2, 3]).lists if name != "extras"]
    for name in names:
        call = make_call(backend, optimizer, [2, 3])
        if call[name]:
            call[name][1] = cut_off(d, call[name][1].numel())
            with pytest.raises(RuntimeError, match=match(optimizer.op, f"{name}[1] {message}")):
                call.run(backend)
    for name in ("found_inf", "inv_scale", "lr"):
        with pytest.raises(RuntimeError, match=match(optimizer.op, f"{name} {message}")):
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
        assert extension.load(namespace, definitions.define).loaded
    yield getattr(torch.ops, namespace)
    library._destroy()


def test_lists_on_two_devices(mixed_devices):
    call, flag, one = mixed_devices.multi_tensor_scale.default, t(()), t(())
    meta = t(2, device="meta")
    with pytest.raises(RuntimeError, match=re.escape("src[1] is on meta, src[0] is on cpu")):
        call([t(2), meta], [t(2), t(2)], flag, one)
    with pytest.raises(RuntimeError, match=re.escape("dst[0] is on meta, src[0] is on cpu")):
        call([t(2)], [meta], flag, one)
    with pytest.raises(RuntimeError, match=re.escape("found_inf is on meta, src[0] is on cpu")):
        call([t(2)], [t(2)], t((), device="meta"), one)
    with pytest.raises(RuntimeError, match=re.escape("scale is on meta, src[0] is on cpu")):
        call([t(2)], [t(2)], flag, t((), device="meta"))
    with pytest.raises(RuntimeError, match=re.escape("scale is on meta, found_inf is on cpu")):
        call([], [], flag, t((), device="meta"))


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
        with pytest.raises(RuntimeError, match=re.escape(f"{name}[1] is on meta, grads[0] is on cpu")):
            call(**{name: meta})
    with pytest.raises(RuntimeError, match=re.escape("extras[1] is on meta, grads[0] is on cpu")):
        call(extras=meta.half())
    for name in ("steps", *optimizer.per_tensor):
        with pytest.raises(RuntimeError, match=re.escape(f"{name}[1] is on meta, grads[0] is on cpu")):
            call(**{name: meta[0]})
    for name in ("found_inf", "inv_scale", "lr", *({"global_grad_norm"} & optimizer.options.keys())):
        with pytest.raises(RuntimeError, match=re.escape(f"{name} is on meta, grads[0] is on cpu")):
            call(**{name: meta[0]})


def test_update_scale_on_two_devices(mixed_devices):
    tensors = [t(1), t(1, dtype=I32), t(1, dtype=I32), t(1)]
    for place, name in enumerate(["growth_tracker", "hysteresis_tracker", "found_inf"], start=1):
        wrong = [*tensors]
        wrong[place] = tensors[place].to("meta")
        with pytest.raises(RuntimeError, match=f"update_scale: {name} is on meta, scale is on cpu"):
            mixed_devices.update_scale.default(*wrong, 2.0, 0.5, 1, 1, 0.0, 1e9)


@pytest.mark.cuda
def test_lists_on_cpu_and_cuda():
    cpu, cuda, one = [t(2)], [t(2, device="cuda")], t(())
    flags = {"cpu": t(()), "cuda": t((), device="cuda")}
    call = COMPILED.ops.multi_tensor_scale.default
    with pytest.raises(RuntimeError, match=re.escape("dst[0] is on cpu, src[0] is on cuda:0")):
        call(cuda, cpu, flags["cuda"], one)
    with pytest.raises(RuntimeError, match=re.escape("found_inf is on cpu, src[0] is on cuda:0")):
        call(cuda, cuda, flags["cpu"], one)
    with pytest.raises(RuntimeError, match=re.escape("found_inf is on cuda:0, src[0] is on cpu")):
        call(cpu, cpu, flags["cuda"], one)
    with pytest.raises(RuntimeError, match=re.escape("scale is on cuda:0, src[0] is on cpu")):
        call(cpu, cpu, flags["cpu"], flags["cuda"])
    with pytest.raises(RuntimeError, match="scale has dtype torch.float64, expected float32 on cuda:0"):
        call(cuda, cuda, flags["cuda"], t((), device="cuda", dtype=F64))
