"""Steps and clips of DTensors see what has changed since the one before."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from kit import params_of
from optimizer_cases import BY_NAME, CHANGES, gradients, parameters
from rank_processes import RANK, all_ranks, flat_mesh, on_ranks
from test_optimizer_plan import same_as_copies
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ampctx import AmpError, clip_grad_norm_
from ampctx.amp import AmpSession
from ampctx.optimizers import LARC, FusedAdam, FusedLAMB, FusedLion, FusedSGD, SplitMasters

# Of one row each: the second rank has no element.
SHAPES = (7, 3), (1, 4), (6,), (4, 2, 3)


def spread(t, placement=None):
    placement = placement or Shard(0)
    return distribute_tensor(t.detach().clone(), flat_mesh(), [placement], src_data_rank=None)


def sharded(dtype=torch.float32, placement=None):
    return [nn.Parameter(spread(p, placement)) for p in parameters(dtype, SHAPES)]


def step_on(optimizer, step):
    """DTensors get gradients as ``fully_shard`` makes them: of the same layout."""
    params = getattr(optimizer, "gives", params_of(optimizer))
    for p, grad in zip(params, gradients(params, step), strict=True):
        p.grad = spread(grad, p.placements[0]) if isinstance(p, DTensor) else grad
    optimizer.step()


def part_replaced(optimizer):
    """As ``fully_shard`` does when a model is converted or moved."""
    p = params_of(optimizer)[0]
    p._local_tensor = p._local_tensor.clone() + 1


def part_of_state_replaced(optimizer):
    state = optimizer.state[params_of(optimizer)[0]]
    state["exp_avg"]._local_tensor = state["exp_avg"]._local_tensor.clone() + 1


def plain_parameters_beside(optimizer):
    optimizer.param_groups[0]["params"].insert(1, parameters(seed=5)[0])


# The memory of a DTensor is that of its part.
OF_PLAIN_TENSORS = ("replace memory of state", "replace data", "edit data", "cast to fp32", "cast to fp64")
OF_PLAIN_TENSORS += ("negate a weight", "negate a state")


@on_ranks(2)
def test_what_changes_between_steps_is_seen():
    changes = [change for name, change in CHANGES.items() if name not in (*OF_PLAIN_TENSORS, "cast half to bf16")]
    for change in (None, *changes, part_replaced, part_of_state_replaced, plain_parameters_beside):
        same_as_copies(lambda: BY_NAME["adam"](sharded()), change, step_on, steps=5)


@on_ranks(2)
def test_steps_of_other_optimizers_and_write_backs_are_those_of_copies():
    for make in (FusedSGD, FusedLion, FusedLAMB):
        same_as_copies(lambda make=make: make(sharded(), lr=0.1), None, step_on)
    same_as_copies(lambda: FusedLAMB(sharded(placement=Replicate()), lr=0.1), None, step_on)
    for options in ({"master_weights": True}, {"master_weights": "split"}, {"write_back": "stochastic"}):
        same_as_copies(lambda options=options: FusedAdam(sharded(torch.bfloat16), lr=0.1, **options), None, step_on)
    same_as_copies(lambda: FusedAdam(sharded(), state_dtype="8bit", min_8bit_size=0), None, step_on)


@on_ranks(2)
def test_private_attributes_of_torch_say_what_the_public_ones_do():
    """C reads these two by their descriptors."""
    p = sharded()[0]
    assert (p._spec.mesh, p._spec.placements) == (p.device_mesh, p.placements)
    assert p._local_tensor.data_ptr() == p.to_local().data_ptr()
    grad = spread(torch.ones(SHAPES[0]))
    assert grad._spec == p._spec
    assert grad._spec != spread(torch.ones(SHAPES[0]), Replicate())._spec
    assert all(hasattr(type(vars(DTensor)[name]), "__get__") for name in ("_spec", "_local_tensor"))


def placed(grad, layout):
    """Sums of which each rank has a part that is not half of them."""
    if layout.is_partial():
        return DTensor.from_local(grad * (0.25, 0.75)[RANK], flat_mesh(), [layout], run_check=False)
    return spread(grad, layout)


@on_ranks(2)
def test_gradients_in_another_layout_are_placed():
    """Split along another dimension, whole on each rank, and as sums that the ranks have still to make."""
    for own in (Shard(0), Replicate()):
        for clips in (False, True):
            found = []
            for other in (own, Shard(1), Replicate(), Partial()):
                params = [nn.Parameter(spread(p, own)) for p in parameters(shapes=[(4, 2), (4, 2, 3)])]
                optimizer = FusedAdam(params, lr=0.1)
                for step, layout in enumerate((own, own, other, own)):
                    for p, grad in zip(params, gradients(params, step), strict=True):
                        p.grad = placed(grad, layout)
                    if clips:
                        clip_grad_norm_(params, 0.5)
                    optimizer.step()
                found.append([p.full_tensor().detach() for p in params])
            for weights in found[1:]:
                torch.testing.assert_close(weights, found[0], rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_each_write_is_told_to_autograd():
    """A tensor that a graph has saved must not change unnoticed."""
    params = sharded()
    session, optimizer = AmpSession(), FusedAdam(params, lr=0.1)
    model = nn.Module()
    for i, p in enumerate(params):
        model.register_parameter(str(i), p)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(4):
        grads = [spread(grad) for grad in gradients(params, step)]
        with session.scale_loss(torch.ones(()), optimizer):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        assert all(grad._version > 0 for grad in grads)
        at_exit = [grad._version for grad in grads]
        clip_grad_norm_(params, 1e-3)
        assert all(grad._version > before for grad, before in zip(grads, at_exit, strict=True))
        before = [(p._version, p.to_local()._version) for p in params]
        optimizer.step()
        for p, (whole, part) in zip(params, before, strict=True):
            assert p._version > whole
            assert p.to_local()._version > part
    session.reset()
    replicas = sharded(placement=Replicate())
    step_on(LARC(FusedSGD(replicas, lr=0.1)), 0)  # adapts gradients
    assert all(p.grad._version > 0 for p in replicas)


@on_ranks(2)
def test_iterations_keep_no_objects():
    for level in (None, "O1"):
        params, session = sharded(), AmpSession()
        optimizer = FusedAdam(params, lr=0.1, skip_nonfinite=level is None)
        if level is not None:
            session.initialize(nn.ParameterList(params), optimizer, opt_level=level, history=0, verbosity=0)
        counts = []
        for step in range(12):
            grads = [spread(grad) for grad in gradients(params, step % 3)]
            with session.scale_loss(torch.ones(()), optimizer) if level else nullcontext():
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
            clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                del grads, grad, p
                gc.collect()
                counts.append(len(gc.get_objects()))
        assert counts[2] <= counts[1], level
        if level is not None:
            session.reset()


@on_ranks(2)
def test_a_norm_follows_its_parameters_and_their_layouts():
    """The same first parameter, and others after it."""
    first, *others = sharded()
    norms = []
    for rest in (others, [spread(p.full_tensor()).requires_grad_() for p in others], others[:1], others):
        replicas = [distribute_tensor(p.full_tensor().detach(), flat_mesh(), [Replicate()]) for p in rest[1:]]
        for params in ([first, *rest], [first, *rest[:1], *map(nn.Parameter, replicas)]):
            whole = gradients(params, 3)
            for p, grad in zip(params, whole, strict=True):
                p.grad = spread(grad, p.placements[0])
            norm = clip_grad_norm_(params, 1e9)
            expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole]).double())
            assert abs(float(norm) / float(expected) - 1) < 1e-6
            norms.append(float(norm))
    assert all(norms == other for other in all_ranks(norms)), RANK


# --- what else DTensors meet ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_sum_that_a_rank_has_no_part_of_keeps_its_grad_dtype():
    p = nn.Parameter(spread(torch.zeros(3, dtype=torch.bfloat16), Replicate()))
    p.grad_dtype = torch.float32
    optimizer = FusedSGD([p], lr=1.0, master_weights=True)
    value = 1 + 2.0**-12  # not in bf16
    for step in range(2):
        lacks = step == 1 and RANK == 0
        p.grad = None if lacks else DTensor.from_local(torch.full((3,), value), flat_mesh(), [Partial()])
        optimizer.step()
        assert p.grad.dtype == torch.float32
    (master,) = optimizer.param_groups_master[0]["params"]
    assert torch.equal(master.to_local(), torch.full((3,), -3 * value))


@on_ranks(2)
def test_what_wraps_a_class_of_torch_refuses_them():
    (p, *_) = sharded(torch.bfloat16)
    with pytest.raises(AmpError, match="not support DTensors, .* Use FusedAdam"):
        SplitMasters(torch.optim.NAdam, [p])
