"""Sparse, complex and double parameters, and double buffers: their gradients are unscaled, checked for inf and nan, and
give the right step, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from odd_models import OddModel, gradients, loss_of
from torch import nn

from ampctx import clip_grad_norm_
from ampctx.amp import AmpSession, GradScaler, master_params
from ampctx.optimizers import FusedAdam

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
LEVELS = ["O0", "O1", "O2", "O5"]
OPTIMIZERS = {
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=False),
    "SGD-foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=True),
    "Adam-plain": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.fixture
def session():
    session = AmpSession()
    yield session
    session.reset()


@optimizers
@pytest.mark.parametrize("level", LEVELS)
def test_complex_and_double_parameters_through_scale_loss(session, make, level):
    model = OddModel(with_complex=True)
    expected = model.exact()
    optimizer, reference = make(model.parameters()), make(expected)
    session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    assert model.cplx.dtype == torch.complex64
    for i in range(3):
        wanted = gradients(model, seed=i)
        with session.scale_loss(loss_of(list(model.parameters()), wanted), optimizer) as scaled:
            scaled.backward()
        loss_of(expected, wanted).backward()
        norms = [clip_grad_norm_(p, 1.0) for p in (master_params(optimizer), expected)]
        torch.testing.assert_close(norms[0].double(), norms[1].double(), rtol=1e-6, atol=0)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    for p, e in zip(master_params(optimizer), expected, strict=True):
        torch.testing.assert_close(p.detach().to(e.dtype), e.detach(), rtol=2e-5, atol=1e-5)


def test_a_double_parameter_and_buffer_keep_their_type_and_bits_where_nothing_is_cast(session):
    model = OddModel()
    running, start = model.running.clone(), model.fp64.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.initialize(model, optimizer, opt_level="O1", loss_scale=64.0, verbosity=0)
    wanted = gradients(model, seed=0)
    with session.scale_loss(loss_of(list(model.parameters()), wanted), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.running, running)
    place = [name for name, _ in model.named_parameters()].index("fp64")
    assert torch.equal(model.fp64, start - 0.5 * wanted[place])


NON_FINITE = {"inf": float("inf"), "-inf": -float("inf"), "nan": float("nan")}


@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("name", ["real", "imag", "fp64"])
@pytest.mark.parametrize("through", ["scale_loss", "GradScaler"])
def test_one_non_finite_number_skips_the_step(session, through, name, value):
    model = OddModel(with_complex=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def spoil() -> None:
        grad = model.fp64.grad if name == "fp64" else getattr(model.cplx.grad, name)
        grad[-1] = value

    loss = loss_of(list(model.parameters()), gradients(model, seed=0))
    if through == "scale_loss":
        session.initialize(model, optimizer, opt_level="O1", verbosity=0)
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            spoil()
        optimizer.step()
        assert session.skipped_steps(optimizer) == 1
    else:
        scaler = GradScaler("cpu", init_scale=64.0)
        scaler.scale(loss).backward()
        spoil()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@optimizers
def test_grad_scaler_with_complex_and_double_parameters(make):
    model = OddModel(with_complex=True)
    expected = model.exact()
    optimizer, reference, scaler = make(model.parameters()), make(expected), GradScaler("cpu", init_scale=64.0)
    for i in range(3):
        wanted = gradients(model, seed=i)
        scaler.scale(loss_of(list(model.parameters()), wanted)).backward()
        loss_of(expected, wanted).backward()
        scaler.unscale_(optimizer)
        for parameters in (model.parameters(), expected):
            clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        reference.step()
        scaler.update()
        for o in (optimizer, reference):
            o.zero_grad()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach().to(e.dtype), e.detach(), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("blocks", [1, 2], ids=["once", "accumulated"])
def test_sparse_complex_gradients_keep_their_imaginary_part(session, level, blocks):
    z = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([z], lr=1.0)
    session.initialize(nn.ParameterList([z]), optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(blocks):
        with session.scale_loss(torch.zeros(()), optimizer):
            values = torch.full((3, 2), 8 + 16j, dtype=torch.complex64)
            z.grad = torch.sparse_coo_tensor([[0, 0, 2]], values, (4, 2), check_invariants=True)
    optimizer.step()
    assert z[:, 0].tolist() == [blocks * (-2 - 4j), 0, blocks * (-1 - 2j), 0]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("tokens", [[1, 1, 1, 4], [4]], ids=["duplicates", "one"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_embeddings_step_as_in_fp64(session, level, tokens, optimizer_class):
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    expected = nn.Embedding(6, 3, sparse=True, _weight=model.weight.detach().double().clone()).double()
    optimizer, reference = optimizer_class(model.parameters(), lr=0.1), optimizer_class(expected.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    weights = torch.arange(1.0, 4.0)
    for _ in range(2):
        with session.scale_loss((model(torch.tensor(tokens)).float() * weights).sum(), optimizer) as scaled:
            scaled.backward()
        (expected(torch.tensor(tokens)) * weights).sum().backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    (master,) = master_params(optimizer)
    torch.testing.assert_close(master.double(), expected.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [40000.0, -40000.0], ids=["up", "down"])
@pytest.mark.parametrize("dense_too", [False, True], ids=["alone", "with-dense"])
def test_uncoalesced_fp16_duplicates_whose_sum_overflows_are_found(session, value, dense_too):
    model = nn.ModuleDict({"table": nn.Embedding(4, 1, sparse=True)})
    if dense_too:
        model["head"] = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    with session.scale_loss(torch.zeros(()), optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weight, values = model["table"].weight, torch.full((2, 1), value).half()
        weight.grad = torch.sparse_coo_tensor([[1, 1]], values, (4, 1), check_invariants=True)
        assert weight.grad._values().isfinite().all()  # uncoalesced: values() refuses
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_what_cannot_be_stepped_says_so_and_changes_nothing(session, level):
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = FusedAdam(embedding.parameters(), lr=0.1)
    session.initialize(embedding, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    before = embedding.weight.detach().clone()
    with session.scale_loss(embedding(torch.tensor([1, 1])).sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match=r"FusedAdam does not support sparse gradients.*param_groups\[0\]"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
