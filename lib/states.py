"""Reading the saved states of a training (training.Checkpoints) without running anything that stands in them.

torch.distributed.checkpoint keeps two kinds of pickles: the list of what is where (.metadata), and values that are no
tensors (in *.distcp). A pickle can call any function. Here the first is read by an unpickler that knows a few classes
of plain data and nothing else, the second as torch.load(weights_only=True) does. The guarantee is that a state which
somebody else has written runs no code. It is not that its numbers are those that were saved: who can write the folder
can change them, and any checksum beside them."""
import pathlib
import pickle
import re

import torch
from torch.distributed.checkpoint import api, DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata

from lib.runtime import InputError, one_line

PLAIN_DATA = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),                         # the layout of a name, "torch.strided"
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "_MEM_FORMAT_ENCODING", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata"))}


class PlainUnpickler(pickle._Unpickler):                            # in Python: the other has no load_build to replace
    """An unpickler of PLAIN_DATA and torch's dtypes."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module, name):
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if (module, name) in PLAIN_DATA or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not what a saved state is made of")

    def load_build(self):
        if isinstance(self.stack[-2], type):                        # would set attributes of a class
            raise pickle.UnpicklingError("a class is changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class StateReader(FileSystemReader):
    """torch's reader of a state's folder, with another way to read its .metadata."""

    def read_metadata(self, *args, **options):
        with self.fs.create_stream(self._get_metadata_path(options.get("rank")), "rb") as file:
            metadata = PlainUnpickler(file).load()
        if type(metadata) is not Metadata or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it describes no state")
        for place in metadata.storage_data.values():
            if not re.fullmatch(r"\w+\.distcp", place.relative_path):
                raise pickle.UnpicklingError(f"it names the file {place.relative_path[:80]!r}")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class StatePlanner(DefaultLoadPlanner):
    """torch's planner, with another way to read values that are no tensors."""

    def load_bytes(self, read_item, value):
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn],
                    torch.load(value, weights_only=True))


def load_state(state, folder):
    """Read a saved state into the tensors of `state`; for all ranks. InputError where it is damaged, or is made of
    anything else than such a state."""
    advice = "remove this folder, and the run goes on from the state before or from the start"
    for path in sorted(pathlib.Path(folder).iterdir()):
        if path.is_symlink() or not path.is_file():
            raise InputError(f"{path}: is a link or no file, so this is no state of this program; {advice}")
    try:
        StateReader(folder).read_metadata()             # load() would print a traceback and look for another file
        load(state, storage_reader=StateReader(folder), planner=StatePlanner())
    except (api.CheckpointException, Exception) as error:           # the first wraps what ranks raise, all sorts
        if isinstance(error, api.CheckpointException):
            error = next(failure for failure, _ in error.failures.values())
        raise InputError(f"{folder}: this saved state cannot be read ({type(error).__name__}: {one_line(error)}); "
                         f"{advice}") from None
