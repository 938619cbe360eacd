"""A list of names that cannot be changed."""

from __future__ import annotations

from typing import Any, NoReturn

from ampctx import AmpNotImplementedError


class Names(list):
    """Raises where it would be changed: the change would have no effect on what is cast."""

    @classmethod
    def of(cls, names: str) -> Names:
        """The words of a text."""
        return cls(names.split())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AmpNotImplementedError(
            "The lists in apex.amp.lists are not what ampctx casts by. Call amp.register_half_function(module, name), "
            "amp.register_float_function(module, name) or amp.register_promote_function(module, name) before "
            "amp.initialize."
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)
