"""``ampctx migrate --to torch``: forms of an O1 loop that are rewritten, and that they train as before."""

import json
import math

import pytest
import torch
from migrating import run
from torch_loops import INITIALIZE, PRINT, STEP, at_the_end, before_step, formed, torch_of

from ampctx import GradScaler

pytest.importorskip("libcst")

# One loop in many forms: what is replaced in PLAIN, and what the result must have.
FORMS = {
    "plain": ([], []),
    "clip master params": (
        before_step("    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)"),
        [
            "    scaler.unscale_(optimizer)\n"
            '    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)\n'
            "    scaler.step(optimizer)\n"
        ],
    ),
    "clip model parameters": (
        before_step("    nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
        ["    scaler.unscale_(optimizer)\n    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"],
    ),
    "clip under another name": (
        [
            (
                "for i in",
                "weights = list(model.parameters())\nclip = getattr(nn.utils, 'clip_' + 'grad_norm_')\nfor i in",
            ),
            *before_step("    clip(weights, 0.1)"),
        ],
        ["    scaler.unscale_(optimizer)\n    clip(weights"],
    ),
    "read gradients": (
        before_step("    for p in model.parameters():\n        p.grad.clamp_(-0.01, 0.01)"),
        ["    scaler.unscale_(optimizer)\n    for p in model.parameters():\n"],
    ),
    "model handed on after the step": (
        at_the_end("list(model.parameters())\n    print(loss.item())"),
        ["    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n"],
    ),
    "accumulation": (
        [
            ("    optimizer.zero_grad()\n", ""),
            ("    loss = criterion(", "    loss = 0.5 * criterion("),
            (STEP, "    if (i + 1) % 2 == 0:\n        optimizer.step()\n        optimizer.zero_grad()"),
        ],
        [
            "    if (i + 1) % 2 == 0:\n        scaler.step(optimizer)\n"
            "        scaler.update()\n        optimizer.zero_grad()\n"
        ],
    ),
    "accumulation, divided in the block, clipped": (
        [
            ("    optimizer.zero_grad()\n", ""),
            ("scale_loss(loss, ", "scale_loss(loss / 2, "),
            (
                STEP,
                "    if i % 2 == 1 or i + 1 == len(x):\n"
                "        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n"
                "        optimizer.step()\n        optimizer.zero_grad()",
            ),
        ],
        [
            "scaler.scale((loss / 2).float()).backward()",
            "1 == len(x):\n        scaler.unscale_(optimizer)\n        nn.utils",
        ],
    ),
    "static scale": (
        [("verbosity=0", "verbosity=0, loss_scale=128.0")],
        ["torch.amp.GradScaler(device_type, init_scale=128.0, growth_interval=2**31 - 1)"],
    ),
    "scale of 1": (
        [("verbosity=0", 'verbosity=0, loss_scale="1"')],
        ["torch.amp.GradScaler(device_type, enabled=False)"],
    ),
    "off": (
        [("verbosity=0", "enabled=False")],
        ["GradScaler(device_type, enabled=False)", "torch.autocast(device_type, dtype=torch.float16, enabled=False)"],
    ),
    "checkpoint": (
        at_the_end("print(loss.item())\nstate = amp.state_dict()\namp.load_state_dict(state)"),
        ["state = scaler.state_dict()\nscaler.load_state_dict(state)\n"],
    ),
    "names that are taken": (
        [("x, y = ", "scaler = device_type = None\nx, y = ")],
        ["amp_device_type = next(", "grad_scaler = torch.amp.GradScaler(amp_device_type)"],
    ),
    "output read later": (
        at_the_end("acc = (output.detach().argmax(1) == y).float().mean()\n    print(acc.item(), loss.item())"),
        ["acc = (output.detach()"],
    ),
    "continue": (
        [
            ("    with amp", "    if not math.isfinite(loss.item()):\n        continue\n    with amp"),
            ("import torch\n", "import math, torch\n"),
        ],
        ["    if not math.isfinite(loss.item()):\n        continue\n    # scaled\n    scaler.scale("],
    ),
    "a multi-line string in the forward": (
        [("    output = model(x)", '    output = model(x)\n    note = """a\nb"""\n    output = output * 1')],
        ['        note = """a\nb"""\n        output = output * 1'],
    ),
    "losses in a list": (
        [
            (
                "    with amp",
                "    parts = [loss]\n    parts.append(output.float().square().mean())\n"
                "    loss = sum(parts)\n    with amp",
            )
        ],
        ["        loss = sum(parts)\n    # scaled\n    scaler."],
    ),
    "train mode": (
        [("for i in range(8):\n", "for i in range(8):\n    model.train()\n")],
        ["    model.train()\n    optimizer.zero_grad()\n    with torch.autocast"],
    ),
    "in place": (
        [(INITIALIZE, "amp.initialize(model, optimizer, verbosity=0)")],
        ["\nscaler = torch.amp.GradScaler(device_type)"],
    ),
    "retain_graph": (
        [("scaled_loss.backward()", "scaled_loss.backward(retain_graph=True)")],
        ["backward(retain_graph=True)"],
    ),
    "zero after the step": (
        [("    optimizer.zero_grad()\n", ""), (STEP, f"{STEP}\n    print(0.5)\n    model.zero_grad()")],
        ["scaler.update()\n    print(0.5)\n    model.zero_grad()\n"],
    ),
    "zero for more rounds than are used": (
        [
            ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    if i < 9:\n"),
            (
                "    output = model(x)\n    # The loss.\n    loss = criterion(\n        output, y\n    )\n"
                "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        # scaled\n"
                "        scaled_loss.backward()\n    optimizer.step()\n",
                "        loss = criterion(model(x), y)\n"
                "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n"
                "        optimizer.step()\n",
            ),
        ],
        ["        scaler.step(optimizer)\n"],
    ),
    "continue before gradients are needed": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (
                STEP,
                "    if i % 2:\n        print(0.5)\n        continue\n"
                "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
                "    optimizer.step()\n    optimizer.zero_grad()",
            ),
        ],
        ["        continue\n    scaler.unscale_(optimizer)\n    nn.utils"],
    ),
    "a loop of its own is left": (
        before_step(
            "    for p in model.parameters():\n        if p.grad is None:\n            break\n"
            "        p.grad.clamp_(-0.01, 0.01)"
        ),
        ["    scaler.unscale_(optimizer)\n    for p in"],
    ),
    "level in a variable": (
        [('"O1"', "level"), ("for i in", "print(0.5)\nfor i in"), ("criterion =", 'level = "O1"\ncriterion =')],
        ['if level not in ("O0", "O1"):\n    raise ValueError(', 'GradScaler(device_type, enabled=level == "O1")'],
    ),
    "scale in a variable": (
        [
            ("verbosity=0", "verbosity=0, loss_scale=static, enabled=on"),
            ("criterion =", 'on, static = 1, "128.0"\ncriterion ='),
        ],
        ["**scale_options, enabled=bool(on))", "dtype=torch.float16, enabled=scaler.is_enabled())"],
    ),
    "loss from a helper": (
        [
            ("    output = model(x)\n", ""),
            ("    loss = criterion(\n        output, y\n    )", "    loss = compute(model, x, y)"),
            ("for i in", "def compute(net, x, y):\n    return criterion(net(x), y)\nfor i in"),
        ],
        ["    with torch.autocast(device_type, dtype=torch.float16):\n        loss = compute(model, x, y)\n"],
    ),
    "output goes into a call": (
        [
            *at_the_end("print(accuracy(output, y))\n    print(loss.item())"),
            ("for i in", "def accuracy(o, y):\n    return (o.argmax(1) == y).float().mean().item()\nfor i in"),
        ],
        ["    with torch.autocast(device_type, dtype=torch.float16):\n        print(accuracy(output, y))\n    print"],
    ),
    "output goes into a matmul": (
        [
            *at_the_end("z = output.detach()\n    z = z @ w\n    print(z.float().sum().abs().item(), loss.item())"),
            ("for i in", "w = torch.randn(4, 4)\nfor i in"),
        ],
        ["    z = output.detach()\n    with torch.autocast(device_type, dtype=torch.float16):\n        z = z @ w\n"],
    ),
    "output is kept": (
        [
            *at_the_end("outputs.append(output)\n    print(loss.item())"),
            ("for i in", "outputs = []\nfor i in"),
            ("print(loss.item())\n", "print(loss.item())\nz = torch.cat(outputs)\n"),
        ],
        ["        outputs.append(output)\n", "float16):\n    z = torch.cat(outputs)\n"],
    ),
    "checkpoint in a function": (
        [("for i in", "def save():\n    return amp.state_dict()\nfor i in"), (PRINT, f"{PRINT}\n    save()")],
        ["    return scaler.state_dict()\n"],
    ),
    "module on a condition": (
        [
            ("from apex import amp", "try:\n    from apex import amp\nexcept ImportError:\n    amp = None"),
            (
                "for i in",
                "if amp is None:\n    raise ImportError('no apex')\nprint(1.0 if amp is not None else 2.0)\nfor i in",
            ),
        ],
        ["from torch import nn\n\ntorch.manual", "print(1.0 if True else 2.0)\n"],
    ),
    "below a condition": (
        [("model, optimizer = amp", "fp16 = 1\nif fp16:\n    model, optimizer = amp")],
        ["fp16 = 1\ndevice_type = next(", "GradScaler(device_type, enabled=bool(fp16))"],
    ),
    "last below a condition that sets the level": (
        [
            ("model, optimizer = amp", "fp16 = True\nif fp16:\n    level = 'O1'\n\n    model, optimizer = amp"),
            ('"O1"', "level"),
            ("for i in", "\n\nfor i in"),
        ],
        [
            "if fp16:\n    level = 'O1'\n",
            "\ndevice_type = next(",
            'GradScaler(device_type, enabled=bool(fp16 and level == "O1"))',
        ],
    ),
    "below nested conditions, with more in them": (
        [
            (
                "model, optimizer = amp",
                "fp16, n = True, 1\nif n == 2:\n    pass\nelif n:\n  if fp16:\n    model, optimizer = amp",
            ),
            ("for i in", "  print(0.5)\nfor i in"),
        ],
        ["enabled=bool(not (n == 2) and n and fp16))", "elif n:\n  print(0.5)\n"],
    ),
    "initialize in another function": (
        [
            (
                "model, optimizer = amp.initialize(model,",
                "def f(model, optimizer):\n    model, optimizer = amp.initialize(model,",
            ),
            ("for i in", "f(model, optimizer)\nfor i in"),
        ],
        ["    global device_type, scaler\n    device_type = next("],
    ),
    "guarded backward": (
        [
            ("model, optimizer = amp", "fp16 = True\nif fp16:\n    model, optimizer = amp"),
            ("    with amp.", "    if fp16:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()",
                "        scaled_loss.backward()\n    else:\n        loss.backward()",
            ),
        ],
        ["\n    scaler.scale(loss.float()).backward()\n    scaler.step"],
    ),
    "guarded backward with other branches": (
        [
            ("    with amp.", "    if i > 99:\n        loss.backward(retain_graph=True)\n    else:\n     with amp."),
            ("        # scaled\n        scaled_loss.backward()", "        scaled_loss.backward()\n     print(0.5)"),
        ],
        [
            "    scaler.scale(loss.float()).backward(retain_graph=True)\n",
            "    else:\n     scaler.scale(loss.float()).backward()\n",
        ],
    ),
    "first scale": (
        [("for i in", "amp._amp_state.loss_scalers[0]._loss_scale = 2**12\nfor i in")],
        ["GradScaler(device_type, init_scale=2**12)"],
    ),
    "a function that autocast casts anyway": (
        [("model, optimizer = amp", "amp.register_half_function(torch, 'einsum')\nmodel, optimizer = amp")],
        ["(64,))\n\ndevice_type = next("],
    ),
    "evaluation while gradients add up": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (STEP, "    if i % 2:\n        optimizer.step()\n        model.zero_grad()\n    evaluate(model)"),
            ("for i in", "def evaluate(net):\n    print(criterion(net(x), y).item())\nfor i in"),
        ],
        ["    if i % 2:\n        scaler.step(optimizer)\n"],
    ),
    "clipped while gradients add up": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (
                STEP,
                f"    nn.utils.clip_grad_norm_(model.parameters(), 0.1 + 0.0)\n    if i % 2:\n    {STEP}\n"
                "        model.zero_grad()",
            ),
        ],
        ["    nn.utils.clip_grad_norm_(model.parameters(), (0.1 + 0.0) * scaler.get_scale())\n"],
    ),
    "items and means": (
        [
            ("scale_loss(loss,", 'scale_loss(losses["total"].mean(),'),
            ("    with amp", '    losses = {"total": loss}\n    with amp'),
        ],
        ['    scaler.scale(losses["total"].mean().float()).backward()'],
    ),
    "several losses": (
        [
            ("verbosity=0", "num_losses=2"),
            ("(loss, optimizer) as", "(loss, optimizer, loss_id=0) as"),
            (
                STEP,
                "    penalty = 0.1 * criterion(model(x * 2), y)\n"
                "    with amp.scale_loss(penalty, optimizer, loss_id=1) as scaled_loss:\n"
                "        scaled_loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
                "    optimizer.step()",
            ),
        ],
        [
            "    scaler.scale(penalty.float()).backward()\n    scaler.unscale_(optimizer)\n    nn.utils",
            "    with torch.autocast(device_type, dtype=torch.float16):\n        penalty = 0.1",
        ],
    ),
    "two blocks while gradients add up": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (
                STEP,
                "    penalty = 0.1 * criterion(model(x * 2), y)\n"
                "    with amp.scale_loss(penalty, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
                "    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n    print(norm.item())\n"
                "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()",
            ),
        ],
        ['for p in group["params"]], 0.1 * scaler.get_scale()) / scaler.get_scale()\n    print(norm'],
    ),
    "norm within an expression": (
        [
            ("    optimizer.zero_grad()\n", ""),
            (
                STEP,
                "    print(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())\n"
                "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()",
            ),
        ],
        [
            "    print((nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale()) "
            "/ scaler.get_scale()).item())"
        ],
    ),
    "nested plain backwards": (
        [
            ("model, optimizer = amp", "fp16 = True\nif fp16:\n    model, optimizer = amp"),
            ("for i in", "def no_sync():\n    return torch.enable_grad()\nfor i in"),
            ("    with amp.", "    if fp16:\n     with amp."),
            (
                "        # scaled\n        scaled_loss.backward()",
                "        scaled_loss.backward()\n    else:\n        if i % 2:\n            loss.backward()\n"
                "        else:\n            with no_sync():\n                loss.backward()",
            ),
        ],
        ["                scaler.scale(loss.float()).backward()\n    scaler.step"],
    ),
    "initialize for evaluation": (
        [("for i in", "teacher = nn.Linear(8, 4)\nteacher = amp.initialize(teacher, opt_level='O1')\nfor i in")],
        ["teacher = nn.Linear(8, 4)\nfor i in"],
    ),
    "models in a list": (
        [
            (INITIALIZE, "nets, optimizer = amp.initialize([model], optimizer, verbosity=0)"),
            ("for i in", "model = nets[0]\nfor i in"),
        ],
        ["scaler = torch.amp.GradScaler(device_type)\nnets = [model]  # casts\n"],
    ),
    "the scale is read": (
        [(PRINT, "print(amp._amp_state.loss_scalers[0]._loss_scale, loss.item())")],
        ["print(scaler.get_scale(), loss.item())"],
    ),
    "optimizer comes back from a function": (
        [("for i in", "def load(m, o):\n    return m, o\nmodel, optimizer = load(model, optimizer)\nfor i in")],
        ["    scaler.step(optimizer)\n"],
    ),
    "no import torch": (
        [("import torch\n", "from torch import manual_seed, optim, randint, randn\n"), ("torch.", "")],
        ["import torch\nfrom torch import manual_seed"],
    ),
    "FusedSGD": (
        [
            ("from apex import amp", "from apex import amp\nfrom apex.optimizers import FusedSGD"),
            ("torch.optim.SGD(", "FusedSGD("),
            ("lr=0.3, momentum=0.9", "0.3, 0.9, materialize_master_grads=False"),
        ],
        ["optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)\n"],
    ),
    "nothing to unscale, nothing to zero": (
        [("verbosity=0", 'verbosity=0, loss_scale="1"'), ("    optimizer.zero_grad()\n", "")],
        ["torch.amp.GradScaler(device_type, enabled=False)"],
    ),
}


