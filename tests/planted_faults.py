"""Plants faults, each in a copy of the tree, and has the tests of `make test` look for them: `make test-faults`.

    python tests/planted_faults.py [part of a name ...] [--jobs N] [--list]

A fault replaces one text, which has to occur once in a file, or in a folder where no file is named. The tests that
have to notice it run without --full. The exit status is 1 where a fault went unnoticed, or could not be planted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """``tests``: what pytest is given. ``path``: a file or folder."""

    name: str
    path: str
    old: str
    new: str
    tests: str


OPS, AMP, ROWS = "tests/ops/test_multi_tensor_", "tests/amp/test_", "tests/reliability/test_"
CPU = "-k cpu"  # the compiled kernels: without building the emulated ones
PROPERTIES = f"tests/ops/test_op_properties.py {CPU}"
FORMULAS, LAYERWISE = (f"tests/ops/test_{kind}_formulas.py {PROPERTIES}" for kind in ("elementwise", "layerwise"))
STEPS = f"{AMP}device_steps.py {AMP}scale_loss.py {AMP}delayed_blocks.py {ROWS}state_machine.py"

FAULTS = [
    # --- signs, in each functor -------------------------------------------------------------------------------------
    Fault(
        "adam adds its step", "csrc/functors/adam.h",
        "return w - lr * (adam.adam_w_mode", "return w + lr * (adam.adam_w_mode", FORMULAS,
    ),
    Fault(
        "sgd decays upwards", "csrc/functors/sgd.h",
        "g = sgd.decay_last ? g + decay : g;", "g = sgd.decay_last ? g - decay : g;",
        PROPERTIES,
    ),
    Fault(
        "adagrad subtracts squares", "csrc/functors/adagrad.h",
        "state[0] + g * g;", "state[0] - g * g;", FORMULAS,
    ),
    Fault(
        "lamb's ratio is the other way round", "csrc/functors/lamb.h",
        "(norm_of_w / norm_of_u)", "(norm_of_u / norm_of_w)", LAYERWISE,
    ),
    Fault(
        "lamb decays upwards", "csrc/functors/lamb.h",
        "u + lamb.weight_decay * w : u", "u - lamb.weight_decay * w : u", LAYERWISE,
    ),
    Fault(
        "novograd divides twice", "ampctx/optimizers/layerwise.py",
        "divide(moves, c1 if reg_inside_moment else d * c1)", "divide(moves, d * c1)",
        "tests/optimizers/test_optimizer_formulas.py",
    ),
    Fault(
        "larc decays upwards", "ampctx/optimizers/larc.py",
        "-decay if group", "decay if group",
        "tests/optimizers/test_larc.py",
    ),
    Fault(
        "lion goes against the sign", "csrc/functors/lion.h",
        "c > 0 ? 1 : c < 0 ? -1 : c;", "c > 0 ? -1 : c < 0 ? 1 : c;", FORMULAS,
    ),
    Fault(
        "muon averages from the wrong end", "csrc/functors/muon.h",
        "weight < 0.5 ? weight : weight - 1", "weight < 0.5 ? weight : 1 - weight", FORMULAS,
    ),
    Fault("axpby subtracts", "csrc/functors/elementwise.h", "a * x + b * y;", "a * x - b * y;", PROPERTIES),
    Fault("scale negates", "csrc/functors/elementwise.h", "x * scale;", "-x * scale;", f"{OPS}scale.py {CPU}"),
    Fault(
        "l2norm adds up absolute values", "csrc/functors/elementwise.h",
        "return scaled * scaled;", "return scaled < 0 ? -scaled : scaled;", PROPERTIES,
    ),
    Fault(
        "an overflow makes the scale larger", "csrc/functors/loss_scale.h",
        "* rule.backoff_factor);", "/ rule.backoff_factor);", f"tests/ops/test_update_scale.py {CPU}",
    ),
    Fault(
        "the scale grows a step late", "csrc/functors/loss_scale.h",
        "clean_steps >= rule.growth_interval;", "clean_steps > rule.growth_interval;",
        f"tests/ops/test_update_scale.py {CPU}",
    ),
    Fault(
        "the scale grows beyond its bound", "csrc/functors/loss_scale.h",
        "*scale = larger > max_scale ? max_scale : larger;", "*scale = larger;",
        f"tests/ops/test_update_scale.py {CPU}",
    ),
    Fault(
        "kahan keeps the error with the other sign", "csrc/functors/write_back.h",
        "extra = is_finite(p) ? w - p : 0;", "extra = is_finite(p) ? p - w : 0;", f"tests/ops/test_write_back.py {CPU}",
    ),
    Fault(
        "ties of fp16 are rounded down", "csrc/functors/convert.h",
        "0xfff + ((magnitude >> 13) & 1)", "0xfff", "tests/ops/test_simd.py",
    ),
    Fault(
        "stochastic rounding goes by other bits", "csrc/functors/random.h",
        "mix64(of_step + golden", "mix64(of_step - golden", f"tests/ops/test_optimizer_steps.py {CPU}",
    ),
    # --- a plan that does not look ------------------------------------------------------------------------------------
    Fault(
        "a plan goes by other groups", "csrc/plan.h",
        "if (!same_items(groups, state.groups) || !same_members(groups, state.members)) return kDiffers;", "",
        "tests/optimizers/test_optimizer_plan.py",
    ),
    Fault(
        "a plan goes by other state", "csrc/plan.h",
        "if (!same_entries(state.mappings)) return kDiffers;", "", "tests/optimizers/test_optimizer_plan.py",
    ),
    Fault(
        "a plan unscales a shared gradient twice", "csrc/plan.h",
        "if (!may_share && is_shared(state)) return kDiffers;", "",
        "tests/optimizers/test_gradients_after_a_step.py",
    ),
    Fault(
        "a plan leaves out a parameter that gets a gradient", "csrc/plan.h",
        "!= Py_None) return differs();", "== nullptr) return differs();",
        "tests/optimizers/test_optimizer_plan.py",
    ),
    Fault(
        "a plan bumps no version", "csrc/plan.h",
        " && bump_versions(state, reader)", "",
        "tests/optimizers/test_optimizer_habits.py tests/reliability/test_written_by_others.py",
    ),
    Fault(
        "a plan reads a negated tensor as it lies", "csrc/library.cpp",
        'add("Negative", Reader::refuse)', 'add("Negative", Reader::take)', f"{ROWS}fuzz_programs.py",
    ),
    Fault(
        "a plan reads between the elements of a tensor", "csrc/tensors.h",
        " && (view.is_contiguous || is_dense(view.layout))", "", f"{ROWS}fuzz_programs.py",
    ),
    Fault(
        "a plan of the end of a block forgets a shared gradient", "ampctx/weights/frame_plan.py",
        "if len(leaf_of) < len(there):", "if False:", f"{ROWS}fuzz_programs.py",
    ),
    Fault(
        "a plan keeps a gradient that is a part of a buffer", "csrc/tensors.h",
        "!is_kept || view.fills_storage", "true", f"{ROWS}fuzz_programs.py",
    ),
    Fault(
        "a guard asks no other rank", "ampctx/optimizers/_guard.py",
        "norm_of(params, self._group, call)", "norm_of(params, None, call)",
        "tests/optimizers/test_guards.py",
    ),
    Fault(
        "guards of ranks decide alone", "ampctx/optimizers/_guard.py",
        "raised_by_any_rank(torch.stack((is_bad, skips)), params, self._group, call)", "torch.stack((is_bad, skips))",
        "tests/optimizers/test_guards.py",
    ),
    Fault(
        "a plan takes a gradient that is laid out otherwise over the ranks", "csrc/tensors.h",
        "return spec == other || PyObject_RichCompareBool(spec.get(), other.get(), Py_EQ) == 1;", "return true;",
        "tests/optimizers/test_plans_on_meshes.py",
    ),
    Fault(
        "a plan bumps no version of a DTensor", "csrc/plan.h",
        "if (!written_now) continue;", "if (written_now != tensors.get()) continue;",
        "tests/optimizers/test_plans_on_meshes.py",
    ),
    Fault(
        "a clip goes by the layouts of other parameters", "ampctx/kernels/sharding.py",
        "key = tuple(map(id, layouts))", "key = (id(layouts[0]), len(layouts))",
        "tests/optimizers/test_plans_on_meshes.py",
    ),
    # --- a flag that nobody raises, reads or joins ------------------------------------------------------------------
    Fault(
        "scale does not report inf", "csrc/cpu/elementwise.cpp",
        "return note(found_inf, direct(", "return void(direct(", f"{OPS}scale.py {CPU}",
    ),
    Fault(
        "axpby looks at x alone", "csrc/functors/elementwise.h",
        "&& (arg_to_check == 0 || is_finite(y));", ";", PROPERTIES,
    ),
    Fault(
        "an optimizer's kernel steps in spite of the flag", "csrc/cpu/optimizers.cpp",
        "if (call.found_inf.is_set()) return;", "", f"tests/ops/test_optimizer_steps.py {CPU}",
    ),
    Fault(
        "the device goes by the flag of the last loss", "ampctx",
        "raised if flag is None else torch.maximum(flag, move(raised, flag.device))", "raised",
        f"{STEPS} {ROWS}outcome_of_each_step.py",
    ),
    Fault(
        "the host goes by the flag of the first loss", "ampctx",
        "gathered(each).tolist() if len(each) > 1 else [flag.item() for flag in each]",
        "[each[0].item()] * len(each) if each else []",
        "tests/apex/test_l0_scale_loss_calls.py",
    ),
    Fault(
        "joined flags are the last of them", "ampctx",
        "result = here if result is None else torch.maximum(result, here)", "result = here",
        f"{STEPS} {ROWS}outcome_of_each_step.py",
    ),
    Fault(
        "a GradScaler's update goes by one optimizer", "ampctx",
        "scale.update(join_flags(flags, flags[0].device))", "scale.update(flags[-1])",
        f"{AMP}grad_scaler_parity.py",
    ),
    Fault(
        "ranks skip where all of them overflow", "ampctx",
        "flag = joined[0] > 0", "flag = joined[0] == joined[1]",
        f"{ROWS}ranks_skip_together.py",
    ),
    Fault(
        "a skipped step of other gradients than the plan's is not counted", "ampctx",
        "step.counts[:] = counts", "pass", f"{AMP}counted_steps.py",
    ),
    Fault(
        "a step reports the norm of an earlier clip", "ampctx",
        "grad.__dict__.pop(CLIPPED, None)", "grad.__dict__.get(CLIPPED)", f"{AMP}history.py -k scaler",
    ),
    Fault(
        "a nested block has the scale of before an overflow", "ampctx",
        "self._factors = None  # first", "pass  # first", f"{AMP}scale_loss.py",
    ),
    # --- gradients that are not unscaled, or lost -------------------------------------------------------------------
    Fault(
        "a block checks gradients and leaves them scaled", "ampctx",
        "foreach.scale(scaled, scaled, found_inf, factor, last)", "foreach.l2norm(scaled, found_inf)", STEPS,
    ),
    Fault(
        "a GradScaler checks gradients and leaves them scaled", "ampctx",
        "foreach.scale(grads, grads, raised, PerDevice(inv_scale))", "foreach.l2norm(grads, raised)",
        f"{AMP}grad_scaler.py",
    ),
    Fault(
        "gradients of masters are read scaled", "ampctx",
        "foreach.scale(self.values, wide, Unread(), self.inv_scale)", "foreach.scale(self.values, wide, Unread(), 1.0)",
        f"{AMP}model_grads.py {AMP}scale_loss.py",
    ),
    Fault(
        "a block drops the gradients from before", "ampctx",
        "foreach.axpby(arrived, before, arrived, found_inf, factor, 1.0,",
        "foreach.axpby(arrived, before, arrived, found_inf, factor, 0.0,", STEPS,
    ),
    Fault(
        "a block drops what its masters had", "ampctx",
        "foreach.axpby(new, totals, totals, found_inf, factor, 1.0,",
        "foreach.axpby(new, totals, totals, found_inf, factor, 0.0,", STEPS,
    ),
    Fault(
        "a nested block adds to what the block around it has stashed", "ampctx",
        "len(self.frames) > 1, self.frames[0].stash", "len(self.frames) > 1, self.frames[-len(self.frames[:2])].stash",
        f"{ROWS}state_machine.py",
    ),
    Fault(
        "a nested block keeps the gradients of the block around it", "ampctx",
        "of_params = {p: frame.stash.get(p) for p in", "of_params = {p: None for p in", f"{ROWS}state_machine.py",
    ),
    Fault(
        "ranks add gradients up without dividing", "ampctx",
        "summed.div_(before)", "pass", f"{ROWS}average_hook.py",
    ),
    # --- references that stay ---------------------------------------------------------------------------------------
    Fault(
        "a replaced method holds its optimizer", "ampctx",
        "optimizer_ref = weakref.ref(optimizer)", "optimizer_ref = lambda: optimizer",
        f"{ROWS}reset_leaves_nothing.py",
    ),
    Fault(
        "the undo of a cast holds its model", "ampctx",
        "model_ref, formers = weakref.ref(model),", "model_ref, formers = (lambda: model),",
        f"{AMP}casting.py {AMP}initialize.py",
    ),
    # --- casts ------------------------------------------------------------------------------------------------------
    Fault(
        "softplus is not in the list of O1", "ampctx",
        "softmax.int softplus sum", "softmax.int sum", f"{AMP}cast_table.py",
    ),
    Fault(
        "lstm is not in the list of O1", "ampctx",
        "lstm.data lstm.input", "lstm.data", f"{AMP}cast_table.py {AMP}autocast.py",
    ),
    Fault(
        "a model's inputs stay fp32", "ampctx",
        "return map_floating(args, self.dtype), map_floating(kwargs, self.dtype)", "return args, kwargs",
        f"{AMP}casting_rows.py",
    ),
    Fault(
        "a model's output stays in 16 bits", "ampctx",
        "return map_floating(output, self.dtype)", "return output", f"{AMP}casting_rows.py",
    ),
    Fault(
        "batch norms become 16-bit", "ampctx",
        "return is_affine and (isinstance(module, _BatchNorm) or module.running_mean is not None)", "return False",
        f"{AMP}casting_rows.py",
    ),
    Fault(
        "a master begins with the rounded weight", "ampctx",
        "source = p if original is None or is_distributed() else original", "source = p",
        f"{ROWS}state_machine.py",
    ),
    Fault(
        "a model's state dict holds rounded masters", "ampctx",
        "exact = masters.exact(t)", "exact = value.float()", f"{ROWS}plain_checkpoints.py",
    ),
    Fault(
        "one rank's masters have bits that another's lack", "ampctx",
        "not self._optimizer().state.get(master):", "False:", "tests/integration/test_ddp.py",
    ),
    # --- what an optimizer hands to its op --------------------------------------------------------------------------
    Fault(
        "the last of an op's numbers is not handed on", "ampctx/optimizers/_options.py",
        "for number in spec.numbers:\n        of", "for number in spec.numbers[:-1]:\n        of",
        "tests/optimizers/test_optimizer_formulas.py",
    ),
    Fault(
        "a changed lr is not handed on in a table", "ampctx/optimizers/_step_plan.py",
        'array("d", [group["lr"] for group in work.groups])', "table[:: len(table) // len(work.groups)]",
        "tests/optimizers/test_param_groups.py",
    ),
    Fault(
        "both calls of muon advance the counts", "ampctx",
        'steps = list(torch.stack([step.reshape(()) for step in work.lists["steps"]]).unbind())',
        'steps = work.lists["steps"]', "tests/optimizers/test_fused_muon.py",
    ),
    Fault(
        "muon clips its updates, too", "ampctx",
        'for name in ("found_inf", "lr", "seed")}', 'for name in arguments.keys() - {"skips"}}',
        "tests/optimizers/test_fused_muon.py",
    ),
    Fault(
        "muon orthogonalises under autocast", "ampctx",
        "off = torch.autocast(first, enabled=False) if torch.is_autocast_enabled(first) else nullcontext()",
        "off = nullcontext()",
        "tests/optimizers/test_fused_muon.py",
    ),
    Fault(
        "muon's adjustment is that of the transpose", "ampctx",
        "max(1.0, rows / max(columns, 1))", "max(1.0, columns / max(rows, 1))", "tests/optimizers/test_fused_muon.py",
    ),
    Fault(
        "ranks take the rows of the first one", "ampctx",
        "redistribute(mesh, stacked).to_local()", "to_local()[:, : len(own[0])]",
        "tests/optimizers/test_layerwise_on_meshes.py -k Muon",
    ),
    # --- the scale, and what is saved -------------------------------------------------------------------------------
    Fault(
        "min_loss_scale is not handed on", "ampctx",
        "interval, min_scale=low, max_scale=high)", "interval, max_scale=high)", f"{AMP}loss_scale.py",
    ),
    Fault(
        "a static scale counts overflows as clean", "ampctx",
        "growth_tracker.add_(found_inf.reshape(()) == 0)", "growth_tracker.add_(1)", f"{AMP}loss_scale.py",
    ),
    Fault(
        "a save drops the gradients that wait", "ampctx",
        "values = masters.values()\n", "values = masters.values()\n        masters.drop_grads()\n",
        f"{ROWS}plain_checkpoints.py",
    ),
    Fault(
        "a GradScaler does not save its hysteresis", "ampctx",
        '"_hysteresis_tracker": scale.hysteresis_left(),', "", f"{AMP}grad_scaler_state.py",
    ),
    Fault(
        "a state by names has rounded weights of \"split\"", "ampctx",
        '"remainder", torch.int16, join,', '"remainder", torch.int16, lambda p, kept: p.detach().float(),',
        f"{ROWS}named_state.py",
    ),
    Fault(
        "a weight with a compensation is its rounded sum", "ampctx",
        "return (weight - kept.float()).to(dtype), kept", "return weight.to(dtype), kept",
        f"{ROWS}named_state.py",
    ),
    Fault(
        "state that torch makes is a step of the run", "ampctx",
        "if CHECKPOINT in sys.modules and", "if False and", f"{ROWS}named_state_on_ranks.py",
    ),
    # --- waiting, exceptions, what is refused -----------------------------------------------------------------------
    Fault(
        "an update reads the flag on the host", "ampctx",
        "if found_inf.device != scale.device:", "if found_inf.item() and found_inf.device != scale.device:",
        f"{ROWS}endless_overflows.py",
    ),
    Fault(
        "a step on the device waits for the count of skips", "ampctx",
        "self._poll()\n        self.history", "self.skipped_steps()\n        self.history",
        f"{ROWS}endless_overflows.py {ROWS}outcome_of_each_step.py {AMP}history.py",
    ),
    Fault(
        "an exception leaves a block open", "ampctx",
        "while self.frames and self.depth > depth:", "while self.depth > depth + 1:", f"{ROWS}exceptions_anywhere.py",
    ),
    Fault(
        "an exception takes the gradients from before along", "ampctx",
        "p.grad = before.get(p)", "p.grad = None", f"{ROWS}exceptions_anywhere.py",
    ),
    Fault(
        "a flag may be of any type", "csrc/check.h",
        "if (!is_int && dtype != aoti_torch_dtype_float32()) {", "if (false) {",
        f"tests/ops/test_op_errors.py {CPU}",
    ),
]  # fmt: skip


def planted(fault: Fault, tree: Path) -> str:
    """Replaces the text and names the file; ValueError where the text does not occur exactly once."""
    at = tree / fault.path
    kinds = {".py", ".h", ".cpp"}
    files = [at] if at.is_file() else sorted(path for path in at.rglob("*") if path.suffix in kinds)
    found = [path for path in files for _ in range(path.read_text().count(fault.old))]
    if len(found) != 1:
        raise ValueError(f"{fault.old!r} occurs {len(found)} times in {fault.path}")
    found[0].write_text(found[0].read_text().replace(fault.old, fault.new))
    return str(found[0].relative_to(tree))


def copy_tree(to: Path) -> None:
    """What git knows or would add, and the built library."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in [*filter(None, listed.split("\0")), "ampctx/_ops.so"]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def run(fault: Fault) -> str:
    """The test that has noticed the fault. ValueError where none has, or where the fault cannot be planted."""
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        planted(fault, tree)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "AMPCTX_REQUIRE_EXTENSION": "1"}
        if fault.path.startswith("csrc"):
            setup = tree / "setup.py"
            setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))  # compiles in a third of the time
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            built = subprocess.run(
                command, cwd=tree, env=environment | {"AMPCTX_CUDA": "0"}, capture_output=True, text=True
            )
            if built.returncode:
                raise ValueError(f"the build failed:\n{built.stdout}{built.stderr}")
        done = run_tests(tree, environment, fault.tests.split())
    if done.returncode == 0:
        raise ValueError(f"NOT NOTICED by {fault.tests}: {done.stdout.strip().splitlines()[-1]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", done.stdout, flags=re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise ValueError(f"the tests could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if run_tests(ROOT, environment | {"PYTHONPATH": str(ROOT)}, [failed[1]]).returncode:
        raise ValueError(f"{failed[1]} fails without the fault, too")
    return failed[1]


def run_tests(tree: Path, environment: dict[str, str], tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument(
        "--list", action="store_true", help="names them with their files, and looks whether each could be planted"
    )
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if not options.names or any(name in fault.name for name in options.names)]
    unnoticed = 0

    def attempt(fault: Fault) -> tuple[bool, str]:
        try:
            if not options.list:
                return True, run(fault)
            with tempfile.TemporaryDirectory() as folder:
                copy_tree(Path(folder))
                return True, planted(fault, Path(folder))
        except ValueError as error:
            return False, str(error)

    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, (noticed, text) in zip(faults, pool.map(attempt, faults), strict=True):
            unnoticed += not noticed
            print(f"{'' if noticed else 'FAILED: '}{fault.name}: {text}", flush=True)
    print(f"{len(faults) - unnoticed} of {len(faults)} faults {'can be planted' if options.list else 'were noticed'}")
    return 1 if unnoticed or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
