"""Each heading of docs/errors.md is a message, and what the page calls its cause raises or logs it."""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampctx
from ampctx import amp
from ampctx.__main__ import explain, main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "errors.md").read_text()
HEADINGS = re.findall(r"^## (.*)$", PAGE, flags=re.M)
# No message, or one of a device or an installation; where the other tests have them.
ELSEWHERE = {
    "The loss scale goes to 0, or the loss is nan",  # guide/debug_nans.md's program
    "are unsafe to autocast",  # of torch on CUDA; that of ampctx is below
    "ampctx runs on plain torch on CUDA, slower",  # test_extension.py
    "differ between ranks",  # reliability/test_rank_safety.py
    "ampctx: out of memory",  # ops/test_out_of_memory.py
    "No module named 'apex', cannot import name 'amp' from 'apex', No module named 'amp_C'",  # test_apex_errors.py
    "is not supported by ampctx",  # apex/test_refused.py
    "ampctx-apex does not hide another apex",  # test_ampctx_apex.py
}
X = torch.ones(8, 4)


@pytest.fixture(autouse=True)
def no_session():
    amp.reset()
    yield
    amp.reset()


def training(level: str = "O1", model: nn.Module | None = None, **options):
    model = model or nn.Linear(4, 2)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, **options)


def backward(model, optimizer, factor=1.0):
    with amp.scale_loss(factor * model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


def scaler_on_fp16_model(scaler):
    model = nn.Linear(4, 2).half()
    scaler.scale(model(X.half()).float().sum()).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def fp32_tensor_meets_fp16():
    torch.bmm(torch.ones(2, 2, 2).half(), torch.ones(2, 2, 2))


def layer_called_from_outside():
    training("O2", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))[0][0](X)


def scaled_model_and_optimizer(scaler, of_the_model=True):
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    scaler.scale(model(X).sum()).backward()
    return torch.optim.SGD((model if of_the_model else other).parameters(), lr=0.1)


def optimizer_of_another_model():
    scaler = torch.amp.GradScaler("cpu")
    scaler.step(scaled_model_and_optimizer(scaler, of_the_model=False))


def update_without_step():
    scaler = torch.amp.GradScaler("cpu")
    scaled_model_and_optimizer(scaler)
    scaler.update()


def repeated(name, scaler):
    optimizer = scaled_model_and_optimizer(scaler)
    getattr(scaler, name)(optimizer)
    getattr(scaler, name)(optimizer)


def unscaled_after_the_step(scaler):
    optimizer = scaled_model_and_optimizer(scaler)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def loss_not_scaled(scaler):
    model = nn.Linear(4, 2)
    model(X).sum().backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def overflow():
    model, optimizer = training("O2")
    backward(model, optimizer, 1e4)
    optimizer.step()


def no_initialize():
    model = nn.Linear(4, 2)
    backward(model, torch.optim.SGD(model.parameters(), lr=0.1))


def wrapped_too_early():
    amp.initialize(nn.DataParallel(nn.Linear(4, 2)), opt_level="O2")


def initialized_twice():
    _, optimizer = training("O4")
    amp.initialize(nn.Linear(4, 2), optimizer, opt_level="O4")


def optimizer_made_anew():
    model, _ = training()
    backward(model, torch.optim.SGD(model.parameters(), lr=0.1))


def block_names_one_of_two():
    left, right = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (left, right)]
    [left, right], optimizers = amp.initialize([left, right], optimizers, opt_level="O1")
    backward(nn.Sequential(left, right), optimizers[0])
    optimizers[1].step()


def backward_of_the_loss_itself():
    model, optimizer = training("O2")
    loss = model(X).sum()
    with amp.scale_loss(loss, optimizer):
        loss.backward()


def no_block():
    model, optimizer = training()
    model(X).sum().backward()
    optimizer.step()


def loss_id_forgotten():
    model, optimizer = training(num_losses=2)
    for _ in range(101):
        backward(model, optimizer)
        optimizer.step()


def no_with():
    model, optimizer = training()
    amp.scale_loss(model(X).sum(), optimizer).backward()


def sigmoid_in_16_bits():
    nn.BCELoss()(torch.sigmoid(training("O1", nn.Linear(4, 1))[0](X)), torch.ones(8, 1))


