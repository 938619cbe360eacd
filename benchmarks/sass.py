"""Reads the machine code that `cuobjdump -sass` prints: instructions, loops, and the loads that are in flight in one.

Control flow is that of the branches. A call returns to the next instruction, and the code of what is called is not
looked into: the kernels call nothing but the slow paths of division and square root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.M)
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;\n]*);", re.M)
REGISTER = re.compile(r"\bR(\d+)")
PREDICATE = re.compile(r"\bU?P\d")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
ENDS = ("EXIT", "RET", "KILL")
INDIRECT = ("BRX", "BRXU")
FORGET = ("CALL", "R2P")  # after these, any predicate may have changed

BYTES = 16  # of an instruction, from sm_70 on
WIDE = 128  # bits of the widest access that all architectures have
KEPT_STATES = 200_000


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # such as "!P0"; empty where it always runs
    opcode: str  # such as "LDG.E.128"
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @cached_property
    def registers(self) -> frozenset[int]:
        """What it names. Of a wider operand that is the first register."""
        return frozenset(int(number) for number in REGISTER.findall(self.operands))

    @cached_property
    def written_predicates(self) -> frozenset[str]:
        """What is written comes first: P0 of `ISETP.NE.AND P0, PT, R0, RZ, P1`, P0 and P3 of `IADD3 R4, P0, P3, R5`."""
        return frozenset(PREDICATE.findall(",".join(self.operands.split(",")[:3])))

    @property
    def is_load(self) -> bool:
        return self.name in ("LDG", "LD")

    @property
    def is_store(self) -> bool:
        return self.name in ("STG", "ST")

    @property
    def is_generic(self) -> bool:
        """Whether it finds out at run time which memory an address is in."""
        return self.name in ("LD", "ST")

    @property
    def is_local(self) -> bool:
        """Whether it spills a register, or reads one that was spilled."""
        return self.name in ("LDL", "STL")

    @property
    def bits(self) -> int:
        """Width of an access to memory."""
        widths = [re.fullmatch(r"[US]?(\d+)", part) for part in self.opcode.split(".")[1:]]
        return next((int(width[1]) for width in widths if width), 32)


def sections(heading: re.Pattern[str], text: str) -> dict[str, str]:
    """The text after each heading up to the next; with FUNCTION that of each function by its mangled name."""
    found = list(heading.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(found, ends, strict=True)}


def instructions(text: str) -> list[Instruction]:
    """All of a function.

    Raises:
        ValueError: one between them was not understood; without it, control flow would be wrong.
    """
    code = [Instruction(int(at, 16), guard, *rest) for at, guard, *rest in INSTRUCTION.findall(text)]
    for before, after in pairwise(code):
        if after.address != before.address + BYTES:
            raise ValueError(f"no instruction between {before.address:#06x} and {after.address:#06x} was understood")
    return code


class Code:
    """The instructions of one function and the ways through them, by their places in the list.

    ``indirect`` has the targets of branches to an address in a register, which cuobjdump -elf lists.
    """

    def __init__(self, code: list[Instruction], indirect: dict[int, list[int]] | None = None) -> None:
        self.code = code
        self._indirect = indirect or {}
        self._place = {instruction.address: place for place, instruction in enumerate(code)}
        self.successors = [self._successors(place) for place in range(len(code))]

    def _successors(self, place: int) -> tuple[int, ...]:
        instruction = self.code[place]
        after = (place + 1,) if place + 1 < len(self.code) else ()
        if instruction.name in ENDS:
            return after if instruction.guard else ()
        if instruction.name in INDIRECT:
            return tuple(self._place[address] for address in self._indirect[instruction.address])
        if instruction.name not in ("BRA", "JMP"):
            return after
        taken = (self._place[int(TARGET.search(instruction.operands)[1], 16)],)
        is_conditional = instruction.guard or "," in instruction.operands  # BRA P1, 0x120
        return tuple(dict.fromkeys(taken + after)) if is_conditional else taken

    def _order(self) -> list[int]:
        """Places that can be reached, each after one that leads to it (reverse postorder)."""
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.successors[0]))]
        while stack:
            place, ways = stack[-1]
            way = next((way for way in ways if way not in seen), None)
            if way is None:
                order.append(place)
                stack.pop()
            else:
                seen.add(way)
                stack.append((way, iter(self.successors[way])))
        return order[::-1]

    def _back_edges(self) -> Iterator[tuple[int, int]]:
        """From the last instruction of a loop to the first, through which every way into the loop goes."""
        order = self._order()
        predecessors: dict[int, list[int]] = {place: [] for place in order}
        for place in order:
            for way in self.successors[place]:
                predecessors[way].append(place)
        # Dominators as in Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm".
        number = {place: i for i, place in enumerate(order)}
        above = {order[0]: order[0]}

        def common(a: int, b: int) -> int:
            while a != b:
                a, b = (above[a], b) if number[a] > number[b] else (a, above[b])
            return a

        changed = True
        while changed:
            changed = False
            for place in order[1:]:
                known = [p for p in predecessors[place] if p in above]
                new = known[0]
                for other in known[1:]:
                    new = common(new, other)
                changed |= above.get(place) != new
                above[place] = new
        for place in order:
            for way in self.successors[place]:
                if number[way] <= number[place] and common(place, way) == way:
                    yield place, way

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """The places of each loop by its first one."""
        predecessors: dict[int, set[int]] = {}
        for place, ways in enumerate(self.successors):
            for way in ways:
                predecessors.setdefault(way, set()).add(place)
        found: dict[int, frozenset[int]] = {}
        for last, first in self._back_edges():
            body, left = {first}, [last]
            while left:
                place = left.pop()
                if place not in body:
                    body.add(place)
                    left += predecessors.get(place, ())
            found[first] = found.get(first, frozenset()) | body
        return found

    @cached_property
    def hot_loops(self) -> list[Loop]:
        """The innermost loops with wide loads, which walk the elements; that with most of them first."""
        wide = {p for p, i in enumerate(self.code) if i.is_load and i.bits >= WIDE}
        loops = [(first, body) for first, body in self.loops.items() if body & wide]
        inner = [(first, body) for first, body in loops if not any(other < body for _, other in loops)]
        inner.sort(key=lambda loop: (-len(loop[1] & wide), loop[0]))
        return [Loop(self, first, body) for first, body in inner]


@dataclass(frozen=True)
class Loop:
    of: Code
    first: int
    body: frozenset[int]

    @property
    def code(self) -> list[Instruction]:
        return [self.of.code[place] for place in sorted(self.body)]

    def widths(self, accesses: str) -> dict[int, int]:
        """How many "loads" or "stores" have which width, widest first."""
        bits = [i.bits for i in self.code if (i.is_load if accesses == "loads" else i.is_store)]
        return {width: bits.count(width) for width in sorted(set(bits), reverse=True)}

    def has_wide_way(self, stores: bool, narrowest: int = WIDE) -> bool:
        """Whether an iteration can do with wide loads, wide stores where ``stores``, and none below ``narrowest``."""
        start = (self.first, False, not stores)
        seen, left = {start}, [start]
        while left:
            place, loaded, stored = left.pop()
            instruction = self.of.code[place]
            is_wide = instruction.bits >= WIDE
            if (instruction.is_load or instruction.is_store) and instruction.bits < narrowest:
                if not instruction.guard:
                    continue
            elif instruction.is_load:
                loaded = loaded or is_wide
            elif instruction.is_store:
                stored = stored or is_wide
            for way in self.of.successors[place]:
                if way == self.first and loaded and stored:
                    return True
                state = (way, loaded, stored)
                if way in self.body and state not in seen:
                    seen.add(state)
                    left.append(state)
        return False

    @cached_property
    def bytes_in_flight(self) -> tuple[int, int] | None:
        """Least and most bytes that a thread has asked for when it first needs some of them.

        Counted from the start of the loop: the bytes of loads up to the first instruction that names a register which
        one of these loads fills. Ways with narrow loads before that instruction do not count; None where none is left.
        """
        found = {4 * len(pending) for pending in self._pending_at_first_use()}
        return (min(found), max(found)) if found else None

    def _pending_at_first_use(self) -> Iterator[frozenset[int]]:
        start = (self.first, frozenset(), frozenset())
        seen, left = {start}, [start]
        while left:
            place, known, pending = left.pop()
            instruction = self.of.code[place]
            if instruction.registers & pending:
                yield pending
                continue
            for state in self._steps(instruction, place, known, pending):
                if state[0] in self.body and state not in seen:
                    seen.add(state)
                    left.append(state)
            if len(seen) > KEPT_STATES:
                raise ValueError(f"too many ways through the loop at {self.of.code[self.first].address:#06x}")

    def _steps(
        self, instruction: Instruction, place: int, known: frozenset[str], pending: frozenset[int]
    ) -> Iterable[tuple[int, frozenset[str], frozenset[int]]]:
        """What can follow. ``known``: guards that are true on this way, so that it takes no branch that contradicts."""
        ways = self.of.successors[place]
        guard = instruction.guard
        opposite = guard[1:] if guard.startswith("!") else f"!{guard}"
        if instruction.is_load:
            if guard and guard not in known:  # left out
                yield from ((way, known | {opposite}, pending) for way in ways)
            if (guard and opposite in known) or instruction.bits < WIDE:
                return
            first = int(REGISTER.search(instruction.operands)[1])
            filled = pending | set(range(first, first + instruction.bits // 32))
            yield from ((way, known | {guard} if guard else known, filled) for way in ways)
        elif instruction.name == "BRA" and guard and "," not in instruction.operands and len(ways) == 2:
            taken, after = ways
            if opposite not in known:
                yield taken, known | {guard}, pending
            if guard not in known:
                yield after, known | {opposite}, pending
        else:
            written = instruction.written_predicates
            forgets = instruction.name in FORGET
            kept = frozenset(g for g in known if not forgets and g.removeprefix("!") not in written)
            yield from ((way, kept, pending) for way in ways)