@pytest.mark.full(but=30)
@pytest.mark.parametrize(("replacements", "expected"), FORMS.values(), ids=FORMS)
def test_forms_of_the_loop(tmp_path, replacements, expected):
    after = torch_of(tmp_path, formed(replacements)).after
    for part in expected:
        assert part in after, after


@pytest.mark.full
def test_they_train_as_before(tmp_path):
    """All forms in one process before, under apex's names, and in one after, without."""
    before, after = {}, {}
    for name, (replacements, _) in FORMS.items():
        before[name] = formed(replacements)
        after[name] = torch_of(tmp_path, before[name]).after
    code = (
        "import contextlib, io, json, sys\n"
        "{setup}\n"
        "losses = {{}}\n"
        "for name, source in json.load(open(sys.argv[1])).items():\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        exec(compile(source, name, 'exec'), {{'__name__': '__main__'}})\n"
        "    {undo}\n"
        "    losses[name] = [float(w) for w in out.getvalue().split() if w[:1].isdigit()]\n"
        "print(json.dumps(losses))\n"
    )
    curves = []
    for sources, setup, undo in [
        (before, "import ampctx.compat.apex; from ampctx import amp", "amp.reset()"),
        (after, "sys.modules['apex'] = sys.modules['ampctx'] = None", "pass"),
    ]:
        path = tmp_path / "sources.json"
        path.write_text(json.dumps(sources))
        result = run("-c", code.format(setup=setup, undo=undo), path)
        assert result.returncode == 0, result.stderr
        curves.append(json.loads(result.stdout))
    for name in FORMS:
        old, new = curves[0][name], curves[1][name]
        assert len(old) == len(new) >= 8, name
        assert len(set(old)) > 2, name
        # Both run Linear in fp16. What else is cast may differ, by 2**-11 relative a rounding; eight steps at a
        # learning rate of 0.3 let that grow by less than an order of magnitude.
        for a, b in zip(old, new, strict=True):
            assert math.isclose(a, b, rel_tol=1e-2), (name, old, new)


def test_old_checkpoints_are_read_by_what_the_report_names(tmp_path):
    result = torch_of(tmp_path, formed(FORMS["checkpoint"][0]))
    assert "use ampctx.GradScaler, which also reads apex's format" in result.findings[-1].message
    state = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}}
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 1024.0
    with pytest.raises(KeyError):
        torch.amp.GradScaler("cpu").load_state_dict(state)
