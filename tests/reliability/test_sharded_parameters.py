"""DTensor parameters (fully_shard, tensor parallelism, plain meshes) and ZeroRedundancyOptimizer train as on one rank
alone."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from kit import assert_same, backward
from kit import uneven as mlp
from rank_processes import RANK, RANKS, all_ranks, counted_all_reduce, distance, flat_mesh, on_ranks, weights, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpError, AmpRankError, AmpTypeError, AmpValueError, clip_grad_norm_, optimizers
from ampctx.amp import AmpSession, GradScaler
from ampctx.kernels.sharding import groups_of
from ampctx.optimizers import FusedAdam

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own
    from torch.distributed.optim import ZeroRedundancyOptimizer

# torch's own, of fully_shard over tensor parallelism: the last layer's output is a view.
warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)

STEPS = 5
OVERFLOW_AT = 2
# Below the first norms and above the last.
MAX_NORM = 0.5
START = 2.0**16
# A step of five overflows, on one rank alone where each has data of its own.
MOVED = [True, True, False, True, True]
SCALES = [START, START, START / 2, START / 2, START / 2]
# Of weights, and relative of norms. In 16 bits batches of another size are rounded otherwise.
EXACT, FP16, BF16 = 1e-6, 1e-3, 1e-2
DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}
KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "Adam-fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedSGD-without-state": lambda params: optimizers.FusedSGD(params, lr=0.1),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.01),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.1),
}


def runs(*cases):
    """The API (a GradScaler, or the level), the optimizer, and what else a test is given."""
    return pytest.mark.parametrize(("api", "kind", "more")[: len(cases[0])], cases)


def policy(dtype):
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def fully_sharded(dtype=None, model=None, mesh=None, api=None, **options) -> nn.Sequential:
    if api in DTYPES:
        options["mp_policy"] = policy(DTYPES[api])
    model = mlp().to(dtype) if model is None else model
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh or flat_mesh(), **options)
    return model


def tensor_parallel(mesh=None) -> nn.Module:
    return parallelize_module(mlp(8), mesh or flat_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def data(step, mine) -> torch.Tensor:
    """A batch of 8, or this rank's share of it."""
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    return batch.chunk(RANKS)[RANK] if mine else batch


