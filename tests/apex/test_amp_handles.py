"""Handles on casts op by op: ``amp.init``, those of O1 and O4, and the optimizers that they wrap."""

import copy

import pytest
import torch
import torch.nn.functional as F
from amp_models import Probe
from apex import amp
from apex.amp import _amp_state
from apex.amp.handle import AmpHandle, NoOpHandle

from ampctx import AmpNotImplementedError

HALF, FLOAT = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)


def dtype_of_mm():
    return torch.mm(FLOAT, FLOAT).dtype


@amp.float_function
def decorated(x):
    return x.dtype


# --- init -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_init_casts_until_deactivate(dtype):
    before = (F.binary_cross_entropy, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    handle = amp.init(patch_type=dtype)
    assert type(handle) is AmpHandle
    assert _amp_state.handle is handle
    assert amp.amp._DECORATOR_HANDLE is handle
    assert (handle.is_active(), handle._is_active) == (True, True)
    assert dtype_of_mm() == dtype
    assert torch.softmax(HALF, 1).dtype == torch.float32
    assert decorated(HALF) == torch.float32
    handle._deactivate()
    assert (handle.is_active(), dtype_of_mm()) == (False, torch.float32)
    assert decorated(HALF) == torch.float16
    handle._deactivate()
    assert before == (F.binary_cross_entropy, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    assert _amp_state.handle is handle  # apex never takes it away


def test_init_leaves_the_rest_alone():
    amp.init()
    assert not hasattr(_amp_state, "opt_properties")
    assert not hasattr(_amp_state, "loss_scalers")
    amp.initialize(Probe(), opt_level="O2", verbosity=0)
    assert _amp_state.opt_properties.opt_level == "O2"


def test_gradients_of_a_weight_that_is_used_twice():
    weight = torch.nn.Parameter(torch.eye(2) * 3)
    handle = amp.init()
    FLOAT.mm(weight).mm(weight).sum().backward()
    handle._deactivate()
    twin = torch.nn.Parameter(torch.eye(2) * 3)
    FLOAT.mm(twin).mm(twin).sum().backward()
    assert torch.equal(weight.grad, twin.grad)


def test_registered_functions_are_installed(monkeypatch):
    import types

    module = types.SimpleNamespace(double=lambda x: x.dtype)
    amp.register_half_function(module, "double")
    handle = amp.init()
    assert module.double(FLOAT) == torch.float16
    handle._deactivate()
    assert module.double(FLOAT) == torch.float32


@pytest.mark.parametrize("inner_first", [True, False])
def test_two_handles(inner_first):
    outer = amp.init()
    inner = amp.init(patch_type=torch.bfloat16)
    assert (_amp_state.handle, dtype_of_mm()) == (inner, torch.bfloat16)
    first, second = (inner, outer) if inner_first else (outer, inner)
    first._deactivate()
    assert dtype_of_mm() == (torch.float16 if inner_first else torch.bfloat16)
    assert _amp_state.handle.is_active()
    second._deactivate()
    assert dtype_of_mm() == torch.float32


def test_reset_switches_init_off():
    import ampctx

    handle = amp.init()
    ampctx.amp.reset()
    assert (dtype_of_mm(), handle.is_active()) == (torch.float32, False)
    assert not hasattr(_amp_state, "handle")
    handle._deactivate()
    assert dtype_of_mm() == torch.float32


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "banned"])
def test_allow_banned(allowed):
    handle = amp.init(allow_banned=allowed)
    p = torch.full((2,), 0.5, dtype=torch.float16, requires_grad=True)
    if allowed:
        loss = F.binary_cross_entropy(p, torch.ones(2, dtype=torch.float16))
        assert loss.dtype == torch.float32
        loss.backward()
        assert p.grad.tolist() == [-1.0, -1.0]
    else:
        with pytest.raises(NotImplementedError, match="binary_cross_entropy got a 16-bit argument"):
            F.binary_cross_entropy(p, torch.ones(2))
    handle._deactivate()


def test_disabled():
    handle = amp.init(enabled=False)
    assert type(handle) is NoOpHandle
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    assert not hasattr(_amp_state, "handle")
    with handle._disable_casts(), handle.scale_loss(FLOAT, None) as loss:
        assert loss is FLOAT
    handle._clear_cache()
    handle._deactivate()
    assert (
        type(handle.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(FLOAT.clone())], lr=1))).__name__
        == "OptimWrapper"
    )
    assert dtype_of_mm() == torch.float32


