"""What GradScaler does beyond the ordinary loop, which test_grad_scaler_parity.py compares with torch's run for run."""

import inspect
import math
from collections import namedtuple

import pytest
import torch
from host_reads import HostReads
from kit import parameter, ready
from torch import nn
from torch.amp.grad_scaler import OptState

from ampctx import GradScaler
from ampctx._errors import AmpError, AmpValueError
from ampctx.optimizers import FusedSGD

NON_FINITE = [math.inf, -math.inf, math.nan]


# --- the same surface as torch's -----------------------------------------------------------------------------------


def test_every_method_of_torchs_is_here_with_its_parameters():
    for name, theirs in vars(torch.amp.GradScaler).items():
        if inspect.isfunction(theirs):
            ours = inspect.signature(getattr(GradScaler, name)).parameters.values()
            parameters = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY]
            assert parameters == list(inspect.signature(theirs).parameters), name


def test_attributes_that_frameworks_read_are_those_of_torchs():
    ours, theirs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert isinstance(ours, torch.amp.GradScaler)
    for scaler in (ours, theirs):
        scaler.scale(torch.ones(()))
    for name in vars(theirs):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_scale_and_tracker_are_live_tensors_after_the_first_scale():
    scaler = GradScaler("cpu", init_scale=8.0)
    assert scaler._scale is scaler._growth_tracker is None
    assert scaler.get_scale() == 8.0
    assert scaler._get_growth_tracker() == 0
    with torch.inference_mode():  # a validation before the first step
        scaler.scale(torch.ones(()))
    assert scaler._scale is scaler._get_scale_async()
    assert (scaler._scale.dtype, scaler._growth_tracker.dtype) == (torch.float32, torch.int32)
    scaler._scale.fill_(2.0)
    scaler._growth_tracker.fill_(3)
    assert scaler.get_scale() == 2.0
    assert scaler._get_growth_tracker() == 3
    p = parameter([4.0])
    scaler.unscale_(torch.optim.SGD([p]))
    assert p.grad.item() == 2.0
    assert scaler.scale(torch.ones((), requires_grad=True)).item() == 2.0


def test_a_framework_may_replace_unscale_grads():
    scaler, optimizer = ready(parameter([8.0, 16.0], torch.float16))
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow_fp16: original(
        optimizer, inv_scale, found_inf, True
    )
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, -1.0]


def test_stages_go_from_ready_to_unscaled_to_stepped_and_back():
    scaler, optimizer = ready(parameter([1.0]))
    states = scaler._per_optimizer_states
    assert states[id(optimizer)] == {"stage": OptState.READY, "found_inf_per_device": {}}
    scaler.unscale_(optimizer)
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert scaler._found_inf_per_device(optimizer) == {torch.device("cpu"): torch.tensor(0.0)}
    scaler.step(optimizer)
    assert states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0


class Wrapper(torch.optim.Optimizer):
    """As frameworks wrap an optimizer, or several."""

    def __init__(self, *inside):
        self.inside, self.state = inside, {}
        self.param_groups = [group for each in inside for group in each.param_groups]

    def step(self):
        for each in self.inside:
            each.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_no_gradient_is_divided_twice(make):
    """By way of a wrapper and of the optimizer in it, or of two optimizers with one parameter."""
    p, q = parameter([8.0]), parameter([16.0])
    scaler, first = ready(p, make=make)
    other, again = make([q], lr=1.0), make([q, p], lr=1.0)
    both = Wrapper(first, other)
    for unscaled, stepped in ((both, [both]), (both, [first, other]), (first, [Wrapper(first), other])):
        scaler.scale(torch.ones(()))
        before = p.item(), q.item()
        p.grad, q.grad = torch.tensor([8.0]), torch.tensor([16.0])
        scaler.unscale_(unscaled)
        calls = [(scaler.unscale_, first)] if unscaled is both else [(scaler.step, again), (scaler.step, both)]
        for call, optimizer in [(scaler.unscale_, again), *calls]:
            with pytest.raises(AmpError, match=r"of param_groups\[\d\]\['params'\]\[\d\] was unscaled through another"):
                call(optimizer)
        for each in stepped:
            scaler.step(each)
        with pytest.raises(AmpError, match="was unscaled through another"):
            scaler.step(again)
        scaler.update()
        assert (p.item(), q.item()) == (before[0] - 1.0, before[1] - 2.0)
    for one in (first, again):  # with a backward for each
        p.grad, q.grad = torch.tensor([8.0]), None
        scaler.scale(torch.ones(()))
        scaler.step(one)
    assert p.grad.item() == 1.0


# --- scale ---------------------------------------------------------------------------------------------------------