class Loop:
    """Steps of a model with a scale that moves: ``api`` is "scaler" or the opt level of a session of its own."""

    def __init__(self, model, kind, api, shares=True, overflow_on=1, **options):
        self.model, self.shares, self.overflow_on = model, shares, overflow_on
        self.optimizer = KINDS[kind](model.parameters()) if isinstance(kind, str) else kind
        self.session = self.scaler = None
        if api == "scaler":
            self.scaler = GradScaler("cpu")
        else:
            self.session = AmpSession()
            options = {"loss_scale": "dynamic", "verbosity": 0, **options}
            self.session.initialize(model, self.optimizer, opt_level=api, **options)
        self.norms, self.moved, self.scales, self.culprits = [], [], [], []

    def loss(self, step, part=slice(None)):
        loss = self.model(data(step, self.shares)[part]).float().square().mean()
        return loss * float("inf") if step == OVERFLOW_AT and self.overflow_on in (RANK, "all") else loss

    def backward(self, loss, **kwargs):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            return
        backward(self.session, loss, self.optimizer, **kwargs)

    def step(self):
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.norms.append(clip_grad_norm_(params, MAX_NORM).item())
        if self.scaler is None:
            self.optimizer.step()
            outcome = self.session.outcome(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            outcome = self.scaler.outcome(self.optimizer)
            self.scaler.update()
        self.moved.append(outcome.stepped)
        self.culprits.append([culprit.name for culprit in outcome.culprits])
        self.scales.append(self.scaler.get_scale() if self.session is None else self.session.loss_scales[0].value())

    def run(self, first=0, last=STEPS):
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(self.loss(step))
            self.step()
        return self

    def end(self):
        if self.session is not None:
            self.session.reset()
        return self


def alone(kind, api, model=None) -> Loop:
    """The run on this rank by itself."""
    return Loop(mlp() if model is None else model, kind, api, shares=False, overflow_on="all").run().end()


def assert_trained(loop, twin, tolerance):
    finite = [(a, b) for a, b in zip(loop.norms, twin.norms, strict=True) if torch.tensor([a, b]).isfinite().all()]
    assert (loop.moved, loop.scales, len(finite)) == (MOVED, SCALES, 4)
    assert max(abs(a - b) / b for a, b in finite) <= tolerance
    assert distance(weights(loop.model), weights(twin.model)) <= tolerance


# --- training ---------------------------------------------------------------------------------------------------------


@runs(
    *(("scaler", kind, EXACT) for kind in KINDS),
    *(("O1", "SGD", FP16), ("O1", "Adam-fused", FP16), ("O1", "FusedAdam", FP16)),
    *(("O0", "SGD", EXACT), ("O0", "FusedAdam", EXACT)),
)
@on_ranks(2)
def test_fully_shard(api, kind, more):
    assert_trained(Loop(fully_sharded(), kind, api).run().end(), alone(kind, api), more)


def train_by(model, kind, level, **options) -> tuple[list, list[torch.Tensor]]:
    """Figures of a run with an overflow on one rank, and the weights."""
    shards = list(model.parameters())
    loop = Loop(model, kind, level, **options).run()
    masters = list(loop.session.master_params(loop.optimizer))
    model.reshard()
    shown = loop.session.master_state_dict(model)
    assert all(a is b is c for a, b, c in zip(masters, shards, model.parameters(), strict=True))
    assert all(shown[n].equal(p) for n, p in model.named_parameters())
    assert (loop.moved, loop.scales) == (MOVED, SCALES)
    loop.end()
    # nan is not equal to itself
    return [str(norm) for norm in loop.norms], [whole(t) for t in (*model.parameters(), *model.buffers())]


@runs(("O5", "FusedAdam"), ("O2", "SGD"))
@on_ranks(2)
def test_o2_and_o5_of_a_sharded_model_are_a_policy_and_o0(api, kind):
    by_hand, expected = train_by(fully_sharded(mp_policy=policy(DTYPES[api])), kind, "O0")
    figures, found = train_by(fully_sharded(mp_policy=policy(DTYPES[api])), kind, api)
    assert (figures, distance(found, expected)) == (by_hand, 0)
    assert 0 < distance(found, train_by(fully_sharded(), kind, "O0")[1]) < 0.1
    assert all(other == figures for other in all_ranks(figures)) or api == "O2"


@runs(("scaler", "SGD", EXACT), ("O1", "FusedAdam", FP16), ("O4", "SGD", BF16))
@on_ranks(2)
def test_tensor_parallelism(api, kind, more):
    loop = Loop(tensor_parallel(), kind, api, shares=False, overflow_on="all")
    assert_trained(loop.run().end(), alone(kind, api, mlp(8)), more)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
@on_ranks(2)
def test_a_mesh_of_two_dimensions(dp, tp):
    """fully_shard over tensor parallelism."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = fully_sharded(model=tensor_parallel(mesh["tp"]), mesh=mesh["dp"])
    loop = Loop(model, "FusedAdam", "O0", shares=dp > 1, overflow_on=1 if dp > 1 else "all")
    assert_trained(loop.run().end(), alone("FusedAdam", "O0", mlp(8)), EXACT)
    assert {p.device_mesh.ndim for p in model.parameters()} == {2}
    assert len(groups_of(model.parameters())) == 1  # nobody to agree with along the other


class Replicated(Loop):
    """Weights on every rank, batches split: gradients are sums that are still to be made."""

    def loss(self, step, part=slice(None)):
        x = distribute_tensor(data(step, False), flat_mesh(), [Shard(0)])
        loss = self.model(x).square().mean().full_tensor()
        return loss * float("inf") if step == OVERFLOW_AT else loss

    def backward(self, loss, **kwargs):
        super().backward(loss, **kwargs)
        self.placements = {str(p.grad.placements) for p in self.model.parameters()}


@runs(("scaler", "SGD"), ("scaler", "FusedAdam"), ("O0", "Adam-fused"))
@on_ranks(2)
def test_gradients_that_are_sums_still_to_be_made(api, kind):
    """Those of a block are laid out as the parameters at its end."""
    loop = Replicated(distribute_module(mlp(), flat_mesh()), kind, api).run().end()
    assert_trained(loop, alone(kind, api), EXACT)
    assert loop.placements == {"(Partial(sum),)" if api == "scaler" else "(Replicate(),)"}


@pytest.mark.parametrize("kind", ["SGD", "Adam-fused", "FusedAdam"])
@pytest.mark.parametrize("api", ["scaler", "O1"])
@on_ranks(2)
def test_inf_in_the_part_of_one_rank_skips_on_both(api, kind):
    """What one rank alone can see."""
    model = fully_sharded()
    loop = Loop(model, kind, api)
    before = weights(model)

    def spoil():
        if RANK == 1:
            model[2].weight.grad.to_local()[0, 0] = torch.inf

    if api == "scaler":
        loop.backward(loop.loss(0))
        spoil()
    else:
        with loop.session.scale_loss(loop.loss(0), loop.optimizer) as scaled:
            scaled.backward()
            spoil()
    loop.step()
    assert (loop.moved, loop.scales, loop.norms) == ([False], [START / 2], [float("inf")])
    # The rank that has it names it.
    name = "2.weight" if api == "O1" else "param_groups[0][2]"
    assert loop.culprits == [[name] if RANK == 1 else []]
    loop.end()
    assert distance(before, weights(model)) == 0


@runs(("scaler", "FusedAdam"), ("O1", "SGD"), ("O1", "FusedAdam"), ("O5", "FusedAdam"))
@on_ranks(2)
def test_a_run_resumes_from_the_state_dicts_of_torch(api, kind):
    """A run that is saved and loaded in the middle, by torch.distributed.checkpoint's state dicts, against a whole."""
    expected = Loop(fully_sharded(api=api), kind, api).run().end()
    model = fully_sharded(api=api)
    loop = Loop(model, kind, api).run(last=3)
    saved = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, loop.optimizer))
    scale = (loop.scaler or loop.session).state_dict()
    loop.end()

    model = fully_sharded(api=api)
    loop = Loop(model, kind, api)
    model.load_state_dict(saved)
    set_optimizer_state_dict(model, loop.optimizer, state)
    (loop.scaler or loop.session).load_state_dict(scale)
    loop.run(first=3).end()
    assert distance(weights(model), weights(expected.model)) == 0.0
    assert loop.scales == expected.scales[3:]
    kinds = {type(v).__name__ for s in loop.optimizer.state.values() for v in s.values() if v.dim() > 0}
    assert kinds == {"DTensor"}


