"""``Offloaded`` over DTensors: the bits of the same optimizer on the device.

A mesh that calls itself one of CUDA stands for a device here, to which nothing of the host may move.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from kit import INF, assert_same
from optimizer_cases import gradients, parameters
from rank_processes import RANK, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ampctx
import ampctx.distributed
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedLion, FusedSGD, Offloaded

# The second rank has no element of one row. Rows of whole blocks of 8-bit codes, and others.
SHAPES = (7, 3), (1, 4), (3, 70), (4, 64)
KINDS = {
    "fp32": (FusedAdam, torch.float32, {}),
    "masters": (FusedAdam, torch.bfloat16, {"master_weights": True}),
    "split": (FusedAdam, torch.bfloat16, {"master_weights": "split"}),
    "stochastic": (FusedAdam, torch.bfloat16, {"write_back": "stochastic"}),
    "8bit": (FusedAdam, torch.float32, {"state_dtype": "8bit", "min_8bit_size": 0}),
    "sgd": (FusedSGD, torch.float32, {"momentum": 0.9}),
    "lion": (FusedLion, torch.bfloat16, {"master_weights": True}),
    "guarded": (FusedAdam, torch.float32, {"skip_nonfinite": True}),
}
# Of fully_shard, tensor parallelism, both, and HSDP.
MESHES = {(2,): ([Shard(0)], [Shard(1)]), (2, 1): ([Shard(0), Shard(1)], [Replicate(), Shard(0)])}


class Model(nn.Module):
    """Parameters on a mesh, and gradients that each rank knows."""

    def __init__(self, kind, mesh, places, is_offloaded):
        super().__init__()
        cls, dtype, options = KINDS[kind]
        for i, p in enumerate(parameters(dtype, SHAPES)):
            self.register_parameter(f"p{i}", nn.Parameter(distribute_tensor(p.detach(), mesh, places)))
        self.optimizer = (partial(Offloaded, cls) if is_offloaded else cls)(self.parameters(), lr=0.1, **options)

    def give(self, grads):
        for p, grad in zip(self.parameters(), grads, strict=True):
            p.grad = grad

    def run(self, first, last, scales=None):
        for step in range(first, last):
            pairs = zip(self.parameters(), gradients(list(self.parameters()), step), strict=True)
            scale = (scales or {}).get(step, 1.0)
            # Like those of fully_shard: around parts, which ``distribute_tensor`` makes on a mesh of the CPU alone.
            parts = [(p, distribute_tensor(g * scale, CPU[p.device_mesh.shape], p.placements)) for p, g in pairs]
            self.give([DTensor(part._local_tensor, p._spec, requires_grad=False) for p, part in parts])
            self.optimizer.step()
        return self

    def bits(self):
        """Of this rank's weights and state."""
        states = [self.optimizer.state[p] for p in self.parameters()]
        every = [
            t
            for p, state in zip(self.parameters(), states, strict=True)
            for t in (p.detach(), *map(state.get, sorted(state)))
        ]
        return [t._local_tensor if isinstance(t, DTensor) else t for t in every]


CPU = {}


def meshes():
    """Meshes of the CPU, made once."""
    for shape in MESHES:
        if shape not in CPU:
            CPU[shape] = init_device_mesh("cpu", shape)
    return CPU


def of_cuda(shape):
    """A mesh of the same ranks and groups that calls itself one of CUDA."""
    mesh = init_device_mesh("cpu", shape)
    mesh._device_type = "cuda"
    return mesh


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_steps_have_the_bits_of_the_optimizer_without_it(kind):
    for shape, mesh in meshes().items():
        for places in MESHES[shape]:
            resident, other = (Model(kind, mesh, places, is_offloaded) for is_offloaded in (False, True))
            for model in (resident, other):
                model.run(0, 4, {2: INF} if kind == "guarded" else None)
            assert_same(other.bits(), resident.bits())
            assert other.optimizer.skipped_steps() == resident.optimizer.skipped_steps() == (kind == "guarded")


