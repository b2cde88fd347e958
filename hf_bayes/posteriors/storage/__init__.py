"""Atomic directories of safetensors and JSON: a reader finds the complete old or the complete new content, verified.

The manifest lists size and sha256 of every file: **the directory is what its manifest lists**. A save is a redo log:

1. Stage. All new files are written and fsynced in a staging directory *inside* the target (hence on its file system).
   The manifest is written last. Then the staging directory is renamed ``_hf_bayes_pending-<digest of that manifest>``.
   The old files are untouched.
2. Commit. ``rename(pending/manifest.json, manifest.json)``, one atomic system call, then fsync.
3. Install. The pending files are renamed to their final names one by one. Files that only the old manifest listed are
   removed, then the pending directory.

A reader looks for each file first in the pending directory of the manifest that it has read, then at the final name.
Before the commit this finds the old file, because no pending directory has the old digest. After the commit it finds
the new file at any point of step 3. Each file must have the hash in the manifest. A reader that a save overtakes
therefore notices it, and starts again with the new manifest.

A writer killed in step 1 leaves a directory that no manifest names; the next save removes it. A writer killed in step 3
leaves a pending directory that readers still use; the next save installs it first. Files of the user in the directory
are never moved or copied.

With several processes each one writes its own files in step 1. The first process writes the manifest and commits.

Writing needs POSIX (rename over an open file, flock on a directory). Reading does not.
"""

from hf_bayes.posteriors.storage.formats import Content
from hf_bayes.posteriors.storage.group import Alone, Group
from hf_bayes.posteriors.storage.manifest import MANIFEST, POSTERIOR
from hf_bayes.posteriors.storage.ownership import check_folder, check_new, check_writable, replaces
from hf_bayes.posteriors.storage.read import listed_files, read_bytes, read_directory, read_file
from hf_bayes.posteriors.storage.recovery import recover
from hf_bayes.posteriors.storage.seal import check_seal, seal, unseal
from hf_bayes.posteriors.storage.write import new_directory, replace_text, write_directory, write_plain

__all__ = [
    "MANIFEST",
    "POSTERIOR",
    "Alone",
    "Content",
    "Group",
    "check_folder",
    "check_new",
    "check_seal",
    "check_writable",
    "listed_files",
    "new_directory",
    "read_bytes",
    "read_directory",
    "read_file",
    "recover",
    "replace_text",
    "replaces",
    "seal",
    "unseal",
    "write_directory",
    "write_plain",
]
