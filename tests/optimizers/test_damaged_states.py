"""A damaged or foreign optimizer state is refused by group, parameter and key, and changes nothing; what torch and apex
save keeps loading."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from host_reads import HostReads
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, STATE, parameters, run
from torch import nn

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.optimizers import FusedAdam, FusedNovoGrad, FusedSGD, SplitMasters

SHAPES = [(3, 5), (17,), (), (2, 3)]
MATRICES = [(3, 5), (17, 1), (2, 2, 3), (2, 3)]
NAN, INF = math.nan, math.inf
AVERAGES = {"exp_avg", "momentum_buffer"}


def make(name):
    return BY_NAME[name](parameters(shapes=shapes_of(name)))


def shapes_of(name):
    """Those that go into one group."""
    return MATRICES if name == "muon" else SHAPES


def trained(name, steps=3):
    optimizer = make(name)
    run(optimizer, steps)
    return optimizer


def filled(shape, value, at=0):
    t = torch.ones(shape)
    t.view(-1)[at] = value
    return t


def refused(optimizer, checkpoint, kind, message):
    before, groups = snapshot(optimizer), [{**g, "params": list(g["params"])} for g in optimizer.param_groups]
    kept = copy.deepcopy(checkpoint)
    with pytest.raises(kind, match=message):
        optimizer.load_state_dict(checkpoint)
    assert_same(snapshot(optimizer), before)
    assert repr(optimizer.param_groups) == repr(groups)
    assert repr(checkpoint) == repr(kept)


# --- states -----------------------------------------------------------------------------------------------------------


# torch's SGD has None for a buffer until a parameter has a gradient.
PARTS = [(name, key) for name in BY_NAME if name != "sgd" for key in sorted(STATE[name])]
STEPS = [(name, "step") for name in ("adam", "lamb", "novograd")]


@pytest.mark.parametrize("value", [None, "missing"], ids=str)
@pytest.mark.parametrize(("name", "key"), [*PARTS, *STEPS])
def test_a_missing_part_of_a_state_would_begin_at_0(name, key, value):
    checkpoint = trained(name).state_dict()
    state = checkpoint["state"][2] = dict(checkpoint["state"][2], **{key: None})
    if value == "missing":
        del state[key]
    why = ".*Bias correction" if key == "step" else ""
    message = rf"the state of param_groups\[0\]\['params'\]\[2\] has no '{key}', only{why}"
    refused(trained(name, 1), checkpoint, AmpKeyError, message)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (INF, AmpValueError),
        (NAN, AmpValueError),
        (-1, AmpValueError),
        (2.5, AmpValueError),
        (10**400, AmpValueError),
        (torch.tensor(INF), AmpValueError),
        (torch.tensor(-2.0), AmpValueError),
        (torch.tensor([0.5]), AmpValueError),
        (torch.tensor(1j), AmpTypeError),
        (torch.tensor(True), AmpTypeError),
        (torch.ones(2), AmpValueError),
        (torch.tensor(1.0, device="meta"), AmpValueError),
        (True, AmpTypeError),
        ("3", AmpTypeError),
        ([3], AmpTypeError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad"])
def test_a_step_that_is_no_count(name, value, kind):
    checkpoint = trained(name).state_dict()
    checkpoint["state"][3]["step"] = value
    refused(trained(name, 1), checkpoint, kind, r"the state 'step' of param_groups\[0\]\['params'\]\[3\] (is|has) ")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in BY_NAME for key in sorted(STATE[name])])
def test_numbers_that_no_run_leaves(name, key):
    values = [NAN, INF, -INF] if key in AVERAGES else [NAN, -1e-3, -INF]
    for value in values:
        checkpoint = trained(name).state_dict()
        shape = checkpoint["state"][1][key].shape
        checkpoint["state"][1][key] = filled(shape, value, at=-1)
        message = rf"the state '{key}' of param_groups\[0\]\['params'\]\[1\] has (nan|-?inf|-0.001\d*), expected"
        refused(trained(name, 1), checkpoint, AmpValueError, message)


def test_an_overflow_of_a_square_goes_on():
    """What torch.optim.Adam leaves in fp16, or after one very large gradient."""
    checkpoint = trained("adam").state_dict()
    checkpoint["state"][0]["exp_avg_sq"] = filled((3, 5), INF).half()
    optimizer = make("adam")
    optimizer.load_state_dict(checkpoint)
    assert optimizer.state[params_of(optimizer)[0]]["exp_avg_sq"][0, 0] == INF


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3, 5, dtype=torch.int64), "torch.int64, expected a floating type"),
        (torch.ones(3, 5, dtype=torch.complex64), "torch.complex64, expected a floating type"),
        (torch.ones(3, 5).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(3, 5, device="meta"), "on the meta device, without values"),
        (torch.ones(5, 3), r"shape \(5, 3\)"),
        ([1.0], "type list, expected a tensor"),
    ],
    ids=["int", "complex", "sparse", "meta", "shape", "list"],
)
@pytest.mark.parametrize("name", BY_NAME)
def test_state_of_another_kind(name, value, message):
    (key, *_) = sorted(STATE[name])
    checkpoint = trained(name).state_dict()
    checkpoint["state"][0][key] = value
    where = rf"the state '{key}' of param_groups\[0\]\['params'\]\[0\]"
    refused(trained(name, 1), checkpoint, AmpValueError, f"{where} (is|has).*{message}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.float(),
        lambda r: r.to(torch.int32),
        lambda r: r.reshape(-1)[:-1],
        lambda r: r.t(),
        lambda r: r.tolist(),
    ],
    ids=["float", "int32", "shorter", "turned", "list"],
)
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_remainder_of_another_kind(name, damage):
    params = [nn.Parameter(torch.randn(3, 5).bfloat16())]
    source = BY_NAME[name](params, master_weights="split")
    run(source, 2)
    optimizer = BY_NAME[name]([nn.Parameter(params[0].detach().clone())], master_weights="split")
    run(optimizer, 1)
    checkpoint = copy.deepcopy(source.state_dict())
    checkpoint["state"][0]["remainder"] = damage(checkpoint["state"][0]["remainder"])
    refused(optimizer, checkpoint, AmpValueError, r"the state 'remainder' of param_groups\[0\]\['params'\]\[0\]")


FOREIGN = {
    "adam": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": torch.optim.Adam,
    "lamb": torch.optim.Adagrad,
    "adagrad": torch.optim.Adam,
    "novograd": torch.optim.Adam,
    "lion": torch.optim.AdamW,
    "muon": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_state_of_another_optimizer(name):
    source = FOREIGN[name](parameters(shapes=shapes_of(name)))
    run(source, 2)
    checkpoint = source.state_dict()
    refused(trained(name, 1), checkpoint, AmpError, "has no|which Fused.* does not keep|elements, expected 1")
    # With the options of its own class, it is the state that is foreign.
    checkpoint["param_groups"] = make(name).state_dict()["param_groups"]
    message = r"of param_groups\[0\]\['params'\]\[0\] has (no|\d+ elem|'.*' does not keep|'\w+', which Fused)"
    refused(trained(name, 1), checkpoint, AmpError, message)


def test_a_weight_decay_that_would_mean_something_else():
    """torch.optim.Adam's is not decoupled, and FusedAdam's is unless it is told so."""
    source = torch.optim.Adam(parameters(shapes=SHAPES), weight_decay=0.1)
    run(source, 2)
    message = "decoupled_weight_decay=False, and FusedAdam has adam_w_mode=True. .* Pass adam_w_mode=False"
    refused(trained("adam", 1), source.state_dict(), AmpValueError, message)
    FusedAdam(parameters(shapes=SHAPES), adam_w_mode=False).load_state_dict(source.state_dict())
    decoupled = torch.optim.AdamW(parameters(shapes=SHAPES), weight_decay=0.1)
    run(decoupled, 2)
    FusedAdam(parameters(shapes=SHAPES)).load_state_dict(decoupled.state_dict())
    # Without a weight decay it does not matter, nor later, when there is one.
    plain = torch.optim.Adam(parameters(shapes=SHAPES))
    run(plain, 2)
    optimizer = FusedAdam(parameters(shapes=SHAPES))
    optimizer.load_state_dict(plain.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.1
    FusedAdam(parameters(shapes=SHAPES)).load_state_dict(optimizer.state_dict())


# --- the form of a checkpoint -----------------------------------------------------------------------------------------


def to_group(**options):
    return lambda c: c["param_groups"][0].update(options)


FORMS = {
    "by text": (lambda c: c.update(state={str(key): value for key, value in c["state"].items()}), AmpKeyError,
        r"state for '0' \(str\), and no param group has a parameter"),
    "no params": (lambda c: c["param_groups"][0].pop("params"), AmpKeyError,
        r'state_dict\["param_groups"\]\[0\] has no "params"'),
    "one for two": (to_group(params=[0, 0, 2, 3]), AmpValueError,
        r"has 0 for param_groups\[0\]\['params'\]\[1\], and for another"),
    "params a number": (to_group(params=4), AmpTypeError,
        r'state_dict\["param_groups"\]\[0\]\["params"\] must be a list, got int'),
    "group no dict": (lambda c: c.update(param_groups=[3]), AmpTypeError, r"\[0\] must be a dict, got int"),
    "state a list": (lambda c: c.update(state=[]), AmpTypeError, r'state_dict\["state"\] must be a dict, got list'),
    "groups no list": (lambda c: c.update(param_groups=3), AmpTypeError, r'\["param_groups"\] must be a list, got int'),
    "no groups": (lambda c: c.pop("param_groups"), KeyError, "param_groups"),
    "no state": (lambda c: c.pop("state"), AmpKeyError, 'state_dict has no "state"'),
    "state of one": (lambda c: c["state"].update({1: [1.0]}), AmpTypeError,
        r"the state of param_groups\[0\]\['params'\]\[1\] must be a dict, got list"),
    "state of one gone": (lambda c: c["state"].update({1: None}), AmpTypeError, "must be a dict, got NoneType"),
    "state of one element": (lambda c: c["state"][1].update(exp_avg_sq=torch.zeros(1)), AmpValueError,
        r"the state 'exp_avg_sq' of param_groups\[0\]\['params'\]\[1\] has shape \(1,\), the para"),
    "lr": (to_group(lr=-1.0), AmpValueError, r"Invalid learning rate: -1.0 \(lr\)"),
    "betas": (to_group(betas=(0.9, 1.0)), AmpValueError, r"Invalid beta parameter at index 1: 1.0 \(betas\[1\]\)"),
    "seed": (to_group(seed=-1), AmpValueError, r"seed is -1, expected 0 to 2\*\*62 - 1"),
    "a parameter less": (lambda c: c["param_groups"][0]["params"].pop(), ValueError,
        "doesn't match the size of optimizer's group"),
    "a group more": (lambda c: c["param_groups"].append({"params": []}), ValueError,
        "loaded state dict has a different number of parameter groups"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_another_form(form):
    edit, kind, message = FORMS[form]
    whole, optimizer = trained("adam").state_dict(), trained("adam", 1)
    checkpoint = copy.deepcopy(whole)
    edit(checkpoint)
    refused(optimizer, checkpoint, kind, message)
    optimizer.load_state_dict(whole)
    assert not optimizer._optimizer_load_state_dict_pre_hooks


# --- options ----------------------------------------------------------------------------------------------------------

NEEDED = {
    "adam": ["lr", "betas", "eps", "weight_decay"],
    "sgd": ["lr", "momentum", "dampening", "weight_decay"],
    "adagrad": ["lr", "eps", "weight_decay"],
    "lamb": ["lr", "betas", "eps", "weight_decay"],
    "novograd": ["lr", "betas", "eps", "weight_decay"],
    "lion": ["lr", "betas", "weight_decay"],
    "muon": ["lr", "momentum", "weight_decay", "ns_coefficients", "eps", "ns_steps"],
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NEEDED.items() for key in keys])
def test_a_group_without_an_option(name, key):
    checkpoint = trained(name).state_dict()
    del checkpoint["param_groups"][0][key]
    refused(trained(name, 1), checkpoint, AmpKeyError, rf'state_dict\["param_groups"\]\[0\] has no "{key}", only')


FLAGS = {
    "adam": ["maximize", "bias_correction", "amsgrad"],
    "sgd": ["maximize", "nesterov"],
    "adagrad": ["maximize"],
    "lamb": ["maximize", "bias_correction", "grad_averaging"],
    "novograd": ["maximize", "bias_correction", "grad_averaging", "init_zero"],
    "lion": ["maximize"],
    "muon": ["maximize", "nesterov"],
}
EACH_FLAG = pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FLAGS.items() for key in keys])
NO_FLAGS = ["False", None, 0.5, [False], NAN, 2]


@EACH_FLAG
def test_a_flag_of_another_type(name, key):
    for value in NO_FLAGS:
        checkpoint = trained(name, 1).state_dict()
        checkpoint["param_groups"][0][key] = value
        message = rf"param_groups\[0\] of the checkpoint: {key} must be True or False, got {re.escape(repr(value))}"
        refused(trained(name, 1), checkpoint, AmpTypeError, message)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sgd", "dampening", NAN),
        ("sgd", "momentum", INF),
        ("adam", "lr", INF),
        ("adam", "weight_decay", 10**400),
        ("adam", "betas", (0.9, NAN)),
        ("adam", "seed", 1.0),
        ("novograd", "norm_type", "2"),
        ("lamb", "max_grad_norm", NAN),
    ],
)
def test_an_option_that_cannot_be_used(name, key, value):
    checkpoint = trained(name, 1).state_dict()
    checkpoint["param_groups"][0][key] = value
    refused(trained(name, 1), checkpoint, AmpError, rf"param_groups\[0\] of the checkpoint: .*{key}")


def test_no_bound_for_the_norm_of_the_gradients():
    source = BY_NAME["lamb"](parameters(shapes=SHAPES), max_grad_norm=INF)
    run(source, 1)
    make("lamb").load_state_dict(source.state_dict())


@EACH_FLAG
def test_a_flag_that_is_set_to_text_between_steps_is_refused_before_any_group_is_stepped(name, key):
    first, second = parameters(shapes=[(3, 1), (4, 1)])
    optimizer = BY_NAME[name]([{"params": [first]}, {"params": [second]}])
    run(optimizer, 2)
    before = snapshot(optimizer)
    optimizer.param_groups[1][key] = "False"
    with pytest.raises(AmpTypeError, match=rf"param_groups\[1\]: {key} must be True or False, got 'False'"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    optimizer.param_groups[1][key] = 0
    run(optimizer, 1)


BETAS = ("ab", 0.9, (0.9,), (0.9, NAN), (1.0, 0.9), None, (0.9, "0.99"))
RATES = ("fast", None, torch.ones(2))


@pytest.mark.parametrize(("key", "value"), [*(("betas", b) for b in BETAS), *(("lr", lr) for lr in RATES)], ids=repr)
@pytest.mark.parametrize("name", ["adam", "lion", "novograd"])
def test_numbers_that_are_set_between_steps(name, key, value):
    optimizer = trained(name)
    before = snapshot(optimizer)
    optimizer.param_groups[0][key] = value
    with pytest.raises(AmpError, match=rf"param_groups\[0\]: .*{key.rstrip('s')}"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    optimizer.param_groups[0][key] = {"betas": [0.5, 0.9], "lr": 1}[key]
    run(optimizer, 1)


# --- what keeps loading -----------------------------------------------------------------------------------------------


def test_parameters_that_were_never_stepped():
    """No entry, an empty one, or torch's None; or no state at all."""
    for name in BY_NAME:
        fresh = make(name)
        fresh.load_state_dict(make(name).state_dict())
        run(fresh, 1)
        checkpoint = trained(name).state_dict()
        del checkpoint["state"][0]
        checkpoint["state"][1] = {}
        checkpoint["state"][2] = {"momentum_buffer": None}
        optimizer = make(name)
        optimizer.load_state_dict(checkpoint)
        assert [bool(optimizer.state.get(p)) for p in params_of(optimizer)] == [False, False, False, True]
        run(optimizer, 1)


