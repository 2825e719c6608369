"""A project of ten lines against an installed Lockstep, in other folders than the checkout: install_test.py BUILD_DIR WHEELS."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BUILD, WHEELS = sys.argv[1:3]

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(train LANGUAGES CXX)
find_package(Lockstep 0.1 REQUIRED COMPONENTS training servers parallel compat)
add_executable(train train.cc)
target_link_libraries(train PRIVATE Lockstep::lockstep)
foreach(library lockstep compat)
  add_executable(ranks_by_${library} ranks.cc)
  target_link_libraries(ranks_by_${library} PRIVATE Lockstep::${library})
endforeach()
"""

PROGRAM = """
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <lockstep/lockstep.h>
#include <iostream>
namespace ls = lockstep;
int main() {
  ls::MultiWorkerMirroredStrategy strategy;
  const auto scope = strategy.scope();
  ls::Sequential model({ls::Dense(8), ls::Dense(2)});
  model.compile({.optimizer = ls::Adam(), .loss = ls::SparseCategoricalCrossentropy({.from_logits = true})});
  auto x = at::zeros({64, 4});
  at::parallel_for(0, 256, 1, [&](std::int64_t begin, std::int64_t end) { x.view(-1).slice(0, begin, end).fill_(1); });
  if (!x.eq(1).all().item<bool>()) return 2;
  const auto data = ls::Dataset::from_tensor_slices(x, at::zeros({64}, at::kLong)).batch(16);
  model.fit(data, {.epochs = 2, .verbose = 0});
  std::cout << "worker " << strategy.worker_rank() << " of " << strategy.num_workers() << " has trained\\n";
}
"""

RANKS = """
#include <lockstep/horovod.h>
#include <iostream>
int main() {
  lockstep::horovod::init();
  std::cout << "rank " << lockstep::horovod::rank() << " of " << lockstep::horovod::size() << "\\n";
  lockstep::horovod::shutdown();
}
"""


class Install(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.tree, self.project = self.folder / "tree", self.folder / "project"

    def do(self, *command, **options):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, **options)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_a_project_finds_builds_and_runs_it(self):
        self.do("cmake", "--install", BUILD, "--prefix", str(self.tree))
        for file in self.tree.rglob("*"):
            if file.suffix in (".h", ".cmake"):
                self.assertNotIn(".deps", file.read_text(), file)
        for binary in [self.tree / "bin/lockstep", *self.tree.glob("lib/*.so*")]:
            self.assertNotIn(".deps", self.do("readelf", "-d", binary), binary)
        torch = self.folder / "wheels"
        torch.symlink_to(WHEELS)
        self.project.mkdir()
        (self.project / "CMakeLists.txt").write_text(PROJECT)
        (self.project / "train.cc").write_text(PROGRAM)
        (self.project / "ranks.cc").write_text(RANKS)
        for compiler in ("g++", "clang++"):
            with self.subTest(compiler):
                build = self.folder / compiler
                self.do("cmake", "-S", str(self.project), "-B", str(build), f"-DCMAKE_PREFIX_PATH={self.tree};{torch}/torch", "-DCMAKE_BUILD_TYPE=Release",
                        f"-DCMAKE_CXX_COMPILER={compiler}")
                self.do("cmake", "--build", str(build))
                output = self.do(str(self.tree / "bin/lockstep"), "run", "-n", "2", str(build / "train"), env={**os.environ, "PATH": "/usr/bin:/bin"})
                self.assertEqual(sorted(output.splitlines()), ["[0] worker 0 of 2 has trained", "[1] worker 1 of 2 has trained"])
                needed = self.do("readelf", "-d", build / "train")
                for library in ("compat", "servers"):
                    self.assertNotIn(f"liblockstep_{library}", needed)
                for library in ("lockstep", "compat"):
                    self.assertEqual(self.do(build / f"ranks_by_{library}"), "rank 0 of 1\n")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
