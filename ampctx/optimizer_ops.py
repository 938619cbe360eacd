"""Typed optimizer ops of ``torch.ops.ampctx``: one call steps many tensors.

Every list has one entry per parameter. ``grads``, ``params`` and state of their size agree at each index in device,
number of elements and memory layout. A list has one dtype: fp32, fp16, bf16, or fp64 on the CPU. Arithmetic is fp32
(fp64 if any tensor is). ``steps`` are one-element fp32 tensors that count the steps so far. ``extras`` depends on
``write_back`` (table: ``ampctx.kernels.reference_steps``) and is empty for "nearest" and "stochastic".

If ``found_inf`` (one element, fp32 or int32) is not 0, the call changes nothing, not even step counts. The kernel reads
the flag on the device. ``inv_scale`` and ``lr`` are floats or one-element tensors, fp32 on the device of the lists or
on the CPU. The kernel multiplies gradients by ``inv_scale`` as it reads them. It stores the result only with
``unscale_grads``, rounded to the gradient's dtype and without the sign of ``maximize``. That is a separate op,
``multi_tensor_unscaling_*``, whose schema declares the write. No host sync.

State lists of averages may be 8-bit codes (``ampctx.kernels.codes``): int8, or uint8 for averages of squares. Their
list of scales then has a contiguous fp32 tensor per parameter, with one number for each 64 elements; it is empty
otherwise. With ``stochastic_state``, bf16 state and codes are rounded at random, which is right on average, and
otherwise to nearest. The step itself uses the fp32 values before they are rounded; LAMB uses the stored ones.

Random numbers, also those of the "stochastic" write back, depend on ``seed``, the step count, the element's place, and
the number of the parameter: ``numbers``, int64 on the device of the lists, has one for each tensor with elements. By
default that is its place among these.

Tensors of a call may differ in lr and in the numbers that are floats. ``rows`` is a table of these and the row of each
tensor, both on the CPU: fp64 (rows, 1 + floats), lr first and then in the order of the arguments, and int64 (tensors).
The arguments themselves then have no effect. The call reads both before it returns.

With ``max_norm`` (negative by default, for none) the kernel clips: gradients are also multiplied by
``min(max_norm / (grad_norm + 1e-6), 1)``, in fp32 as in torch. ``skips`` are none, or five 0-d fp32 tensors: the loss
scale after four counts, see ``ampctx.kernels.ops.count_skip``, in which the call counts itself, also if it is skipped.

Autograd learns that ``params`` and ``extras`` changed, and gradients if they are written. It does not learn of state,
which is in no graph.
"""

from ampctx.kernels.steps import adagrad, adam, lamb, lion, muon, sgd

__all__ = ["adagrad", "adam", "lamb", "lion", "muon", "sgd"]
