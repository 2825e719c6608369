// For parameter_server_faults_test: a training of a table whose rows tell how often they were updated, in processes
// that may not have more than some memory of their own.
#include <lockstep/lockstep.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <iostream>

// Arguments: rows, elements of a row, ids in a step, epochs, MiB of memory for each process (0: any), a folder for
// checkpoints, and steps between two checkpoints. The environment's COPIES: of each row.
int main(int argc, char** argv) {
  if (argc != 8) return 2;
  const std::int64_t rows = std::atoll(argv[1]), width = std::atoll(argv[2]), ids = std::atoll(argv[3]);
  const int epochs = std::atoi(argv[4]);
  try {
    const auto limit = static_cast<rlim_t>(std::atoll(argv[5])) << 20;
    const rlimit memory{.rlim_cur = limit, .rlim_max = limit};
    if (limit > 0 && setrlimit(RLIMIT_DATA, &memory) != 0) throw lockstep::Error("setrlimit failed");
    const char* const copies = std::getenv("COPIES");
    const lockstep::ParameterServerStrategy strategy(
        {.threads_per_replica = 1, .replicas_of_shards = copies == nullptr ? 1 : std::atoi(copies)});
    std::cout << strategy.task_type() << " " << strategy.task_index() << " at " << getpid() << std::endl;

    // Every id once an epoch. The gradient of a row's elements is -1, so SGD counts; the data are made as they are
    // read.
    const auto number = [](const at::Tensor& x) { return lockstep::Example{x, at::zeros({1}), {}}; };
    const auto batches = lockstep::Dataset::from_generator(
        [=] {
          return [=, next = std::int64_t{0}]() mutable -> std::optional<lockstep::Example> {
            if (next >= rows) return std::nullopt;
            next += ids;
            return number(at::arange(next - ids, next));
          };
        },
        rows / ids);
    const auto loss = [](const at::Tensor&, const at::Tensor& out) { return -out.sum().view({1}); };
    const auto scope = strategy.scope();
    lockstep::Sequential model({lockstep::ShardedEmbedding(rows, width, {.embeddings_initializer = "zeros"})});
    model.compile({.optimizer = lockstep::SGD({.learning_rate = 1}), .loss = lockstep::Loss("minus", loss)});
    const lockstep::BackupAndRestore backup(argv[6], {.save_freq = std::atoi(argv[7])});
    model.fit(batches.batch(1), {.epochs = epochs, .verbose = 0, .callbacks = {backup}});
    if (!strategy.is_chief()) return 0;
    double least = 1e9, most = 0;
    const std::int64_t samples = 1000;
    const auto sample = at::arange(samples) * (rows / samples);
    const auto values = model.predict(lockstep::Dataset::from_tensor_slices(sample.view({samples, 1})).batch(100));
    least = values.min().item<double>();
    most = values.max().item<double>();
    std::cout << "steps " << model.iterations() << ", rows from " << least << " to " << most << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "failed: " << error.what() << std::endl;
    return 1;
  }
}
