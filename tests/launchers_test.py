"""Runs the seed program on two workers, and Horovod's tutorial on four ranks, by each launcher that a site may have. launchers_test.py MNIST HOROVOD LOCKSTEP RESUME DDP SERVERS (empty: built without gRPC)."""
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from free_ports import free_ports

MNIST, HOROVOD, LOCKSTEP, RESUME, DDP, SERVERS = sys.argv[1:7]
SCRIPT = pathlib.Path(__file__).parents[1] / "deploy/train.slurm"
LIMIT_S = 300


def training(epochs):
    return [MNIST, "--strategy", "multi_worker", "--replicas", "1", "--epochs", str(epochs)]


TRAIN = training(1)  # as many as show that the processes are one job


class Slurm:
    """A controller and a node on this machine, in a folder of their own."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        folder, host = self.folder, socket.gethostname().split(".")[0]
        controller_port, node_port = free_ports(2)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
""")
        self.start("/usr/sbin/munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
                   f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed")
        self.wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self.start("/usr/sbin/slurmctld", "-D")
        self.start("/usr/sbin/slurmd", "-D")
        self.wait_for(lambda: "idle" in subprocess.run(["sinfo", "-h"], env=self.environment, capture_output=True, text=True).stdout, "an idle node")
        return self

    def start(self, *command):
        with open(self.folder / "log", "a") as log:
            self.started.append(subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=log))

    def wait_for(self, ready, what):
        end = time.monotonic() + 60
        while not ready():
            if time.monotonic() > end:
                raise RuntimeError(f"Slurm: there is no {what}:\n" + (self.folder / "log").read_text()[-4000:])
            time.sleep(0.05)

    def __exit__(self, *_):
        # One after the other: a slurmd that ends tells the controller of its jobs, and waits two minutes for one that is gone.
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Jobs(unittest.TestCase):
    TRAINED = "steps 100, updates by a batch 2 to 2, of a shard 100 100\n"

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_all(self, *commands, environments=None):
        """Starts the commands together in the same folder, and returns what they print; all end well."""
        environments = environments or [{}] * len(commands)
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        started = [subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})
                   for command, environment in zip(commands, environments)]
        try:
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, output in zip(started, outputs):
            self.assertEqual(process.returncode, 0, output)
        return "".join(outputs)

    def expect_accuracy(self, output, least):
        accuracies = re.findall(r"Eval accuracy: ([0-9.]+)", output)
        self.assertEqual(len(accuracies), 1, output)  # the chief's
        self.assertGreaterEqual(float(accuracies[0]), least)

    def train(self, *commands, environments=None, accuracy=0.75, epochs=1):
        self.expect_accuracy(self.run_all(*commands, environments=environments), accuracy)
        self.assertTrue((self.folder / f"work/training_checkpoints/ckpt_{epochs}.safetensors").exists())

    def train_by_horovod(self, *launcher, steps, accuracy):
        """Trains once, and goes on from the checkpoint."""
        for until in (steps, 2 * steps):
            output = self.run_all([*launcher, HOROVOD, "--steps", str(4 * until)])
            self.assertIn(f"step {until}, processes 4", output)
        self.expect_accuracy(output, accuracy)
        kept = {path.name for path in (self.folder / "work/mnist_convnet_model").glob("*.safetensors")}
        self.assertEqual(kept, {f"model.ckpt-{step}.safetensors" for step in (0, steps, 2 * steps)})

    def torchrun(self, processes=2):
        # Debian's torchrun (1.13) knows only stdout's number of the streams with Python 3.11.
        streams = ["--redirects", "1", "--tee", "1", "--log_dir", str(self.folder / "logs")]
        return ["/usr/bin/torchrun", "--no_python", "--nproc_per_node", str(processes), "--master_port", str(free_ports(1)[0]), *streams]


