"""``state_dtype``: the state of an optimizer in bf16 or 8-bit codes. The arithmetic: tests/ops/test_state_types.py."""

import copy
import re

import pytest
import torch
from kit import assert_same, params_of, snapshot
from kit import through_a_file as saved
from optimizer_cases import BY_NAME, give, gradients, like, parameters, run, run_alike
from torch import nn

from ampctx import AmpKeyError, AmpTypeError, AmpValueError, optimizers
from ampctx.kernels import codes as kernel_codes
from ampctx.optimizers import FusedAdam, FusedSGD, unpack_state
from ampctx.optimizers._state_types import CODED, decoded

MIXED = {"exp_avg": "8bit", "exp_avg_sq": torch.bfloat16}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit", "mixed": MIXED}
KINDS = ["adam", "sgd", "lamb", "novograd", "lion", "muon"]
# Blocks that are full and others, rows that are whole blocks and others, channels_last, transposed, empty.
SHAPES = [(3, 5), (), (0,), (1,), (63,), (64,), (65,), (3, 128), (2, 64, 3, 3), (5, 4), (5, 130)]


def state_dtype_of(name, kind):
    """``MIXED`` for the states that an optimizer has."""
    given = TYPES[kind]
    if not isinstance(given, dict):
        return given
    if name == "muon":  # of its matrices, and of its groups of AdamW
        return {"momentum_buffer": "8bit", "exp_avg_sq": torch.bfloat16}
    return {"momentum_buffer": torch.bfloat16} if name == "sgd" else dict(list(given.items())[: 1 + (name in DOUBLE)])


DOUBLE = ("adam", "lamb")


def make(name, kind, params=None, **options):
    params = parameters(shapes=SHAPES) if params is None else params
    if name == "adam":
        options.setdefault("amsgrad", False)
    how = {"state_dtype": state_dtype_of(name, kind), "min_8bit_size": 0, "seed": 5}
    return BY_NAME[name](params, **how, **options)


def one(kind="8bit", shape=(4, 128), steps=2, **options):
    """FusedAdam with one parameter after some steps, and the state of that parameter."""
    optimizer = make("adam", kind, parameters(torch.float32, [shape]), **options)
    run(optimizer, steps)
    return optimizer, optimizer.state[params_of(optimizer)[0]]


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
@pytest.mark.parametrize("name", KINDS[:-1])
def test_state_is_as_it_should_be_and_near_that_in_fp32(name, kind):
    exact, optimizer = make(name, "fp32"), make(name, kind)
    run(exact, 3)
    run(optimizer, 3)
    for p, q in zip(params_of(exact), params_of(optimizer), strict=True):
        state = optimizer.state[q]
        for key in {state.key for state in optimizers._base.OPTIMIZERS[optimizer._op].coded}:
            if kind == "bf16":
                assert state[key].dtype == torch.bfloat16
                value = state[key].float()
            else:
                codes, scales = state[CODED[key].codes_key], state[CODED[key].scales]
                assert codes.dtype == kernel_codes.DTYPES[CODED[key].code]
                assert codes.stride() == q.stride()
                assert scales.numel() == kernel_codes.blocks_of(q.numel())
                assert key not in state
                value = decoded(codes, scales)
            largest = exact.state[p][key].abs().max() if q.numel() else 0
            assert (value - exact.state[p][key]).abs().le(0.04 * largest).all()
        # LAMB steps along the rounded averages, the others along those before they are rounded.
        bound = 0.08 if "lamb" in name else 0.02
        torch.testing.assert_close(p, q, rtol=bound, atol=bound)
    shapes = {
        tuple(p.shape): optimizer.state[p].get("exp_avg_scales", torch.zeros(())).shape for p in params_of(optimizer)
    }
    if kind == "8bit" and name != "sgd":
        assert shapes[3, 128] == (3, 2)
        assert shapes[5, 130] == (11,)
        assert shapes[2, 64, 3, 3] == (2, 9)
        assert shapes[65,] == (2,)
        assert shapes[0,] == (0,)


@pytest.mark.parametrize(
    "options", [{"state_dtype": "8bit"}, {"write_back": "stochastic", "state_dtype": torch.float32}]
)
def test_random_bits_belong_to_the_parameter(options):
    """And not to its place among those with gradients, to its group, or to what is stepped with it."""

    def end(split, idle=()):
        params = parameters(torch.bfloat16, [(200,), (64, 3), (300,), (64,)])
        groups = [{"params": params[:split]}, {"params": params[split:]}] if split else params
        optimizer = FusedSGD(groups, lr=0.01, momentum=0.9, min_8bit_size=100, seed=3, **options)
        for step in range(2):
            grads = gradients(params, step)
            give(params, [None if i in idle else grad for i, grad in enumerate(grads)])
            optimizer.step()
        return [[p.detach(), *optimizer.state[p].values()] for p in params]

    expected = end(0)
    for split in (1, 2, 3):
        for found, each in zip(end(split), expected, strict=True):
            assert_same(found, each)
    for i, found in enumerate(end(0, idle=(0, 1))):
        assert (i < 2) == (len(found) == 1)
        if i >= 2:
            assert_same(found, expected[i])