# --- a handle's attributes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_by", ["init", "O1", "O4"])
def test_is_active_can_be_set(made_by):
    low = torch.bfloat16 if made_by == "O4" else torch.float16
    model = torch.nn.Linear(2, 2)
    if made_by == "init":
        amp.init()
    else:
        amp.initialize(model, opt_level=made_by, verbosity=0)
    handle = _amp_state.handle
    assert handle is _amp_state.handle
    assert model(FLOAT).dtype == dtype_of_mm() == low
    handle._is_active = False
    assert (handle.is_active(), handle._is_active) == (False, False)
    assert model(FLOAT).dtype == dtype_of_mm() == torch.float32
    assert decorated(HALF) == torch.float16
    handle._is_active = True
    assert handle.is_active()
    assert model(FLOAT).dtype == dtype_of_mm() == low
    assert decorated(HALF) == torch.float32


@pytest.mark.parametrize("how", ["handle", "amp"])
def test_disable_casts(how):
    amp.initialize(Probe(), opt_level="O1", verbosity=0)
    handle = _amp_state.handle
    disabled = handle._disable_casts if how == "handle" else amp.disable_casts
    with disabled():
        with disabled():
            assert not handle.is_active()
        assert dtype_of_mm() == torch.float32
    with pytest.raises(ValueError, match="mine"), disabled():
        raise ValueError("mine")
    assert (handle.is_active(), dtype_of_mm()) == (True, torch.float16)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_deactivate_the_casts_of_a_level(level):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = _amp_state.handle
    handle._deactivate()
    assert (handle.is_active(), dtype_of_mm(), model(FLOAT).dtype) == (False, torch.float32, torch.float32)
    with amp.scale_loss(model(FLOAT).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    # As between two runs of a test of apex's: initialized again without a reset.
    other = torch.nn.Linear(2, 2)
    amp.initialize(other, opt_level=level, verbosity=0)
    assert _amp_state.handle is not handle
    assert _amp_state.handle.is_active()
    assert other(FLOAT).dtype != torch.float32


def test_the_cache_is_torchs():
    handle = amp.init(enable_caching=False, verbose=True)
    assert (handle.has_cache, handle._enable_caching, handle.verbose, handle._verbose) == (False, False, True, True)
    weight = torch.nn.Parameter(FLOAT.clone())
    torch.mm(FLOAT, weight)
    assert handle.cache == handle._cache == {}
    handle._cache[weight] = HALF
    handle.remove_cache(weight)
    handle.remove_cache(weight)
    handle._cache[weight] = HALF
    handle._clear_cache()
    assert handle.cache == {}


def test_saved_functions_come_back_the_latest_first():
    class Owner:
        value = "original"

    handle = AmpHandle()
    for new in ("one", "two"):
        amp.utils.set_func_save(handle, Owner, "value", new)
    assert [name for _, name, _ in handle._all_wrappers] == ["value", "value"]
    handle._deactivate()
    assert (Owner.value, handle._all_wrappers, handle.is_active()) == ("original", [], False)


def test_the_old_scale_loss_says_what_to_do():
    with pytest.raises(RuntimeError, match="^The old Amp API is no longer supported"):
        amp.init().scale_loss(FLOAT.sum(), None)


# --- OptimWrapper -----------------------------------------------------------------------------------------------------


def wrapped(num_loss=1):
    p = torch.nn.Parameter(torch.full((2,), 4.0))
    handle = amp.init(loss_scale=128.0)
    assert handle._default_scaler.loss_scale() == 128.0
    optimizer = handle.wrap_optimizer(torch.optim.SGD([p], lr=1.0), num_loss)
    assert handle._default_scaler is None
    for scaler in optimizer._loss_scaler:
        scaler._loss_scale = 8.0
    return p, handle, optimizer


def test_a_wrapped_optimizer_unscales_gradients():
    p, _, optimizer = wrapped()
    with optimizer.scale_loss(p.sum() * 0.5) as scaled:
        assert scaled.item() == 32.0
        scaled.backward()
    assert p.grad.tolist() == [0.5, 0.5]
    optimizer.step()
    assert p.tolist() == [3.5, 3.5]


def test_several_losses_add_up():
    p, _, optimizer = wrapped(num_loss=3)
    p.grad = torch.full((2,), 100.0)  # of before the iteration: accumulated, as with any optimizer
    optimizer.zero_grad()
    for factor in (0.5, 1.0):
        with optimizer.scale_loss(p.sum() * factor) as scaled:
            scaled.backward()
    with optimizer.scale_loss(torch.ones(1, requires_grad=True).sum()) as scaled:
        scaled.backward()  # reaches no parameter
    assert p.grad.tolist() == [1.5, 1.5]
    assert optimizer._loss_idx == 3
    with pytest.raises(IndexError), optimizer.scale_loss(p.sum()):
        pass
    optimizer.step()
    assert optimizer._loss_idx == 0
    assert p.tolist() == [2.5, 2.5]


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
def test_an_overflow_in_any_loss_skips_the_step(bad, capsys):
    p, _, optimizer = wrapped(num_loss=2)
    _amp_state.verbosity = 1
    for i in range(2):
        with optimizer.scale_loss(p.sum() * (float("inf") if i == bad else 1.0)) as scaled:
            scaled.backward()
    assert optimizer._skip_next == [bad == 0, bad == 1]
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [4.0 if i == bad else 8.0 for i in range(2)]
    assert optimizer.step() is None
    assert p.tolist() == [4.0, 4.0]
    assert capsys.readouterr().out == "Gradient overflow, skipping update\n"
    assert optimizer._skip_next == [False, False]
    optimizer.zero_grad()
    with optimizer.scale_loss(p.sum()) as scaled:
        scaled.backward()
    optimizer.step()
    assert p.tolist() == [3.0, 3.0]


def test_an_exception_leaves_gradients_as_they_were():
    p, _, optimizer = wrapped(num_loss=2)
    with optimizer.scale_loss(p.sum()) as scaled:
        scaled.backward()
    with pytest.raises(ValueError, match="mine"), optimizer.scale_loss(p.sum()) as scaled:
        scaled.backward()
        raise ValueError("mine")
    assert p.grad.tolist() == [1.0, 1.0]
    assert optimizer._loss_idx == 1


def test_a_closure_is_refused_while_casts_are_on():
    p, handle, optimizer = wrapped()
    with pytest.raises(AmpNotImplementedError, match="OptimWrapper.step takes no closure"):
        optimizer.step(lambda: p.sum())
    handle._deactivate()
    assert optimizer.step(lambda: 3.0) == 3.0
    with optimizer.scale_loss(FLOAT) as loss:
        assert loss is FLOAT


def test_the_rest_is_the_optimizers():
    p, _, optimizer = wrapped()
    assert optimizer.param_groups[0]["params"] == [p]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(FLOAT.clone())]})
    assert len(optimizer.param_groups) == 2
    p.grad = torch.ones(2)
    optimizer.zero_grad()
    assert p.grad is None
    assert repr(optimizer).startswith("OptimWrapper(SGD (")
    assert optimizer._cur_loss_scaler() is optimizer._loss_scaler[0]
    twin = copy.copy(optimizer)
    assert twin._optimizer is optimizer._optimizer
    with pytest.raises(AttributeError, match="nothing"):
        optimizer.nothing  # noqa: B018


