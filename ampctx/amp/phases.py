"""The states of one optimizer under amp, as a table: which calls are allowed in each, and the state that follows.

Two states and a mark. ``masters.gradients.Phase`` is the state of ``.grad``: IDLE, OPEN (blocks are open) or WINDOW
(scaled gradients of delayed blocks). ``StepPhase`` is the state of the optimizer. Gradients are *incomplete* after an
exception that came while a block added them up. The binding looks up refusals and next states here. A random walk in
the tests holds the rest of the code to the table.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ampctx.masters.gradients import Phase


class StepPhase(Enum):
    READY = "between steps"
    STEPPING = "the optimizer's own code runs"
    PERTURBED = "between first_step and second_step of SAM"
    SKIPPED = "first_step was skipped, and second_step is to come"
    RELEASED = "not under amp any more"


class StackChange(Enum):
    """How an event changes the stack of open blocks. The lowest entry may be an accumulation window."""

    KEEP = "nothing"
    PUSH = "a block begins"
    POP = "the latest ends; with the last one, the window ends as well"
    DELAY = "the only one becomes a window"
    UNDO = "the latest ends as if it had not begun; the window stays"
    CLEAR = "the window ends"


class Mark(Enum):
    """How an event treats incomplete gradients."""

    REFUSED = "it is refused"
    STAYS = "they stay incomplete"
    BEGINS = "it makes them so"
    ENDS = "it ends them"


class Row(NamedTuple):
    """An event. ``gradients`` and the keys of ``steps``: the states that allow it. ``steps`` maps to the next state."""

    gradients: tuple[Phase, ...]
    blocks: StackChange
    steps: dict[StepPhase, StepPhase]
    incomplete: Mark


_ANY = tuple(Phase)
_BETWEEN = (Phase.IDLE, Phase.WINDOW)
_OPEN = (Phase.OPEN,)

READY, STEPPING, PERTURBED, SKIPPED, RELEASED = StepPhase
# In these states a call of a replaced method is the optimizer's own, or passes through.
NOT_THE_USERS = (STEPPING, RELEASED)
_BETWEEN_STEPS = {READY: READY, PERTURBED: PERTURBED, SKIPPED: SKIPPED}
# A closure and the hooks of a step may call everything that is allowed between steps.
_STAYS = {**_BETWEEN_STEPS, STEPPING: STEPPING}
_UNPERTURBED = {phase: phase for phase in _STAYS if phase is not PERTURBED}

TABLE = {
    # scale_loss. A block inside another one may begin on incomplete gradients.
    "enter": Row(_BETWEEN, StackChange.PUSH, _STAYS, Mark.REFUSED),
    "enter nested": Row(_OPEN, StackChange.PUSH, _STAYS, Mark.STAYS),
    "exit": Row(_OPEN, StackChange.POP, _STAYS, Mark.STAYS),
    "exit delayed": Row(_OPEN, StackChange.DELAY, _STAYS, Mark.STAYS),
    "exit raised": Row(_OPEN, StackChange.UNDO, {**_STAYS, PERTURBED: READY}, Mark.STAYS),
    # An exception while gradients are added up, such as KeyboardInterrupt or out of memory.
    "exit interrupted": Row(_OPEN, StackChange.UNDO, {**_STAYS, PERTURBED: READY}, Mark.BEGINS),
    # Steps that ran, and skipped ones.
    "step": Row(_BETWEEN, StackChange.CLEAR, _BETWEEN_STEPS, Mark.REFUSED),
    "first_step": Row(_BETWEEN, StackChange.CLEAR, {READY: PERTURBED, SKIPPED: PERTURBED}, Mark.REFUSED),
    "first_step skipped": Row(_BETWEEN, StackChange.CLEAR, {READY: SKIPPED, SKIPPED: SKIPPED}, Mark.REFUSED),
    "first_step raised": Row(_BETWEEN, StackChange.CLEAR, {READY: READY, SKIPPED: READY}, Mark.REFUSED),
    "second_step": Row(_BETWEEN, StackChange.CLEAR, dict.fromkeys(_BETWEEN_STEPS, READY), Mark.REFUSED),
    # Other calls of the user.
    "zero_grad": Row(_ANY, StackChange.CLEAR, _STAYS, Mark.ENDS),
    "master_params": Row(_ANY, StackChange.KEEP, _STAYS, Mark.STAYS),
    "add_param_group": Row(_ANY, StackChange.KEEP, _STAYS, Mark.STAYS),
    "save": Row(_BETWEEN, StackChange.KEEP, _UNPERTURBED, Mark.STAYS),
    "load": Row(_BETWEEN, StackChange.CLEAR, {**dict.fromkeys(_BETWEEN_STEPS, READY), STEPPING: STEPPING}, Mark.ENDS),
    "reset": Row(_BETWEEN, StackChange.CLEAR, dict.fromkeys(_STAYS, RELEASED), Mark.ENDS),
}

# Messages, to follow the name of the call.
_IN_BLOCK = (
    "was called inside a scale_loss block. Gradients are still scaled there. Move the call after the block. "
    "See docs/tutorial.md#train."
)
_STATE_IN_BLOCK = (
    "was called inside a scale_loss block. The state of a step is incomplete there. Leave the block first."
)
_INCOMPLETE = (
    "was called after an exception at the end of a scale_loss block, so gradients are incomplete. Call "
    "optimizer.zero_grad() and repeat this step's backward passes."
)
_PERTURBED_TWICE = (
    "was called a second time. The weights are perturbed already, and the original ones would be lost. Call "
    "optimizer.second_step() first; after optimizer.zero_grad() it only restores the weights."
)
_STATE_PERTURBED = (
    "was called between first_step() and second_step(). The weights are perturbed there. Save after second_step()."
)
_AFTER_RESET = "was called after amp.reset(), so amp no longer handles this optimizer. Call amp.initialize again."


def refusal(event: str, gradients: Phase, step: StepPhase, incomplete: bool) -> str | None:
    """Why an event is refused in these states, None if it is allowed."""
    row = TABLE[event]
    of_state = event in ("save", "load", "reset")
    if gradients not in row.gradients:
        return _STATE_IN_BLOCK if of_state else _IN_BLOCK
    if incomplete and row.incomplete is Mark.REFUSED:
        return _INCOMPLETE
    if step in row.steps:
        return None
    if step is RELEASED:
        return _AFTER_RESET
    return _STATE_PERTURBED if of_state else _PERTURBED_TWICE
