"""Every test here compiles: see `tests.compiling`."""

from tests.compiling import fresh_compiler

__all__ = ["fresh_compiler"]
