"""apex's FusedAdam and FusedSGD become torch's, where the arguments mean the same."""

from __future__ import annotations

from ampctx_apex.migrate import flow
from ampctx_apex.migrate.analysis import Parsed, Use
from ampctx_apex.migrate.report import Edit

_ADAM = ["params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none"]
_SGD = ["params", "lr", "momentum", "dampening", "weight_decay", "nesterov"]
TARGETS = {
    "apex.optimizers.FusedAdam": "torch.optim.AdamW",
    "apex.optimizers.fused_adam.FusedAdam": "torch.optim.AdamW",
    "apex.optimizers.FusedSGD": "torch.optim.SGD",
    "apex.optimizers.fused_sgd.FusedSGD": "torch.optim.SGD",
}
MESSAGES = dict.fromkeys(
    TARGETS, "torch.optim's, which computes the same; its saved state has another form. Pass fused=True for its kernel"
)
# Arguments without effect at these values, which torch does not know.
_DROPPED = {
    "bias_correction": {"True"},
    "amsgrad": {"False"},
    "set_grad_none": {"True"},
    "capturable": {"False"},
    "master_weights": {"False"},
    "wd_after_momentum": {"False"},
    "materialize_master_grads": {"True", "False"},
    "set_to_none": {"True"},
}


def replaced(parsed: Parsed, use: Use) -> list[Edit]:
    """The edits of one call.

    Raises:
        NotUnderstood: torch's optimizer has no equivalent of an argument.
    """
    assert use.call is not None
    is_adam = use.name.endswith("Adam")
    order, target = _ADAM if is_adam else _SGD, TARGETS[use.name]
    kept: list[str] = []
    given: set[str] = set()
    for index, argument in enumerate(use.call.args):
        name = argument.keyword.value if argument.keyword is not None else order[index] if index < len(order) else ""
        # With the parentheses of a tuple, which are not part of its span.
        value = parsed.tree.code_for_node(argument.value)
        given.add(name)
        if name == "adam_w_mode" and value in ("True", "False"):
            target = "torch.optim.AdamW" if value == "True" else "torch.optim.Adam"
        elif name not in order or argument.star or name in _DROPPED or name == "adam_w_mode":
            if value not in _DROPPED.get(name, ()):
                raise flow.refuse(
                    parsed, use.call, f"torch.optim has no equivalent of {(parsed.arguments(use.call) or ())[index]}"
                )
        else:
            kept.append(value if index == 0 and argument.keyword is None else f"{name}={value}")
    # The default of torch's AdamW is 0.01.
    if target.endswith("AdamW") and "weight_decay" not in given:
        kept.append("weight_decay=0.0")
    edits = [Edit(*parsed.span(use.chain), target)]
    if use.call.args:
        start, end = parsed.span(use.call.args[0])[0], parsed.span(use.call)[1]
        edits.append(Edit(start, end, ", ".join(kept) + ")"))
    return edits
