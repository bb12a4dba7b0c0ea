"""Google Cloud Storage: checkpoints read in place, and outputs that appear there whole."""
