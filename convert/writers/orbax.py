"""Write a `Checkpoint` as an Orbax checkpoint, in the form that its layout's library saves.

The forms are in `orbax_tree`. DeepMind's is a tree alone; Tunix's ``CheckpointManager``
(google-tunix 0.1.7, ``tunix/sft/checkpoint_manager.py``) saves ``nnx.state(model)`` through Orbax's
``PyTreeCheckpointHandler``::

    <directory>/0/_CHECKPOINT_METADATA             item handlers, custom metadata
    <directory>/0/model_params/_METADATA           the tree: keys, kind of value, write shape
    <directory>/0/model_params/_sharding           where each array lay
    <directory>/0/model_params/array_metadatas/    the chunk shape of each array
    <directory>/0/model_params/ocdbt.process_0/    zarr v2 arrays, zstd, in an OCDBT store

Orbax writes these here too, through a handler of ours that moves the bytes of the arrays a block
at a time (Orbax's own want whole arrays in memory) and says in ``_sharding`` that they lie on one
device.
"""

from __future__ import annotations

import json
import shutil
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_convert.convert.awaited import bring
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import GemmaConvertError, OutputError
from gemma_convert.convert.read_ahead import Block, read_ahead
from gemma_convert.convert.tensor import Tensor, all_findings, recall_all, slices
from gemma_convert.convert.tiles import tile_shape, tiles
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.orbax_tree import CHUNK_BYTES, FORMS, TreeForm, make_tree
from gemma_convert.convert.writers.orbax_verify import fold, verify_orbax
from gemma_convert.convert.writers.sync import sync_tree

IN_FLIGHT = 4
"""Blocks that may be handed over and not yet on the disk."""

TREE = "tree"
"""The one piece of an Orbax output in the journal: all arrays."""

Progress = Callable[[int], None]


