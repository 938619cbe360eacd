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
# The test that has a program tell the message; no message, or one of a device or an installation has no text there.
ELSEWHERE = {
    "Attempting to unscale FP16 gradients": "amp/test_grad_scaler.py",
    "unscale_() has already been called on this optimizer since the last update()": "amp/test_grad_scaler_state.py",
    "step() has already been called since the last update()": "amp/test_grad_scaler_state.py",
    "unscale_() is being called after step()": "amp/test_grad_scaler_state.py",
    "No inf checks were recorded prior to update": "amp/test_grad_scaler_state.py",
    "The source state dict is empty": "amp/test_grad_scaler_state.py",
    "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to": "amp/test_scale_loss.py",
    "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized": "amp/test_scale_loss.py",
    "did not go through amp.initialize": "amp/test_scale_loss.py",
    "Incoming model is an instance of torch.nn.parallel": "amp/test_wrap_order.py",
    "A given optimizer should only be passed through amp.initialize once": "amp/test_initialize.py",
    "the model was sharded after amp.initialize": "amp/test_wrap_order.py",
    "has left scaled gradients in": "amp/test_misuse.py",
    "amp.scale_loss is a context manager": "amp/test_misuse.py",
    "a GradScaler was given an optimizer that is under amp with fp32 master weights": "amp/test_misuse.py",
    "no backward went through the scaled loss": "amp/test_hints.py",
    "no scale_loss block has named this optimizer": "amp/test_hints.py",
    "no scale_loss block has used loss_id": "amp/test_hints.py",
    "see gradients multiplied by the loss scale": "amp/test_hints.py",
    "the loss scale fell to": "amp/test_hints.py",
    "got gradients and are in no optimizer": "amp/test_hints.py",
    "has changed no fp32 master weight": "amp/test_hints.py",
    "An average in 16 bits loses small changes": "amp/test_hints.py",
    "binary_cross_entropy got a 16-bit argument": "amp/test_autocast.py",
    "was written through .data": "reliability/test_written_by_others.py",
    "was called inside a scale_loss block": "reliability/test_closures_and_sam.py",
    "the checkpoint has no fp32 master weights": "reliability/test_plain_checkpoints.py",
    "differ between ranks": "reliability/test_rank_safety.py",
    "is not supported by ampctx": "apex/test_refused.py",
    "The loss scale goes to 0, or the loss is nan": "",  # guide/debug_nans.md's program
    "are unsafe to autocast": "",  # of torch on CUDA; that of ampctx is above
    "ampctx runs on plain torch on CUDA, slower": "",  # test_extension.py
    "ampctx: out of memory": "",  # ops/test_out_of_memory.py
    "No module named 'apex', cannot import name 'amp' from 'apex', No module named 'amp_C'": "",  # test_apex_errors.py
    "ampctx-apex does not hide another apex": "",  # test_ampctx_apex.py
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


def scaled_model_and_optimizer(scaler, of_the_model=True):
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    scaler.scale(model(X).sum()).backward()
    return torch.optim.SGD((model if of_the_model else other).parameters(), lr=0.1)


def optimizer_of_another_model():
    scaler = torch.amp.GradScaler("cpu")
    scaler.step(scaled_model_and_optimizer(scaler, of_the_model=False))


def loss_not_scaled(scaler):
    model = nn.Linear(4, 2)
    model(X).sum().backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def scheduler_after_a_skip(scaler):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(model(X * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()


def clipped_after_the_block():
    model, optimizer = training("O5")
    with amp.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    ampctx.clip_grad_norm_(model.parameters(), 1.0)


def skipped_without_amp():
    model = nn.Linear(4, 2)
    optimizer = ampctx.optimizers.FusedSGD(model.parameters(), lr=0.1, skip_nonfinite=True)
    model(X * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.outcome.skipped


class Masks(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.eye(8, 2) > 0, -1e9)


class Scatters(nn.Linear):
    def forward(self, x):
        return torch.zeros(1, 2).index_add_(0, torch.zeros(8, dtype=torch.long), super().forward(x))


class Distances(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, x)


SCALERS = (lambda: torch.amp.GradScaler("cpu"), lambda: ampctx.GradScaler("cpu"))
CASES: list[tuple[str, Callable[[], object]]] = [
    (
        "expected scalar type Half but found Float",
        lambda: torch.bmm(torch.ones(2, 2, 2).half(), torch.ones(2, 2, 2)),
    ),
    ("mat1 and mat2 must have the same dtype", lambda: training("O2")[0].forward(X)),
    (
        "mat1 and mat2 must have the same dtype",  # a layer that is called from outside
        lambda: training("O2", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))[0][0](X),
    ),
    ("must have the same scalar type", lambda: training("O1", Scatters(4, 2))[0](X)),
    ("value cannot be converted to type c10::Half without overflow", lambda: training("O1", Masks(4, 2))[0](X)),
    ("not implemented for 'Half'", lambda: training("O2", Distances(4, 2))[0](X)),
    ("No inf checks were recorded for this optimizer", optimizer_of_another_model),
    *(("Attempted step but _scale is None", lambda s=s: loss_not_scaled(s())) for s in SCALERS),
    ("got an unexpected keyword argument 'offload'", lambda: ampctx.optimizers.FusedAdam([X], offload="cpu")),
    ("Found param with type torch.HalfTensor, expected fp32", lambda: training("O2", nn.Linear(4, 2).half())),
    ("the model is under amp already", lambda: amp.initialize(training("O2")[0], opt_level="O2")),
    ("amp.initialize returned a pair, the model and the optimizer", lambda: training()(X)),
    ("amp.initialize returned a pair, the model and the optimizer", lambda: training().train()),
    ("Detected call of lr_scheduler.step() before optimizer.step()", lambda: scheduler_after_a_skip(SCALERS[0]())),
    ("has no gradient, and clipping would not reach it", clipped_after_the_block),
    ("GradScaler is enabled, but CUDA is not available", lambda: torch.amp.GradScaler("cuda")),
    ("Unexpected optimization level '02'", lambda: training("02")),
    ("steps skipped so far, for inf, nan or a large norm of gradients", skipped_without_amp),
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


def test_every_heading_has_its_cause():
    """Here, or in a test that has these words."""
    assert {message for message, _ in CASES} | {*ELSEWHERE} >= set(HEADINGS)
    for message, file in ELSEWHERE.items():
        assert message in PAGE
        words = (Path(__file__).parent / file).read_text().replace("\\", "") if file else message
        assert message in " ".join(words.split()), f"{file} does not expect: {message}"


@pytest.mark.parametrize("message", sorted({*HEADINGS, *ELSEWHERE, *(message for message, _ in CASES)}))
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
    "docs/guide/skip_bad_steps.md": "steps skipped so far",
    "FSDP2 CPU offload optimizer": "got an unexpected keyword argument 'offload'",
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
