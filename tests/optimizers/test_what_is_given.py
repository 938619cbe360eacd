"""What an optimizer is given: parameters twice or of other dtypes, and numbers of other libraries than Python's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from kit import assert_same, backward, snapshot, through_a_file
from optimizer_cases import BY_NAME, give, gradients, parameters, run
from torch import nn

from ampctx import AmpSession
from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.amp import GradScaler
from ampctx.optimizers import LARC, FusedAdam, FusedNovoGrad, FusedSGD

# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in-larc"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_parameter_that_comes_twice_is_stepped_once(name, wrapped):
    """torch warns. The group and the checkpoint have it twice, as torch's."""
    once, twice = parameters(shapes=[(3,), (4,)]), parameters(shapes=[(3,), (4,)])
    expected = BY_NAME[name](once)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = BY_NAME[name]([twice[0], twice[0], twice[1]])
    stepping = [LARC(o) if wrapped else o for o in (expected, optimizer)]
    for step in range(3):
        for params, o in zip((once, twice), stepping, strict=True):
            give(params, gradients(params, step))
            o.step()
    assert_same([p.detach() for p in twice], [p.detach() for p in once])
    checkpoint = copy.deepcopy(optimizer.state_dict())
    assert checkpoint["param_groups"][0]["params"] == [1, 1, 2]  # as torch.optim's
    assert sorted(checkpoint["state"]) == [1, 2]
    before = snapshot(optimizer)
    optimizer.load_state_dict(checkpoint)
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_gradient_of_a_parameter_that_comes_twice_is_unscaled_once(name):
    for level in ("O0", "O2", "O3", "unscale_"):
        found = []
        for times in (1, 2):
            torch.manual_seed(0)
            model = nn.Linear(3, 2, bias=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = BY_NAME[name]([model.weight] * times)
            session, scaler = AmpSession(), GradScaler("cpu", init_scale=64.0)
            if level != "unscale_":
                session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
                assert len({id(p) for p in session.master_params(optimizer)}) == 1
            for _ in range(3):
                loss = model(torch.ones(1, 3)).float().square().sum()
                if level == "unscale_":
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    backward(session, loss, optimizer)
                    optimizer.step()
                optimizer.zero_grad()
            session.reset()
            found.append(model.weight.detach().clone())
            assert len(optimizer.state) == 1
        assert_same(found[:1], found[1:])


ODD_DTYPES = [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_of_other_dtypes_are_refused_by_name(name, dtype):
    odd = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    message = r"param_groups\[0\]\['params'\]\[1\] is"
    with pytest.raises(AmpValueError, match=message):
        BY_NAME[name]([*parameters(shapes=[(3,)]), odd])
    optimizer = BY_NAME[name](parameters(shapes=[(3,)]))
    with pytest.raises(AmpValueError, match=r"param_groups\[0\]\['params'\]\[0\] \(odd\) is"):
        BY_NAME[name]([("odd", odd)])
    kind = "does not support complex parameters.*" if dtype.is_complex else ""
    with pytest.raises(AmpValueError, match=rf"{kind}param_groups\[1\]\['params'\]\[0\] is"):
        optimizer.add_param_group({"params": [odd]})
    assert len(optimizer.param_groups) == 1


# --- numbers of other libraries ---------------------------------------------------------------------------------------


class Pair:
    """As OmegaConf's ListConfig: a sequence that is no list."""

    def __init__(self, *values):
        self._values = values

    def __len__(self):
        return len(self._values)

    def __getitem__(self, i):
        return self._values[i]

    def __repr__(self):
        return f"Pair{self._values}"  # the same in each process that tests are spread over


class Scalar:
    """As numpy's scalars and arrays without dimensions: no number of Python's."""

    shape = ()

    def __init__(self, value):
        self._value = value

    def item(self):
        return self._value


def of_numpy():
    np = pytest.importorskip("numpy")
    return (np.array([0.75, 0.5]), np.array(0.25), np.float32, np.int64(3), np.bool_(True))


NUMBERS = {
    "sequence": lambda: (Pair(0.75, 0.5), Scalar(0.25), Scalar, 3, Scalar(True)),
    "list": lambda: ([0.75, 0.5], 0.25, float, 3, 1),
    "tensor": lambda: (torch.tensor([0.75, 0.5]), 0.25, torch.tensor, 3, torch.tensor(True)),
    "tensors": lambda: ((torch.tensor(0.75), torch.tensor([0.5])), 0.25, torch.tensor, 3, True),
    "numpy": of_numpy,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_other_libraries_become_plain_ones(kind):
    betas, lr, scalar, seed, flag = NUMBERS[kind]()
    adam = FusedAdam(
        parameters(), lr=lr, betas=betas, eps=scalar(0.125), weight_decay=scalar(0.5), seed=seed, amsgrad=flag
    )
    sgd = FusedSGD(parameters(), lr=lr, momentum=scalar(0.5), dampening=scalar(-0.25), maximize=flag)
    nova = FusedNovoGrad(parameters(), lr=lr, betas=betas, norm_type=Scalar(0))
    for optimizer in (adam, sgd, nova):
        run(optimizer, 1)
        optimizer.param_groups[0]["lr"] = Scalar(0.25)
        run(optimizer, 1)
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        for name, value in optimizer.param_groups[0].items():
            assert name in ("params", "betas") or type(value) in (float, int, bool), name
    group = adam.param_groups[0]
    assert [group[k] for k in ("lr", "betas", "eps", "weight_decay", "seed", "amsgrad")] == [
        *(0.25, (0.75, 0.5), 0.125, 0.5, 3, True)
    ]
    assert {type(beta) for beta in group["betas"]} == {float}
    assert [sgd.param_groups[0][k] for k in ("momentum", "dampening", "maximize")] == [0.5, -0.25, True]


NO_PAIRS = {
    "text": "ab",
    "bytes": b"ab",
    "dict": {0: 0.9, 1: 0.9},
    "set": {0.9, 0.99},
    "one": (0.9,),
    "text in a pair": Pair(0.9, "0.99"),
    "column": torch.ones(2, 1),
    "None": None,
}


@pytest.mark.parametrize("betas", NO_PAIRS.values(), ids=NO_PAIRS)
def test_no_pair_of_numbers(betas):
    with pytest.raises(AmpTypeError, match=r"betas.* must be a (pair of numbers|number), got"):
        FusedAdam(parameters(), betas=betas)