@pytest.mark.parametrize(
    ("api", "synchronized", "tolerance"),
    [("scaler", True, EXACT), ("O1", True, FP16), ("O1", False, FP16), ("O2", False, FP16)],
)
@on_ranks(2)
def test_accumulation(api, synchronized, tolerance):
    """Four micro-batches, of which the last one alone is reduced over the ranks unless ``synchronized``."""
    model = fully_sharded(api=api)
    loop = Loop(model, "SGD", api)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        for i in range(4):
            last = i == 3
            model.set_requires_gradient_sync(last or synchronized)
            delay = {} if api == "scaler" else {"delay_unscale": not last}
            loop.backward(loop.loss(step, slice(i, i + 1)) / 4, **delay)
        loop.step()
    assert_trained(loop.end(), alone("SGD", api), tolerance)


@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"master_weights": "split"}, {"write_back": "kahan"}, {}], ids=str
)
@on_ranks(2)
def test_16_bit_parameters_with_what_the_optimizer_keeps(options):
    models = [mlp().bfloat16(), fully_sharded(torch.bfloat16)]
    for model in models:
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            # The same on each rank: sums over the ranks round nothing off.
            model(data(step, False).bfloat16()).float().square().mean().backward()
            optimizer.step()
    assert distance(*map(weights, models)) == 0.0


ZERO = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "FusedAdam": (optimizers.FusedAdam, {"lr": 0.01}),
    "FusedAdam-masters": (optimizers.FusedAdam, {"lr": 0.01, "master_weights": True}),
}


