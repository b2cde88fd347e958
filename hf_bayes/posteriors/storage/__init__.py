"""A directory of safetensors and JSON that is always the old one or the new one, and that is checked when it is read.

The manifest lists size and sha256 of every file: **the directory is what its manifest says**. A save is a redo log:

1. all new files are written and fsynced in a staging directory *inside* the target (hence on its file system), the
   manifest last; then staging is renamed ``_hf_bayes_pending-<digest of that manifest>``. The old files are untouched.
2. the commit: ``rename(pending/manifest.json, manifest.json)``, one atomic system call, fsynced.
3. the pending files are renamed to their final names one by one, files that only the old manifest listed are removed,
   then the pending directory.

A reader looks for each file first in the pending directory of the manifest it has read, then at the final name. Before
2 that is the old file (no pending directory has the old digest); after 2 it is the new one, wherever step 3 has got to.
What it finds must have the manifest's hash, so a reader overtaken by a save notices, and starts again with the new
manifest. A writer killed in 1 leaves a directory that no manifest names; killed in 3, one that readers still use: the
next save drops the first and completes the second before it starts. Nothing that a user keeps there is moved or copied.

Of several processes each writes its own files in 1, the first one makes manifest and commit.

Writing needs POSIX (rename over an open file, flock on a directory); reading does not.
"""

from hf_bayes.posteriors.storage.manifest import MANIFEST, POSTERIOR, Content
from hf_bayes.posteriors.storage.read import listed_files, read_directory, read_file
from hf_bayes.posteriors.storage.seal import check_seal, seal, unseal
from hf_bayes.posteriors.storage.write import Alone, Group, check_writable, recover, write_directory, write_plain

__all__ = [
    "MANIFEST",
    "POSTERIOR",
    "Alone",
    "Content",
    "Group",
    "check_seal",
    "check_writable",
    "listed_files",
    "read_directory",
    "read_file",
    "recover",
    "seal",
    "unseal",
    "write_directory",
    "write_plain",
]
