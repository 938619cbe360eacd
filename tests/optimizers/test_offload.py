"""``Offloaded`` against the same optimizer on the device: every bit of weights, state and gradients.

The parameters are on the CPU here, so that copies take the place of streams.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import fuzz_programs as fuzz
import pytest
import torch
from faults import Fault, fault_at_line, lines_of
from host_reads import OpCalls
from kit import INF, assert_same, batch, each_copy, mlp, params_of, snapshot, start, through_a_file, train
from kit import same as equal
from optimizer_cases import BY_NAME, CHANGES, MODES, give, gradients, make, offloaded, parameters, run
from torch import nn

import ampctx
from ampctx.amp import AmpSession
from ampctx.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD, Offloaded
from ampctx.optimizers import offloaded as module

OFFLOADED = ["adam", "sgd", "adagrad", "lion"]


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Op calls of a few elements, so that a step has several."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 20)


def pair(name, mode="split", **more):
    return [made(name, mode, **more) for made in (make, offloaded)]


def step_both(optimizers, step, **attributes):
    for optimizer in optimizers:
        give(params_of(optimizer), gradients(params_of(optimizer), step))
        vars(optimizer).update(attributes)
        optimizer.step()
        for attribute in attributes:
            delattr(optimizer, attribute)


def assert_alike(optimizers):
    resident, other = optimizers
    assert_same(snapshot(resident), snapshot(other))
    assert_same([p.grad for p in params_of(resident)], [p.grad for p in params_of(other)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OFFLOADED)
def test_steps_have_the_bits_of_the_optimizer_without_it(name, mode):
    both = pair(name, mode)
    for step in range(6):
        step_both(both, step, found_inf=torch.tensor(float(step == 2)), grad_scale=torch.tensor(8.0))
        assert_alike(both)
    assert all(state["step"] == 5 for state in both[1].state.values() if "step" in state)


def test_a_step_is_several_op_calls():
    run(optimizer := offloaded("adam", "split"), 2)
    with OpCalls() as calls:
        run(optimizer, 1, first=2)
    assert calls.of["multi_tensor_adam"] > 3


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"negate a weight"}))  # by .data, at the same address
def test_what_changes_between_steps_is_seen(change):
    both = pair("adam")
    for step in range(2):
        step_both(both, step)
    for optimizer in both:
        CHANGES[change](optimizer)
    for step in range(2, 4):
        step_both(both, step)
    assert_alike(both)


def test_one_gradient_of_two_parameters_is_unscaled_once():
    found = []
    for kind in (FusedAdam, partial(Offloaded, FusedAdam)):
        params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = kind(params)
        params[0].grad = params[1].grad = torch.full((4,), 8.0)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        found.append([*snapshot(optimizer), params[0].grad])
    assert_same(*found)
    assert found[1][-1].tolist() == [2.0] * 4


@pytest.mark.parametrize("mode", ["fp32", "masters", "split"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_checkpoints_go_both_ways(name, mode):
    both = pair(name, mode)
    for step in range(2):
        step_both(both, step)
    states = [optimizer.state_dict() for optimizer in both]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    resumed = pair(name, mode)
    for optimizer, saver, state in zip(resumed, both[::-1], states[::-1], strict=True):
        for p, q in zip(params_of(optimizer), params_of(saver), strict=True):
            p.data.copy_(q)
        optimizer.load_state_dict(through_a_file(state))
    for step in range(2, 4):
        step_both([*both, *resumed], step)
    for optimizer in (both[1], *resumed):
        assert_same(snapshot(optimizer), snapshot(both[0]))


@each_copy
def test_a_copy_goes_on_by_itself(copied):
    resident, optimizer = pair("adam")
    run(optimizer, 2)
    twin, before = copied(optimizer), snapshot(optimizer)
    run(twin, 2, first=2)
    run(resident, 4)
    assert_same(snapshot(twin), snapshot(resident))
    assert_same(snapshot(optimizer), before)


# --- under amp and a GradScaler ---------------------------------------------------------------------------------------


def by_amp(level):
    def run_loop(of):
        session, kept = AmpSession(), "split" if level == "O5" else False
        make_it = partial(of(FusedAdam), lr=0.01, master_weights=kept)
        options = {"loss_scale": "dynamic", "max_loss_scale": 2.0**10, **({"master_weights": False} if kept else {})}
        model, optimizer = start(session, level, make_it, **options)
        train(session, model, optimizer, 12, overflow_at=(5,), max_norm=0.5)
        found = [*snapshot(optimizer), torch.tensor(session.skipped_steps(optimizer))]
        session.reset()
        return found

    return run_loop


def by_scaler(kind, unscale):
    def run_loop(of):
        # torch's unscale_ refuses fp16 gradients.
        dtype, kept = (torch.bfloat16, "split") if unscale else (torch.float16, True)
        model, scaler = mlp().to(dtype), kind("cpu", init_scale=2.0**10)
        optimizer = of(FusedSGD)(model.parameters(), lr=0.01, momentum=0.9, master_weights=kept)
        for step in range(12):
            loss = model(batch(step).to(dtype)).float().square().mean() * (INF if step == 5 else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*snapshot(optimizer), torch.tensor(scaler.get_scale())]

    return run_loop


LOOPS = {
    "O1": by_amp("O1"),
    "O5": by_amp("O5"),
    "ours": by_scaler(ampctx.GradScaler, False),
    "torch's, clipped": by_scaler(torch.amp.GradScaler, True),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_under_amp_and_a_scaler_are_the_same(loop):
    resident, other = (LOOPS[loop](of) for of in (partial, partial(partial, Offloaded)))
    assert_same(other, resident)
    if loop.startswith("O"):
        assert resident[-1] == 1


@pytest.mark.filterwarnings("ignore")
def test_drawn_programs_have_the_bits_of_the_optimizer_without_it():
    """Of the fuzz, with odd gradients, other groups, faults. A step that refuses the state has taken chunks before."""
    kinds, count = {BY_NAME[name].func.__name__ for name in OFFLOADED}, 0
    for program in map(fuzz.drawn, range(240)):
        start = program["start"]
        keeps_masters = start["level"] in ("O2", "O3", "O5") and not start["options"].get("master_weights")
        if start["kind"] in kinds and not keeps_masters and not start["options"].get("capturable"):
            resident = fuzz.KINDS[start["kind"]]
            there = {start["kind"]: partial(Offloaded, resident.func, **resident.keywords)}
            seen, _ = fuzz.Run(program)()
            with mock.patch.dict(fuzz.KINDS, there):
                other, _ = fuzz.Run(program)()
            refused = next((i for i, (_, what, _) in enumerate(seen) if what == "step"), None)
            assert not fuzz.difference(seen[:refused], other[:refused]), program
            count += 1
    assert count > 20


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with pytest.raises(ampctx.AmpValueError, match="capturable=False"):
        Offloaded(FusedAdam, parameters(), capturable=True)
    no_given = type("Old", (FusedAdam,), {"step": lambda self, closure=None: None})
    for kind, name in ((FusedLAMB, "FusedLAMB"), (parameters(), "Parameter"), (no_given, "Old"), ("X", "X")):
        with pytest.raises(ampctx.AmpTypeError, match=f"kind must be one of FusedAdam, [^.]*, got [^.]*{name}"):
            Offloaded(kind, parameters())
    with pytest.raises(ampctx.AmpTypeError, match=r"'offload'. Write Offloaded\(FusedSGD, params, ...\)"):
        FusedSGD(parameters(), lr=0.1, offload="cpu")


def test_larc_adapts_its_gradients():
    both = [LARC(kind(parameters(), lr=0.1, weight_decay=0.1)) for kind in (FusedSGD, partial(Offloaded, FusedSGD))]
    for optimizer in both:
        run(optimizer, 3)
    assert_alike(both)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_amp_keeps_no_masters_beside_it(level):
    model, session = mlp(), AmpSession()
    optimizer = Offloaded(FusedAdam, model.parameters())
    with pytest.raises(ampctx.AmpError, match="0.weight.* is .*=False to amp.initialize, and master_weights='split'"):
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert params_of(optimizer) == list(model.parameters())


def test_too_little_host_memory_is_told_with_the_bytes(monkeypatch):
    few = nn.Parameter(torch.empty(2**10, dtype=torch.bfloat16, device="meta"))
    many = nn.Parameter(torch.empty(2**45, dtype=torch.bfloat16, device="meta"))
    # Weights and gradients 4, remainders 2, moments 8, and the step count.
    with pytest.raises(ampctx.AmpValueError, match=f"FusedAdam.* needs {14 * 2**45 + 4:,} bytes of host memory"):
        Offloaded(FusedAdam, [many], master_weights="split")
    optimizer = Offloaded(FusedAdam, [few], master_weights="split")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        ampctx.AmpValueError, match=f"on this rank, {8 * (14 * 2**45 + 4):,} on all 8 ranks of this machine"
    ):
        Offloaded(FusedAdam, [many], master_weights="split")
    with pytest.raises(ampctx.AmpValueError, match=f"needs {14 * 2**45 + 10 * 2**10 + 8:,} bytes"):
        optimizer.add_param_group({"params": [many]})
    assert params_of(optimizer) == [few]


def test_a_compiled_step_leaves_the_graph():
    resident, other = pair("adam")
    compiled = torch.compile(other.step, backend="eager")
    for step in range(3):
        for optimizer, take in ((resident, resident.step), (other, compiled)):
            give(params_of(optimizer), gradients(params_of(optimizer), step))
            take()
    assert_alike((resident, other))


def test_a_fault_at_any_line_leaves_each_parameter_as_before_or_whole():
    def ready():
        optimizer = offloaded("adam", "split")
        run(optimizer, 1)
        give(params_of(optimizer), gradients(params_of(optimizer), 1))
        return optimizer

    def found(optimizer):
        return [[p, optimizer.state[p]] for p in params_of(optimizer)]

    before, after = ready(), ready()
    places = lines_of(after.step)
    for place in places[::10]:
        optimizer = ready()
        with fault_at_line(place), pytest.raises(Fault):
            optimizer.step()
        for now, *either in zip(found(optimizer), found(before), found(after), strict=True):
            assert any(equal(now[:1], each[:1]) and equal(now[1].values(), each[1].values()) for each in either), place
        optimizer.step()


def test_what_a_step_refuses_changes_nothing():
    optimizer = offloaded("adam", "split")
    run(optimizer, 1)
    before = snapshot(optimizer)
    give(params_of(optimizer), gradients(params_of(optimizer), 1))
    params_of(optimizer)[5].grad = params_of(optimizer)[5].grad.to_sparse()
    with pytest.raises(ampctx.AmpError, match=r"sparse gradients, and param_groups\[0\]\['params'\]\[5\]"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_a_parameter_that_split_weights_cannot_hold_is_refused_before_the_step():
    params = parameters(torch.float32)
    optimizer = Offloaded(FusedAdam, params, master_weights="split")
    for p in params:
        p.data = p.data.half()
    give(params, gradients(params, 0))
    with pytest.raises(ampctx.AmpValueError, match="is float16: pass master_weights=True"):
        optimizer.step()
    assert not optimizer.state


def test_another_shape_is_refused_by_name():
    optimizer = offloaded("adam", "fp32")
    run(optimizer, 1)
    p, before = params_of(optimizer)[4], snapshot(optimizer)
    former, p.grad, p.data = p.data, None, torch.ones(18)
    with pytest.raises(
        ampctx.AmpError, match=r"\[4\] is of shape \(18,\) on cpu, and was of shape \(17,\) on cpu when"
    ):
        optimizer.step()
    p.data = former
    assert_same(snapshot(optimizer), before)
    saved = through_a_file(optimizer.state_dict())
    saved["state"][4]["exp_avg"] = torch.ones(18)
    with pytest.raises(
        ampctx.AmpValueError, match=r"'exp_avg' of param_groups\[0\]\['params'\]\[4\] has shape \(18,\)"
    ):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_state_in_fewer_bits_is_that_of_the_resident(state_dtype):
    """Codes and random bits, too: these belong to the parameter, wherever its op call is made."""
    options = {"state_dtype": state_dtype, "min_8bit_size": 0, "seed": 3, "amsgrad": False}
    both, resumed = pair("adam", **options), pair("adam", **options)
    for step in range(4):
        step_both(both, step)
    assert_alike(both)
    for optimizer, saver in zip(resumed, both, strict=True):
        optimizer.load_state_dict(saver.state_dict())
        assert_same(optimizer.state_dict()["state"], saver.state_dict()["state"])