# --- which parameters -------------------------------------------------------------------------------------------------


def test_small_parameters_keep_fp32_in_place_of_codes():
    params = parameters(torch.float32, [(64, 64), (63, 65), (10,)])
    optimizer = FusedAdam(params, state_dtype="8bit")
    run(optimizer, 1)
    assert ["exp_avg_codes" in optimizer.state[p] for p in params] == [True, False, False]
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32
    optimizer = FusedAdam(
        parameters(torch.float32, [(10,)]), state_dtype={"exp_avg": "8bit", "exp_avg_sq": torch.bfloat16}
    )
    run(optimizer, 1)
    state = optimizer.state[params_of(optimizer)[0]]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.bfloat16)


def test_groups_choose_for_themselves():
    params = parameters(torch.float32, [(64, 64), (64, 64), (64, 64)])
    groups = [{"params": params[:1], "state_dtype": "8bit"}, {"params": params[1:2]}]
    optimizer = FusedAdam(groups, lr=0.1)
    optimizer.add_param_group({"params": params[2:], "state_dtype": {"exp_avg": torch.bfloat16}})
    run(optimizer, 1)
    assert "exp_avg_codes" in optimizer.state[params[0]]
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[params[2]]["exp_avg_sq"].dtype == torch.float32


def test_groups_of_fp32_state_are_as_before():
    optimizer = FusedAdam(parameters())
    run(optimizer, 1)
    assert not {"state_dtype", "min_8bit_size"} & optimizer.state_dict()["param_groups"][0].keys()


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("of", TYPES)
def test_a_change_between_steps_converts_the_state(of, to):
    optimizer = make("adam", of)
    run(optimizer, 3)
    other = make("adam", to, like(optimizer))
    other.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["state_dtype"] = TYPES[to]
    run_alike(optimizer, other)


def test_a_dict_that_is_changed_in_place_and_a_size_are_seen():
    optimizer, state = one("mixed")
    optimizer.param_groups[0]["state_dtype"]["exp_avg"] = torch.float32
    run(optimizer, 1)
    assert state["exp_avg"].dtype == torch.float32
    assert not {"exp_avg_codes", "exp_avg_scales"} & state.keys()
    optimizer.param_groups[0].update(state_dtype="8bit", min_8bit_size=10_000)
    run(optimizer, 1)
    assert state["exp_avg_sq"].dtype == torch.float32
    optimizer.param_groups[0]["min_8bit_size"] = 1
    run(optimizer, 1)
    assert state["exp_avg_sq_codes"].dtype == torch.uint8


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("of", TYPES)
@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_any_state_loads_into_any_other(name, of, to):
    source = make(name, of)
    run(source, 3)
    target = make(name, to, like(source))
    target.load_state_dict(saved(source.state_dict()))
    if "state_dtype" in target.param_groups[0]:
        assert target.param_groups[0]["state_dtype"] == state_dtype_of(name, to)
    there, here = (unpack_state(each.state_dict())["state"] for each in (source, target))
    for i, p in enumerate(params_of(target)):
        for key in there[i].keys() & CODED.keys():
            if of == to or to == "fp32":
                assert_same([here[i][key]], [there[i][key]])
            elif p.numel():
                bound = 0.01 if key != "exp_avg_sq" else 0.02
                assert (here[i][key] - there[i][key]).abs().max() <= bound * there[i][key].abs().max()
        assert here[i]["step"] == there[i]["step"]
    # To fp32 and back nothing is lost.
    back = make(name, of, like(source))
    wide = make(name, "fp32", like(source))
    wide.load_state_dict(source.state_dict())
    back.load_state_dict(wide.state_dict())
    assert_same(snapshot(back), snapshot(source))


def test_codes_load_into_another_layout():
    source = make("adam", "8bit", parameters(torch.float32, [(2, 64, 3, 3), (128, 4)]))
    run(source, 2)
    params = [nn.Parameter(p.detach().contiguous()) for p in params_of(source)]
    params[1] = nn.Parameter(params[1].detach().t().contiguous().t())
    target = make("adam", "8bit", params)
    target.load_state_dict(source.state_dict())
    there, here = (unpack_state(each.state_dict())["state"] for each in (source, target))
    for i, p in enumerate(params):
        assert target.state[p]["exp_avg_codes"].stride() == p.stride()
        assert (here[i]["exp_avg"] - there[i]["exp_avg"]).abs().max() <= 0.01 * there[i]["exp_avg"].abs().max()


