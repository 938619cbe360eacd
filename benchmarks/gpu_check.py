"""What `make gpu-check` runs on a machine with a GPU: build, tests, compute-sanitizer, benchmarks, one JSON.

    python3 benchmarks/gpu_check.py build | test | sanitize | bench | report [--output FILE]

Each step ends within ten minutes and leaves what it found under build/gpu-check/; `report` joins them into one JSON for
benchmarks/results/. Installs nothing: the python that runs it must have torch with CUDA, pytest and setuptools.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "build" / "gpu-check"
STEP_LIMIT = 570
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(command: list[str], limit: float = STEP_LIMIT, **env: str) -> dict:
    """Runs a command in the checkout; its exit code (124 when the limit ended it), seconds and last lines."""
    print("+", " ".join(command), flush=True)
    start = time.monotonic()
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        code, output = result.returncode, result.stdout
    except subprocess.TimeoutExpired as expired:
        code, output = 124, (expired.stdout or b"").decode(errors="replace")
    print(output[-4000:], flush=True)
    return {
        "command": " ".join(Path(c).name if os.path.isabs(c) else c for c in command),
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "last_lines": output.strip().splitlines()[-5:],
    }


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def build() -> dict:
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"gpu-check needs a GPU that torch can use; torch {torch.__version__} sees none")
    major, minor = torch.cuda.get_device_capability()
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
    return run(command, AMPCTX_CUDA="1", AMPCTX_CUDA_ARCHS=f"{major}{minor}")


def test() -> dict:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    part = run(command, AMPCTX_REQUIRE_EXTENSION="cuda")
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", " ".join(part["last_lines"]))
    return {**part, **{word: int(n) for n, word in counts}}


def sanitize() -> dict:
    parts = {}
    for tool in SANITIZER_TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "exercise"]
        # The caching allocator would hide accesses beyond a tensor within its blocks.
        parts[tool] = run(
            command,
            STEP_LIMIT / len(SANITIZER_TOOLS),
            AMPCTX_REQUIRE_EXTENSION="cuda",
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
    return {"exit_code": max(p["exit_code"] for p in parts.values()), **parts}


def exercise() -> None:
    """Every kernel on small lists of every dtype, checked: what compute-sanitizer watches."""
    import torch

    from ampctx import ops, optimizer_ops

    cuda = torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        lists = [torch.randn(n, device=cuda).to(dtype) for n in (0, 1, 7, 1000, 70001, 0)]
        lists.append(torch.randn(999, device=cuda).to(dtype)[1:])
        out = [torch.empty_like(t, dtype=torch.float32) for t in lists]
        flag = torch.zeros((), device=cuda)
        ops.multi_tensor_scale(lists, out, flag, 0.5)
        ops.multi_tensor_axpby(lists, out, out, flag, torch.full((), 2.0, device=cuda), 1.0)
        for t, o in zip(lists, out, strict=True):
            torch.testing.assert_close(o, t.float() * 2.5)
        norm, each = ops.multi_tensor_unscale_l2norm(lists, flag, 0.5, per_tensor=True)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(each))
        for write_back, extra in (("nearest", None), ("copy", torch.float32), ("stochastic", None)):
            step_optimizers(optimizer_ops, lists, write_back, extra)
        if dtype == torch.bfloat16:
            step_optimizers(optimizer_ops, lists, "split", torch.int16)
        if dtype != torch.float32:
            step_optimizers(optimizer_ops, lists, "kahan", dtype)
        step_layers(optimizer_ops, lists)
        lists[4][-1] = float("inf")
        ops.multi_tensor_l2norm(lists, flag)
        scale, growth, hysteresis = torch.full((), 8.0, device=cuda), *torch.ones(2, dtype=torch.int32, device=cuda)
        ops.update_scale(scale, growth, hysteresis, flag)
        if (flag.item(), scale.item()) != (1.0, 4.0):
            sys.exit("the overflow was not seen")


def step_optimizers(optimizer_ops, weights: list, write_back: str, extra) -> None:
    """One step of every element-wise optimizer from zero states, checked; and one that an overflow skips."""
    import torch

    def like(value: float, dtype) -> list:
        return [torch.full_like(w, value, dtype=dtype) for w in weights]

    shared = {"weight_decay": 0.0, "write_back": write_back, "seed": 1}
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 0.0}
    calls = {  # what the first step takes from a weight at lr 0.5, for gradients of 2
        "adam": (2, optimizer_ops.adam, adam, 0.5),
        "amsgrad": (3, optimizer_ops.adam, adam, 0.5),
        "sgd": (0, optimizer_ops.sgd, {}, 1.0),
        "momentum": (1, optimizer_ops.sgd, {"momentum": 0.9}, 1.0),
        "adagrad": (1, optimizer_ops.adagrad, {"eps": 0.0}, 0.5),
    }
    for name, (states, step, options, taken) in calls.items():
        params, grads = [w.clone() for w in weights], like(1.0, weights[0].dtype)
        moments = [like(0.0, torch.float32) for _ in range(states)]
        if name in ("adam", "sgd"):  # the list that is left out
            moments.append([])
        extras = like(0, extra) if extra else []
        steps = [torch.zeros((), device=w.device) for w in weights]
        for overflow in (1.0, 0.0):
            found_inf = torch.full((), overflow, device=weights[0].device)
            lr = torch.full((), 0.5, device=weights[0].device)
            step(grads, params, *moments, extras, steps, found_inf, 2.0, lr, **options, **shared)
            for w, p in zip(weights, params, strict=True):
                want = w.float() - (0.0 if overflow else taken)
                tolerance = torch.finfo(p.dtype).eps
                torch.testing.assert_close(p.float(), want, rtol=tolerance, atol=max(tolerance, 1e-5))
            if any(s.item() != 1 - overflow for s in steps):
                sys.exit(f"{name}, {write_back}: wrong step counts")


def step_layers(optimizer_ops, weights: list) -> None:
    """The optimizers with norms of tensors: the first step from zero states, checked; and one that is skipped."""
    import torch

    device = weights[0].device
    params, grads = [w.clone() for w in weights], [torch.full_like(w, 0.5) for w in weights]
    states = [[torch.zeros_like(w, dtype=torch.float32) for w in weights] for _ in range(2)]
    steps, norms = ([torch.zeros((), device=device) for _ in weights] for _ in range(2))
    shared = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "bias_correction": False}
    for overflow in (1.0, 0.0):
        found_inf, lr = torch.full((), overflow, device=device), torch.full((), 0.5, device=device)
        limit = torch.full((), 2.0, device=device)
        before = [p.clone() for p in params]
        optimizer_ops.lamb(
            grads, params, *states, [], steps, found_inf, 2.0, lr, limit, max_grad_norm=1.0, use_nvlamb=True, **shared
        )
        for w, p in zip(before, params, strict=True):  # u is 1
            taken = 0.5 * torch.linalg.vector_norm(w.float()) / max(w.numel(), 1) ** 0.5
            want = w.float() - (0.0 if overflow else taken)
            tolerance = torch.finfo(p.dtype).eps
            torch.testing.assert_close(p.float(), want, rtol=tolerance, atol=max(tolerance, 1e-5))
        optimizer_ops.larc(grads, weights, found_inf, 2.0, 1.0, trust_coefficient=0.25, eps=0.0, clip=False)
        for w, g in zip(weights, grads, strict=True):
            rate = 0.25 * torch.linalg.vector_norm(w.float()) / max(w.numel(), 1) ** 0.5
            want = torch.full_like(w, 0.5) if overflow else rate.to(w.dtype).expand(w.shape)
            torch.testing.assert_close(g, want)
        for inf_norm in (False, True):
            optimizer_ops.novograd(
                grads, params, states[0], [], norms, steps, found_inf, 1.0, lr, inf_norm=inf_norm, **shared
            )
        wrong = [s.item() for s in steps if s.item() != (0.0 if overflow else 3.0)]
        for g, n in zip(grads, norms, strict=True):
            largest = g.float().abs().max() if g.numel() else torch.zeros((), device=device)
            torch.testing.assert_close(n, torch.zeros_like(n) if overflow else largest)
        if wrong:
            sys.exit(f"layer-wise optimizers: step counts {wrong}")


def bench() -> dict:
    from suite import entries

    parts, end = {}, time.monotonic() + STEP_LIMIT
    for entry in entries("cuda"):
        file = PARTS / f"{entry.file}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, *entry.command(file, rounds=11)]
        part = run(command, max(1.0, end - time.monotonic()), AMPCTX_REQUIRE_EXTENSION="cuda")
        part["figures"] = json.loads(file.read_text()) if file.exists() else None
        parts[entry.file] = part
    return {"exit_code": max(p["exit_code"] for p in parts.values()), **parts}


def report(output: Path | None) -> None:
    import torch

    gpu = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    result = {
        "commit": output_of("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(output_of("git", "status", "--porcelain")),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"gpu": gpu, "cpu_cores": os.cpu_count(), "system": platform.system(), "arch": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "command": "make gpu-check",
    }
    for step in ("build", "test", "sanitize", "bench"):
        file = PARTS / f"{step}.json"
        result[step] = json.loads(file.read_text()) if file.exists() else None
    name = re.sub(r"[^a-z0-9]+", "-", gpu.partition(",")[0].lower()).strip("-") or "no-gpu"
    output = output or ROOT / "benchmarks" / "results" / f"gpu-check-{name}.json"
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {output}")


def main() -> None:
    steps = {"build": build, "test": test, "sanitize": sanitize, "bench": bench}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*steps, "exercise", "report"])
    parser.add_argument("--output", type=Path, help="the JSON that report writes")
    arguments = parser.parse_args()
    if arguments.step == "exercise":
        return exercise()
    if arguments.step == "report":
        return report(arguments.output)
    PARTS.mkdir(parents=True, exist_ok=True)
    part = steps[arguments.step]()
    (PARTS / f"{arguments.step}.json").write_text(json.dumps(part, indent=2) + "\n")
    if part["exit_code"]:
        sys.exit(f"{arguments.step} failed, see above")


if __name__ == "__main__":
    main()
