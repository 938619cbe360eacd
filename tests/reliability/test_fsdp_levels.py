"""O2 and O5 of a model sharded over one rank: as without sharding, and what each refusal leaves."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as fsdp
from kit import backward, batch, same, start
from kit import uneven as mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ampctx
from ampctx import AmpError, AmpTypeError, AmpValueError
from ampctx.amp import AmpSession
from ampctx.distributed import fully_shard, mixed_precision_policy

DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}


def of_all_kinds() -> nn.Sequential:
    """BatchNorm, which O2 and O5 keep in fp32, and a layer for ``keep_fp32``."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False)),
    )
    return rounded(model)


def rounded(model):
    """In a process group amp's masters start from the rounded weights, and shards do not."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().half())
    return model


def shard(model, mesh, layers=(0, 2), **options):
    for layer in (*(model[i] for i in layers), model):
        fsdp.fully_shard(layer, mesh=mesh, **options)
    return model


def shard_mlp(mesh, level="O5", layers=(0, 2)):
    return shard(mlp(), mesh, layers, mp_policy=mixed_precision_policy(level))


def policy(dtype, reduce_dtype=torch.float32, **options) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, **options)


BF16 = policy(torch.bfloat16)


class Run:
    """Steps of a session of its own, with an overflow in the fourth where the scale moves."""

    def __init__(self, model, level, **options):
        self.session = AmpSession()
        self.model, self.optimizer = start(self.session, level, "FusedAdam", model, **options)

    def steps(self, first=0, last=6):
        for step in range(first, last):
            out = self.model(batch(step, 8, 5))
            assert out.dtype == torch.float32 or self.session.policy.opt_level in ("O1", "O4")
            overflows = step == 3 and self.session.loss_scales[0].dynamic
            loss = out.square().mean() * (torch.inf if overflows else 1)
            backward(self.session, loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def end(self) -> list[torch.Tensor]:
        """The weights, statistics and loss scale."""
        scale = torch.tensor(self.session.loss_scales[0].value())
        self.session.reset()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        return [*whole(self.model), scale]


def whole(model) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    return [getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for t in found]


def units(model) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def policies(model) -> list[MixedPrecisionPolicy]:
    """All that torch keeps: of states, groups and parameters. Their names are private; see ``fsdp_units``."""
    states = [fsdp.fully_shard.state(unit) for unit in units(model)]
    groups = [
        group for s in states for group in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if group
    ]
    holders = [*(group for group in groups if hasattr(group, "mp_policy")), *(p for g in groups for p in g.fsdp_params)]
    return [*(s._mp_policy for s in states), *(holder.mp_policy for holder in holders)]


def hooks(model) -> list[int]:
    return [len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_hooks) for m in model.modules()]


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["ampctx", "hand"])
@pytest.mark.parametrize("level", DTYPES)
def test_a_sharded_model_trains_as_one_that_is_not(mesh, level, by):
    expected = Run(of_all_kinds(), level, keep_fp32="5.0").steps().end()
    model = of_all_kinds()
    if by == "ampctx":
        fully_shard(model, level, mesh=mesh, units=[model[0], nn.LayerNorm], keep_fp32="5.0")
        assert [name for name, m in model.named_modules() if isinstance(m, FSDPModule)] == [*("", "0", "1", "4", "5.0")]
    else:
        fsdp.fully_shard(model[5][0], mesh=mesh, mp_policy=policy(torch.float32))
        fsdp.fully_shard(model[1], mesh=mesh)
        shard(model, mesh, (0, 4), mp_policy=mixed_precision_policy(level))
    assert same(Run(model, level, keep_fp32="5.0").steps().end(), expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_other_levels_get_no_policy(mesh, level):
    assert mixed_precision_policy(level) == MixedPrecisionPolicy()
    model = fully_shard(of_all_kinds(), level, mesh=mesh, units=nn.Linear)
    assert len(units(model)) == 4
    assert {*policies(model)} == {MixedPrecisionPolicy()}
    assert same(Run(model, level).steps().end(), Run(of_all_kinds(), level).steps().end())


def test_a_grad_dtype_that_torch_drops_is_told(mesh, said):
    model = mlp()
    model[2].weight.grad_dtype = torch.bfloat16
    fully_shard(model, "O5", mesh=mesh)
    drops = model[2].weight.grad_dtype == torch.float32  # torch before 2.15
    fully_shard(mlp(), "O5", mesh=mesh)
    assert [("without their grad_dtype, so gradients of 2.weight get" in text) for text in said()] == [True] * drops


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_a_policy_of_the_level_is_taken_as_it_is(mesh, reduce_dtype):
    given = policy(torch.bfloat16, reduce_dtype)
    assert mixed_precision_policy("O5", reduce_dtype=reduce_dtype) == given
    model = shard(mlp(), mesh, mp_policy=given)
    run = Run(model, "O5").steps()
    assert {*policies(model)} == {given}
    run.end()
    assert {*policies(model)} == {given}


def test_outputs_are_those_of_the_level(mesh, session):
    """Also where the policy has other ones."""
    given = policy(torch.bfloat16, output_dtype=torch.bfloat16)
    expected = Run(shard_mlp(mesh), "O5").steps().end()
    assert same(Run(shard(mlp(), mesh, mp_policy=given), "O5").steps().end(), expected)
    model = shard_mlp(mesh)
    session.initialize(model, None, opt_level="O5", cast_model_outputs=torch.float16, verbosity=0)
    assert model(torch.ones(2, 5)).dtype == torch.float16
    session.reset()
    assert model(torch.ones(2, 5)).dtype == torch.bfloat16  # as before


def test_layers_of_one_unit_and_a_compiled_model(mesh, session):
    """fully_shard of a list is one unit. torch.compile names the model another way."""
    expected = Run(shard_mlp(mesh), "O5").steps().end()
    model = mlp()
    fsdp.fully_shard([model[0], model[2]], mesh=mesh, mp_policy=BF16)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=BF16)
    assert same(Run(model, "O5").steps().end(), expected)
    compiled = torch.compile(shard_mlp(mesh), backend="eager")
    session.initialize(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), opt_level="O5", verbosity=0)
    assert compiled(torch.ones(2, 5)).dtype == torch.float32


# --- reset and checkpoints --------------------------------------------------------------------------------------------


def test_initialize_again_after_reset(mesh):
    model = shard_mlp(mesh, "O2")
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    first = Run(model, "O2").steps().end()
    before = hooks(model)
    model.load_state_dict(state)
    assert same(Run(model, "O2").steps().end(), first)
    assert hooks(model) == before


def test_an_initialize_that_fails_later_leaves_nothing(mesh):
    model = shard_mlp(mesh, "O2")
    before = hooks(model)
    low = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    bad = [torch.optim.SGD([low], lr=0.1) for _ in range(2)]
    with pytest.raises(AmpError, match="in two optimizers"):
        AmpSession().initialize(model, bad, opt_level="O2", verbosity=0)
    assert hooks(model) == before


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 5))
    model.train()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_forward_without_backward_leaves_nothing_behind(mesh, level):
    """torch leaves the model itself gathered after it."""
    model = shard(mlp(), mesh, mp_policy=policy(torch.float16 if level == "O2" else torch.bfloat16))
    evaluate(model)
    run = Run(model, level).steps(last=2)
    before = copy.deepcopy(run.session.get_state_dict(model, run.optimizer))
    exported = run.session.master_state_dict(model)
    evaluate(model)
    after = run.session.get_state_dict(model, run.optimizer)
    assert same(after["model"].values(), before["model"].values())
    assert after["optim"].keys() == before["optim"].keys()
    evaluate(model)
    run.session.set_state_dict(model, run.optimizer, before)
    evaluate(model)
    assert same(run.session.master_state_dict(model).values(), exported.values())
    run.end()


# --- refusals ---------------------------------------------------------------------------------------------------------


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def only_layers(mesh):
    model = mlp()
    fsdp.fully_shard(model[0], mesh=mesh)
    return model


def ignoring(mesh):
    model = mlp()
    return shard(model, mesh, (0,), ignored_params={model[2].bias})


def by_layer(mesh, policies):
    """A policy for each of the layers and the model."""
    model = mlp()
    for module, one in zip((model[0], model[2], model), policies, strict=True):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=one)
    return model


def shard_norm(mesh, **options):
    return shard(with_norm(), mesh, **options)


def over_two_meshes(mesh):
    model = mlp()
    fsdp.fully_shard(model[0], mesh=mesh, mp_policy=BF16)
    return shard(model, init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")), (2,), mp_policy=BF16)


LINES = r'\n    fully_shard\(module, mesh=mesh, mp_policy=ampctx.distributed.mixed_precision_policy\("O5"\)\)'
ITSELF = "the unit of the model itself"
# How the model is made, the message, and options of initialize.
REFUSED = {
    "no policy": (lambda mesh: shard(mlp(), mesh),
        rf'the unit "0" has no mp_policy.*\n    model = ampctx.distributed.fully_shard\(model, "O5", mesh=.*{LINES}'),
    "another dtype": (partial(by_layer, policies=(BF16, policy(torch.float16), BF16)),
        rf'the unit "2" has a policy that casts "2.weight" to torch.float16.*{LINES}'),
    "fp32": (partial(by_layer, policies=(policy(torch.float32), BF16, BF16)),
        rf'the unit "0" has a policy that casts "0.weight" to torch.float32.*{LINES}'),
    "only outputs": (partial(by_layer, policies=(policy(None, output_dtype=torch.bfloat16), BF16, BF16)),
        rf'the unit "0" has a policy that does not cast "0.weight".*{LINES}'),
    "inputs in another dtype": (partial(by_layer, policies=(BF16, BF16, policy(torch.float16))),
        rf"{ITSELF} has a policy that casts its inputs to torch.float16.*{LINES}"),
    "several policies": (partial(by_layer, policies=(BF16, policy(torch.bfloat16, torch.bfloat16), BF16)),
        rf'the unit "0" and the unit "2" have several policies.*torch.float32 and in torch.bfloat16.*{LINES}'),
    "some have no policy": (
        partial(by_layer, policies=(MixedPrecisionPolicy(), policy(torch.bfloat16, torch.bfloat16), BF16)),
        rf'the unit "0" has no mp_policy.*{LINES}'),
    "in no unit": (only_layers, r'"2.weight" is in no unit of fully_shard'),
    "ignored": (ignoring, r'"2.bias" is in no unit of fully_shard'),
    "two meshes": (over_two_meshes,
        rf'the unit "0" is on the mesh \[0\], the unit "2" on the mesh \[\[0\]\]|{ITSELF} is on'),
    "BatchNorm": (partial(shard_norm, layers=(0,), mp_policy=BF16),
        rf'"1" stays in fp32, and shares {ITSELF} with "2.weight".*\n    fully_shard\(model.get_submodule\("1"\)'),
    "BatchNorm in 16 bits": (partial(shard_norm, layers=(0, 1, 2), mp_policy=BF16),
        r'"1.weight" stays in fp32, and the unit "1" casts it to torch.bfloat16. Leave mp_policy out'),
    "BatchNorm that is cast": (partial(shard_norm, layers=(0, 1)),
        r'keep_batchnorm_fp32=False would cast "1", and fully_shard casts no running statistics',
        {"keep_batchnorm_fp32": False}),
    "keep_fp32": (partial(shard_mlp, layers=()), rf'"2" stays in fp32, and shares {ITSELF} with "0.weight"',
        {"keep_fp32": "2"}),
    "no masters": (shard_mlp, r"O5 with master_weights=False does not work.*leave master_weights at None",
        {"master_weights": False}),
    "O3": (shard_mlp, r"O3 with master_weights=False does not work.*Use O2 or O5", {"opt_level": "O3"}),
    "tensor parallelism alone": (
        lambda mesh: parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()}),
        r"DTensor of torch.float32.*With tensor parallelism alone use O1 or O4"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused_by_name_and_nothing_changes(mesh, why):
    make, message, *options = REFUSED[why]
    model = make(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = policies(model), hooks(model), [id(p) for p in model.parameters()], whole(model)
    with pytest.raises(AmpError) as caught:
        AmpSession().initialize(model, optimizer, **{"opt_level": "O5", "verbosity": 0, **dict(*options)})
    assert re.search(message, str(caught.value), flags=re.S), str(caught.value)
    assert "ampctx explain sharded" in str(caught.value)
    after = policies(model), hooks(model), [id(p) for p in model.parameters()]
    assert after == before[:3]
    assert same(whole(model), before[3])
    assert "step" not in vars(optimizer)


# --- other versions of torch ------------------------------------------------------------------------------------------


def test_a_torch_without_the_private_attributes(mesh, monkeypatch):
    """Units of ampctx's making still work; the message leads there."""
    expected = Run(shard_mlp(mesh), "O5").steps().end()
    model, of_ours = shard_mlp(mesh), fully_shard(mlp(), "O5", mesh=mesh, units=nn.Linear)
    monkeypatch.delattr(fsdp.fully_shard, "state")
    lines = re.escape('    model = ampctx.distributed.fully_shard(model, "O5", mesh=mesh, units=[...])')
    with pytest.raises(
        AmpError, match=rf"(?s)policy of the unit .* in torch {re.escape(torch.__version__)}.*\n{lines}"
    ):
        AmpSession().initialize(model, None, opt_level="O5", verbosity=0)
    assert same(Run(of_ours, "O5").steps().end(), expected)