@runs(("scaler", "AdamW"), ("scaler", "FusedAdam"), ("O1", "AdamW"), ("O1", "Adam-fused"), ("O5", "FusedAdam-masters"))
@on_ranks(2)
def test_zero_redundancy_optimizer(api, kind):
    """The state of the optimizer on the ranks, against all of it on each, under DistributedDataParallel."""
    make, options = ZERO[kind]
    at_level = {"master_weights": False} if api == "O5" else {}

    def run(optimizer_of):
        model = mlp()
        loop = Loop(model, optimizer_of(model.parameters()), api, **at_level)
        loop.model = DistributedDataParallel(model)
        return loop.run()

    twin = run(lambda params: make(params, **options))
    loop = run(lambda params: ZeroRedundancyOptimizer(params, optimizer_class=make, **options))
    # Each has the state of some of four parameters; the first has it all once it is consolidated.
    kept = all_ranks(len([p for p in loop.model.parameters() if loop.optimizer.optim.state.get(p)]))
    assert sum(kept) == 4
    assert all(kept)
    loop.optimizer.consolidate_state_dict(to=0)
    if RANK == 0:
        expected, state = (o.state_dict()["state"] for o in (twin.optimizer, loop.optimizer))
        assert len(state) == 4
        for i, entries in expected.items():
            assert distance(*(map(torch.as_tensor, s.values()) for s in (state[i], entries))) == 0.0
    assert_trained(loop.end(), twin.end(), 0.0)


@pytest.mark.parametrize("kind", ["SGD", "FusedAdam"])
@on_ranks(2)
def test_fsdp1_with_a_process_group(kind):
    """Its shards are plain tensors: inf in the part of one rank."""
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    optimizer = KINDS[kind](model.parameters())
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    moved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(data(step, True)).square().mean()).backward()
        if step == OVERFLOW_AT and RANK == 1:
            next(model.parameters()).grad[0] = torch.inf
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        moved.append(distance(before, list(model.parameters())) > 0)
    assert (moved, scaler.get_scale()) == (MOVED, START / 2)


# --- clipping, and collectives ----------------------------------------------------------------------------------------


@pytest.mark.full(but=4)
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("which", [slice(0, 2), slice(0, 3), slice(0, 4)], ids=["split", "replicas", "plain"])
@on_ranks(2)
def test_clipping_by_the_norm_of_whole_tensors(which, order):
    """Of DTensors, and of these with replicas and with plain tensors, beside torch's."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((5, 3), (1,), (4,), (2, 2))][which]
    layouts = [[Shard(0)], [Shard(0)], [Replicate()], None][which]
    ours, plain = (
        [
            nn.Parameter(distribute_tensor(value, flat_mesh(), layout) if distributed and layout else value.clone())
            for value, layout in zip(values, layouts, strict=True)
        ]
        for distributed in (True, False)
    )
    for p in (*ours, *plain):
        p.grad = p.detach() * 2
    expected, norm = nn.utils.clip_grad_norm_(plain, 1.0, order), clip_grad_norm_(ours, 1.0, order)
    assert type(norm) is torch.Tensor
    assert abs(norm.item() / expected.item() - 1) < EXACT
    assert distance([whole(p.grad) for p in ours], [p.grad for p in plain]) < EXACT


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@on_ranks(2)
def test_clipping_by_the_norm_of_all_stages(order):
    """Each rank has other parameters, and the second some of no elements and no gradients, as experts may be."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), (2, 2), (0,))]
    stages = [values[:1], values[1:]]
    for level in ("O0", "O5"):
        whole, params = nn.ParameterList(map(torch.clone, values)), nn.ParameterList(map(torch.clone, stages[RANK]))
        clipped = []
        for group, model in ((None, whole), (dist.group.WORLD, params)):
            session, optimizer = AmpSession(), FusedAdam(model.parameters())
            session.initialize(model, optimizer, opt_level=level, verbosity=0)
            with session.scale_loss(torch.ones(()), optimizer):
                for p in model:
                    p.grad = (p.detach() * 2) if p.numel() != 4 or p.dim() == 2 else None
            masters = session.master_params(optimizer)
            norm = clip_grad_norm_(masters, 0.5, order, process_group=group)
            clipped.append((norm, [m.grad for m in session.master_params(optimizer)]))
            session.reset()
        (expected, grads), (norm, mine) = clipped
        assert abs(norm.item() / expected.item() - 1) < EXACT
        assert_same([g is None for g in mine], [g is None for g in (grads[:1], grads[1:])[RANK]])
        here = (grads[:1], grads[1:])[RANK]
        with_elements = [(g, of) for g, of in zip(mine, here, strict=True) if g is not None and g.numel()]
        assert distance(*map(list, zip(*with_elements, strict=True))) < EXACT


