"""The fp32 weights of a run can be exported: those that the optimizer steps, for plain torch without this library."""

import pytest
import torch
from kit import assert_same, every_level, mlp, start
from kit import train as train_with
from torch import nn

from ampctx import AmpTypeError


class Tied(nn.Module):
    """Weights that two modules share, batch norm, a buffer, a frozen weight, and a hook that renames an entry."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, tokens):
        return self.head(self.fixed(self.hidden(self.norm(self.embed(tokens))))) * self.temperature


def started(session, level, make="Adam-foreach", **options):
    torch.manual_seed(0)
    model, optimizer = start(session, level, make, Tied(), **options)
    go_on(session, model, optimizer)
    return model, optimizer


def go_on(session, model, optimizer):
    tokens = torch.arange(8).repeat(4)
    train_with(session, model, optimizer, 3, loss=lambda m, _: m(tokens).float().square().mean())


@every_level
def test_it_holds_the_masters_under_the_models_keys(session, level):
    model, optimizer = started(session, level)
    exported, shown = session.master_state_dict(model), model.state_dict()
    assert list(exported) == list(shown)
    assert exported._metadata == shown._metadata
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    masters = [p for p in session.master_params(optimizer) if p.requires_grad]
    for name, master in zip(trained, masters, strict=True):
        assert torch.equal(exported[name], master.float())
    assert torch.equal(exported["head.weight"], exported["embed.weight"])
    for name in exported.keys() - {*trained, "head.weight"}:
        assert torch.equal(exported[name], shown[name].float() if exported[name].is_floating_point() else shown[name])
    assert {v.dtype for v in exported.values()} == {torch.float32, torch.int64}
    # A state dict shows the masters by itself.
    assert all(torch.equal(exported[n], shown[n]) for n in trained)
    rounded = any(not torch.equal(exported[n], model.get_parameter(n)) for n in trained)
    assert rounded == (level in ("O2", "O5"))


@every_level
def test_it_loads_in_plain_torch_without_this_library(session, level, tmp_path):
    model, optimizer = start(session, level, "SGD-plain")
    train_with(session, model, optimizer, 3)
    torch.save(session.master_state_dict(model), tmp_path / "masters")
    session.reset()  # the model is in fp32 again, with the masters' values
    assert b"ampctx" not in (tmp_path / "masters").read_bytes()
    plain = mlp(seed=1)
    plain.load_state_dict(torch.load(tmp_path / "masters", weights_only=True))
    assert_same(plain.eval()(torch.ones(3, 4)), model.eval()(torch.ones(3, 4)))


def test_nothing_is_shared_with_the_run_and_ties_are_kept(session):
    model, optimizer = started(session, "O2")
    parameters, data = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    exported = session.master_state_dict(model)
    assert exported["head.weight"] is exported["embed.weight"]
    live = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *session.master_params(optimizer))}
    assert not any(value.requires_grad or value.data_ptr() in live for value in exported.values())
    before = {k: v.clone() for k, v in exported.items()}
    # Nor has the model changed.
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == data
    assert {p.dtype for p in parameters} == {torch.float16, torch.float32}
    go_on(session, model, optimizer)
    assert_same(dict(exported), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_in_another_type(session, level, dtype):
    model, _ = started(session, level)
    exact = session.master_state_dict(model)
    for name, value in session.master_state_dict(model, dtype=dtype).items():
        expected = exact[name].to(dtype) if exact[name].is_floating_point() else exact[name]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def test_fp64_entries_lose_nothing_by_default(session):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    session.initialize(model, opt_level="O1", verbosity=0)
    assert session.master_state_dict(model)["1.weight"].dtype == torch.float64
    assert session.master_state_dict(model, dtype=torch.float16)["1.weight"].dtype == torch.float16


def test_parts_and_wrappers_of_the_model(session):
    model, _ = started(session, "O2")
    exported = session.master_state_dict(model)
    part = session.master_state_dict(model.hidden)
    assert part
    assert all(torch.equal(v, exported[f"hidden.{k}"]) for k, v in part.items())
    wrapped = session.master_state_dict(nn.DataParallel(model))
    assert list(wrapped) == [f"module.{k}" for k in exported]
    assert all(torch.equal(v, exported[k.removeprefix("module.")]) for k, v in wrapped.items())


def test_without_initialize_it_is_the_models(session):
    model = nn.Linear(2, 2)
    exported = session.master_state_dict(model)
    assert torch.equal(exported["weight"], model.weight)
    assert exported["weight"].data_ptr() != model.weight.data_ptr()


def test_wrong_arguments(session):
    with pytest.raises(AmpTypeError, match="model must be a torch.nn.Module, got dict"):
        session.master_state_dict({})
    with pytest.raises(AmpTypeError, match="dtype is torch.int8, expected one of torch.float16"):
        session.master_state_dict(nn.Linear(1, 1), dtype=torch.int8)
    with pytest.raises(AmpTypeError, match="model must be a torch.nn.Module, got dict"):
        session.master_model({})