class Launchers(Jobs):
    """A job by each launcher, one that is saved and goes on, and one of several roles."""

    def test_by_hand_with_tf_config(self):
        workers = [f"localhost:{port}" for port in free_ports(2)]
        config = [{"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}})} for i in range(2)]
        self.train(TRAIN, TRAIN, environments=config)

    def test_a_loop_of_ones_own_by_each(self):
        with Slurm(self.folder) as slurm:
            launchers = ([], [LOCKSTEP, "run", "-n", "2"], ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
                         ["mpirun.mpich", "-np", "2"], self.torchrun(), ["srun", "-n", "2", "--overcommit"])
            for launcher in launchers:
                with self.subTest(launcher=launcher[:1]):
                    output = self.run_all([*launcher, DDP, "--examples", "10000"], environments=[slurm.environment])
                    accuracies = re.findall(r"test accuracy: ([0-9.]+)", output)
                    self.assertEqual(len(accuracies), 1, output)  # rank 0's: the processes are one job
                    self.assertGreaterEqual(float(accuracies[0]), 0.60)

    def test_slurm_queues_the_job_again_when_its_time_is_over(self):
        work = self.folder / "work"
        work.mkdir()
        with Slurm(self.folder) as slurm:
            def ask(*command):
                done = subprocess.run(command, env={**slurm.environment, "HOME": str(self.folder)}, cwd=work, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                return done.stdout

            # In the tenth step of its first attempt rank 1 has Slurm send what it sends before the end of the time.
            job = ask("sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--overcommit", "--time=2", "--signal=TERM@1", "--output=out",
                      SCRIPT, RESUME, ".", "10", "scancel --signal=TERM $SLURM_JOB_ID", "1").strip()
            output = lambda: (work / "out").read_text() if (work / "out").exists() else ""
            state = lambda: ask("scontrol", "show", "job", job)
            try:
                slurm.wait_for(lambda: "Restarts=1" in state() and "JobState=PENDING" in state(), "job that was queued again")
                self.assertTrue((work / "backup/backup.safetensors").exists(), output())
                # Else Slurm waits two minutes; and it ends a job that starts again in the second in which it was ended.
                ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
                slurm.wait_for(lambda: "JobState=COMPLETED" in state(), "job that has completed")
            except RuntimeError as error:
                self.fail(f"{error}\n{state()}\n{output()}")
            self.assertIn("training was interrupted by Terminated", output())
            self.assertIn("epochs in the history: 4", output())
            self.assertTrue((work / "final.safetensors").exists())

    @unittest.skipUnless(SERVERS, "built without gRPC")
    def test_parameter_servers_by_tf_config(self):
        ports = [f"localhost:{port}" for port in free_ports(4)]
        cluster = {"chief": ports[:1], "worker": ports[1:3], "ps": ports[3:]}
        tasks = [{"type": type, "index": i} for type in cluster for i in range(len(cluster[type]))]
        output = self.run_all(*[[SERVERS, "2", "0"]] * 4, environments=[{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks])
        self.assertEqual(output.count(self.TRAINED), 1, output)


class MoreLaunchers(Jobs):
    def test_lockstep_run(self):
        self.train([LOCKSTEP, "run", "-n", "2", *training(epochs=5)], accuracy=0.90, epochs=5)

    def test_open_mpi(self):
        self.train(["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2", *TRAIN])

    def test_horovod_by_lockstep_run(self):
        self.train_by_horovod(LOCKSTEP, "run", "-n", "4", steps=500, accuracy=0.85)

    def test_horovod_by_open_mpi(self):
        self.train_by_horovod("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "4", steps=100, accuracy=0.5)

    def test_mpich(self):
        self.train(["mpirun.mpich", "-np", "2", *TRAIN])

    def test_torchrun(self):
        self.train([*self.torchrun(), *TRAIN])

    @unittest.skipUnless(SERVERS, "built without gRPC")
    def test_parameter_servers_by_each(self):
        with Slurm(self.folder) as slurm:
            launchers = (["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "4"], ["mpirun.mpich", "-np", "4"], self.torchrun(4),
                         ["srun", "-n", "4", "--overcommit"])
            for launcher in launchers:
                with self.subTest(launcher=launcher[:1]):
                    output = self.run_all([*launcher, SERVERS, "2", "0"], environments=[{**slurm.environment, "NUM_PS": "1"}])
                    self.assertEqual(output.count(self.TRAINED), 1, output)

    def test_slurm(self):
        with Slurm(self.folder) as slurm:
            self.train(["srun", "-n", "2", "--overcommit", *TRAIN], environments=[slurm.environment])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[7:]], verbosity=2)
