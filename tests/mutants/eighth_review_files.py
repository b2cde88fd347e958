"""Planted faults: exports and files of a command in one step, and the words of its tables and errors."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_REVIEW_FILES = (
    Fault("eighth: an export that failed leaves its staging directory", "posteriors/storage/write.py",
          "shutil.rmtree(staging, ignore_errors=True)", "pass",
          ("models/test_exporting.py::test_a_full_disk_leaves_no_part_of_a_model",
           "posteriors/storage/test_write.py::test_a_plain_directory_on_a_full_disk_is_named")),
    Fault("eighth: a model is exported file by file", "models/exporting.py",
          "model.save_pretrained(staging)", "model.save_pretrained(directory)",
          ("models/test_exporting.py::test_a_full_disk_leaves_no_part_of_a_model",)),
    Fault("eighth: a file of a command is truncated before it is written", "cli/output_file.py",
          "disk.write(part, data)", "target.write_bytes(data[:1]), disk.write(part, data)",
          ("cli/test_output_file.py::test_a_full_disk_leaves_the_old_file",)),
    Fault("eighth: a pipe is replaced by a file", "cli/output_file.py",
          "direct = file.exists() and (not file.is_file() or", "direct = file.exists() and (",
          ("cli/test_output_file.py::test_a_link_and_a_pipe_stay",)),
    Fault("eighth: figures in small units are shown as 0.0000", "cli/evaluation/table.py",
          'return ".4g" if results["kind"]', 'return ".4f" if results["kind"]',
          ("cli/evaluation/test_table.py::test_figures_of_any_unit_have_four_digits",)),
)
# fmt: on
