"""Calls the ops with arguments that are wrong in every way we could think of, for a given time.

    python tests/reliability/fuzz_ops.py --seconds 300 [--seed 0 1 2] [--only CALL]

A call that fits is made, then up to three of its arguments are spoilt. Then

- the process must live: the calls run in a child, and the parent reports the call that ended it;
- a refused call is a Python exception, and has changed no tensor;
- the compiled kernels and the plain-torch ones refuse the same calls, and give the same bits where arithmetic is
  element by element.

Call number N of a seed is the same in every run: ``--only N`` repeats it.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import figures
import torch
from odd_tensors import ODD, WRONG_OBJECTS, make_odd
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from backends import ALL_FLOATS, COMPILED, REFERENCE
from optimizer_calls import CODED, DEFAULTS, ELEMENTWISE, STEP_OPS, WRITE_BACKS, make_call, takes

from ampctx.kernels import definitions

SIZES = (0, 1, 2, 3, 7, 17, 513, 2047, 2048, 2049, 5000)
NUMBERS = (0.0, -0.0, -1.0, 1.0, 2.0, 1e30, -1e300, 1e-300, float("nan"), float("inf"), -float("inf"), 1e19)
INTEGERS = (0, 1, -1, 2, 5, 1 << 31, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 64, 1 << 40)
ELEMENTWISE_OPS = {"multi_tensor_scale", "multi_tensor_axpby", "update_scale"} | {o.op for o in ELEMENTWISE}


class Case:
    """One call: the op's name, its arguments by name, and what was done to them."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = random.Random(f"{seed}:{number}")
        self.done: list[str] = []
        self.shares_memory = False
        self.op, self.arguments = self._fitting()
        self.excess: list[Any] = []
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 3))):
            self._spoil()

    # --- a call that fits ---------------------------------------------------------------------------------------------

    def _fitting(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        sizes = [rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 3, 5, 40)))]
        dtypes = [rng.choice(ALL_FLOATS) for _ in range(3)]
        lists = [COMPILED.randn(sizes, dtype, seed=i) for i, dtype in enumerate(dtypes)]
        flag = torch.zeros((), dtype=rng.choice((torch.float32, torch.int32)))
        kind = rng.randrange(5 + len(STEP_OPS))
        if kind == 0:
            return "multi_tensor_scale", {"src": lists[0], "dst": lists[1], "found_inf": flag, "scale": self._factor()}
        if kind == 1:
            scalars = {
                "found_inf": flag,
                "a": self._factor(),
                "b": self._factor(),
                "arg_to_check": rng.choice((-1, 0, 1)),
            }
            return "multi_tensor_axpby", dict(x=lists[0], y=lists[1], out=lists[2], **scalars)
        if kind == 2:
            return "multi_tensor_l2norm", {"tensors": lists[0], "found_inf": flag, "per_tensor": rng.random() < 0.5}
        if kind == 3:
            scalars = {"found_inf": flag, "inv_scale": self._factor(), "per_tensor": rng.random() < 0.5}
            return "multi_tensor_unscale_l2norm", dict(tensors=lists[0], **scalars)
        if kind == 4:
            tensors = {"scale": torch.tensor(rng.choice((1.0, 65536.0, 1e38, 1e-38)))}
            for name in ("growth_tracker", "hysteresis_tracker"):
                value = rng.choice((0, 1, 5, (1 << 31) - 1, -(1 << 31)))
                tensors[name] = torch.tensor(value, dtype=torch.int32)
            flag.fill_(rng.choice((0, 1, 2)))
            rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": rng.choice((1, 5, 2000, 1 << 40))}
            rule |= {"hysteresis": rng.choice((1, 2, 9)), "min_scale": 0.0, "max_scale": float("inf")}
            return "update_scale", {**tensors, "found_inf": flag, **rule}
        return self._fitting_step(STEP_OPS[kind - 5], sizes, dtypes, flag)

    def _fitting_step(self, optimizer, sizes, dtypes, flag) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        write_back = rng.choice(WRITE_BACKS)
        param = rng.choice([d for d in ALL_FLOATS if takes(write_back, d)])
        types = {
            "grad": dtypes[0],
            "param": param,
            "state": dtypes[1],
            "extra": param if write_back == "kahan" else dtypes[2],
        }
        are_coded = {*optimizer.states} <= CODED.keys() and torch.float64 not in types.values()
        if are_coded and rng.random() < 0.5:
            types |= {"state": rng.choice((torch.bfloat16, "8bit", "mixed")), "stochastic_state": rng.random() < 0.5}
        call = make_call(COMPILED, optimizer, sizes, write_back=write_back, **types)
        flag.fill_(rng.choice((0, 0, 0, 1)))
        given = {
            **DEFAULTS,
            **call.lists,
            **call.options,
            "found_inf": flag,
            "inv_scale": self._factor(),
            "lr": self._factor(),
        }
        if rng.random() < 0.5:
            given["numbers"] = torch.arange(sum(size != 0 for size in sizes)) * 3
        given["skips"] = [torch.ones(()) for _ in range(rng.choice((0, 5)))]
        given |= {"grad_norm": self._factor(), "max_norm": rng.choice((-1.0, 0.25, 1.0))}
        return optimizer.op, {a.name: given[a.name] for a in schema(optimizer.op)}

    def _factor(self) -> Tensor:
        return torch.tensor(self.rng.choice((0.5, 2.0, 1 / 3)), dtype=self.rng.choice((torch.float32, torch.float64)))

    # --- spoiling it --------------------------------------------------------------------------------------------------

    def _spoil(self) -> None:
        argument = self.rng.choice(schema(self.op))
        kind = str(argument.type)
        spoil = self.rng.choice(
            {
                "List[Tensor]": (self._replace_tensor,) * 5 + (self._share_memory, self._length, self._object),
                "Tensor": (self._replace_scalar,) * 3 + (self._object,),
                "float": (self._number,) * 3 + (self._object,),
                "int": (self._number,) * 3 + (self._object,),
                "bool": (self._flip, self._object),
            }[kind]
        )
        spoil(argument.name)
        if self.rng.random() < 0.02:
            self.excess = self.rng.choice(([None], [3, 4], [torch.ones(2)]))
            self.done.append(f"{len(self.excess)} arguments too many")

    def _tensors(self, name: str) -> list[Tensor]:
        """The list of that name, or an empty one where it holds anything else. That stays as it is: every call is given
        the same one, and torch prints it into its error, and dies at a tensor whose memory is gone."""
        value = self.arguments[name]
        return value if isinstance(value, list) and all(isinstance(t, Tensor) for t in value) else []

    def _replace_tensor(self, name: str) -> None:
        tensors = self._tensors(name)
        if not tensors:
            return self._object(name)
        i = self.rng.randrange(len(tensors))
        size = 3 if _has_no_size(tensors[i]) else tensors[i].numel()
        size = min(size, max(SIZES))  # what is there may be odd already, and claim a terabyte
        odd = self.rng.choice(list(ODD))
        all_of_them = self.rng.random() < 0.2
        for at in range(len(tensors)) if all_of_them else [i]:
            tensors[at] = make_odd(odd, size)
        self.done.append(f"{name}[{'all' if all_of_them else i}]: {odd}")

    def _replace_scalar(self, name: str) -> None:
        odd = self.rng.choice(list(ODD))
        self.arguments[name] = make_odd(odd, self.rng.choice((1, 1, 1, 0, 2)))
        self.done.append(f"{name}: {odd}")

    def _share_memory(self, name: str) -> None:
        """The same tensor twice, one of another list, or a window of another one."""
        tensors = self._tensors(name)
        if not tensors:
            return
        other = self.rng.choice(self.rng.choice([found for n in self.arguments if (found := self._tensors(n))]))
        i = self.rng.randrange(len(tensors))
        if not _has_no_size(other) and other.numel() > 1 and self.rng.random() < 0.5:
            # Not of one that an earlier spoil has taken the memory of.
            whole = other.layout == torch.strided and other.device.type == "cpu" and not _is_cut_off(other)
            other = other.reshape(-1)[1:] if whole else other
        tensors[i] = other
        self.shares_memory = True
        self.done.append(f"{name}[{i}]: memory of another")

    def _length(self, name: str) -> None:
        tensors = self.arguments[name]
        if not isinstance(tensors, list):
            return
        change = self.rng.choice(("none", "fewer", "more", "many", "tuple"))
        if change == "tuple":
            self.arguments[name] = tuple(tensors)
        elif change == "many":
            self.arguments[name] = [torch.ones(1)] * 30_000
            self.shares_memory = True
        else:
            self.arguments[name] = {"none": [], "fewer": tensors[:-1], "more": [*tensors, torch.ones(3)]}[change]
        self.done.append(f"{name}: length, {change}")

    def _object(self, name: str) -> None:
        value = self.rng.choice(WRONG_OBJECTS)
        self.arguments[name] = value
        # Without its elements: torch cannot print a tensor whose memory an earlier spoil has taken.
        self.done.append(f"{name}: a {type(value).__name__}")

    def _number(self, name: str) -> None:
        value = self.rng.choice((*NUMBERS, *INTEGERS))
        self.arguments[name] = value
        self.done.append(f"{name}: {value if isinstance(value, (int, float)) else type(value).__name__}")

    def _flip(self, name: str) -> None:
        self.arguments[name] = not self.arguments[name]
        self.done.append(f"{name}: {self.arguments[name]}")

    # --- running it ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        found = []
        for value in self.arguments.values():
            found += [t for t in value if isinstance(t, Tensor)] if isinstance(value, (list, tuple)) else [value]
        return list({id(t): t for t in found if isinstance(t, Tensor)}.values())  # each once

    def has_fp64_lists(self) -> bool:
        """torch's fp64 root is not exact."""
        lists = [value for value in self.arguments.values() if isinstance(value, (list, tuple))]
        return any(t.dtype == torch.float64 for tensors in lists for t in tensors)

    def run(self, namespace: str) -> tuple[str, Any]:
        """("accepted", what came back) or (the class of the error, its message)."""
        op = getattr(getattr(torch.ops, namespace), self.op)
        try:
            with torch.no_grad():
                return "accepted", op.default(*self.arguments.values(), *self.excess)
        except Exception as error:
            return type(error).__name__, str(error).replace(namespace, "ampctx")

    def __str__(self) -> str:
        return f"{self.op} ({'; '.join(self.done) or 'as it should be'})"


