"""The Hugging Face Hub: push a directory there, and fetch what a conversion reads from there."""
