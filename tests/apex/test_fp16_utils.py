"""apex.fp16_utils but for FP16_Optimizer."""

import pytest
import torch
from apex.fp16_utils import (
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from kit import through_a_file
from torch import nn

import ampctx


class Model(nn.Module):
    """Every kind of tensor that a cast has a rule for."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.plain_bn = nn.BatchNorm2d(4, affine=False)
        self.norm = nn.GroupNorm(2, 4)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        return self.norm(self.plain_bn(self.bn(self.conv(x)))), self.table


def pair_of_linears(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


# --- casts ------------------------------------------------------------------------------------------------------------


def test_network_to_half_and_fp16_model_take_fp32_input_and_keeps_affine_batch_norm():
    model = Model()
    network = network_to_half(model)
    assert isinstance(network[0], tofp16)
    assert network[0](torch.ones(2)).dtype == torch.float16
    assert list(network[0].parameters()) == []
    assert network[1] is model
    assert model.bn.weight.dtype == model.bn.running_mean.dtype == torch.float32
    assert model.conv.weight.dtype == model.plain_bn.running_mean.dtype == torch.float16
    assert network(torch.randn(2, 3, 5, 5))[0].dtype == torch.float16
    other = FP16Model(Model())
    assert other.network.bn.weight.dtype == torch.float32
    assert other.network.conv.weight.dtype == other(torch.randn(2, 3, 5, 5))[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_convert_network_casts_floating_tensors_in_place_but_for_affine_batch_norm(dtype):
    model = Model()
    weight = model.conv.weight
    weight.grad = torch.ones_like(weight)
    assert convert_network(model, dtype) is model
    assert model.conv.weight is weight
    assert weight.dtype == weight.grad.dtype == model.norm.weight.dtype == model.table.dtype == dtype
    assert model.plain_bn.running_mean.dtype == dtype
    assert model.bn.weight.dtype == model.bn.running_var.dtype == torch.float32
    assert model.count.dtype == torch.int64


# --- masters by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_a_loop_by_hand_steps_as_sgd_over_fp32_masters_does(flat):
    model = pair_of_linears()
    twin = pair_of_linears().float()
    params, masters = prep_param_lists(model, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(params, twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).half()
            q.grad = p.grad.float()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        reference.step()
    for p, q in zip(params, twin.parameters(), strict=True):
        assert torch.equal(p, q.half())


def test_a_missing_gradient_stays_missing():
    params, masters = prep_param_lists(pair_of_linears())
    for p in params:
        p.grad = torch.ones_like(p)
    model_grads_to_master_grads(params, masters)
    kept = masters[1].grad
    params[0].grad = None
    params[1].grad = torch.full_like(params[1], 2.0)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    assert masters[1].grad is kept
    assert torch.equal(kept, torch.full((4,), 2.0))


def test_lists_that_do_not_belong_together_are_refused():
    params, masters = prep_param_lists(pair_of_linears())
    _, flat = prep_param_lists(pair_of_linears(), flat_master=True)
    for copy in (model_grads_to_master_grads, master_params_to_model_params):
        with pytest.raises(ampctx.AmpValueError, match="model_params has 4 tensors, master_params has 3"):
            copy(params, masters[:3])
        with pytest.raises(ampctx.AmpValueError, match="flat_master=True expects one master, master_params has 4"):
            copy(params, masters, flat_master=True)
        with pytest.raises(
            ampctx.AmpValueError, match=r"^master_params\[0\] is flat with 26 elements, the parameters have 12"
        ):
            copy(params[:1], flat, flat_master=True)
    with pytest.raises(ampctx.AmpValueError, match="no parameter with requires_grad"):
        prep_param_lists(nn.ReLU(), flat_master=True)


# --- loss scalers -----------------------------------------------------------------------------------------------------


def with_grads(*values):
    found = []
    for value in values:
        p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        p.grad = None if value is None else torch.tensor([1.0, value, 1.0], dtype=torch.float16)
        found.append(p)
    return found


def test_a_static_scaler_scales_and_never_looks():
    scaler = LossScaler(128.0)
    assert scaler.loss_scale == scaler.cur_scale == 128.0
    assert scaler.has_overflow(with_grads(float("inf"))) is False
    assert LossScaler._has_inf_or_nan(torch.tensor(float("nan"))) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 128.0
    scaler.cur_scale = 2
    assert scaler.loss_scale == 2
    assert LossScaler().loss_scale == 1


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(init_scale=4.0)], ids=["static", "dynamic"])
def test_scalers_scale_losses_and_gradients_and_are_loaded_with_the_defaults_of_torch_load(scaler):
    loaded = through_a_file(scaler)
    assert type(loaded) is type(scaler)
    assert vars(loaded) == vars(scaler)
    p = nn.Parameter(torch.ones(2))
    loss = (3 * p).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert torch.equal(p.grad, torch.full((2,), 24.0))
    scaled = scaler.scale_gradient(None, (torch.ones(2), None), (None,))
    assert torch.equal(scaled[0], torch.full((2,), 4.0))
    assert scaled[1] is None


@pytest.mark.parametrize(
    ("values", "overflow"),
    [
        ((), False),
        ((None,), False),
        ((1.0, 65504.0, None), False),
        ((1.0, float("inf")), True),
        ((float("nan"), 1.0), True),
    ],
    ids=["nothing", "no-gradient", "finite", "inf", "nan"],
)
def test_has_overflow(values, overflow):
    assert DynamicLossScaler().has_overflow(with_grads(*values)) is overflow


def expected_scales(overflows, scale, factor, window):
    """The rule as apex states it."""
    last = -1
    for i, overflow in enumerate(overflows):
        if overflow:
            scale, last = max(scale / factor, 1), i
        elif (i - last) % window == 0:
            scale *= factor
        yield scale


@pytest.mark.parametrize(
    ("overflows", "options"),
    [
        ([False] * 7, {"init_scale": 8.0, "scale_window": 3}),
        ([False, False, True, False, False, False, True, True, False, False, False], {"scale_window": 3}),
        ([True] * 5, {"init_scale": 8.0}),
        ([True, False, False, True, False, False], {"init_scale": 64.0, "scale_factor": 4.0, "scale_window": 2}),
    ],
    ids=["growth", "mixed", "floor-of-1", "factor"],
)
def test_dynamic_scale_follows_the_rule(overflows, options):
    complete = {"init_scale": 2**32, "scale_factor": 2.0, "scale_window": 1000, **options}
    scaler = DynamicLossScaler(**options)
    assert scaler.loss_scale == complete["init_scale"]
    wanted = expected_scales(overflows, complete["init_scale"], complete["scale_factor"], complete["scale_window"])
    for i, (overflow, scale) in enumerate(zip(overflows, wanted, strict=True)):
        scaler.update_scale(overflow)
        assert scaler.loss_scale == scaler.cur_scale == scale
        assert scaler.cur_iter == i + 1
    assert scaler.last_overflow_iter == max((i for i, o in enumerate(overflows) if o), default=-1)
