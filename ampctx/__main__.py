"""``python -m ampctx`` and the ``ampctx`` command.

``info`` shows versions and the kernels in use, ``info --test`` also tries these, ``explain TEXT`` shows what
errors.md says about a message. Without torch, ``--help``, ``--version`` and ``explain`` work; ``info`` prints one
line that says what to install.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ampctx import __version__
from ampctx._version import why_no_torch


def info() -> dict[str, Any]:
    """Collects versions and the compiled extension's state on this machine. No host sync."""
    import torch

    with warnings.catch_warnings():
        # The import may warn about the extension. The report says the same.
        warnings.simplefilter("ignore", RuntimeWarning)
        import ampctx
        from ampctx.kernels import cuda_support
        from ampctx.kernels import extension as _extension

        extension = ampctx.ops.extension
        # With a driver too old for torch, device_count() works and every other call raises.
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        problem = ""
        if gpus:
            try:
                extension.serves("cuda")  # looks at the GPUs
            except ampctx.AmpError as error:  # AMPCTX_REQUIRE_EXTENSION=cuda
                problem = str(error)
    # Without a GPU, it is unknown whether the CUDA kernels would run.
    backends = [name for name in extension.backends if extension.late is None or name != "cuda"]
    driver = cuda_support.driver_version()
    return {
        "ampctx": ampctx.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver_cuda": driver and cuda_support.dotted(driver),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "gpu_archs": [cuda_support.arch_name(torch.cuda.get_device_capability(i)) for i in gpus],
        "extension": {
            "loaded": extension.loaded,
            "path": str(_extension.LIBRARY),
            "backends": [*backends, *map(str, extension.apart)],
            "reason": problem or extension.reason or ("no GPU is visible" if extension.late else ""),
            **extension.build,
        },
    }


def _test(device: str | None) -> dict[str, Any]:
    """Compares ops with plain torch on a device. RuntimeError or AssertionError if torch cannot use it."""
    import torch

    from ampctx.kernels import selftest
    from ampctx.ops import extension

    # The device with its index.
    at = torch.zeros((), device=device or ("cuda" if torch.cuda.is_available() else "cpu")).device
    if at.type == "meta":
        raise RuntimeError("tensors on meta have no values")
    runs_kernels = extension.serves(at.type) or at in extension.apart
    return {"device": str(at), "runs_kernels": runs_kernels, "differences": selftest.differences(at)}


def _lines(report: dict[str, Any]) -> list[str]:
    """The report as text, in 80 columns."""
    extension = report["extension"]
    gpus = [f"{name} ({arch})" for name, arch in zip(report["gpus"], report["gpu_archs"], strict=True)]
    driver = report["driver_cuda"]
    rows = [
        ("ampctx", report["ampctx"]),
        ("python", report["python"]),
        ("torch", f"{report['torch']} (CUDA {report['torch_cuda'] or 'not built in'})"),
        ("driver", f"serves CUDA {driver}" if driver else "no NVIDIA driver"),
        ("GPUs", ", ".join(gpus) or "none visible"),
    ]
    if extension["loaded"]:
        rows.append(("extension", f"loaded, kernels in use for {' and '.join(extension['backends'])}"))
        rows.append(("CPU", f"{extension['simd_used']} (built: {', '.join(extension['simd'])})"))
        if extension["cuda"]:
            rows.append(("CUDA", f"built by {extension['nvcc']} for {', '.join(extension['cuda_archs'])}"))
        if extension["reason"]:
            rows.append(("" if extension["cuda"] else "CUDA", f"not in use: {extension['reason']}"))
    else:
        rows.append(("extension", "not loaded: the ops run on plain torch"))
        rows.append(("", extension["reason"]))
    if test := report.get("test"):
        what = "kernels against plain torch" if test["runs_kernels"] else "plain torch against itself, without kernels"
        rows.append(("test", f"on {test['device']}, ten calls of each op: {what}"))
        rows += [(kind, problem or "same") for kind, problem in test["differences"].items()]
    wrap = partial(textwrap.wrap, width=80, subsequent_indent=" " * 11, break_on_hyphens=False)
    return [line for name, text in rows for line in wrap(text, initial_indent=f"{name:11}")]