TORCHS = {
    "adam": (torch.optim.AdamW, {"weight_decay": 0.1}, ["exp_avg", "exp_avg_sq"]),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}, ["momentum_buffer"]),
}


@pytest.mark.parametrize("name", TORCHS)
def test_state_goes_to_torch_and_back(name):
    kind, options, keys = TORCHS[name]
    ours = make(name, "8bit", parameters(torch.float32, [(64, 64), (65,)]), **options)
    run(ours, 3)
    theirs = kind(like(ours), lr=0.01, **options)
    theirs.load_state_dict(unpack_state(saved(ours.state_dict())))
    kept = theirs.state[params_of(theirs)[0]]
    assert {key: value.dtype for key, value in kept.items()} == dict.fromkeys(["step", *keys], torch.float32)
    run(theirs, 1, first=3)
    run(ours, 1, first=3)
    torch.testing.assert_close(params_of(ours), params_of(theirs), rtol=1e-5, atol=1e-6)
    resumed = make(name, "8bit", like(theirs), **options)
    resumed.load_state_dict(theirs.state_dict())
    assert resumed.state[params_of(resumed)[0]][f"{keys[0]}_codes"].dtype == torch.int8
    run(resumed, 1, first=4)


def test_torch_refuses_codes_instead_of_training_on_them():
    ours, _ = one()
    theirs = torch.optim.AdamW(like(ours), lr=0.01)
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        run(theirs, 1)