@on_ranks(2)
def test_sums_that_ranks_have_still_to_make_are_made():
    mesh, found = meshes()[(2,)], []
    for is_offloaded in (False, True):
        model = Model("fp32", mesh, [Shard(0)], is_offloaded)
        for step in range(3):
            grads = gradients(list(model.parameters()), step)
            model.give([DTensor.from_local(g * (0.25, 0.75)[RANK], mesh, [Partial()], run_check=False) for g in grads])
            model.optimizer.step()
        found.append(model.bits())
    assert_same(*found)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@on_ranks(2)
def test_a_sharded_model_under_amp_is_that_of_the_optimizer_without_it(level):
    found = []
    for make in (FusedAdam, partial(Offloaded, FusedAdam)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        model = ampctx.distributed.fully_shard(model, level, mesh=meshes()[(2,)])
        session, optimizer = AmpSession(), make(model.parameters(), lr=0.01)
        session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        for step in range(5):
            loss = model(torch.full((2, 5), RANK + step * 0.1)).float().square().mean()
            optimizer.zero_grad()
            with session.scale_loss(loss * (INF if step == 2 else 1.0), optimizer) as scaled:
                scaled.backward()
            ampctx.clip_grad_norm_(session.master_params(optimizer), 0.5)
            optimizer.step()
        found.append([p.to_local().detach() for p in model.parameters()])
        assert session.skipped_steps(optimizer) == 1
        session.reset()
    assert_same(*found)


@pytest.mark.parametrize("kind", ["masters", "split", "8bit"])
@on_ranks(2)
def test_checkpoints_by_names_go_both_ways(kind):
    for shape, mesh in meshes().items():
        for full in (False, True)[: 1 + (kind != "split")]:  # gloo gathers no int16
            for saver, loader in ((False, True), (True, False), (True, True)):
                saved, loaded = (Model(kind, mesh, MESHES[shape][0], is_offloaded) for is_offloaded in (saver, loader))
                saved.run(0, 2)
                with torch.no_grad():
                    for p, q in zip(loaded.parameters(), saved.parameters(), strict=True):
                        p.copy_(q)
                options = StateDictOptions(full_state_dict=full)
                state = get_optimizer_state_dict(saved, saved.optimizer, options=options)
                assert all(isinstance(t, torch.Tensor) for s in state["state"].values() for t in s.values())
                set_optimizer_state_dict(loaded, loaded.optimizer, state, options=options)
                assert_same(loaded.run(2, 4).bits(), saved.run(2, 4).bits())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "guarded"])
@on_ranks(2)
def test_a_mesh_of_the_device_keeps_the_host_on_the_host(kind):
    for shape in meshes():
        resident = Model(kind, CPU[shape], MESHES[shape][0], False)
        other = Model(kind, CPU[shape], MESHES[shape][0], False)
        mesh = of_cuda(shape)
        cls, _, options = KINDS[kind]
        for name, p in list(other.named_parameters()):
            spec = type(p._spec)(mesh, p.placements, tensor_meta=p._spec.tensor_meta)
            setattr(other, name, nn.Parameter(DTensor(p._local_tensor, spec, requires_grad=False)))
        other.optimizer = Offloaded(cls, other.parameters(), lr=0.1, **options)
        assert_same(other.run(0, 3).bits(), resident.run(0, 3).bits())
        if KINDS[kind][1] != torch.float32:
            continue
        # A whole state, as a file of one process has it.
        sessions = [AmpSession(), AmpSession()]
        for session, model in zip(sessions, (resident, other), strict=True):
            session.initialize(model, model.optimizer, opt_level="O0", verbosity=0)
        whole = sessions[0].get_state_dict(resident, resident.optimizer, full_state_dict=True)
        other.run(3, 4)
        sessions[1].set_state_dict(other, other.optimizer, whole)
        assert_same(other.run(3, 5).bits(), resident.run(3, 5).bits())


@on_ranks(2)
def test_a_rank_outside_of_the_mesh_is_refused_by_name():
    p = nn.Parameter(distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0]), [Shard(0)]))
    optimizer = Offloaded(FusedAdam, [nn.Parameter(torch.ones(2))])
    with pytest.raises(ampctx.AmpValueError, match=r"\[1\]\['params'\]\[0\]") if RANK else nullcontext():
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 2 - RANK