def explain(text: str) -> tuple[bool, str]:
    """True and the section of errors.md for a message, words or a topic of one, or a page; else False and the three
    nearest headings. A heading wins over a quoted message with as many of the words."""
    page = Path(__file__).with_name("errors.md").read_text("utf-8")
    sections = re.findall(r"^## (.*?)\s*(?=^## |\Z)", page, flags=re.M | re.S)
    heads = {section.partition("\n")[0]: section for section in sections}
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-"): head for head in heads}

    def words(message: str) -> set[str]:
        return set(re.findall(r"\w+", message.lower().replace("bfloat16", "half")))

    def fit(head: str) -> tuple[float, float]:
        quoted = [(words(q), 0.0) for q in re.findall(r"`([^`]+)`", heads[head])]
        common = [(len(q & wanted), more, min(len(q), len(wanted))) for q, more in [(words(head), 0.5), *quoted]]
        most = max((n + more for n, more, of in common if n >= 0.8 * of and n >= min(3, len(wanted)) > 0), default=0)
        rare = [1 / page.lower().count(w) for w in wanted if w in heads[head].lower()]
        return most, common[0][0] / len(words(head)) + sum(rare)

    def link(found: re.Match[str]) -> str:  # a wheel has no pages, but the other sections
        head = anchors.get(found[2].removeprefix("#"))
        return f'{found[1]} (ampctx explain "{head}")' if head else found[1]

    file, topic = re.findall(r"docs/([\w/]+\.md)|ampctx explain ([\w.-]+)|$", text)[0]
    wanted = words(topic or text)
    linking = [head for head in heads if file and f"({file}" in heads[head]]
    best = sorted(heads, key=lambda head: (head in linking[:1], *fit(head)), reverse=True)[:3]
    if linking or fit(best[0])[0]:
        return True, re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, heads[best[0]])
    return False, "\n".join(f'  ampctx explain "{head}"' for head in best)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ampctx", description="Show versions and the kernels that ampctx uses here.")
    parser.add_argument("--version", action="version", version=f"ampctx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    info_parser = commands.add_parser("info", help="show versions and the kernels in use (the default)")
    info_parser.add_argument("--json", action="store_true", help="print one JSON object")
    info_parser.add_argument("--test", action="store_true", help="compare ops with plain torch; exits 1 if they differ")
    info_parser.add_argument("--device", help="of --test, such as cuda:1; default: cuda where there is a GPU, else cpu")
    explain_parser = commands.add_parser("explain", help="print what is known about a message")
    explain_parser.add_argument("text", nargs="+", help="the message, or a part of it")
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["run"], ["migrate"]):
        print(
            f"ampctx has no command {words[0]!r}. Install ampctx-apex and run 'ampctx-apex {words[0]}'", file=sys.stderr
        )
        return 2
    arguments = parser.parse_args(words)
    if arguments.command == "explain":
        is_known, found = explain(" ".join(arguments.text))
        _print(found if is_known else f"No section about this message. The nearest:\n{found}")
        return 0 if is_known else 1
    if problem := why_no_torch():
        print(problem, file=sys.stderr)
        return 1
    if getattr(arguments, "device", None) and not arguments.test:
        info_parser.error("--device goes with --test")
    report = info()
    if getattr(arguments, "test", False):
        try:
            report["test"] = _test(arguments.device)
        except (RuntimeError, AssertionError) as error:
            info_parser.error("--test: " + str(error).partition("\n")[0])
    if getattr(arguments, "json", False):
        _print(json.dumps(report, indent=2))
    else:
        _print("\n".join(_lines(report)))
    return int(any(report.get("test", {"differences": {}})["differences"].values()))


def _print(text: str) -> None:
    """Prints, even if the reader has gone, as in ``ampctx info | head -1``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise the interpreter's flush at exit would raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