def test_unpack_state_changes_nothing_and_shares_nothing():
    optimizer, state = one("mixed")
    before = copy.deepcopy(optimizer.state_dict())
    unpacked = unpack_state(optimizer.state_dict())
    assert unpacked["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for value in unpacked["state"][0].values()} == {torch.float32}
    assert not {"state_dtype", "min_8bit_size"} & unpacked["param_groups"][0].keys()
    unpacked["state"][0]["exp_avg"].zero_()
    unpacked["state"][0]["step"].zero_()
    assert_same(list(state.values()), list(before["state"][0].values()))
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_unpack_state_refuses_what_is_no_state():
    with pytest.raises(AmpTypeError, match="unpack_state: state_dict must be what optimizer.state_dict"):
        unpack_state({"model": {}})
    optimizer, _ = one()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    del checkpoint["state"][0]["exp_avg_scales"]
    with pytest.raises(AmpKeyError, match="parameter 0 has 'exp_avg_codes' without 'exp_avg_scales'"):
        unpack_state(checkpoint)


def _edit(key, change):
    def edit(state):
        state[key] = change(state[key])

    return edit


DAMAGES = {
    "no scales": (AmpKeyError, lambda s: s.pop("exp_avg_scales"), "has 'exp_avg_codes' without 'exp_avg_scales'"),
    "no codes": (AmpKeyError, lambda s: s.pop("exp_avg_sq_codes"), "'exp_avg_sq_scales' without 'exp_avg_sq_codes'"),
    "nothing": (AmpKeyError, lambda s: (s.pop("exp_avg_codes"), s.pop("exp_avg_scales")), "has no 'exp_avg', only"),
    "both": (AmpKeyError, lambda s: s.update(exp_avg=torch.zeros(4, 128)), "has both 'exp_avg' and 'exp_avg_codes'"),
    "dtype": (AmpValueError, _edit("exp_avg_codes", torch.Tensor.byte), "of torch.uint8, expected torch.int8"),
    "floats": (AmpValueError, _edit("exp_avg_codes", torch.Tensor.float), "of torch.float32, expected torch.int8"),
    "shape": (AmpValueError, _edit("exp_avg_codes", lambda t: t[:2]), re.escape("shape (4, 2), expected (2, 2)")),
    "both shapes": (AmpValueError,
        lambda s: s.update(exp_avg_codes=s["exp_avg_codes"][:2], exp_avg_scales=s["exp_avg_scales"][:2]),
        re.escape("shape (2, 128), the parameter has (4, 128)")),
    "scales' shape": (AmpValueError, _edit("exp_avg_sq_scales", torch.Tensor.flatten),
        re.escape("shape (8,), expected (4, 2)")),
    "scales' dtype": (AmpValueError, _edit("exp_avg_sq_scales", torch.Tensor.double),
        "of torch.float64, expected torch.float32"),
    "negative": (AmpValueError, _edit("exp_avg_scales", torch.Tensor.neg), r"'exp_avg_scales' of .* has -"),
    "nan": (AmpValueError, _edit("exp_avg_scales", lambda t: t * torch.nan), "has nan, expected finite numbers >= 0"),
    "inf": (AmpValueError, _edit("exp_avg_sq_scales", lambda t: t * torch.inf), "has inf, expected finite numbers"),
    "code": (AmpValueError, _edit("exp_avg_codes", lambda t: t.fill_(-128)), "has -128, expected codes from -127"),
    "no tensor": (AmpValueError, _edit("exp_avg_codes", lambda t: 3), "is of type int, expected a tensor"),
    "meta": (AmpValueError, _edit("exp_avg_codes", lambda t: t.to("meta")), "on the meta device, without values"),
    "sparse": (AmpValueError, _edit("exp_avg_codes", torch.Tensor.to_sparse), "of layout torch.sparse_coo"),
    "layout and sign": (AmpValueError, lambda s: s.update(exp_avg_codes=s["exp_avg_codes"].t().contiguous().t(),
        exp_avg_scales=-s["exp_avg_scales"].flatten() - 1), r"'exp_avg_scales' of .* has -"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("to", ["8bit", "fp32"])
def test_damaged_state_is_refused_by_name_and_changes_nothing(damage, to):
    error, change, message = DAMAGES[damage]
    optimizer, _ = one()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    change(checkpoint["state"][0])
    target, state = one(to, steps=3)
    before, groups = snapshot(target), copy.deepcopy(target.state_dict()["param_groups"])
    with pytest.raises(error, match=message) as raised:
        target.load_state_dict(checkpoint)
    assert "param_groups[0]['params'][0]" in str(raised.value)
    assert_same(snapshot(target), before)
    assert target.state_dict()["param_groups"] == groups
    assert target.state[params_of(target)[0]] is state


def test_codes_of_another_optimizer_are_refused():
    optimizer, _ = one()
    with pytest.raises(AmpKeyError, match="has 'exp_avg_sq_codes', which FusedLion does not keep"):
        make("lion", "8bit", like(optimizer)).load_state_dict(optimizer.state_dict())


# --- refused options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": torch.float16}, AmpValueError,
            r"state_dtype is torch.float16, expected torch.float32 or torch."),
        ({"state_dtype": "4bit"}, AmpValueError, "state_dtype is '4bit', expected torch.float32 or .* or '8bit'"),
        ({"state_dtype": None}, AmpValueError, "state_dtype is None, expected"),
        ({"state_dtype": {"exp_avg": "fp8"}}, AmpValueError, re.escape("state_dtype['exp_avg'] is 'fp8', expected")),
        ({"state_dtype": {"momentum_buffer": "8bit"}}, AmpValueError,
            "state_dtype has 'momentum_buffer', and FusedAdam keeps no such state .* 'exp_avg' or 'exp_avg_sq'"),
        ({"state_dtype": "8bit", "min_8bit_size": -1}, AmpValueError, "min_8bit_size is -1, expected a number of"),
        ({"min_8bit_size": 4.5}, AmpTypeError, "min_8bit_size must be an int, got float"),
        ({"min_8bit_size": True}, AmpTypeError, "min_8bit_size must be an int, got bool"),
        ({"state_dtype": "8bit", "amsgrad": True}, AmpValueError, "state_dtype='8bit' does not go with amsgrad=True"),
    ],
)  # fmt: skip
def test_refused_options(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam(parameters(), **options)
    optimizer, _ = one("fp32", amsgrad=False)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1
    before = snapshot(optimizer)
    optimizer.param_groups[0].update(options)
    with pytest.raises(error, match=message) as raised:
        run(optimizer, 1)
    assert str(raised.value).startswith("param_groups[0]: ")
    assert_same(snapshot(optimizer), before)


def test_fp64_parameters_are_refused():
    with pytest.raises(
        AmpValueError, match=r"does not go with float64 parameters, and param_groups\[0\]\['params'\]\[1\]"
    ):
        FusedAdam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))], state_dtype="8bit")
    optimizer, _ = one()
    params_of(optimizer)[0].data = params_of(optimizer)[0].data.double()
    params_of(optimizer)[0].grad = None
    with pytest.raises(AmpValueError, match="does not go with float64 parameters"):
        run(optimizer, 1)
    wide = {"params": parameters(torch.float64), "state_dtype": torch.float32}
    optimizer, _ = one()
    optimizer.add_param_group(wide)
    run(optimizer, 1)


def test_adagrad_is_refused():
    for options in ({"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16}):
        with pytest.raises(AmpValueError, match="FusedAdagrad keeps a sum that grows, in torch.float32 alone"):
            optimizers.FusedAdagrad(parameters(), **options)
        with pytest.raises(AmpValueError, match="FusedAdagrad keeps a sum that grows, in torch.float32 alone"):
            optimizers.FusedAdagrad([{"params": parameters(), **options}])