def write_verified(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    form: TreeForm,
    progress: Progress,
    journal: Journal,
    custom_metadata: Mapping[str, Any] | None = None,
) -> None:
    """`write_orbax` and `verify_orbax`, but for what ``journal`` says is done.

    The tree is one piece: Orbax finishes a save as a whole, so a run that was killed while it wrote
    begins anew, and one that was killed while it verified goes on with that.

    Raises:
        OutputError: See there.
    """
    record = journal.pieces.get(TREE)
    if record is None or not any(directory.iterdir()):
        _empty(directory)
        sums = write_orbax(
            checkpoint, directory, form=form, progress=progress, custom_metadata=custom_metadata
        )
        sync_tree(directory)
        journal.finish(TREE, {"sums": sums, "findings": all_findings(checkpoint)})
    else:
        sums = record["sums"]
        recall_all(checkpoint, record["findings"])
        progress(checkpoint.nbytes)
    verify_orbax(checkpoint, directory, sums, form=form, progress=progress)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_orbax(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    form: TreeForm = FORMS["tunix"],
    block_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
    custom_metadata: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write ``checkpoint`` as an Orbax checkpoint, in bounded memory.

    Args:
        checkpoint: Tensors by the names of their layout, such as ``layers.0.attn.q_einsum.w``.
        directory: A fresh directory of the caller's, who also syncs and renames it.
        form: How the layout nests its parameters, and whether they are an item of step 0.
        block_bytes: Most bytes of one chunk on the disk, and of one read. At most `IN_FLIGHT`
            blocks are held at a time beside those that are read ahead.
        progress: Told the number of bytes whenever a block is on the disk, in this thread.
        custom_metadata: JSON values that Tunix's ``maybe_restore`` hands back.

    Returns:
        Name to checksum of what was written, for `verify_orbax`.

    Raises:
        OutputError: If a name or a shape cannot be stored, or Orbax or the disk fails. Errors of
            the tensors themselves (`GemmaConvertError`) pass through.
    """
    tree = make_tree(checkpoint, form)
    sums = dict.fromkeys((".".join(form.keys(name)) for name in checkpoint), 0)
    handler = _tensor_handler(block_bytes, progress or (lambda _: None), sums)
    try:
        _save(tree, directory, form.item, handler, custom_metadata or {})
    except GemmaConvertError:
        raise
    except Exception as error:
        raise OutputError(
            f"Orbax could not write {directory}: {str(error) or type(error).__name__}",
            "check the free space and permissions there, then run again",
        ) from error
    return dict(zip(checkpoint, sums.values(), strict=True))


def _save(
    tree: Mapping[str, Any],
    directory: Path,
    item: str | None,
    handler: Any,
    custom_metadata: Mapping[str, Any],
) -> None:
    """Save ``tree`` through Orbax itself, with a handler for `Tensor` leaves."""
    import jax
    import orbax.checkpoint as ocp

    # Registered for jax.Array too, because Orbax takes the store of array metadata from there.
    registry = ocp.type_handlers.create_type_handler_registry(
        (Tensor, handler), (jax.Array, handler)
    )
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    save = ocp.args.PyTreeSave(tree)
    directory = directory.resolve()
    if item is None:
        with ocp.Checkpointer(trees) as checkpointer:
            checkpointer.save(directory, args=save, custom_metadata=custom_metadata, force=True)
        return
    with ocp.CheckpointManager(
        directory,
        item_handlers={item: trees},
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    ) as manager:
        arguments = ocp.args.Composite(**{item: save})
        manager.save(0, args=arguments, custom_metadata=dict(custom_metadata), force=True)


def _tensor_handler(block_bytes: int, progress: Progress, sums: dict[str, int]) -> Any:
    """Orbax's handler of jax arrays, with `Tensor` leaves streamed where it would serialize.

    It keeps the type string ``jax.Array``: by that string a restore without a target picks its
    handler (Orbax 0.12.8, ``batched_serialization_requests``), as with Tunix's own checkpoints.
    """
    import orbax.checkpoint as ocp
    import tensorstore as ts
    from orbax.checkpoint._src.metadata.array_metadata_store import Store
    from orbax.checkpoint._src.serialization.tensorstore_utils import build_array_write_spec

    class TensorHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
        async def serialize(
            self, values: Sequence[Tensor], infos: Sequence[Any], args: Any = None
        ) -> Sequence[Any]:
            """Write everything before returning, so that nothing is left for Orbax to await."""
            specs = [
                build_array_write_spec(
                    info,
                    global_shape=tensor.shape,
                    # One chunk a tile: each is written once, whole, and none is read back.
                    local_shape=tile_shape(tensor, block_bytes),
                    dtype=tensor.dtype,
                    use_ocdbt=True,
                    process_index=0,
                )
                for tensor, info in zip(values, infos, strict=True)
            ]
            stores = [  # all opened at once: OCDBT then commits their headers together
                ts.open(ts.Spec(spec.json), create=True, open=True, context=info.ts_context)
                for spec, info in zip(specs, infos, strict=True)
            ]
            try:
                names = [info.name for info in infos]
                tensors = dict(zip(names, values, strict=True))
                opening = dict(zip(names, stores, strict=True))
                bring(tensors)
                _stream(tensors, opening, block_bytes, progress, sums)
            finally:  # an opening still under way would make files while the caller cleans up
                _settle(stores)
            item = infos[0].parent_dir
            (item / "_sharding").write_text(_shardings(names))
            await self._array_metadata_store.write(item, [s.metadata for s in specs], 0)
            return []

    return TensorHandler(array_metadata_store=Store())


def _stream(
    tensors: Mapping[str, Tensor],
    openings: Mapping[str, Any],
    block_bytes: int,
    progress: Progress,
    sums: dict[str, int],
) -> None:
    """Copy each tensor into its (opening) tensorstore; `IN_FLIGHT` blocks are being written."""
    pending: deque[tuple[Any, int]] = deque()
    held = 0
    try:
        for block in read_ahead(tensors, block_bytes, tiles):
            while pending and held + block.array.nbytes > IN_FLIGHT * block_bytes:
                held -= _finish(*pending.popleft(), progress)
            pending.append((_write(openings[block.name].result(), block), block.array.nbytes))
            held += block.array.nbytes
            sums[block.name] = fold(sums[block.name], block)
        while pending:
            _finish(*pending.popleft(), progress)
    finally:
        _settle(write for write, _ in pending)


def _write(store: Any, block: Block) -> Any:
    """The future of a block's write."""
    return store[slices(block.box)].write(block.array, can_reference_source_data_indefinitely=True)


def _finish(write: Any, nbytes: int, progress: Progress) -> int:
    """Wait until a block is on the disk, tell so, and return its size."""
    write.result()
    progress(nbytes)
    return nbytes


def _settle(futures: Iterable[Any]) -> None:
    """Wait until nothing of ``futures`` is under way, however each of them ends."""
    for future in futures:
        future.exception()


def _shardings(names: Iterable[str]) -> str:
    """The ``_sharding`` file: every array whole on device 0, by base64 of its name.

    A mesh of the device with id 0 rather than a single device, because Orbax finds the former by
    its id, on a CPU as on an accelerator, and the latter only by a name such as ``cpu:0``.
    """
    import jax
    from orbax.checkpoint.metadata import NamedShardingMetadata

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    text = NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    return json.dumps({urlsafe_b64encode(name.encode()).decode(): text for name in names})