@on_ranks(2)
def test_clipping_over_meshes_and_stages():
    """Ranks of a mesh, each beside a stage of its own: here a group of one."""
    mine = dist.new_subgroups(1)[0]
    params = [nn.Parameter(distribute_tensor(torch.ones(5, 3), flat_mesh(), [Shard(0)]))]
    params[0].grad = params[0].detach() * 2
    assert abs(clip_grad_norm_(params, 1.0, process_group=mine).item() - 2 * 15**0.5) < EXACT
    for value, kind in ((dist.GroupMember.NON_GROUP_MEMBER, AmpValueError), ([0, 1], AmpTypeError)):
        before = params[0].grad.to_local().clone()
        with pytest.raises(kind, match="process_group"):
            clip_grad_norm_(params, 0.1, process_group=value)
        with pytest.raises(
            AmpValueError, match=r"norm_type is -1.0, expected a number above 0 or 'inf' where ranks join"
        ):
            clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, -1.0, process_group=mine)
        assert torch.equal(before, params[0].grad.to_local())


def collectives(model, clips=True, api="O0") -> list[int]:
    """How many are ours at the end of a block, in clipping and in a step."""
    loop = Loop(model, "FusedAdam", api, shares=False)
    block = loop.session.scale_loss(loop.loss(0), loop.optimizer)
    block.__enter__().backward()
    with counted_all_reduce() as at_exit:  # not those of fully_shard in the backward
        block.__exit__(None, None, None)
    with counted_all_reduce() as in_clip:
        if clips:
            expected = nn.utils.get_total_norm([whole(p.grad) for p in model.parameters()]).item()
            assert abs(clip_grad_norm_(model.parameters(), MAX_NORM).item() - expected) < 2e-7 * expected
    with counted_all_reduce() as in_step:
        loop.optimizer.step()
    assert loop.session.outcome(loop.optimizer).stepped
    loop.end()
    return [len(at_exit), len(in_clip), len(in_step)]


@on_ranks(2)
def test_a_block_and_clipping_are_a_collective_each():
    assert collectives(fully_sharded(), api="O1") == [1, 1, 0]
    assert collectives(tensor_parallel()) == [1, 1, 0]
    assert collectives(fully_sharded(), clips=False) == [1, 0, 0]


@on_ranks(2)
def test_ranks_agree_at_the_end_of_the_block():
    """The scale, a state and a scale that is loaded then need no other call."""
    model = fully_sharded()
    loop = Loop(model, "FusedAdam", "O0")
    for step, expected in ((OVERFLOW_AT, START / 2), (0, START / 2)):
        loop.backward(loop.loss(step))
        assert loop.session.loss_scale() == expected
    loop.step()  # the inf of the first block is in the sum, or there is none left: skipped all the same
    loop.optimizer.zero_grad()
    loop.backward(loop.loss(OVERFLOW_AT))
    named = loop.session.get_state_dict(model, loop.optimizer)["amp"]
    state = loop.session.state_dict(masters=True)
    assert named["loss_scaler0"]["loss_scale"] == state["loss_scaler0"]["loss_scale"] == START / 4
    loop.session.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
    loop.step()
    assert loop.moved == [False, False]
    assert loop.session.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 7}
    loop.end()


@on_ranks(2)
def test_a_block_finds_a_scale_that_differs():
    """Rank 1 alone has loaded another scale: the end of the block raises on every rank, and no step follows."""
    model = fully_sharded()
    loop = Loop(model, "FusedAdam", "O0").run(last=1)
    if RANK == 1:
        loop.session.load_state_dict({"loss_scaler0": {"loss_scale": 1000.5, "unskipped": 1}})
    loop.optimizer.zero_grad()
    with pytest.raises(AmpRankError) as caught:
        loop.backward(loop.loss(1))
    assert str(caught.value).startswith("the end of an amp.scale_loss block: loss scales differ between ranks.")
    assert f"rank {RANK} of a group of 2 ranks [0, 1], and has {[START, 1000.5][RANK]}." in str(caught.value)
    with pytest.raises(AmpError, match="gradients are incomplete"):
        loop.optimizer.step()
    loop.end()