@pytest.mark.parametrize("place", ["mp_policy", "_mp_policy"])
def test_a_torch_that_keeps_policies_elsewhere(mesh, monkeypatch, place):
    model = shard_mlp(mesh)
    before = policies(model)
    state = fsdp.fully_shard.state(model[2])
    with monkeypatch.context() as other_torch:
        other_torch.delattr(state if place == "_mp_policy" else state._fsdp_param_group.fsdp_params[0], place)
        with pytest.raises(AmpError, match='cannot read the policy of the unit "2"'):
            AmpSession().initialize(model, None, opt_level="O5", verbosity=0)
    assert policies(model) == before


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"opt_level": "O3"}, AmpValueError, "opt_level O3 keeps no fp32 weights"),
        ({"opt_level": "05"}, AmpValueError, "Unexpected optimization level '05'"),
        ({"reduce_dtype": "fp32"}, AmpTypeError, "reduce_dtype is 'fp32', expected a floating torch.dtype"),
        ({"reduce_dtype": torch.int32}, AmpTypeError, "reduce_dtype is torch.int32"),
        ({"units": "layers.*"}, AmpTypeError, "units .*expected a module class or a module"),
        ({"units": nn.Conv2d}, AmpValueError, "units has a Conv2d that is no module of the model"),
        ({"units": [nn.Linear(1, 1)]}, AmpValueError, "units has a Linear that is no module of the model"),
        ({"keep_fp32": "head"}, AmpValueError, "keep_fp32: no module of the models has a name that matches 'head'"),
        ({"mp_policy": BF16}, AmpTypeError, "opt_level sets mp_policy"),
        ({"model": None}, AmpTypeError, "model must be a torch.nn.Module, got NoneType"),
    ],
)
def test_invalid_arguments_of_fully_shard(mesh, options, kind, message):
    arguments = {"model": mlp(), "opt_level": "O5", "mesh": mesh, **options}
    model = arguments.pop("model")
    with pytest.raises(kind, match=message):
        ampctx.distributed.fully_shard(model, **arguments)
    assert model is None or units(model) == []


def test_a_model_is_sharded_once(mesh):
    model = fully_shard(with_norm(), "O5", mesh=mesh)
    before = policies(model)
    with pytest.raises(AmpError, match="the model is sharded already"):
        fully_shard(model, "O2", mesh=mesh)
    assert policies(model) == before
