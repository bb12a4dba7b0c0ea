"""Readers: open a checkpoint on disk as a lazy mapping, from headers that are not trusted.

`open_checkpoint` tells the format by what is there. No reader imports jax, orbax or torch, and
tensorstore only once an Orbax checkpoint is opened.
"""

from gemma_convert.convert.readers.base import open_base
from gemma_convert.convert.readers.directory import open_checkpoint, open_headers
from gemma_convert.convert.readers.orbax import open_orbax
from gemma_convert.convert.readers.safetensors import open_safetensors, read_file

__all__ = [
    "open_base",
    "open_checkpoint",
    "open_headers",
    "open_orbax",
    "open_safetensors",
    "read_file",
]
