"""Encodes PTX for the interpreter: registers become numbers, branches places, calls the function that is called.

What it does not know is an error with file and line, never skipped. The opcodes are those of opcodes.cpp, which refuses
others when a program is loaded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
OPERANDS = 6
SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x")
IGNORED = (".loc", ".pragma", ".file", "//")


class PtxError(Exception):
    """PTX that is not as expected: in which file and line."""


@dataclass
class Statement:
    text: str
    line: int


@dataclass
class Function:
    """An entry, or a function that entries call: its parameters as declared, its body in statements."""

    name: str
    is_entry: bool
    head: str
    line: int
    body: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    """A PTX file, taken apart."""

    file: str
    text: str
    target: str
    functions: dict[str, Function]
    shared: dict[str, tuple[int, int]]  # alignment, bytes of each variable

    @property
    def entries(self) -> list[Function]:
        return [function for function in self.functions.values() if function.is_entry]


def as_gcc_mangles(name: str) -> str:
    """nvcc gives anonymous namespaces the name of their file, which stands in the mangled name with its length."""
    return re.sub(r"(\d+)(_GLOBAL__N__\w+)", lambda m: "12_GLOBAL__N_1" + m[2][int(m[1]) :], name)


def statements(lines: Iterable[str], first: int) -> Iterator[Statement]:
    """Cuts lines at semicolons and joins what goes on in the next; labels and braces stand alone."""
    pending, start = "", 0
    for number, line in enumerate(lines, first):
        text = line.partition("//")[0].strip()
        if not text or text.startswith(IGNORED):
            continue
        if inner := re.fullmatch(r"\{ \.reg \.b\d+ (\w+); (.*;) \}", text):  # a scratch register of one line
            text = re.sub(rf"\b{inner[1]}\b", "%scratch", inner[2])
        if not pending and (text in "{}" or re.fullmatch(r"\$\w+:", text)):
            yield Statement(text, number)
            continue
        start = start if pending else number
        pending = f"{pending} {text}" if pending else text
        if pending.endswith(";"):
            yield Statement(pending[:-1], start)
            pending = ""
    if pending:
        raise PtxError(f"line {start}: a statement without an end")


def parse(text: str, file: str) -> Module:
    """Splits a file into its functions; the header must be there, so that a file cut short is noticed."""
    lines = text.splitlines()
    found = {key: re.search(rf"^\.{key} (\S+)", text, re.M) for key in ("version", "target")}
    if not all(found.values()):
        raise PtxError(f"{file}: no .version and .target: not PTX, or cut short")
    module = Module(file, text, found["target"][1], {}, {})
    for match in re.finditer(r"^\s*\.shared \.align (\d+) \.[bus](\d+) (\w+)(?:\[(\d+)\])?;", text, re.M):
        module.shared[match[3]] = int(match[1]), BYTES[match[2]] * int(match[4] or 1)
    at = 0
    while at < len(lines):
        match = re.match(r"(?:\.visible |\.weak )*\.(func|entry)\s*(?:\(.*?\))?\s*(\w+)", lines[at])
        if not match:
            at += 1
            continue
        start, head = at, ""
        while at < len(lines) and lines[at].strip() not in ("{", ";"):
            head += lines[at] + "\n"
            at += 1
        if at == len(lines):
            raise PtxError(f"{file}, line {start + 1}: cut short in {match[2]}")
        if lines[at].strip() == ";":  # declared ahead
            continue
        body = at
        depth = 0
        while True:
            if at == len(lines):
                raise PtxError(f"{file}, line {start + 1}: cut short in {match[2]}")
            line = lines[at].split("//")[0].strip()
            depth += line.startswith("{") - line.endswith("}") if line in "{}" and line else 0
            at += 1
            if depth == 0:
                break
        function = Function(match[2], match[1] == "entry", head, start + 1)
        function.body = list(statements(lines[body + 1 : at - 1], body + 2))
        module.functions[function.name] = function
    return module


def split_operands(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])+", text) if part.strip()]


def constant(text: str) -> int | None:
    """The bits of a number, or None."""
    if match := re.fullmatch(r"0f([0-9a-fA-F]{8})", text):
        return int(match[1], 16)
    if match := re.fullmatch(r"0d([0-9a-fA-F]{16})", text):
        return int(match[1], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return int(text, 0) & 0xFFFFFFFFFFFFFFFF
    return None


@dataclass
class Code:
    """One instruction as the interpreter takes it."""

    opcode: str
    guard: int
    operands: list[int]
    immediate: int
    line: int
    target: str = ""


class Encoder:
    """Encodes one entry."""

    def __init__(self, module: Module, entry: Function) -> None:
        self.module, self.entry = module, entry
        self.registers: dict[str, int] = {}
        self.predicates: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.code: list[Code] = []
        self.labels: dict[str, int] = {}
        self.calls = 0
        self.line = entry.line
        self.parameters = self._parameters()
        self.shared: dict[str, int] = {}
        end = 0
        for name, (alignment, size) in module.shared.items():
            self.shared[name] = -(-end // alignment) * alignment
            end = self.shared[name] + size
        self.shared_bytes = end
        maximum = re.search(r"\.maxntid (\d+)", entry.head)
        self.max_threads = int(maximum[1]) if maximum else 1024
        self._encode(entry.body, "", "ret")
        for code in self.code:
            if code.target:
                if code.target not in self.labels:
                    self.refuse(f"no label {code.target}")
                code.immediate = self.labels[code.target]

    def refuse(self, why: str) -> None:
        raise PtxError(f"{self.module.file}, line {self.line}: {why}")

    def _parameters(self) -> dict[str, tuple[int, int]]:
        """Offset and bytes of each parameter of the entry, as the ISA lays them out."""
        declared, end, places = self.entry.head.partition("(")[2].rpartition(")")[0], 0, {}
        for text in filter(None, map(str.strip, re.split(r",\s*\n", declared))):
            if match := re.fullmatch(r"\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
                alignment, name, size = int(match[1]), match[2], int(match[3])
            elif match := re.fullmatch(r"\.param \.[busf](\d+) (?:\.ptr \.align \d+ )?(\w+)", text):
                alignment = size = BYTES[match[1]]
                name = match[2]
            else:
                self.refuse(f"a parameter declared as {text!r}")
            offset = -(-end // alignment) * alignment
            places[name] = offset, size
            end = offset + size
        self.parameter_bytes = end
        return places

    # --- operands ---

    def constant(self, value: int) -> int:
        return ~self.constants.setdefault(value, len(self.constants))

    def register(self, name: str) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def predicate(self, name: str) -> int:
        return self.predicates.setdefault(name, len(self.predicates))

    def operand(self, text: str, scope: str) -> int:
        """A register, a number, or the address of a variable."""
        if text.startswith("%"):
            return self.register(scope + text)
        if (value := constant(text)) is not None:
            return self.constant(value)
        if text in self.parameters:
            return self.constant(self.parameters[text][0])
        if text in self.shared:
            return self.constant(self.shared[text])
        self.refuse(f"unknown operand {text!r}")
        raise AssertionError

    def address(self, text: str, scope: str) -> tuple[int, int]:
        """The register with the base, and the offset."""
        match = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not match:
            self.refuse(f"an address written {text!r}")
        return self.operand(match[1], scope), int(match[2] or 0)

    # --- statements ---

    def emit(
        self, opcode: str, operands: Iterable[int] = (), guard: int = 0, immediate: int = 0, target: str = ""
    ) -> None:
        self.code.append(Code(opcode, guard, list(operands), immediate, self.line, target))

    def _encode(self, body: list[Statement], scope: str, returns: str) -> None:
        """``scope`` tells the registers of functions apart; ``returns``: ret, or the label behind a call."""
        for statement in body:
            self.line, text = statement.line, statement.text
            if text in "{}" or text.startswith((".reg ", ".shared ", ".param ")):
                continue
            if text.endswith(":"):
                self.labels[scope + text[:-1]] = len(self.code)
                continue
            guard = 0
            if match := re.match(r"@(!?)(%p\d+)\s+", text):
                guard = self.predicate(scope + match[2]) + 1
                guard = -guard if match[1] else guard
                text = text[match.end() :]
            opcode, *rest = text.split(None, 1)
            self._instruction(opcode, rest[0] if rest else "", guard, scope, returns)

    def _instruction(self, opcode: str, rest: str, guard: int, scope: str, returns: str) -> None:
        kind, _, modifiers = opcode.partition(".")
        if kind == "bra":
            return self.emit("bra", guard=guard, target=scope + rest)
        if kind == "ret":
            return self.emit("ret", guard=guard) if returns == "ret" else self.emit("bra", guard=guard, target=returns)
        if opcode == "bar.sync":
            if rest != "0":
                self.refuse(f"barrier {rest}: only barrier 0 is known")
            return self.emit("bar.sync", guard=guard)
        if kind == "call":
            return self._call(rest, scope)
        operands = split_operands(rest)
        if kind in ("ld", "st"):
            return self._access(kind, modifiers.split("."), operands, guard, scope)
        if kind == "mov":
            return self._move(opcode, operands, guard, scope)
        if kind == "atom":
            base, offset = self.address(operands[1], scope)
            values = [self.register(scope + operands[0]), base, self.operand(operands[2], scope)]
            return self.emit(opcode, values, guard, offset)
        if opcode in ("shfl.sync.down.b32", "shfl.sync.idx.b32"):
            result, _, in_range = operands[0].partition("|")
            predicate = self.predicate(scope + in_range) if in_range else -1
            values = [self.operand(o, scope) for o in operands[1:]]
            return self.emit(opcode, [self.register(scope + result), predicate, *values], guard)
        if kind == "setp" or modifiers == "pred":
            first = self.predicate(scope + operands[0])
            of = self.predicate if modifiers == "pred" else None
            values = [of(scope + o) if of else self.operand(o, scope) for o in operands[1:]]
            if kind == "setp" and len(operands) != 3:
                self.refuse(f"{opcode} with {len(operands)} operands")
            return self.emit(opcode, [first, *values], guard)
        if kind == "selp":
            values = [self.operand(o, scope) for o in operands[:3]]
            return self.emit(opcode, [*values, self.predicate(scope + operands[3])], guard)
        return self.emit(opcode, [self.operand(o, scope) for o in operands], guard)

    def _access(self, kind: str, modifiers: list[str], operands: list[str], guard: int, scope: str) -> None:
        address, value = operands if kind == "st" else reversed(operands)
        space = modifiers.pop(0) if modifiers[0] in ("global", "shared", "param", "const", "local") else "global"
        name = address.strip("[] ").partition("+")[0].strip()
        if space == "param" and name not in self.parameters and not name.startswith("%"):
            # Of a function, or of a call: a register of its own.
            own, given = self.register(scope + name), self.operand(value, scope)
            return self.emit(f"mov.{modifiers[-1]}", [own, given] if kind == "st" else [given, own], guard)
        base, offset = self.address(address, scope)
        values = [self.operand(v, scope) for v in split_operands(value.strip("{}"))]
        if name in self.parameters:
            size = BYTES[modifiers[-1].lstrip("busf")] * len(values)
            if not 0 <= offset <= self.parameters[name][1] - size:
                self.refuse(f"{size} bytes at {offset} are not within the parameter")
        self.emit(".".join([kind, space, *modifiers]), [base, *values], guard, offset)

    def _call(self, rest: str, scope: str) -> None:
        """Puts the function in, with registers and labels of its own."""
        match = re.fullmatch(r"\((\w+)\),\s*(\w+),\s*\(([\s\w,]*)\)", rest)
        if not match or match[2] not in self.module.functions:
            self.refuse(f"a call written {rest!r}")
        function = self.module.functions[match[2]]
        result, *parameters = re.findall(r"\.param \.b64 (\w+)", function.head)
        self.calls += 1
        inner, line = f"{self.calls}:", self.line
        for parameter, given in zip(parameters, split_operands(match[3]), strict=True):
            self.emit("mov.b64", [self.register(inner + parameter), self.register(scope + given)])
        self._encode(function.body, inner, f"{inner}end")
        self.labels[f"{inner}end"], self.line = len(self.code), line
        self.emit("mov.b64", [self.register(scope + match[1]), self.register(inner + result)])

    def _move(self, opcode: str, operands: list[str], guard: int, scope: str) -> None:
        to, value = operands
        kind = opcode.rpartition(".")[2]
        if kind == "pred":
            target = self.predicate(scope + to)
            if (number := constant(value)) is not None:
                return self.emit("set.pred", [target], guard, number & 1)
            return self.emit("mov.pred", [target, self.predicate(scope + value)], guard)
        if to.startswith("{"):
            halves = [self.operand(o, scope) for o in split_operands(to.strip("{}"))]
            return self.emit(f"unpack.{kind}", [*halves, self.operand(value, scope)], guard)
        if value.startswith("{"):
            halves = [self.operand(o, scope) for o in split_operands(value.strip("{}"))]
            return self.emit(f"pack.{kind}", [self.operand(to, scope), *halves], guard)
        if value in SPECIAL:
            return self.emit(f"mov.{value}", [self.operand(to, scope)], guard)
        return self.emit(opcode, [self.operand(to, scope), self.operand(value, scope)], guard)


# --- the file that program.cpp reads ----------------------------------------------------------------------------------


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *(v - (1 << 64) if v >= 1 << 63 else v for v in values))


def _text(text: str) -> bytes:
    return _numbers(len(text.encode())) + text.encode()


def write_program(modules: Iterable[Module], functions: dict[int, str], path: Path) -> dict[str, int]:
    """Encodes all entries. ``functions``: the name of each function of the library at its offset. Returns the number of
    instructions of each entry, in the order of the file."""
    opcodes: dict[str, int] = {}
    kernels: dict[str, bytes] = {}
    sizes = {}
    for module in modules:
        for entry in module.entries:
            encoder, name = Encoder(module, entry), as_gcc_mangles(entry.name)
            if name in kernels:
                raise PtxError(f"{module.file}, line {entry.line}: a second entry {name}")
            parts = [_text(name), _text(module.file), _numbers(len(encoder.parameters))]
            parts += [_numbers(*place) for place in encoder.parameters.values()]
            parts.append(_numbers(encoder.parameter_bytes, encoder.shared_bytes, encoder.max_threads))
            parts.append(_numbers(len(encoder.registers), len(encoder.predicates)))
            parts.append(_numbers(len(encoder.constants), *encoder.constants, len(encoder.code)))
            for code in encoder.code:
                if len(code.operands) > OPERANDS:
                    raise PtxError(f"{module.file}, line {code.line}: {code.opcode} with {len(code.operands)} operands")
                operands = code.operands + [0] * (OPERANDS - len(code.operands))
                number = opcodes.setdefault(code.opcode, len(opcodes))
                parts.append(_numbers(number, code.guard, *operands, code.immediate, code.line))
            kernels[name] = b"".join(parts)
            sizes[name] = len(encoder.code)
    known = [(offset, name) for offset, name in functions.items() if name in kernels]
    table = b"".join([_numbers(len(known)), *(_numbers(offset) + _text(name) for offset, name in known)])
    head = b"".join([_numbers(len(opcodes)), *map(_text, opcodes)])
    path.write_bytes(head + table + _numbers(len(kernels)) + b"".join(kernels.values()))
    return sizes
