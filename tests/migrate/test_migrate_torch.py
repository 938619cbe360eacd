"""``ampctx migrate --to torch``: which O1 loops are rewritten, that they train as before, and what is left and why."""

import json
import math

import pytest
import torch
from migrating import ROOT, dedent, migrated, run

from ampctx import GradScaler
from ampctx.migrate import cli

pytest.importorskip("libcst")

PAGE = (ROOT / "docs" / "to_torch_amp.md").read_text()

HEAD = """
import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
criterion = nn.CrossEntropyLoss()
x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
"""

PLAIN = (
    HEAD
    + """
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # casts
for i in range(8):
    optimizer.zero_grad()
    output = model(x)
    # The loss.
    loss = criterion(
        output, y
    )
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        # scaled
        scaled_loss.backward()
    optimizer.step()
    print(loss.item())
"""
)


def torch_of(tmp_path, source):
    result = migrated(tmp_path, source, "torch")
    assert {f.status for f in result.findings} <= {"adapted", "served"}, result.findings
    assert "apex" not in result.after
    return result


def test_a_plain_loop(tmp_path):
    result = torch_of(tmp_path, PLAIN)
    assert result.after == dedent(PLAIN).replace("from apex import amp\n", "").replace(
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # casts',
        "device_type = next(model.parameters()).device.type\nscaler = torch.amp.GradScaler(device_type)  # casts",
    ).replace(
        """\
    output = model(x)
    # The loss.
    loss = criterion(
        output, y
    )
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        # scaled
        scaled_loss.backward()
    optimizer.step()
""",
        """\
    with torch.autocast(device_type, dtype=torch.float16):
        output = model(x)
        # The loss.
        loss = criterion(
            output, y
        )
    # scaled
    scaler.scale(loss.float()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )
    assert [f.name for f in result.findings] == ["apex.amp.initialize", "apex.amp.scale_loss"]
    assert "evaluation" in result.findings[0].message


STEP, PRINT = "    optimizer.step()", "print(loss.item())"
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)'


def before_step(text):
    return [(STEP, f"{text}\n{STEP}")]


def at_the_end(text):
    return [(PRINT, text)]


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
CLIP = "    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n"


def formed(replacements):
    source = dedent(PLAIN)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


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


# The same for a program with two optimizers.
LEFT_OF_TWO = {
    "initialize apart": (
        [
            ("[netD, netG], [optimizerD, optimizerG] = amp.initialize(\n", "netD, optimizerD = amp.initialize(\n"),
            (
                "    [netD, netG], [optimizerD, optimizerG], opt_level=opt_level, num_losses=3\n)",
                "    netD, optimizerD, opt_level=opt_level\n)\n"
                "netG, optimizerG = amp.initialize(netG, optimizerG, opt_level='O1')",
            ),
        ],
        "initialize",
        r"line \d+: a second call of amp.initialize with an optimizer",
    ),
    "gradients of one add up": (
        [("    optimizerG.step()", "    if i % 2:\n        optimizerG.step()")],
        "scale",
        r"line \d+: this step would change the scale while gradients of optimizerG add up",
    ),
    "zero of another model": (
        [("    netG.zero_grad()", "    netD.zero_grad()")],
        "zeroed-gradients",
        r"found no unconditional optimizerG.zero_grad\(\)",
    ),
    "zero of a model that holds some of the parameters": (
        [
            ("    netD.zero_grad()\n", "    optimizerD.zero_grad()\n"),
            ("optim.Adam(netG.parameters(),", "optim.Adam([*netG.parameters(), *more],"),
            ("    nn.utils.clip_grad_norm_(netD.parameters(), 0.5)\n", ""),
        ],
        "zeroed-gradients",
        r"found no unconditional optimizerG.zero_grad\(\)",
    ),
    "a step without a block": (
        [("    netG.zero_grad()\n", "    netG.zero_grad()\n    optimizerG.step()\n")],
        "step",
        "found 2 calls of optimizerG.step",
    ),
    "an optimizer without a block": (
        [
            ("[netD, netG], [optimizerD, optimizerG] =", "[netD, netG], [optimizerD, optimizerG, third] ="),
            ("[netD, netG], [optimizerD, optimizerG],", "[netD, netG], [optimizerD, optimizerG, third],"),
            ("    netG.zero_grad()\n", "    netG.zero_grad()\n    third.step()\n"),
        ],
        "step",
        "no block of amp.scale_loss belongs to this third.step",
    ),
    "one step, backwards for different optimizers": (
        [("scale_loss(errD_fake, optimizerD,", "scale_loss(errD_fake, [optimizerD, optimizerG],")],
        "step",
        "one step follows backwards for different optimizers",
    ),
    "steps apart": (
        [("scale_loss(errG, optimizerG,", "scale_loss(errG, [optimizerG, optimizerD],")],
        "step",
        "do not follow each other|one step follows",
    ),
    "a step in a function while gradients are scaled": (
        [
            ("    optimizerG.step()\n", "    first()\n    optimizerG.step()\n"),
            ("    optimizerD.step()\n", ""),
            ("data = [", "def first():\n    optimizerD.step()\ndata = ["),
        ],
        "step",
        "another function uses optimizerD",
    ),
}


def test_initialize_for_one_optimizer_after_the_other(tmp_path):
    source = (ROOT / "tests" / "migrate" / "programs" / "gan.py").read_text()
    together = torch_of(tmp_path, source).after
    call = source[source.index("[netD, netG], [optimizerD") : source.index("data = [")]
    apart = "".join(f"net{n}, optimizer{n} = amp.initialize(net{n}, optimizer{n}, opt_level=opt_level)\n" for n in "DG")
    assert torch_of(tmp_path, source.replace(call, apart)).after == together


@pytest.mark.full(but=3)
@pytest.mark.parametrize(("replacements", "topic", "reason"), LEFT_OF_TWO.values(), ids=LEFT_OF_TWO)
def test_two_optimizers_that_are_left(tmp_path, replacements, topic, reason):
    source = (ROOT / "tests" / "migrate" / "programs" / "gan.py").read_text()
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    result = migrated(tmp_path, source, "torch")
    assert result.after == source
    for finding in result.findings:
        assert pytest.raises(Exception, match=reason).matches(Exception(finding.message)), finding.message
        assert finding.link == f"docs/to_torch_amp.md#{topic}"


def test_a_loop_whose_amp_is_used_in_another_file_is_left(tmp_path):
    (tmp_path / "train.py").write_text(dedent(PLAIN))
    (tmp_path / "tools.py").write_text("from apex import amp\ndef save():\n    return amp.state_dict()\n")

    def train():
        return next(r for r in cli.migrate([tmp_path], "torch") if r.path.endswith("train.py"))

    assert train().changed
    (tmp_path / "train.py").write_text("from tools import save\n" + dedent(PLAIN))
    assert not train().changed
    for finding in train().findings:
        assert "tools.py:3 also uses amp" in finding.message
        assert finding.link == "docs/to_torch_amp.md#other-files"
    (alone,) = cli.migrate([tmp_path / "train.py"], "torch")
    assert alone.changed
    (tmp_path / "train.py").write_text(dedent(PLAIN))
    (tmp_path / "tools.py").write_text("from apex import amp\nimport train\namp.state_dict()\n")
    assert not train().changed


def test_an_import_that_was_the_whole_of_a_block(tmp_path):
    guarded = 'try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError("no apex")'
    after = migrated(tmp_path, formed([("from apex import amp", guarded)]), "torch").after
    assert "try" not in after
    assert "apex" not in after
    flagged = guarded.replace("import amp\n", "import amp\n    HAS = True\n").replace(
        'raise ImportError("no apex")', "HAS = False"
    )
    after = migrated(tmp_path, formed([("from apex import amp", flagged)]), "torch").after
    assert "from torch import nn\nHAS = True\n\n" in after


def test_names_without_a_loop(tmp_path):
    result = migrated(tmp_path, "from apex.optimizers import FusedAdam\nFusedAdam(p)\n", "torch")
    assert not result.changed
    (finding,) = result.findings
    assert (finding.status, finding.link) == ("person", "docs/apex_differences.md#optimizers")
    assert "--to ampctx moves it" in finding.message


def test_in_a_function_with_tabs_and_crlf(tmp_path):
    body = PLAIN[PLAIN.index("torch.manual_seed") :]
    source = "import torch\nfrom torch import nn\nfrom apex import amp\ndef main():\n"
    source += "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    source = source.replace("    ", "\t").replace("\n", "\r\n")
    path = tmp_path / "a.py"
    path.write_bytes(source.encode())
    (result,) = cli.migrate([path], "torch")
    assert (
        "\r\n\t\twith torch.autocast(device_type, dtype=torch.float16):\r\n\t\t\toutput = model(x)\r\n" in result.after
    )
    assert result.after.count("\n") == result.after.count("\r\n")
    compile(result.after, "a.py", "exec")


def test_old_checkpoints_are_read_by_what_the_report_names(tmp_path):
    result = torch_of(tmp_path, formed(FORMS["checkpoint"][0]))
    assert "use ampctx.GradScaler, which also reads apex's format" in result.findings[-1].message
    state = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}}
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 1024.0
    with pytest.raises(KeyError):
        torch.amp.GradScaler("cpu").load_state_dict(state)
