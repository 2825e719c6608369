"""examples/gpt on meshes of processes: parallel_test.py GPT LOCKSTEP TEXT."""
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
import unittest

GPT, LOCKSTEP, TEXT = sys.argv[1:4]
LIMIT_S = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(ranks, *options, launcher=()):
    return [LOCKSTEP, "run", "-n", str(ranks), *launcher, GPT, *options, TEXT]


def run(ranks, *options, data_bytes=None):
    def limit():
        if data_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    return subprocess.run(command(ranks, *options), capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, preexec_fn=limit)


def losses(ranks, *options):
    result = run(ranks, "--steps", "20", "--layers", "4", "--width", "64", *options)
    if result.returncode != 0:
        raise AssertionError(result.stderr[-3000:])
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", result.stdout)]


class OnMeshes(unittest.TestCase):
    def expect_the_loss_of_one_process(self, meshes):
        expected = losses(1)
        self.assertEqual(len(expected), 3)
        self.assertLess(expected[-1], expected[0] - 1)
        for ranks, *options in meshes:
            with self.subTest(f"{ranks} {' '.join(options)}"):
                for one, split in zip(expected, losses(ranks, *options), strict=True):
                    self.assertAlmostEqual(one, split, delta=2e-4)

    def kill_one(self, ranks, victim, coordinates, *options):
        """Kills a rank in the middle of the training: all others say which one, within two seconds."""
        with subprocess.Popen(command(ranks, "--steps", "100000", *options, launcher=("--min-n", "1")), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as job:
            lines = []
            while not any("step 10:" in line for line in lines):
                lines.append(job.stdout.readline())
                self.assertTrue(lines[-1], "".join(lines))
            pids = {rank: pid for pid, rank in ranks_of(job.pid).items()}
            self.assertEqual(sorted(pids), list(range(ranks)))
            start = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            output = job.communicate(timeout=60)[0]
            seconds = time.monotonic() - start
        for rank in set(range(ranks)) - {victim}:
            own = "".join(line + "\n" for line in output.splitlines() if line.startswith(f"[{rank}]"))
            self.assertIn(f"lost rank {victim} of generation 0: ({coordinates})", own, output)
        self.assertLess(seconds, 2, output)

    def lose_a_row(self, *options):
        options = (*options, "--steps", "60", "--layers", "4", "--width", "64", "--batch", "64")
        expected = re.findall(r"step ([0-9]+): loss ([0-9.]+)", run(1, *options[2:]).stdout)
        with subprocess.Popen(command(4, *options, "--elastic", launcher=("--min-n", "2", "--restarts", "2")),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as job:
            lines = []
            while not any("step 10:" in line for line in lines):
                lines.append(job.stdout.readline())
                self.assertTrue(lines[-1], "".join(lines))
            os.kill({rank: pid for pid, rank in ranks_of(job.pid).items()}[3], signal.SIGKILL)
            output = "".join(lines) + job.communicate(timeout=LIMIT_S)[0]
        self.assertEqual(job.returncode, 0, output)
        self.assertIn("fit goes on with 2 workers (4 before)", output)
        self.assertIn("fit goes on with 4 workers (2 before)", output)
        for (step, loss), (its_step, its_loss) in zip(expected, re.findall(r"step ([0-9]+): loss ([0-9.]+)", output), strict=True):
            self.assertEqual(step, its_step)
            self.assertAlmostEqual(float(loss), float(its_loss), delta=2e-3)


class Meshes(OnMeshes):
    def test_the_loss_is_that_of_one_process(self):
        self.expect_the_loss_of_one_process(((4, "--shard", "2", "--pipeline", "2"), (2, "--tensor", "2")))

    def test_a_lost_rank_is_named_on_all(self):
        self.kill_one(2, 1, "data 0, shard 1, pipeline 0, tensor 0", "--shard", "2")

    def test_an_elastic_mesh_goes_on_without_a_row_and_takes_in_another(self):
        self.lose_a_row("--tensor", "2")

    def test_meshes_that_do_not_fit_are_refused(self):
        result = run(2, "--tensor", "3")
        self.assertEqual(result.returncode, 1)
        self.assertIn("DeviceMesh(data -1, shard 1, pipeline 1, tensor 3): the number of ranks, 2, is not a multiple of 3", result.stderr)


class MoreMeshes(OnMeshes):
    def test_the_loss_is_the_same_on_every_mesh(self):
        self.expect_the_loss_of_one_process(((2,), (2, "--pipeline", "2"), (4, "--tensor", "2"), (4, "--shard", "4"),
                                             (8, "--tensor", "2", "--pipeline", "2"), (8, "--shard", "2", "--pipeline", "2", "--tensor", "2")))

    def test_a_model_that_does_not_fit_trains_when_it_is_split(self):
        options, limit = ("--steps", "1", "--layers", "24", "--width", "512", "--sequence", "16", "--batch", "4", "--microbatches", "1"), 1000 << 20
        whole = run(1, *options, data_bytes=limit)
        self.assertNotEqual(whole.returncode, 0)
        self.assertIn("not enough memory", whole.stderr)
        split = run(4, *options, "--shard", "4", data_bytes=limit)
        self.assertEqual(split.returncode, 0, split.stderr[-2000:])

    def test_a_plan_trains_to_the_same_loss(self):
        for one, planned in zip(losses(1), losses(2, "--plan"), strict=True):
            self.assertAlmostEqual(one, planned, delta=2e-4)

    def test_a_plan_says_what_it_expects_and_refuses_what_does_not_fit(self):
        options = ("--plan", "--steps", "0", "--layers", "8", "--width", "256")
        every = run(2, *options)
        self.assertEqual(every.returncode, 0, every.stderr[-2000:])
        needs = {row[0]: int(row[1]) for row in re.findall(r"^(?:\[0\] )?(\S.*?)  +[0-9.]+  +([0-9]+)  ", every.stdout, re.MULTILINE)}
        self.assertGreaterEqual(len(needs), 9, every.stdout)
        some = run(2, *options, "--memory-mib", str(min(needs.values()) + 1))
        self.assertIn("refused: needs", some.stdout)
        none = run(2, *options, "--memory-mib", "1")
        self.assertEqual(none.returncode, 1)
        self.assertIn("plan_parallel: no split can be used", none.stderr)

    def test_plans_of_bad_input_are_one_line(self):
        for ranks, options, said in ((1, ("--plan-ranks", "4"), "one rank cannot measure what 4 would communicate"),
                                     (2, ("--plan-ranks", "-1"), "ranks is -1; it must be above 0"),
                                     (2, ("--batch", "0"), "x has no examples"),
                                     (2, ("--memory-mib", "-1"), "memory_bytes is -1")):
            with self.subTest(said):
                result = run(ranks, "--plan", *options)
                self.assertEqual(result.returncode, 1)
                self.assertIn(said, result.stderr)

    def test_a_lost_rank_is_named_on_all(self):
        for coordinates, *options in (("data 1, shard 0, pipeline 0, tensor 0",),
                                      ("data 0, shard 0, pipeline 1, tensor 0", "--pipeline", "2"),
                                      ("data 0, shard 0, pipeline 0, tensor 1", "--tensor", "2")):
            with self.subTest(coordinates):
                self.kill_one(2, 1, coordinates, *options)

    def test_an_elastic_mesh_goes_on_without_a_row_and_takes_in_another(self):
        for options in (("--shard", "2"), ("--pipeline", "2")):
            with self.subTest(options[0]):
                self.lose_a_row(*options)

    def test_a_lost_rank_of_three_axes_is_named_on_all(self):
        self.kill_one(8, 6, "data 0, shard 1, pipeline 1, tensor 0", "--shard", "2", "--pipeline", "2", "--tensor", "2", "--layers", "2", "--width", "64")


def ranks_of(launcher):
    """The ranks of a launcher's processes, by pid."""
    ranks = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry)
            status = (folder / "status").read_text()
            is_gpt = GPT.encode() in (folder / "cmdline").read_bytes().split(b"\0")[:1]
        except (OSError, UnicodeDecodeError):
            continue
        if is_gpt and f"PPid:\t{launcher}\n" in status:
            ranks[int(folder.name)] = int(variables["LOCKSTEP_RANK"])
    return ranks


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
