"""The entries of the table of apex names in ``names``."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Name(NamedTuple):
    """One apex name.

    ``status``: "supported" works as in apex; "adapted" differs as ``note`` says; "refused" raises, and ``note`` names
    the replacement; "missing" is not there, unless an installed apex has it.

    ``target``: the same object, or an equivalent torch function, under its ampctx or torch name. None if only the apex
    name reaches it; ``note`` may then name a newer alternative.

    ``at_import``: a refused name raises when it is imported, not when it is called. Programs probe for such a name, and
    do without it.
    """

    status: Literal["supported", "adapted", "refused", "missing"]
    target: str | None = None
    note: str = ""
    at_import: bool = False

    @property
    def is_served(self) -> bool:
        """Whether programs can use it."""
        return self.status in ("supported", "adapted")


def below(
    prefix: str, names: str, status: Literal["supported", "adapted", "refused", "missing"], note: str = ""
) -> dict[str, Name]:
    """Entries for ``prefix`` names without a target."""
    return {f"{prefix}.{name}": Name(status, None, note) for name in names.split()}
