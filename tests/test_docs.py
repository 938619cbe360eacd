"""Every Python block of README and docs runs as it stands; what is shown exists, links lead somewhere.

The API page has every public name. Topics that messages of ampctx name are explained.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from page_programs import programs

import ampctx
from ampctx.__main__ import explain
from ampctx.optimizers import FusedAdam

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("[RCS]*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {page: page.relative_to(ROOT).as_posix().removeprefix("docs/") for page in PAGES}
# Programs, with the text that follows them.
BLOCKS = [
    pytest.param(f"{NAMES[page]}-{i}", code, text, id=f"{NAMES[page]}-{i}")
    for page in PAGES
    for i, (code, text) in enumerate(
        re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), flags=re.S)
    )
]


@pytest.fixture(scope="module")
def run_block():
    """Runs code by itself, as a script of its own would: (exit status, stderr)."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "block_server.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def run(name: str, code: str) -> tuple[int, str]:
        server.stdin.write(json.dumps([name, code]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the process that runs the blocks ended with {server.wait()}"
        return tuple(json.loads(answer))

    with server:
        yield run
        server.stdin.close()


def alike(line: str, other: str) -> bool:
    """The same words, and about the same numbers: kernels of other CPUs round otherwise."""
    number = re.compile(r"\d[\d.,]*")
    words = [number.sub("#", text).split() for text in (line, other)]
    one, two = ([float(n.strip(".,").replace(",", "")) for n in number.findall(text)] for text in (line, other))
    return words[0] == words[1] and one == pytest.approx(two, rel=0.02)


@pytest.mark.parametrize(("name", "code", "shown"), BLOCKS)
def test_block_runs_and_prints_what_the_page_shows(run_block, name, code, shown):
    """In this order; amp's log may stand between."""
    status, printed = run_block(name, code)
    assert status == 0, printed
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        assert any(alike(line, other) for other in lines), f"no {line!r} in\n{printed}"


def test_a_block_that_fails_or_crashes_is_seen(run_block):
    for code, told in (
        ("raise ValueError('x')", "ValueError: x"),
        ("import warnings; warnings.warn('x')", "UserWarning: x"),
    ):
        status, errors = run_block("failing", code)
        assert status == 1
        assert told in errors
    assert run_block("crashing", "import os; os.abort()")[0] == -6
    assert run_block("fine", "import torch; torch.ones(2)")[0] == 0


@pytest.mark.parametrize(("page", "count"), [("tutorial", 4), ("guide/fsdp_zero", 2)])
def test_a_page_of_diffs_prints_what_it_shows(run_block, page, count):
    """Its programs, as the diffs below them change them, print the lines of the text that follows."""
    shown = programs((ROOT / "docs" / f"{page}.md").read_text())
    for program, text in shown:
        status, output = run_block(page, program)
        assert status == 0, output
        assert set(text.splitlines()) <= set(output.splitlines()), output
    assert len(shown) == count


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{NAMES[page]} links to {target}"


def test_messages_name_no_page_that_a_wheel_lacks_and_explain_knows_their_topics():
    texts = [path.read_text() for path in (ROOT / "ampctx").rglob("*.py")]
    assert not [text for text in texts if re.search(r"docs/[\w/]+\.md", text)]
    topics = {topic for text in texts for topic in re.findall(r"`ampctx explain ([\w-]+)`", text)}
    assert len(topics) > 20
    assert [topic for topic in sorted(topics) if not explain(topic)[0]] == []


def test_make_targets_that_are_shown_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets, NAMES[page]
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        named = re.findall(r"run: make ([a-z-]+)", text) + re.findall(
            r"[a-z-]+", "".join(re.findall(r"target: (.*)", text))
        )
        assert named, workflow.name
        assert set(named) <= targets, workflow.name


def test_other_files_repeat_versions_as_they_are():
    hooks, project = ((ROOT / name).read_text() for name in (".pre-commit-config.yaml", "pyproject.toml"))
    pins = set(re.findall(r"\S+==[\d.]+", hooks.replace('"', " ")))
    assert pins
    assert all(f'"{pin}"' in project for pin in pins)
    assert f"version: {ampctx.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "module", [ampctx, ampctx.amp, ampctx.optimizers, ampctx.distributed], ids=lambda module: module.__name__
)
def test_api_page_has_every_public_name(module):
    page = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


# Words, code included and what a program writes left out: a page that grows past this has to be split or cut.
BUDGETS = {
    250: "cli guide/clip guide/gradient_penalty guide/muon guide/schedulers guide/skip_bad_steps",
    400: "contributing guide/ddp guide/health guide/smaller_state",
    500: "options limitations performance adding_kernels"
    " guide/accumulate guide/compile_export guide/debug_nans guide/fsdp_zero guide/offload guide/scale",
    600: "../README why from_torch_amp reliability guide/checkpoints guide/fp32_layers",
    700: "install levels frameworks",
    760: "optimizers",
    800: "from_apex",
    900: "tutorial apex_differences how_a_step_works kernels find",
    1250: "design",
    1800: "errors",
}


@pytest.mark.parametrize(("budget", "page"), [(budget, page) for budget in BUDGETS for page in BUDGETS[budget].split()])
def test_pages_are_short(budget, page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    text = re.sub(r"<!-- (\w+): python .*?<!-- end of \1 -->", "", text, flags=re.S)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 1.1 * budget


def bytes_between_steps(session, level, master_weights=False, state_dtype=torch.float32):
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = FusedAdam(model.parameters(), state_dtype=state_dtype, master_weights=master_weights)
    of_amp = False if master_weights else None
    session.initialize(model, optimizer, opt_level=level, master_weights=of_amp, loss_scale=1.0)
    with session.scale_loss(model(torch.ones(2, 512)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [t for of_one in optimizer.state.values() for t in of_one.values() if isinstance(t, torch.Tensor)]
    held = {t.data_ptr(): t for t in (model.weight, *session.master_params(optimizer), *state)}
    found = sum(t.numel() * t.element_size() for t in held.values() if t.numel() > 1) / model.weight.numel()
    session.reset()
    return found


def test_the_table_of_levels_has_the_bytes_of_a_parameter(session):
    rows = re.findall(r"\| ([^|]*`.*) \|[^|]*\| ([\d.]+)[^|]*\|$", (ROOT / "docs" / "levels.md").read_text(), re.M)
    assert len(rows) == 6
    more = {}
    for which, shown in rows:
        more |= {"master_weights": "split"} if "split" in which else {}
        more |= {"state_dtype": "8bit"} if "8bit" in which else {}
        for level in re.findall(r"`(O\d)`", which) or ["O5"]:
            assert f"{bytes_between_steps(session, level, **more):.2g}" == shown, which
