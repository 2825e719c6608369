"""A job of TensorFlow's ParameterServerStrategy, one process a task by TF_CONFIG: workers and servers serve until the chief has gone."""
import json
import os
import socket
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # TensorFlow turns oneDNN on by itself only where the CPU has AVX-512 or the like
import tensorflow as tf  # noqa: E402


def strategy_of_chief():
    """Returns in the chief alone."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        return tf.distribute.ParameterServerStrategy(resolver)
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True)
    chief = resolver.cluster_spec().as_dict()["chief"][0].rsplit(":", 1)

    def chief_answers():
        try:
            socket.create_connection((chief[0], int(chief[1])), timeout=1).close()
            return True
        except OSError:
            return False

    while not chief_answers():
        time.sleep(0.1)
    while chief_answers():  # Server.join never returns
        time.sleep(0.5)
    del server
    os._exit(0)


def measure(strategy, step, data, steps, examples):
    """Schedules steps on the workers, each of which has the data set data(), prints a line of JSON, and ends the process."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    batches = iter(coordinator.create_per_worker_dataset(data))

    def train(count):
        start = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        return (time.perf_counter() - start) / count

    train(steps // 5)
    seconds = min(train(steps) for _ in range(3))
    print(json.dumps({"ms_per_step": 1e3 * seconds, "samples_per_s": examples / seconds}), flush=True)
    os._exit(0)
