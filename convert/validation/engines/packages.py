"""Whether the packages of an engine are installed, told before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from gemma_convert.convert.errors import InputError


def require_packages(engine: str, packages: tuple[str, ...], extra: str) -> None:
    """Refuse an engine whose packages are missing.

    Args:
        engine: Its name, for the message.
        packages: Names as they are imported.
        extra: The extra of this package that installs them.

    Raises:
        InputError: Naming the first that is missing.
    """
    missing = next((name for name in packages if find_spec(name) is None), None)
    if missing is not None:
        raise InputError(
            f"{engine} cannot run here: the package {missing} is not installed",
            f"pip install 'gemma-convert[{extra}]'",
        )