def schema(op: str) -> list[Any]:
    return getattr(torch.ops.ampctx, op).default._schema.arguments


def _has_no_size(t: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(t) or t.is_nested


def _content(t: Tensor) -> Tensor | None:
    """A copy of the numbers, None of what has none or cannot be copied."""
    if _has_no_size(t) or t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized:
        return None
    if t._is_zerotensor() or t.numel() > 1 << 20 or _is_cut_off(t):  # private: there is no public way to ask
        return None
    return t.detach().resolve_conj().resolve_neg().clone()


def _is_cut_off(t: Tensor) -> bool:
    """Whether the storage is too small for the tensor."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    return (t.storage_offset() + last + 1) * t.element_size() > t.untyped_storage().nbytes()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """The same bits, but for those of nans."""
    if a is None or b is None:
        return a is b
    if a.dtype == torch.float8_e4m3fn:  # few ops know it
        a, b = a.float(), b.float()
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


def check(seed: int, number: int) -> tuple[str, str]:
    """Runs a call; the answer and what is wrong, "" where nothing is."""
    case = Case(seed, number)
    before = [_content(t) for t in case.tensors()]
    answer, result = case.run(COMPILED.namespace)
    after = [_content(t) for t in case.tensors()]
    if answer != "accepted" and "Expected Tensor but got None" in result:
        return answer, ""  # torch's stand-in for negative views: it makes the call, and fails as it writes back
    if answer != "accepted" and not all(map(_same, before, after)):
        return answer, f"was refused ({result}), and has changed a tensor"
    other = Case(seed, number)
    other_answer, other_result = other.run(REFERENCE.namespace)
    if other_answer != "accepted" and "Inplace update to inference tensor" in other_result:
        return answer, ""  # torch's own ops ask for a clone, where the kernels just write
    if (answer == "accepted") != (other_answer == "accepted"):
        return answer, f"compiled: {answer} {result!s:.300}, reference: {other_answer} {other_result!s:.300}"
    if answer == "accepted" and case.op in ELEMENTWISE_OPS and not case.shares_memory and not case.has_fp64_lists():
        theirs = [_content(t) for t in other.tensors()]
        for i, (a, b) in enumerate(zip(after, theirs, strict=True)):
            if not _same(a, b):
                return answer, f"compiled and reference differ in tensor {i} of the arguments"
    return answer, ""


def child(seed: int, first: int, seconds: float, last: float, progress: Path) -> None:
    """Calls from number ``first`` to before ``last``; ``progress`` always holds the number of the one that runs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    library = definitions.define(REFERENCE.namespace)
    assert library is not None
    end, number = time.monotonic() + seconds, first
    answers: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    with progress.open("w") as file:
        while number < last and time.monotonic() < end and len(wrong) < 20:
            file.seek(0)
            file.write(f"{number:>12}")
            file.flush()
            answer, problem = check(seed, number)
            answers[answer] += 1
            if problem:
                wrong.append(f"call {number}, {Case(seed, number)}: {problem}")
            number += 1
    print(json.dumps({"calls": number - first, "answers": answers, "wrong": wrong}))


def fuzz(seed: int, seconds: float = math.inf, calls: float = math.inf) -> dict[str, Any]:
    """Runs calls in child processes, a new one after a crash; what was counted."""
    total: dict[str, Any] = {"seed": seed, "seconds": seconds, "calls": 0, "accepted": 0, "refused": {}, "wrong": []}
    total["crashes"] = []
    end, first = time.monotonic() + seconds, 0
    while first < calls and time.monotonic() < end and len(total["wrong"]) < 20 and len(total["crashes"]) < 20:
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "progress"
            command = [sys.executable, __file__, "--child", str(first), "--seed", str(seed)]
            command += ["--seconds", str(end - time.monotonic()), "--calls", str(calls), "--progress", str(progress)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 1:
                raise RuntimeError(f"the fuzzer itself failed:\n{result.stderr}")
            if result.returncode:
                number = int(progress.read_text()) if progress.exists() else -1
                last = result.stderr.strip().splitlines()[-30:]
                total["crashes"].append({"call": number, "exit_code": result.returncode, "stderr": last})
                total["calls"] += max(number - first, 0)
                first = number + 1
                if number < 0:
                    break
                continue
        found = json.loads(result.stdout)
        total["calls"] += found["calls"]
        total["accepted"] += found["answers"].pop("accepted", 0)
        for name, count in found["answers"].items():
            total["refused"][name] = total["refused"].get(name, 0) + count
        total["wrong"] += found["wrong"]
        break
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each seed; default 10")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--csv", type=Path, metavar="FILE", help="put the counts there, in place of earlier ones")
    parser.add_argument("--only", type=int, help="the number of one call, to be repeated in this process")
    parser.add_argument("--calls", type=float, default=math.inf, help="at most, for each seed")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seed = arguments.seed[0]
    if arguments.child is not None:
        child(seed, arguments.child, arguments.seconds, arguments.calls, arguments.progress)
        return 0
    if arguments.only is not None:
        library = definitions.define(REFERENCE.namespace)
        print(Case(seed, arguments.only), *check(seed, arguments.only), sep="\n")
        return 0 if library is not None else 1
    results = [fuzz(seed, arguments.seconds, arguments.calls) for seed in arguments.seed]
    for found in results:
        refused = ", ".join(f"{count} {name}" for name, count in sorted(found["refused"].items()))
        seconds, seed = found["seconds"], found["seed"]
        print(f"{found['calls']} calls in {seconds:.0f} s, seed {seed}: {found['accepted']} accepted;")
        print(f"refused: {refused or 'none'};")
        print(f"{len(found['crashes'])} crashes, {len(found['wrong'])} calls that went wrong")
        for problem in (*found["wrong"], *found["crashes"]):
            print(problem)
    if arguments.csv is not None:
        kinds = {kind: [found[kind] for found in results] for kind in ("calls", "accepted", "wrong", "crashes")}
        counts = {f"fuzz/{kind}": sum(n if isinstance(n, int) else len(n) for n in of) for kind, of in kinds.items()}
        figures.write(arguments.csv, "fuzz-cpu", counts)
    return 1 if any(found["crashes"] or found["wrong"] for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