def scheduler_after_a_skip(scaler):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(model(X * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()


def scaler_over_masters():
    model, optimizer = training("O2")
    scaler = ampctx.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    scaler.unscale_(optimizer)


def clipped_after_the_block():
    model, optimizer = training("O5")
    backward(model, optimizer)
    ampctx.clip_grad_norm_(model.parameters(), 1.0)


def clipped_in_a_hook():
    model, optimizer = training()
    model.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    backward(model, optimizer)


def one_bad_batch_in_three():
    model, optimizer = training(max_loss_scale=2.0)
    for i in range(9):
        backward(model, optimizer, 1.0 if i % 3 else float("inf"))
        optimizer.step()
        optimizer.zero_grad()


def layer_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4")
    backward(model, optimizer)
    optimizer.step()


def stepped_past_the_masters():
    model = nn.Linear(4, 2)
    kept = list(model.parameters())

    class Keeps(torch.optim.SGD):
        def step(self):
            for p in kept:
                p.data.sub_(p.data)

    model, optimizer = amp.initialize(model, Keeps(kept, lr=0.1), opt_level="O2")
    for _ in range(2):
        backward(model, optimizer, 1e-3)
        optimizer.step()


def skipped_without_amp():
    model = nn.Linear(4, 2)
    optimizer = ampctx.optimizers.FusedSGD(model.parameters(), lr=0.1, skip_nonfinite=True)
    model(X * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.outcome.skipped


def stepped_inside_the_block():
    model, optimizer = training()
    with amp.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()


def masters_rounded_off():
    model, optimizer = training("O2")
    model.load_state_dict({name: p.detach().float() for name, p in model.named_parameters()})
    amp.load_state_dict(amp.state_dict())
    backward(model, optimizer)


def average_of_a_16_bit_model():
    model, optimizer = training("O2")
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        backward(model, optimizer, 1e-3)
        optimizer.step()
        average.update_parameters(model)


def written_through_data():
    model, optimizer = training("O2")
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
        model.weight.data.mul_(0.5)


class Masks(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.eye(8, 2) > 0, -1e9)


class Scatters(nn.Linear):
    def forward(self, x):
        return torch.zeros(1, 2).index_add_(0, torch.zeros(8, dtype=torch.long), super().forward(x))


class Distances(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, x)


def state_of_a_disabled_scaler():
    state = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    ampctx.GradScaler("cpu").load_state_dict(state)


SCALERS = (lambda: torch.amp.GradScaler("cpu"), lambda: ampctx.GradScaler("cpu"))
TWICE = "has already been called"
CASES: list[tuple[str, Callable[[], object]]] = [
    *(("Attempting to unscale FP16 gradients", lambda s=s: scaler_on_fp16_model(s())) for s in SCALERS),
    ("expected scalar type Half but found Float", fp32_tensor_meets_fp16),
    ("mat1 and mat2 must have the same dtype", lambda: training("O2")[0].forward(X)),
    ("mat1 and mat2 must have the same dtype", layer_called_from_outside),
    ("must have the same scalar type", lambda: training("O1", Scatters(4, 2))[0](X)),
    ("value cannot be converted to type c10::Half without overflow", lambda: training("O1", Masks(4, 2))[0](X)),
    ("not implemented for 'Half'", lambda: training("O2", Distances(4, 2))[0](X)),
    ("No inf checks were recorded for this optimizer", optimizer_of_another_model),
    ("got an unexpected keyword argument 'offload'", lambda: ampctx.optimizers.FusedAdam([X], offload="cpu")),
    ("No inf checks were recorded prior to update.", update_without_step),
    *(
        case
        for s in SCALERS
        for case in (
            (f"unscale_() {TWICE} on this optimizer since the last update()", lambda s=s: repeated("unscale_", s())),
            (f"step() {TWICE} since the last update().", lambda s=s: repeated("step", s())),
            ("unscale_() is being called after step().", lambda s=s: unscaled_after_the_step(s())),
            ("Attempted step but _scale is None", lambda s=s: loss_not_scaled(s())),
        )
    ),
    ("Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to", overflow),
    ("Invoked 'with amp.scale_loss', but internal Amp state has not been initialized", no_initialize),
    ("Found param with type torch.HalfTensor, expected fp32", lambda: training("O2", nn.Linear(4, 2).half())),
    ("the model is under amp already", lambda: amp.initialize(training("O2")[0], opt_level="O2")),
    ("Incoming model is an instance of torch.nn.parallel", wrapped_too_early),
    ("A given optimizer should only be passed through amp.initialize once", initialized_twice),
    ("did not go through amp.initialize", optimizer_made_anew),
    ("has left scaled gradients in", block_names_one_of_two),
    ("no backward went through the scaled loss", backward_of_the_loss_itself),
    ("no scale_loss block has named this optimizer", no_block),
    ("no scale_loss block has used loss_id", loss_id_forgotten),
    ("amp.scale_loss is a context manager", no_with),
    ("amp.initialize returned a pair, the model and the optimizer", lambda: training()(X)),
    ("amp.initialize returned a pair, the model and the optimizer", lambda: training().train()),
    ("binary_cross_entropy got a 16-bit argument", sigmoid_in_16_bits),
    ("Detected call of lr_scheduler.step() before optimizer.step()", lambda: scheduler_after_a_skip(SCALERS[0]())),
    ("a GradScaler was given an optimizer that is under amp with fp32 master weights", scaler_over_masters),
    ("has no gradient, and clipping would not reach it", clipped_after_the_block),
    ("was written through .data", written_through_data),
    ("see gradients multiplied by the loss scale", clipped_in_a_hook),
    ("the loss scale fell to", one_bad_batch_in_three),
    ("got gradients and are in no optimizer", layer_replaced),
    ("has changed no fp32 master weight", stepped_past_the_masters),
    ("The source state dict is empty", state_of_a_disabled_scaler),
    ("GradScaler is enabled, but CUDA is not available", lambda: torch.amp.GradScaler("cuda")),
    ("Unexpected optimization level '02'", lambda: training("02")),
    ("steps skipped so far, for inf, nan or a large norm of gradients", skipped_without_amp),
    ("was called inside a scale_loss block", stepped_inside_the_block),
    ("the checkpoint has no fp32 master weights", masters_rounded_off),
    ("An average in 16 bits loses small changes", average_of_a_16_bit_model),
]


def told(cause: Callable[[], object], caplog) -> str:
    """All that the cause raises, warns of and logs, on one line; names of parameters and backticks left out."""
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        try:
            cause()
            raised = ""
        except Exception as error:
            raised = str(error)
    texts = [raised, *(str(warning.message) for warning in warned), *(r.getMessage() for r in caplog.records)]
    words = " ".join(" ".join(texts).split()).replace("`", "")
    return words.replace("Found param weight with", "Found param with")


@pytest.mark.parametrize(
    ("message", "cause"), CASES, ids=[f"{i}-{message[:40]}" for i, (message, _) in enumerate(CASES)]
)
def test_the_cause_tells_the_message(message, cause, caplog):
    assert message in PAGE
    if "CUDA is not available" in message and torch.cuda.is_available():
        pytest.skip("CUDA is available")
    assert message in told(cause, caplog)


def test_the_scaler_of_ampctx_does_not_cause_the_schedulers_warning(caplog):
    assert "lr_scheduler" not in told(lambda: scheduler_after_a_skip(ampctx.GradScaler("cpu")), caplog)


def test_every_heading_has_its_cause():
    assert {message for message, _ in CASES} | ELSEWHERE >= set(HEADINGS)
    assert set(HEADINGS) > ELSEWHERE


@pytest.mark.parametrize("message", sorted({*HEADINGS, *(message for message, _ in CASES)}))
def test_explain_prints_the_section_of_a_message(message, capsys):
    assert main(["explain", f"RuntimeError: {message}"]) == 0
    assert message in capsys.readouterr().out


SAYS = re.compile(r"(logger|warnings)\.warn(ing)?|warn|self\.(log\.)?(say|log)")
# Texts that others say for a function: what it returns or raises.
TEXTS_OF = {"f'amp: x'": "message", "f'torch.nn.utils.x'": "refuse_to_clip"}


def logged_texts():
    """All that ampctx warns of and logs, with x for what differs."""
    for path in sorted(Path(ampctx.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts = []
            if isinstance(node, ast.FunctionDef) and node.name in TEXTS_OF.values():
                texts = [ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
            elif isinstance(node, ast.Call) and SAYS.fullmatch(ast.unparse(node.func)):
                texts = [max(map(ast.unparse, node.args), key=len)]  # beside names and kinds
            for text in (re.sub(r"\{[^}]*\}|%[sd]", "x", text) for text in texts):
                if re.match("f?['\"]", text) and "torch deprecated" not in text and text not in TEXTS_OF:
                    yield text


def test_explain_knows_every_text_that_ampctx_logs():
    texts = [*logged_texts()]
    assert len(texts) > 25
    assert [text for text in texts if not explain(text)[0]] == []


WORDS = {
    "overflow": "Gradient overflow",
    "loss is nan": "The loss scale goes to 0",
    "ampctx: a few skipped steps are normal. The loss scale starts high": "Gradient overflow",
    "amp.load_state_dict was called before amp.initialize": "Invoked",
    "See docs/errors.md#has-left-scaled-gradients-in.": "has left scaled gradients in",
    "Unexpected optimization level '02'. Use the letter O. See docs/levels.md.": "Unexpected optimization level",
    "docs/guide/skip_bad_steps.md": "steps skipped so far",
    "out of memory": "ampctx: out of memory",
    "FSDP2 CPU offload optimizer": "got an unexpected keyword argument 'offload'",
    "adam offload slow": "got an unexpected keyword argument 'offload'",
    "mat1 and mat2 must have the same dtype, but got Float and Half": "expected scalar type Half",
}


@pytest.mark.parametrize("text", WORDS)
def test_explain_finds_what_users_type(text):
    is_known, found = explain(text)
    assert is_known
    assert found.startswith(WORDS[text])
    assert "](" not in found, "pages are not in a wheel"


def test_explain_takes_words_in_any_order_and_says_what_it_does_not_know(capsys):
    assert main(["explain", "expected", "scalar", "type", "Float", "but", "found", "BFloat16"]) == 0
    assert capsys.readouterr().out.startswith("expected scalar type Half but found Float")
    for text in ("an illegal memory access was encountered", ""):
        assert main(["explain", text]) == 1, text
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "No section about this message. The nearest:"
        assert {line.split('"')[1] for line in lines[1:]} < set(HEADINGS)
        assert len(lines) == 4