def test_scale_keeps_the_shape_of_nested_outputs():
    Pair = namedtuple("Pair", "a b")
    scaler = GradScaler("cpu", init_scale=2.0)
    one = torch.ones(())
    scaled = scaler.scale([one, (one, one), Pair(one, one), (t for t in [one])])
    assert scaled[0].item() == 2.0
    assert type(scaled[1]) is tuple
    assert type(scaled[2]) is Pair
    assert [t.item() for t in scaled[3]] == [2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_scaled_dtype_is_torchs(dtype):
    for outputs in (torch.ones((), dtype=dtype), torch.ones(3, dtype=dtype)):
        ours, theirs = (s.scale(outputs) for s in (GradScaler("cpu", 8.0), torch.amp.GradScaler("cpu", 8.0)))
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("outputs", [1.0, "loss", {"loss": torch.ones(())}, [torch.ones(()), None]])
def test_scale_refuses_what_is_no_tensor(outputs):
    with pytest.raises(AmpValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        GradScaler("cpu").scale(outputs)


# --- gradients of every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("bad", [None, *NON_FINITE])
def test_dtypes_unscale_and_check(dtype, bad):
    p = parameter([8.0, -16.0, 24.0 if bad is None else bad], dtype)
    scaler, optimizer = ready(p)
    scaler.step(optimizer)
    assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == (bad is not None)
    assert p.grad[:2].tolist() == [1.0, -2.0]
    assert p.tolist() == ([0.0, 3.0, -2.0] if bad is None else [1.0, 1.0, 1.0])


# torch 2.11 warns of it even where the argument is given.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("bad", [None, *NON_FINITE])
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])
def test_sparse_gradients_unscale(coalesced, bad):
    p = nn.Parameter(torch.zeros(4, 2))
    values = torch.tensor([[8.0, 8.0], [16.0, bad or 16.0], [8.0, 8.0]])
    indices = torch.tensor([[0, 2, 3 if coalesced else 0]])
    p.grad = torch.sparse_coo_tensor(indices, values, (4, 2), is_coalesced=coalesced, check_invariants=True)
    scaler, optimizer = ready(p)
    scaler.step(optimizer)
    if bad is None:
        assert p.tolist() == [[-1.0 if coalesced else -2.0] * 2, [0, 0], [-2.0] * 2, [-1.0 if coalesced else 0] * 2]
    else:
        assert not p.any()


def test_sparse_fp16_duplicates_that_overflow_together_are_found():
    p = nn.Parameter(torch.zeros(4, 1, dtype=torch.float16))
    indices, values = torch.tensor([[1, 1]]), torch.full((2, 1), 40000.0).half()
    p.grad = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    scaler, optimizer = ready(p)
    assert scaler._check_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0


def test_unscale_of_fp16_is_refused_by_name_and_changes_nothing():
    first, second = parameter([8.0]), parameter([8.0, 8.0], torch.float16)
    scaler, optimizer = ready(first, second)
    with pytest.raises(AmpValueError, match=r"Attempting to unscale FP16 gradients. param_groups\[0\].*\[1\] of shape"):
        scaler.unscale_(optimizer)
    assert first.grad.item() == second.grad[0].item() == 8.0


# --- flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [0.0, 1.0, 2.0, 0.5, math.nan])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_any_flag_but_zero_skips_the_step(fused, flag):
    p = parameter([8.0])
    scaler, optimizer = ready(p, make=torch.optim.Adam, fused=fused)
    scaler.unscale_(optimizer)
    scaler._found_inf_per_device(optimizer)[torch.device("cpu")].fill_(flag)
    scaler.step(optimizer)
    assert (p.item() == 1.0) == (flag != 0)
    scaler.update()
    assert scaler.get_scale() == (4.0 if flag else 8.0)


@pytest.mark.parametrize("flags", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_flags_of_several_devices_join_and_stay_as_they_are(flags):
    p = parameter([8.0])
    scaler, optimizer = ready(p)
    scaler.unscale_(optimizer)
    per_device = scaler._found_inf_per_device(optimizer)
    # The keys are all that tells that these are two devices.
    per_device.update({torch.device("cuda", i): torch.tensor(flag) for i, flag in enumerate(flags)})
    with HostReads() as reads:
        scaler.step(optimizer)
    assert reads.count == 1
    scaler.update()
    assert p.item() == (1.0 if any(flags) else 0.0)
    assert scaler.get_scale() == (4.0 if any(flags) else 8.0)
    assert [per_device[torch.device("cuda", i)].item() for i in (0, 1)] == list(flags)


# --- optimizers that scale by themselves ---------------------------------------------------------------------------


class Recording(torch.optim.SGD):
    """An optimizer that reads the flag and the scale by itself."""

    _step_supports_amp_scaling = True

    def step(self):
        self.seen = (self.grad_scale, self.found_inf)
        return "stepped"


@pytest.mark.parametrize("grad", [8.0, math.inf])
@pytest.mark.parametrize(
    ("unscaled", "own", "expected"), [(False, None, 8.0), (True, None, None), (False, 4.0, 32.0), (True, 4.0, 4.0)]
)
def test_optimizer_gets_scale_and_flag_for_the_length_of_the_step(unscaled, own, expected, grad):
    """A scale that the program has set, too, is multiplied in."""
    scaler, optimizer = ready(parameter([grad]), make=Recording)
    if own is not None:
        optimizer.grad_scale = torch.tensor(own)
    if unscaled:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) == "stepped"
    grad_scale, found_inf = optimizer.seen
    assert (grad_scale if expected is None else grad_scale.item()) == expected
    assert (found_inf.item(), found_inf.dtype) == (grad == math.inf, torch.float32)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


class TakesTheScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, factor=1, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        return factor, grad_scaler


def test_optimizer_that_takes_the_scaler_itself():
    p = parameter([8.0])
    scaler, optimizer = ready(p, make=TakesTheScaler)
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself as a keyword argument"):
        assert scaler.step(optimizer, 3) == (3, scaler)
    assert p.grad.item() == 1.0
