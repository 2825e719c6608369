"""Compiles compile_errors.cc, whose mistakes must each be named in one error: compile_errors_test.py BUILD_DIR."""
import pathlib
import re
import subprocess
import sys
import unittest

BUILD = sys.argv[1]
SOURCE = pathlib.Path(__file__).with_name("compile_errors.cc")


class CompileErrors(unittest.TestCase):
    def test_each_mistake_is_named_once_and_nothing_else_is_wrong(self):
        done = subprocess.run(["cmake", "--build", BUILD, "--target", "compile_errors"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=600)
        self.assertNotEqual(done.returncode, 0, "it compiled")
        expected = sorted(re.findall(r"// expect: (.*)", SOURCE.read_text()))
        self.assertEqual(len(expected), 8)
        errors = re.findall(r"error: (.*)", done.stdout)
        found = sorted(text for error in errors for text in set(expected) if text in error)
        self.assertEqual(found, expected, done.stdout)
        self.assertEqual(len(errors), len(expected), done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