# --- what detection libraries do at import ----------------------------------------------------------------------------


class Pooler:
    @amp.float_function
    def forward(self, x):
        return x.dtype


# A builtin has no __dict__, and the decoration comes before any initialize.
builtin = amp.float_function(torch.ops.aten.sum.default)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_decorated_before_any_initialize(level):
    assert Pooler().forward(HALF) == torch.float16
    amp.initialize(Probe(), opt_level=level, verbosity=0)
    casts = level in ("O1", "O4")
    assert Pooler().forward(HALF) == (torch.float32 if casts else torch.float16)
    assert builtin(HALF).dtype == (torch.float32 if casts else torch.float16)
    assert builtin(FLOAT).item() == 4.0


@pytest.mark.parametrize(("module", "name"), [(torch, "sigmoid"), (torch, "bmm")], ids=["sigmoid", "bmm"])
def test_registered_before_initialize(module, name):
    original = getattr(module, name)
    amp.register_float_function(module, name)
    try:
        amp.initialize(Probe(), opt_level="O1", verbosity=0)
        args = (torch.ones(1, 2, 2, dtype=torch.float16),) * (2 if name == "bmm" else 1)
        assert getattr(module, name)(*args).dtype == torch.float32
    finally:
        from ampctx.amp import _default_session

        _default_session.reset()
        _default_session._function_casts._queue.clear()
    assert getattr(module, name) is original


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_lists_are_data():
    from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

    assert functional_overrides.MODULE is F
    assert "conv2d" in functional_overrides.FP16_FUNCS
    assert [name for name, _ in functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]
    assert "softmax" in functional_overrides.FP32_FUNCS
    assert torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]
    assert tensor_overrides.FP16_FUNCS[0] == "__matmul__"
    assert {"sum", "cpu"} <= set(tensor_overrides.FP32_FUNCS)
    assert copy.deepcopy(torch_overrides.CASTS) == torch_overrides.CASTS
    for change in (
        lambda names: names.append("x"),
        lambda names: names.remove(names[0]),
        lambda names: names.__setitem__(0, "x"),
        lambda names: names.__iadd__(["x"]),
    ):
        with pytest.raises(AmpNotImplementedError, match="Call amp.register_half_function"):
            change(torch_overrides.FP16_FUNCS)


