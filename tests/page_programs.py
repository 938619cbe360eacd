"""The programs of a page that shows one and then diffs of it."""

import re


def programs(page: str) -> list[tuple[str, str]]:
    """Each program, made from the one before by diffs, and what the page says that it prints."""
    program, found = "", []
    for kind, text in re.findall(r"```(python|diff|text)\n(.*?)```", page, flags=re.S):
        if kind == "python":
            program = text
        elif kind == "diff":
            before, after = (
                "".join(line[1:] + "\n" for line in text.splitlines() if line[0] in signs) for signs in (" -", " +")
            )
            assert program.count(before) == 1, f"no place for\n{text}"
            program = program.replace(before, after)
        else:
            found.append((program, text))
    return found
