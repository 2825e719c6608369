"""Ranks of the backend "mpi" under each MPI's launcher, and what users are told where MPI cannot be used. mpi_test.py MPI_RANKS MPICH5 (the folder of PyPI's mpich, which has the ABI of MPI 5)."""
import os
import pathlib
import subprocess
import sys
import unittest

RANKS, MPICH5 = sys.argv[1], pathlib.Path(sys.argv[2])
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np"]
MPICH = ["mpiexec.mpich", "-np"]
MPI5 = [str(MPICH5 / "bin/mpiexec.hydra"), "-np"]
LAUNCHERS = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "MPI 5": MPI5}
OPEN_MPI_LIBRARY, MPICH_LIBRARY = "libmpi.so.40", "libmpich.so.12"
LIMIT_S = 60


def environment_of(launcher):
    """Debian's libraries are found by their names, PyPI's in its folder."""
    return {"LD_LIBRARY_PATH": str(MPICH5 / "lib")} if launcher is MPI5 else {}


class Mpi(unittest.TestCase):
    def run_ranks(self, command, environment=None):
        """Runs the command and returns its exit status with what it printed."""
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
                              env={**os.environ, **(environment or {})})
        return done.returncode, done.stdout

    def expect(self, command, *texts, environment=None, status=0):
        returned, output = self.run_ranks(command, environment)
        self.assertEqual(returned == 0, status == 0, output)
        for text in texts:
            self.assertIn(text, output)
        return output

    def test_every_operation(self):
        for name, launcher in LAUNCHERS.items():
            for ranks in range(1, 6):
                with self.subTest(mpi=name, ranks=ranks):
                    output = self.expect([*launcher, str(ranks), RANKS], "[  PASSED  ] ", environment=environment_of(launcher))
                    self.assertNotIn("FAILED", output)

    def test_the_others_go_on_where_a_rank_is_killed(self):
        """By Open MPI's mpirun alone: MPICH's mpiexec kills the others, also with -disable-auto-cleanup."""
        output = self.expect([OPEN_MPI[0], "--enable-recovery", *OPEN_MPI[1:], "3", RANKS, "--mode", "lose"])
        self.assertEqual((output.count("lost rank 1\n"), output.count("survivors 2\n")), (2, 2), output)

    def test_a_library_of_another_mpi_is_refused(self):
        for launcher, library, told in (
            (OPEN_MPI, MPICH_LIBRARY, "the MPI library is MPICH Version [0-9.]+, but Open MPI's mpirun started this process"),
            (MPICH, OPEN_MPI_LIBRARY, "the MPI library is Open MPI v[0-9.]+, but MPICH's mpiexec started this process"),
        ):
            with self.subTest(library=library):
                output = self.expect([*launcher, "2", RANKS, "--mode", "make"], status=1, environment={"LOCKSTEP_MPI_LIBRARY": library})
                self.assertRegex(output, told)
                self.assertEqual(output.count("error: "), 2, output)  # each rank says so

    def test_there_is_no_library(self):
        output = self.expect([*OPEN_MPI, "2", RANKS, "--mode", "make"], "there is no MPI library, which LOCKSTEP_MPI_LIBRARY can name: /nowhere/libmpi.so",
                             "No such file", status=1, environment={"LOCKSTEP_MPI_LIBRARY": "/nowhere/libmpi.so"})
        self.assertEqual(output.count("error: "), 2, output)

    def test_there_is_no_launcher(self):
        self.expect([RANKS, "--mode", "make"], "error: make_group: rank 0: no launcher of MPI started this process", status=1)

    def test_threads_are_no_ranks(self):
        output = self.expect([*OPEN_MPI, "2", RANKS, "--mode", "threads"])
        self.assertEqual(output.count("threads: "), 4, output)
        self.assertEqual(output.count("ranks 0 and 1 are both MPI's rank 0; ranks must be processes that one mpirun has started"), 4, output)

    def test_the_program_has_mpi_begin_and_end(self):
        for name, launcher in LAUNCHERS.items():
            with self.subTest(mpi=name):
                output = self.expect([*launcher, "2", RANKS, "--mode", "own"], environment=environment_of(launcher))
                self.assertEqual(output.count("sum 2\n"), 2, output)

    def test_too_few_threads_are_refused(self):
        self.expect([*MPICH, "2", RANKS, "--mode", "own_single"], "needs MPI_THREAD_MULTIPLE", status=1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
