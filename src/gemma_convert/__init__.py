"""Convert, merge and check Gemma checkpoints between JAX (Orbax, Tunix, Qwix) and Hugging Face.

Import the part you need: ``gemma_convert.convert`` (checkpoints, layouts, readers, writers) or
``gemma_convert.surgery`` (functions from checkpoint to checkpoint).
"""

__version__ = "0.1.0"