@on_ranks(2)
def test_sums_still_to_be_made_of_which_a_rank_lacks_its_part():
    """The first rank has no gradient of one weight, and nobody has one of another."""
    model = distribute_module(mlp(), flat_mesh())
    loop = Replicated(model, "FusedAdam", "O0").run(last=1)
    lacks, nobody_has = model[0].weight, model[2].weight
    loop.optimizer.zero_grad()
    with loop.session.scale_loss(loop.loss(1), loop.optimizer) as scaled:
        scaled.backward()
        assert str(lacks.grad.placements) == "(Partial(sum),)"
        theirs = all_ranks(lacks.grad.to_local().double() / loop.session.loss_scales[0].value())[1:]
        if RANK == 0:
            lacks.grad = None
        nobody_has.grad = None
    assert distance([lacks.grad.to_local()], [sum(theirs)]) < EXACT
    before = weights(model)
    loop.step()
    loop.end()
    assert nobody_has.grad is None
    assert [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)] == [True, True, False, True]
    mine = [p.to_local() for p in model.parameters()]
    assert max(distance(mine, other) for other in all_ranks(mine)) == 0.0
    assert len(set(all_ranks(loop.norms[-1]))) == 1


def meshes_of_two_dimensions(calls):
    """Meshes on four ranks. A fifth has no part in them."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return

    def over_tensor_parallelism():
        return fully_sharded(model=tensor_parallel(mesh["tp"]), mesh=mesh["dp"])

    assert collectives(over_tensor_parallelism()) == [calls, calls, 0]
    assert collectives(fully_sharded(model=mlp(8), mesh=mesh)) == [calls, calls, 0]
    assert collectives(fully_sharded(model=mlp(8), mesh=mesh["dp"])) == [1, 1, 0]
    for kind in ("SGD", "FusedAdam"):
        loop = Loop(over_tensor_parallelism(), kind, "O0", shares=False, overflow_on="all").run().end()
        assert_trained(loop, alone(kind, "O0", mlp(8)), EXACT)
    model = over_tensor_parallelism()
    loop = Loop(model, "FusedAdam", "O0", shares=False, overflow_on=None)
    with loop.session.scale_loss(loop.loss(0), loop.optimizer) as scaled:
        scaled.backward()
        if RANK == 3:
            model[0].weight.grad.to_local()[0, 0] = torch.inf
    loop.step()
    loop.end()
    assert (loop.moved, loop.scales, loop.norms) == ([False], [START / 2], [float("inf")])


@pytest.mark.full
@on_ranks(4)
def test_meshes_of_two_dimensions_on_four_ranks():
    meshes_of_two_dimensions(calls=1)


@pytest.mark.full
@on_ranks(5)
def test_meshes_of_two_dimensions_on_four_of_five_ranks():
    """Where the default group has other ranks, too, each dimension needs a collective."""
    meshes_of_two_dimensions(calls=2)


# --- what cannot work says what does ----------------------------------------------------------------------------------


@on_ranks(2)
def test_masters_that_cannot_be_are_refused_and_nothing_changes():
    """Other refusals of sharded models are in test_fsdp_levels.py."""
    low, plain = fully_sharded(torch.float16, api="O2"), mlp()
    zero = ZeroRedundancyOptimizer(plain.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    for level, model, optimizer, message in (
        ("O2", low, torch.optim.SGD(low.parameters(), lr=0.1), '"0.weight" is a DTensor of torch.float16'),
        *((level, plain, zero, "ZeroRedundancyOptimizer would step it.*Use O1 or O4") for level in ("O2", "O5")),
    ):
        session, dtypes = AmpSession(), [p.dtype for p in model.parameters()]
        session.allow_incoming_model_not_fp32 = True
        with pytest.raises(AmpError, match=message):
            session.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert [p.dtype for p in model.parameters()] == dtypes
        assert "step" not in vars(optimizer)


@on_ranks(2)
def test_norms_of_replicas_are_whole():
    # The same on every rank: nothing about a norm is missing here.
    replicas, single = distribute_module(mlp(), flat_mesh()), mlp()
    for model in (replicas, single):
        for p in model.parameters():
            p.grad = p.detach() / 2
        optimizers.FusedLAMB(model.parameters(), lr=0.1).step()
    assert distance(weights(replicas), weights(single)) == 0.0
