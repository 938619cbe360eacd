"""What the tests of ``ampctx migrate --to torch`` share: a plain loop, and how its forms are made."""

from migrating import dedent, migrated

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


STEP, PRINT = "    optimizer.step()", "print(loss.item())"
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)'


def before_step(text):
    return [(STEP, f"{text}\n{STEP}")]


def at_the_end(text):
    return [(PRINT, text)]


CLIP = "    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n"


def formed(replacements):
    source = dedent(PLAIN)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source
