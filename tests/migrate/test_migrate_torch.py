"""``ampctx migrate --to torch``: a plain O1 loop, loops with two optimizers, and what stands around them in files."""

import pytest
from migrating import ROOT, dedent, migrated
from torch_loops import PLAIN, formed, torch_of

from ampctx.migrate import cli

pytest.importorskip("libcst")


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
