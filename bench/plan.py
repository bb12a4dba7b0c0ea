"""Plan a conversion to Orbax as ``--dry-run`` does, but for the room that it wants on the disk.

python -m bench.plan BASE
"""

from __future__ import annotations

import sys
from pathlib import Path

from gemma_convert.convert.jobs import hf_to_orbax
from gemma_convert.convert.readers.safetensors import open_safetensors

if __name__ == "__main__":
    job = hf_to_orbax(open_safetensors(Path(sys.argv[1])))
    print(f"{len(job.plan.target)} tensors, {job.plan.target.nbytes / 1e9:.1f} GB")