@pytest.mark.parametrize(("name", "key"), [("adagrad", "sum"), ("sgd", "momentum_buffer"), ("lion", "exp_avg")])
def test_counts_that_others_do_not_keep(name, key):
    """apex's FusedAdagrad and FusedSGD, and most implementations of Lion, have none."""
    optimizer, resumed = trained(name), make(name)
    checkpoint = optimizer.state_dict()
    for state in checkpoint["state"].values():
        del state["step"]
    resumed.load_state_dict(checkpoint)
    for p, q in zip(params_of(optimizer), params_of(resumed), strict=True):
        assert_same([resumed.state[q][key]], [optimizer.state[p][key]])


def test_a_momentum_that_came_late():
    """A buffer begins with the next gradient where the momentum was 0 in all steps before."""
    optimizer = FusedSGD(parameters(shapes=SHAPES), lr=0.1)
    run(optimizer, 2)
    optimizer.param_groups[0]["momentum"] = 0.9
    resumed = FusedSGD(parameters(shapes=SHAPES), lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    run(resumed, 1)


def test_flags_as_numbers():
    checkpoint = trained("novograd").state_dict()
    checkpoint["param_groups"][0].update(bias_correction=1, init_zero=0.0, maximize=torch.tensor(False))
    optimizer = make("novograd")
    optimizer.load_state_dict(checkpoint)
    group = optimizer.param_groups[0]
    assert [group[key] for key in ("bias_correction", "init_zero", "maximize")] == [True, False, False]
    assert {type(group[key]) for key in ("bias_correction", "init_zero", "maximize")} == {bool}


def test_novograds_norms_of_another_form():
    optimizer = trained("novograd")
    for norms in (torch.ones(4), [torch.ones(4)], [torch.zeros(0), 3], "norms"):
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["param_groups"][0]["exp_avg_sq"] = norms
        refused(trained("novograd", 1), checkpoint, AmpTypeError, "exp_avg_sq of a param group is .*expected a list")
    assert isinstance(optimizer, FusedNovoGrad)


def test_loading_reads_no_tensor_by_itself():
    """All that is looked at comes to the host together."""
    for name in BY_NAME:
        for optimizer in (make(name), BY_NAME[name](parameters(torch.float16, shapes=SHAPES), master_weights=True)):
            run(optimizer, 2)
            checkpoint = optimizer.state_dict()
            if name == "sgd":  # which looks whether a buffer has begun
                for state in checkpoint["state"].values():
                    state["step"] = 2.0
            with HostReads() as reads:
                optimizer.load_state_dict(checkpoint)
            assert reads.count == optimizer.capturable  # its lr is a tensor, and checked


@pytest.mark.parametrize("value", [1e39, 10**400], ids=["float", "int"])
@pytest.mark.parametrize("capturable", [False, True])
def test_an_lr_beyond_float32_is_refused_before_anything_changes(capturable, value):
    checkpoint = FusedAdam(parameters(shapes=SHAPES), capturable=capturable).state_dict()
    checkpoint["param_groups"][0]["lr"] = value
    why = "lr is too large for a float" if isinstance(value, int) else "Invalid learning rate: .* and <= 3.4"
    message = rf"param_groups\[0\] of the checkpoint: {why}"
    refused(FusedAdam(parameters(shapes=SHAPES), capturable=capturable), checkpoint, AmpValueError, message)


def test_groups_in_a_tuple_are_those_of_a_list():
    """torch takes them, and would round the state to the parameters' dtype."""
    params = [nn.Parameter(torch.ones(4).bfloat16())]
    optimizer = FusedAdam(params)
    params[0].grad = torch.full((4,), 0.3).bfloat16()
    optimizer.step()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    expected = copy.deepcopy(checkpoint["state"][0])
    checkpoint["param_groups"] = tuple(checkpoint["param_groups"])
    optimizer.load_state_dict(checkpoint)
    assert_same(optimizer.state_dict()["state"][0], expected)
    checkpoint["state"][0]["exp_avg_sq"][1] = NAN
    refused(
        optimizer, checkpoint, AmpValueError, r"the state 'exp_avg_sq' of param_groups\[0\]\['params'\]\[0\] has nan"
    )


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "sgd", "lamb", "muon"])
def test_a_later_format_is_refused_by_its_number(name):
    optimizer = trained(name)
    state = optimizer.state_dict()
    assert "format" not in state  # those of torch and apex have none
    refused(optimizer, {**state, "format": 2, "shards": ()}, AmpValueError, r'"format"\] is 2\. .* know "shards"')
    refused(optimizer, {**state, "format": 1, "shards": ()}, AmpKeyError, 'state_dict has "shards", which this version')
    refused(optimizer, {**state, "version": 2}, AmpKeyError, 'state_dict has "version", which this version')
    make(name).load_state_dict({**state, "format": 1})


@pytest.mark.parametrize("options", [{"master_weights": True}, {"write_back": "kahan"}, {"state_dtype": "8bit"}])
def test_a_state_that_torch_and_apex_do_not_have_says_its_format(options):
    param = nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state_dict()["format"] == 1


def test_a_later_format_of_split_masters_is_refused_by_its_number():
    optimizer = SplitMasters(torch.optim.AdamW, [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    state = optimizer.state_dict()
    assert state["format"] == 1
    with pytest.raises(AmpValueError, match=r'"format"\] is 2\. .* does not know what its entries mean'):
        optimizer.load_state_dict({**state, "format": 2})
    optimizer.load_state_dict(state)
