"""Tests of what starts the program in a wheel: packaging/python/tessera."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """#!/bin/sh
echo "$#|$1|$2|$RANK|$LD_LIBRARY_PATH"
exit 75
"""


class Wheel(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.site = Path(scratch.name, "site")
        self.package = self.site / "tessera"
        (self.package / "bin").mkdir(parents=True)
        for source in (ROOT / "packaging/python/tessera").glob("*.py"):
            (self.package / source.name).write_text(source.read_text())
        (self.package / "torch_version").write_text("2.13.0\n")
        program = self.package / "bin" / "tessera"
        program.write_text(PROGRAM)
        program.chmod(0o755)

    def torch(self, folder, version):
        (folder / "torch" / "lib").mkdir(parents=True)
        (folder / "torch" / "__init__.py").write_text("raise ImportError('not imported')\n")
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")

    def start(self, *arguments, also=None, libraries=None):
        paths = [str(self.site)] + ([str(also)] if also else [])
        return subprocess.run(
            [sys.executable, "-S", "-m", "tessera", *arguments], capture_output=True, text=True,
            env={"PYTHONPATH": os.pathsep.join(paths), "RANK": "3",
                 **({"LD_LIBRARY_PATH": libraries} if libraries else {})})

    def test_words_environment_and_exit_code_go_through(self):
        self.torch(self.site, "2.13.0+cpu")
        done = self.start("train", "a file.json")
        self.assertEqual(done.stdout, "2|train|a file.json|3|\n", done.stderr)
        self.assertEqual(done.returncode, 75)

    def test_torch_of_another_environment_is_found(self):
        elsewhere = self.site.parent / "elsewhere"
        self.torch(elsewhere, "2.13.0")
        done = self.start("--version", also=elsewhere)
        self.assertEqual(done.stdout, f"1|--version||3|{elsewhere}/torch/lib\n", done.stderr)

    def test_another_torch_is_not_found_first(self):
        self.torch(self.site, "2.13.0+cpu")
        done = self.start("--version", libraries="/of/another")
        self.assertEqual(done.stdout, f"1|--version||3|{self.site}/torch/lib:/of/another\n", done.stderr)

    def test_another_torch_is_refused(self):
        self.torch(self.site, "2.12.1+cpu")
        done = self.start("--version")
        self.assertEqual(done.returncode, 1)
        self.assertIn("for torch 2.13.0, but there is 2.12.1 for", done.stderr)
        self.assertIn("pip install torch==2.13.0", done.stderr)

    def test_no_torch_is_refused(self):
        done = self.start("--version")
        self.assertIn("but there is none", done.stderr)


if __name__ == "__main__":
    unittest.main()
