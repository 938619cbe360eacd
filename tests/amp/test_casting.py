import copy

import pytest
import torch
from kit import LEVELS, LOW, half_dtypes
from torch import nn

from ampctx import AmpError
from ampctx.casts.casting import cast_model, check_models, install_io_casts, install_state_dict_upcast
from ampctx.casts.model_watch import ParameterNames

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


class Mixed(nn.Module):
    """A parameter or buffer of every sort that a cast has to tell apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
        self.ln = nn.LayerNorm(4)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc.weight

    def forward(self, x):
        return self.tied(self.ln(self.plain_bn(self.bn(self.fc(x)))))


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def dtypes(model):
    return {name: t.dtype for name, t in tensors(model).items()}


# --- checks -----------------------------------------------------------------------------------------------------------


@half_dtypes
def test_16_bit_models_are_refused(dtype):
    check_models([Mixed(), nn.Linear(2, 2).double(), nn.Module()], allow_16bit=False)
    kind = {HALF: "torch.HalfTensor", BF16: "torch.BFloat16Tensor"}[dtype]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(AmpError, match=rf"^Found param 1.weight with type {kind}.*model\.float\(\)"):
        check_models([nn.Linear(2, 2), model], allow_16bit=False)
    check_models([model], allow_16bit=True)
    buffered = nn.Module()
    buffered.register_buffer("table", torch.ones(2, dtype=dtype))
    with pytest.raises(AmpError, match=f"^Found buffer table with type {kind}"):
        check_models([buffered], allow_16bit=False)
    with pytest.raises(AmpError, match=rf"^Found param weight with type {dtype}"):
        check_models([nn.LazyLinear(2).to(dtype)], allow_16bit=False)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_wrapper_with_flat_parameters_is_refused():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    class Sharded(FSDPModule, nn.Linear):
        """What fully_shard turns a Linear into."""

        def __new__(cls, *args):
            return nn.Module.__new__(cls)

    check_models([Sharded(2, 2)], allow_16bit=False)

    class Flattened(FullyShardedDataParallel):
        """Its flat parameters would need a GPU."""

        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(AmpError, match=r"instance of torch.distributed.fsdp.FullyShardedDataParallel"):
        check_models([Flattened()], allow_16bit=False)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False], ids=["keep-bn", "all"])
@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=["fp16", "bf16", "fp32"])
def test_what_is_cast(dtype, keep):
    model = Mixed()
    before, expected = tensors(model), dtypes(model)
    bn = {n for n in expected if n.startswith("bn.")} if keep else set()
    for name, was in expected.items():
        if was.is_floating_point and name not in bn:
            expected[name] = dtype
    undo, _ = cast_model(model, dtype, keep)
    assert dtypes(model) == expected
    assert cast_model(model, dtype, keep)[1] == {}  # nothing is left to cast
    # The same objects: ties and optimizers hold on to them.
    assert all(t is before[name] for name, t in tensors(model).items())
    assert model.tied.weight is model.fc.weight
    for t in (model.fc.weight, model.scale):
        t.data.fill_(1.5)
    undo()
    assert dtypes(model) == dtypes(Mixed())
    assert all(t.eq(1.5).all() for t in (model.fc.weight, model.scale))


def test_parameters_of_the_users_own_beside_statistics_are_cast():
    class Conditional(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(4, affine=False)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return super().forward(x) * self.gain

    model = nn.Sequential(nn.Linear(4, 4), Conditional(), nn.Linear(4, 4))
    cast_model(model, HALF, True)
    assert (model[1].running_mean.dtype, model[1].running_var.dtype, model[1].gain.dtype) == (FLOAT, FLOAT, HALF)
    assert model(torch.randn(6, 4).half()).dtype == HALF


def test_lazy_parameters_materialize_in_the_new_type():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    undo, originals = cast_model(model, HALF, True)
    assert originals == {}
    assert model(torch.ones(2, 5).half()).dtype == HALF
    assert (model[0].weight.dtype, model[1].weight.dtype) == (HALF, FLOAT)
    undo()
    assert model[0].weight.dtype == FLOAT
    assert model(torch.ones(2, 5)).dtype == FLOAT


def test_a_cast_that_fails_half_way_leaves_nothing_behind():
    class Refuses(torch.Tensor):
        def to(self, *args, **kwargs):
            raise OSError("out of memory")

    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("stuck", torch.ones(2).as_subclass(Refuses))
    with pytest.raises(OSError, match="out of memory"):
        cast_model(model, HALF, True)
    assert model[0].weight.dtype == FLOAT
    assert model[0].bias.dtype == FLOAT


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def test_hooks_of_the_user_see_uncast_inputs_and_cast_outputs():
    model, seen = nn.Linear(2, 2), {}
    model.register_forward_pre_hook(lambda m, args: seen.update(before=args[0].dtype))
    model.register_forward_hook(lambda m, args, out: seen.update(after=out.dtype))
    cast_model(model, HALF, False)
    install_io_casts(model, HALF, FLOAT)
    model.register_forward_hook(lambda m, args, out: seen.update(later=out.dtype))
    x = torch.ones(1, 2, requires_grad=True)
    out = model(x)
    assert out.dtype == FLOAT
    assert seen == {"before": FLOAT, "after": FLOAT, "later": FLOAT}
    out.sum().backward()
    assert x.grad.dtype == FLOAT
    assert torch.equal(x.grad, model.weight.detach().float().sum(0, keepdim=True).half().float())


# --- state dict -------------------------------------------------------------------------------------------------------


class Keeper(nn.Linear):
    def get_extra_state(self):
        return {"half": torch.ones(1).half(), "note": "kept"}

    def set_extra_state(self, state):
        self.restored = state


def cast_nest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), Keeper(3, 2)))
    cast_model(model, HALF, True)
    return model


def test_state_dict_shows_fp32_at_any_depth():
    model = cast_nest()
    install_state_dict_upcast(model)
    for module in model.modules():
        shown = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        assert all(v.dtype == FLOAT for v in shown.values())
    state = model.state_dict(prefix="net.")
    assert torch.equal(state["net.0.weight"], model[0].weight.float())
    assert state["net.1.1._extra_state"]["note"] == "kept"
    assert state["net.1.1._extra_state"]["half"].dtype == HALF


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_parameter_has_one_name_in_messages_and_reports():
    one, two, stranger = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([one.weight, two.bias, stranger], lr=0.1)
    master = nn.Parameter(two.weight.detach().clone())
    optimizer.add_param_group({"params": [master]})
    for models, prefixes in (([one], ("",)), ([one, two], ("models[0].", "models[1]."))):
        names = ParameterNames(models)
        of = names.of(optimizer, {master: two.weight})
        for model, prefix in zip(models, prefixes, strict=True):
            assert (names(model.bias), of[id(model.weight)]) == (f'"{prefix}bias"', f"{prefix}weight")
        assert (names(stranger), of[id(stranger)]) == ("a parameter of shape (3,)", "param_groups[0][2]")
    assert ParameterNames()(one.weight) == "a parameter of shape (2, 2)"
    del one
    assert names(two.bias) == '"models[1].bias"'


# --- notes on errors that leave a forward -----------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.project, self.compute = nn.Linear(4, 4), compute

    def forward(self, x):
        return self.compute(self.project(x))


ERRORS = {
    "mask": (lambda h: h.masked_fill(h > 0, -1e9), ["O1", "O2", "O3"], "Mask with torch.finfo"),
    "zeros": (lambda h: torch.zeros(4, 4) @ h.T, ["O2", "O3", "O5"], "New tensors are float32"),
    "scatter": (lambda h: torch.zeros(4, 4).index_add_(0, torch.arange(3), h), LEVELS[1:], "New tensors are float32"),
    "cdist": (lambda h: torch.cdist(h, h), ["O2", "O3", "O5"], "ops_fp32"),
}


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
@pytest.mark.parametrize(
    ("case", "level"), [(case, level) for case, (_, levels, _) in ERRORS.items() for level in levels]
)
def test_an_error_about_dtypes_names_the_module_and_the_cure(session, level, case):
    compute, _, cure = ERRORS[case]
    model = session.initialize(nn.Sequential(nn.Linear(4, 4), Inner(compute)), opt_level=level, verbosity=0)
    with pytest.raises((RuntimeError, TypeError)) as raised:
        model(torch.ones(3, 4))
    (note,) = raised.value.__notes__
    low = "bfloat16" if level in ("O4", "O5") else "float16"
    assert note.startswith(f'ampctx: "1" (Inner) computes in {low}. ')
    assert cure in note
    assert 'keep_fp32="1"' in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("convert", [nn.Module.float, lambda model: copy.deepcopy(model).double()])
def test_an_error_of_a_model_that_was_converted_later_says_so(session, level, convert):
    model = session.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), opt_level=level, verbosity=0)
    converted = convert(model)
    with pytest.raises(RuntimeError) as raised:
        converted(torch.ones(3, 4))
    (note,) = raised.value.__notes__
    kind = str(converted[0].weight.dtype).removeprefix("torch.")
    assert f"weights are {kind} now: converted after amp.initialize. Use amp.master_model(model)" in note


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_other_errors_have_no_note(session, level):
    def fail(h):
        raise errors[0]

    model = session.initialize(Inner(fail), opt_level=level, verbosity=0)
    for error in (ValueError("a dtype"), RuntimeError("no such file"), AmpError("scalar type")):
        errors = [error]
        with pytest.raises(type(error)):
            model(torch.ones(3, 4))
        assert not hasattr(error, "__notes__")
    try:
        raise RuntimeError("a dtype of the program's own, which is handled around a forward")
    except RuntimeError as error:
        session.initialize(nn.Sequential(nn.ReLU()), opt_level=level, verbosity=0)(torch.ones(1))
        found = getattr(error, "__notes__", None)
    assert found is None