def test_casters():
    from apex.amp._initialize import applier, to_type

    ids = torch.arange(2)
    result = applier({"x": [FLOAT, (HALF, ids)], "n": 3}, lambda t: to_type(torch.float16, t))
    assert result["x"][0].dtype == torch.float16
    assert result["x"][1][0] is HALF
    assert result["x"][1][1] is ids
    assert result["n"] == 3


def test_utils(capsys):
    from apex.amp import compat, utils

    assert utils.is_fp_tensor([FLOAT, (HALF,)])
    assert not utils.is_fp_tensor([FLOAT, 1])
    assert utils.type_string(HALF) == "HalfTensor"
    assert utils.collect_fp_tensor_types([FLOAT, [HALF], 3], {"x": FLOAT}) == {"FloatTensor", "HalfTensor"}
    assert [t.dtype for t in utils.maybe_half([FLOAT, HALF])] == [torch.float16] * 2
    assert utils.maybe_float(FLOAT) is FLOAT
    assert utils.maybe_bfloat16((FLOAT,))[0].dtype == torch.bfloat16
    kwargs = {"b": FLOAT, "n": 1}
    (cast,) = utils.casted_args(utils.maybe_half, [FLOAT], kwargs)
    assert (cast.dtype, kwargs["b"].dtype, kwargs["n"]) == (torch.float16, torch.float16, 1)
    utils.verbosify(utils.maybe_half, "mm", True)(FLOAT)
    assert capsys.readouterr().out == "Float->Half (mm)\n"
    assert utils.verbosify(utils.maybe_half, "mm", False) is utils.maybe_half
    weight, cache = torch.nn.Parameter(FLOAT.clone()), {}
    with torch.no_grad():
        kept = utils.cached_cast(utils.maybe_half, weight, cache)
        assert utils.cached_cast(utils.maybe_half, [weight], cache)[0] is kept
    again = utils.cached_cast(utils.maybe_half, weight, cache)
    assert again is not kept
    assert utils.cached_cast(utils.maybe_half, weight, cache) is again
    again.sum().backward()
    assert weight.grad is not None
    assert utils.should_cache([weight])
    assert not utils.should_cache(FLOAT)
    assert list(utils.as_inplace(["exp"])) == ["exp_"]
    assert utils.get_cuda_version() == () or utils.is_cuda_enabled()
    holder = {"f": 1}
    utils.set_func(holder, "f", 2)
    assert (utils.has_func(holder, "f"), utils.get_func(holder, "f"), utils.has_func(torch, "nope")) == (True, 2, False)
    assert compat.filter_attrs(torch, ["mm", "nope"]) == ["mm"]
    assert (compat.variable_is_tensor(), compat.tensor_is_variable(), compat.tensor_is_float_tensor()) == (
        True,
        False,
        False,
    )
    assert compat.is_tensor_like(FLOAT)
    assert compat.scalar_python_val(torch.tensor([3])) == compat.scalar_python_val([3]) == 3
    assert amp.rnn_compat.has_old_rnns() is False


def test_wrappers():
    from apex.amp import utils, wrap

    handle = amp.init()
    half = wrap.make_cast_wrapper(lambda x: x.dtype, utils.maybe_half, handle)
    widest = wrap.make_promote_wrapper(lambda x, y: (x.dtype, y.dtype), utils.maybe_float)
    assert (half(FLOAT), widest(HALF, y=FLOAT)) == (torch.float16, (torch.float32, torch.float32))
    handle._deactivate()
    assert (half(FLOAT), widest(HALF, y=FLOAT)) == (torch.float32, (torch.float16, torch.float32))
