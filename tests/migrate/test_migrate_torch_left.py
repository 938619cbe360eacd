"""``ampctx migrate --to torch``: loops that are left as they are, and the reasons."""

import pytest
from migrating import ROOT, migrated
from torch_loops import CLIP, INITIALIZE, PRINT, STEP, before_step, formed

pytest.importorskip("libcst")

PAGE = (ROOT / "docs" / "to_torch_amp.md").read_text()

LEFT = {
    "O2": ([('"O1"', '"O2"')], "line 11: torch.amp has no equivalent of opt_level='O2'"),
    "bounds of the scale": (
        [("verbosity=0", "min_loss_scale=1.0")],
        "torch.amp has no equivalent of min_loss_scale=1.0",
    ),
    "strange scale": ([("verbosity=0", 'loss_scale="fast"')], "loss_scale='fast'"),
    "enabled is no bool": ([("verbosity=0", "enabled=1")], "enabled=1"),
    "scale of nan": ([("verbosity=0", 'loss_scale="nan"')], "loss_scale='nan'"),
    "all names taken": (
        [("for i in", "scaler = grad_scaler = amp_grad_scaler = 1\nfor i in")],
        "the names scaler, grad_scaler, amp_grad_scaler are all taken",
    ),
    "unknown arguments": ([("verbosity=0", "**options")], "cannot match the arguments of amp.initialize"),
    "several optimizers": (
        [("initialize(model, optimizer,", "initialize(model, [optimizer, other],")],
        "not assigned back to model, optimizer, other",
    ),
    "optimizers in a dict": (
        [("amp.initialize(model, optimizer,", 'amp.initialize(model, parts["optimizer"],')],
        "not called with variables for its optimizers",
    ),
    "models in a dict": (
        [("amp.initialize(model, optimizer,", 'amp.initialize(parts["model"], optimizer,')],
        "not called with variables for its models",
    ),
    "no optimizer": (
        [("model, optimizer = amp.initialize(model, optimizer,", "model = amp.initialize(model,")],
        "amp.initialize is not called with an optimizer",
    ),
    "other result": ([("model, optimizer = amp", "net, optimizer = amp")], "not assigned back to model, optimizer"),
    "initialize twice": (
        [("for i in", "model, optimizer = amp.initialize(model, optimizer)\nfor i in")],
        "line 12: a second call of amp.initialize with an optimizer",
    ),
    "branches that take turns": (
        [
            ("    with amp.", "    if i % 2:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()\n    optimizer.step()",
                "        scaled_loss.backward()\n     optimizer.step()\n    else:\n"
                "     with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
                "     optimizer.step()",
            ),
        ],
        r"found 2 calls of optimizer.step\(\), expected one",
    ),
    "branches on an attribute that changes": (
        [
            ("criterion =", "class S: pass\nstate = S()\ndef switch():\n    state.on = 0\ncriterion ="),
            ("    with amp.", "    if state.on:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()\n    optimizer.step()",
                "        scaled_loss.backward()\n     optimizer.step()\n    else:\n"
                "     with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
                "     optimizer.step()",
            ),
        ],
        r"found 2 calls of optimizer.step\(\), expected one",
    ),
    "branches on the length of a list": (
        [
            ("criterion =", "queue = []\ncriterion ="),
            ("    with amp.", "    queue.append(i)\n    if len(queue) > 4:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()\n    optimizer.step()",
                "        scaled_loss.backward()\n     optimizer.step()\n    else:\n"
                "     with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
                "     optimizer.step()",
            ),
        ],
        r"found 2 calls of optimizer.step\(\), expected one",
    ),
    "a backward that only some ways have": (
        [
            ("    with amp.", "    if fp16:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()",
                "        scaled_loss.backward()\n    else:\n        if i:\n            loss.backward()",
            ),
        ],
        "a branch beside amp.scale_loss has no backward",
    ),
    "zero between two blocks": (
        [
            (
                STEP,
                "    optimizer.zero_grad()\n    penalty = criterion(model(x), y)\n"
                "    with amp.scale_loss(penalty, optimizer) as s:\n        s.backward()\n    optimizer.step()",
            )
        ],
        "gradients are zeroed between backward and step",
    ),
    "scale of another loss": (
        [(PRINT, "print(amp._amp_state.loss_scalers[1].loss_scale())")],
        "uses apex.amp._amp_state.loss_scalers, which torch.amp lacks",
    ),
    "options of FusedAdam": (
        [
            ("from apex import amp", "import apex\nfrom apex import amp"),
            ("torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)", "apex.optimizers.FusedAdam(p, amsgrad=on)"),
        ],
        "torch.optim has no equivalent of amsgrad=on",
    ),
    "delay_unscale": ([("(loss, optimizer) as", "(loss, optimizer, delay_unscale=True) as")], "delay_unscale=True"),
    "two contexts": ([("with amp.", "with open(f), amp.")], "is not the only context of a with statement"),
    "not with": (
        [("with amp.scale_loss(loss, optimizer) as", "block = amp.scale_loss(loss, optimizer)\n    with block as")],
        "is not the only context",
    ),
    "loss is a call": ([("scale_loss(loss,", "scale_loss(reduce(loss),")], "the loss is neither a variable"),
    "other optimizer": (
        [("scale_loss(loss, optimizer)", "scale_loss(loss, other)")],
        "not called for optimizer alone",
    ),
    "more in the block": (
        [("        scaled_loss.backward()", "        scaled_loss.backward()\n        print(1)")],
        "the block of amp.scale_loss holds more than scaled_loss.backward()",
    ),
    "scaled loss used later": (
        [("print(loss.item())", "print(scaled_loss)")],
        "scaled_loss is used outside of the block",
    ),
    "another backward": (
        [("    optimizer.step()", "    penalty.backward()\n    optimizer.step()")],
        "a second backward",
    ),
    "autograd.grad": (
        [("    optimizer.step()", "    torch.autograd.grad(loss, x)\n    optimizer.step()")],
        "torch.autograd.grad",
    ),
    "loss from a helper": (
        [
            ("    output = model(x)\n", ""),
            ("    loss = criterion(\n        output, y\n    )", "    loss = compute(x, y)"),
        ],
        r"found no call of model\(...\) in this block that leads to the loss",
    ),
    "loss from outside of the loop": (
        [("for i in range(8):", "output = model(x)\nfor i in range(8):"), ("    output = model(x)\n", "")],
        r"no call of model\(...\)",
    ),
    "no step": ([("    optimizer.step()\n", "")], r"found 0 calls of optimizer.step\(\), expected one"),
    "two steps": ([("    optimizer.step()", "    optimizer.step()\n    optimizer.step()")], "2 calls"),
    "closure": ([("optimizer.step()", "optimizer.step(closure)")], "takes a closure"),
    "result of the step": ([("    optimizer.step()", "    r = optimizer.step()")], "its result is used"),
    "step on one line with others": (
        [("    optimizer.step()", "    optimizer.step(); y = y")],
        "not a statement on its own line",
    ),
    "step before": (
        [
            ("    optimizer.step()\n", ""),
            ("    optimizer.zero_grad()", "    optimizer.step()\n    optimizer.zero_grad()"),
        ],
        "comes before amp.scale_loss",
    ),
    "step on a condition that calls": (
        [("    optimizer.step()", "    if ready():\n        optimizer.step()")],
        r"the condition around optimizer.step\(\) calls a function",
    ),
    "step in an else": (
        [("    optimizer.step()", "    if i:\n        pass\n    else:\n        optimizer.step()")],
        "nor in an if there",
    ),
    "step in a loop": ([("    optimizer.step()", "    for _ in y:\n        optimizer.step()")], "nor in an if there"),
    "step after the loop": (
        [("    optimizer.step()\n", ""), ("    print(loss.item())\n", "optimizer.step()\n")],
        "gradients are zeroed between backward and step",
    ),
    "step in a function": (
        [("    optimizer.step()", "    step()"), ("for i in", "def step():\n    optimizer.step()\nfor i in")],
        "another function uses optimizer",
    ),
    "optimizer assigned again": ([("for i in", "optimizer = other\nfor i in")], "optimizer is assigned again"),
    "optimizer in the forward": ([("criterion(\n", "criterion(optimizer,\n")], "the forward uses optimizer"),
    "function in the forward": ([("criterion(\n", "(lambda a, b: a.sum())(\n")], "the forward defines a function"),
    "output is kept in an attribute": (
        [("print(loss.item())", "store.outputs.append(output)")],
        r"line 23: output may be in 16 bits here.*Pass output.float\(\)",
    ),
    "output decides": (
        [("print(loss.item())", "if accuracy(output, y):\n        break")],
        "output may be in 16 bits here",
    ),
    "output is returned": (
        [
            ("model, optimizer = amp.initialize(model, optimizer,", "amp.initialize(model, optimizer,"),
            ("for i in range(8):\n", "def step(i):\n"),
            ("print(loss.item())", "return output, loss"),
        ],
        "output may be in 16 bits here",
    ),
    "below a condition that calls": (
        [("model, optimizer = amp", "if ready():\n    model, optimizer = amp")],
        "amp.initialize runs on a condition that calls a function",
    ),
    "the model moves on the condition of initialize": (
        [
            ("model, optimizer = amp", "if fp16:\n  model.cuda()\n  loop = range(8)\n  model, optimizer = amp"),
            ("for i in range(8):\n", "  amp.load_state_dict(state)\nfor i in loop:\n"),
        ],
        "must run before the scaler is made",
    ),
    "a branch without a backward": (
        [
            ("    with amp.", "    if fp16:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()",
                "        scaled_loss.backward()\n    elif slow:\n"
                "        engine(loss)\n    else:\n        loss.backward()",
            ),
        ],
        "a branch beside amp.scale_loss has no backward",
    ),
    "a branch with another loss": (
        [
            ("    with amp.", "    if fp16:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()",
                "        scaled_loss.backward()\n    else:\n        penalty.backward()",
            ),
        ],
        "a second backward",
    ),
    "arguments of DistributedDataParallel": (
        [
            ("for i in", "model = apex.parallel.DistributedDataParallel(model, num_allreduce_streams=2)\nfor i in"),
            ("from apex import amp", "import apex\nfrom apex import amp"),
        ],
        "torch has no equivalent of the argument num_allreduce_streams=2",
    ),
    "zero_grad before the step": (
        [("    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()")],
        "gradients are zeroed between backward and step",
    ),
    "gradients read by a function of the file while they add up": (
        [
            (STEP, "    evaluate(model)\n    if i % 2:\n        optimizer.step()"),
            ("for i in", "def evaluate(net):\n    print(net[0].weight.grad)\nfor i in"),
        ],
        "where they are now scaled",
    ),
    "gradients read after the step": (
        [("print(loss.item())", "print(model[0].weight.grad)")],
        "where they are now scaled",
    ),
    "gradients read while they add up": (
        [("    optimizer.step()", "    log(model)\n    if i % 2:\n        optimizer.step()")],
        "where they are now scaled",
    ),
    "gradients read by other names while they add up": (
        [("    optimizer.step()", "    log(weights)\n    if i % 2:\n        optimizer.step()")],
        "where they are now scaled",
    ),
    "checkpoint before": (
        [("model, optimizer = amp", "amp.load_state_dict(s)\nmodel, optimizer = amp")],
        "may not have run",
    ),
    "checkpoint with a destination": (
        [("print(loss.item())", "amp.state_dict({})")],
        "has arguments that torch's lacks",
    ),
    "masters of another": ([("print(loss.item())", "list(amp.master_params(other))")], "not called for optimizer"),
    "private name": (
        [("print(loss.item())", "amp._amp_state")],
        "line 23 uses apex.amp._amp_state, which torch.amp lacks",
    ),
    "private attribute": (
        [("print(loss.item())", "optimizer._amp_stash")],
        "line 23 uses private or dynamically imported apex names",
    ),
    "casts of functions": (
        [("criterion = ", "criterion = amp.float_function("), ("EntropyLoss()", "EntropyLoss())")],
        "float_function",
    ),
    "other names of apex": (
        [
            ("from apex import amp", "from apex import amp\nfrom apex.optimizers import FusedAdam"),
            ("criterion =", "FusedAdam\ncriterion ="),
        ],
        "line 9 uses apex.optimizers.FusedAdam, which must go first",
    ),
    "star": ([("from apex import amp", "from apex import amp\nfrom apex.amp import *")], "imports everything"),
    "autocast already": (
        [("    output = model(x)", "    with torch.autocast('cpu'):\n        output = model(x)")],
        "already uses autocast",
    ),
    "torch is a variable": ([("for i in", "def f(torch):\n    pass\nfor i in")], "uses torch as a variable"),
    "no initialize": ([(INITIALIZE, "pass")], "amp.initialize is not called in this file"),
    "never zero": (
        [("    optimizer.zero_grad()\n", "")],
        r"line \d+: found no unconditional optimizer.zero_grad\(\) between",
    ),
    "zero before the loop": (
        [("    optimizer.zero_grad()\n", ""), ("for i in", "optimizer.zero_grad()\nfor i in")],
        "found no unconditional optimizer.zero_grad",
    ),
    "zero once in an outer loop": (
        [
            (
                "for i in range(8):\n    optimizer.zero_grad()\n",
                "for j in y:\n  optimizer.zero_grad()\n  for i in y:\n",
            ),
        ],
        "found no unconditional optimizer.zero_grad",
    ),
    "zero on a condition": (
        [("    optimizer.zero_grad()", "    if i % 3 == 0:\n        optimizer.zero_grad()")],
        "found no unconditional optimizer.zero_grad",
    ),
    "zero on another condition than the step": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (STEP, "    if i % 2:\n        optimizer.step()\n    if i % 4:\n        optimizer.zero_grad()"),
        ],
        "found no unconditional optimizer.zero_grad",
    ),
    "zero of another": (
        [("    optimizer.zero_grad()", "    other.zero_grad()")],
        "found no unconditional optimizer.zero_grad",
    ),
    "zero as a part of an expression": (
        [("    optimizer.zero_grad()", "    i and optimizer.zero_grad()")],
        "found no unconditional optimizer.zero_grad",
    ),
    "continue before the zero": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (STEP, "    optimizer.step()\n    if i:\n        continue\n    optimizer.zero_grad()"),
        ],
        "found no unconditional optimizer.zero_grad",
    ),
    "continue between unscale_ and step": (
        before_step(f"{CLIP}    if norm > 9:\n        continue"),
        r"line \d+: continue between scaler.unscale_, .* and scaler.step and update",
    ),
    "break between unscale_ and step": (
        before_step(f"{CLIP}    for p in y:\n        pass\n    else:\n        break"),
        "break between scaler.unscale_",
    ),
    "raise between unscale_ and step": (
        before_step(f"{CLIP}    if norm > 9:\n        raise ValueError(norm)"),
        "raise between scaler.unscale_",
    ),
    "continue after an error between unscale_ and step": (
        before_step(
            "    try:\n        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
            "    except RuntimeError:\n        continue"
        ),
        "continue between scaler.unscale_",
    ),
    "continue in a block between unscale_ and step": (
        [
            (
                STEP,
                f"    if i % 2:\n    {CLIP}        with open(f):\n            while y:\n                break\n"
                "            continue\n        optimizer.step()",
            )
        ],
        "line 27: continue between scaler.unscale_",
    ),
    "errors are suppressed": (
        [
            ("for i in", "with contextlib.suppress(RuntimeError):\n  for i in"),
            *((old, f"  {old}") for old in ("    optimizer.zero_grad()", "    output = model(x)\n")),
            (
                "    # The loss.\n    loss = criterion(\n        output, y\n    )\n",
                "      loss = criterion(output, y)\n",
            ),
            ("    with amp.", "      with amp."),
            (STEP, f"  {CLIP}      optimizer.step()"),
            ("    print(loss.item())", "      print(loss.item())"),
        ],
        "suppresses exceptions between scaler.unscale_ and scaler.step",
    ),
    "another name for the optimizer": (
        [("for i in", "opt = optimizer\nopt.step()\nfor i in")],
        "line 12: optimizer gets a second name",
    ),
    "the model moves": ([("for i in", "model.cuda()\nfor i in")], "model may move to another device"),
    "gradients read after the step, while they add up": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (STEP, "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n    log(model)"),
        ],
        "gradients may be read before the step, where they are now scaled",
    ),
}


@pytest.mark.full(but=24)
@pytest.mark.parametrize(("replacements", "reason"), LEFT.values(), ids=LEFT)
def test_what_is_not_understood_is_left_with_a_reason(tmp_path, replacements, reason):
    source = formed(replacements)
    result = migrated(tmp_path, source, "torch")
    assert result.after == source
    found = [f for f in result.findings if f.name.startswith("apex.amp")]
    assert found
    for finding in found:
        assert finding.status == "person"
        assert pytest.raises(Exception, match=reason).matches(Exception(finding.message)), finding.message
        page, _, section = finding.link.partition("#")
        assert page == "docs/to_torch_amp.md"
        assert f"\n## {section.replace('-', ' ').capitalize()}\n" in PAGE
