"""Whether JSON from outside has the types that its readers count on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY_KEY = "*"
"""In a form, stands for each key that is not named."""


def fits(value: Any, form: Any) -> bool:
    """Whether ``value`` is of ``form``; a key that is absent fits, one that no form names too.

    Args:
        value: As JSON gives it.
        form: A type or a tuple of types; ``[form]``, a list of such; ``{key: form}``, an object.
    """
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, dict):
        every = form.get(ANY_KEY, object)
        return isinstance(value, Mapping) and all(
            fits(item, form.get(key, every)) for key, item in value.items()
        )
    return isinstance(value, form)
