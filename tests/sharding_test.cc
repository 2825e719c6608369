// Counts which worker gets which examples, under each policy.
#include <filesystem>
#include <fstream>

#include "tests/workers.h"

namespace lockstep {
namespace {

constexpr int kExamples = 23;  // in batches of 6: the last has 5

// Files of 1, 2, 3, ... numbers; example k of all has the value k.
class Files {
 public:
  explicit Files(int count) {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    for (int file = 0, number = 0; file < count; ++file) {
      paths_.push_back(folder_ + "/" + std::to_string(file));
      std::ofstream out(paths_.back());
      for (int k = 0; k <= file; ++k) out << number++ << "\n";
      examples_ = number;
    }
  }
  ~Files() { std::filesystem::remove_all(folder_); }

  Dataset dataset() const {
    return Dataset::from_files(paths_, [](const std::string& path) {
      std::ifstream in(path);
      std::vector<float> numbers;
      for (float number = 0; in >> number;) numbers.push_back(number);
      return Dataset::from_tensor_slices(at::tensor(numbers));
    });
  }
  int examples() const { return examples_; }

 private:
  std::string folder_ = "/tmp/lockstep-files-XXXXXX";
  std::vector<std::string> paths_;
  int examples_ = 0;
};

Dataset numbers() { return Dataset::from_tensor_slices(at::arange(kExamples, at::kFloat)); }

// The examples that the replicas of a worker saw, step by step.
using Steps = std::vector<std::vector<float>>;

std::map<int, Steps> walk(const WorkerOptions& options,
                          const std::function<DistributedDataset(const MultiWorkerMirroredStrategy&)>& distribute,
                          int resume_after = -1) {
  Collected<Steps> seen;
  expect_no_errors(run_workers(options, [&](const MultiWorkerMirroredStrategy& strategy) {
    Steps steps;
    const auto data = distribute(strategy);
    auto iterator = data.iterate();
    while (true) {
      if (static_cast<int>(steps.size()) == resume_after) iterator = data.iterate(iterator.position());
      const auto batch = iterator.next();
      if (!batch) break;
      auto& step = steps.emplace_back();
      for (const auto& part : *batch) {
        for (std::int64_t i = 0; i < part.size(); ++i) step.push_back(part.x[i].item<float>());
      }
    }
    seen.add(strategy, steps);
  }));
  return seen.values();
}

// How often each example came, over all workers.
std::map<float, int> counts(const std::map<int, Steps>& workers) {
  std::map<float, int> all;
  for (const auto& [worker, steps] : workers) {
    for (const auto& step : steps) {
      for (const float number : step) ++all[number];
    }
  }
  return all;
}

void expect_each(const std::map<int, Steps>& workers, int examples, int times) {
  const auto all = counts(workers);
  EXPECT_EQ(all.size(), static_cast<std::size_t>(examples));
  for (const auto& [number, count] : all) EXPECT_EQ(count, times) << "example " << number;
  for (const auto& [worker, steps] : workers) EXPECT_EQ(steps.size(), workers.at(0).size()) << "worker " << worker;
}

auto under(AutoShardPolicy policy, const Dataset& data) {
  return [=](const MultiWorkerMirroredStrategy& strategy) {
    return strategy.distribute(data.with_options({.auto_shard_policy = policy}).batch(6));
  };
}

class Sharding : public testing::TestWithParam<WorkerOptions> {};

TEST_P(Sharding, DataGivesEachExampleOnceInTheBatchesOfOneProcess) {
  const auto workers = walk(GetParam(), under(AutoShardPolicy::data, numbers()));
  expect_each(workers, kExamples, 1);
  ASSERT_EQ(workers.at(0).size(), 4u);
  for (std::size_t step = 0; step < 4; ++step) {
    std::vector<float> together;
    for (const auto& [worker, steps] : workers) together.insert(together.end(), steps[step].begin(), steps[step].end());
    std::vector<float> expected;
    for (auto k = 6 * step; k < std::min<std::size_t>(kExamples, 6 * step + 6); ++k) expected.push_back(k);
    EXPECT_EQ(together, expected) << "step " << step;
  }
}

TEST_P(Sharding, FileGivesEachExampleOnceAndEachFileToOneWorker) {
  const Files files(7);
  const auto workers = walk(GetParam(), under(AutoShardPolicy::file, files.dataset()));
  expect_each(workers, files.examples(), 1);
  int first = 0;
  for (int file = 0; file < 7; first += ++file) {
    const int owner = file % GetParam().workers;
    for (int k = first; k <= first + file; ++k) {
      const auto& steps = workers.at(owner);
      EXPECT_TRUE(std::any_of(steps.begin(), steps.end(),
                              [k](const auto& step) { return std::find(step.begin(), step.end(), k) != step.end(); }))
          << "example " << k << " of file " << file;
    }
  }
  for (const auto& [worker, steps] : workers) {
    const int all = GetParam().workers * GetParam().replicas, most = GetParam().replicas * ((6 + all - 1) / all);
    for (const auto& step : steps) EXPECT_LE(static_cast<int>(step.size()), most);
  }
}

TEST_P(Sharding, OffGivesEachExampleOnceAWorker) {
  const auto workers = walk(GetParam(), under(AutoShardPolicy::off, numbers()));
  expect_each(workers, kExamples, GetParam().workers);
}

TEST_P(Sharding, AutomaticIsByFilesWhereThereAreEnough) {
  const auto policies = {AutoShardPolicy::automatic, AutoShardPolicy::file, AutoShardPolicy::data};
  const auto walks = [&](const Dataset& data) {
    std::vector<std::map<int, Steps>> all;
    for (const auto policy : policies) all.push_back(walk(GetParam(), under(policy, data)));
    return all;
  };
  const Files many(6), few(1);
  const auto by_file = walks(many.dataset());
  EXPECT_EQ(by_file[0], by_file[1]);
  EXPECT_NE(by_file[0], by_file[2]);
  EXPECT_EQ(walk(GetParam(), under(AutoShardPolicy::automatic, few.dataset())),
            walk(GetParam(), under(AutoShardPolicy::data, few.dataset())));
}

// Workers whose data end early go on without examples; a restart in any step sees what a run that goes on sees.
TEST_P(Sharding, UnevenShardsEndTogetherAndARestartSeesTheSame) {
  const Files files(7);
  for (const auto policy : {AutoShardPolicy::data, AutoShardPolicy::file, AutoShardPolicy::off}) {
    const auto whole = walk(GetParam(), under(policy, files.dataset()));
    for (std::size_t after = 0; after < whole.at(0).size(); ++after) {
      EXPECT_EQ(walk(GetParam(), under(policy, files.dataset()), static_cast<int>(after)), whole) << after;
    }
  }
}

TEST_P(Sharding, FromFunctionEachWorkerMakesItsOwn) {
  const auto workers = walk(GetParam(), [](const MultiWorkerMirroredStrategy& strategy) {
    return strategy.distribute_from_function([](const InputContext& context) {
      const auto size = context.get_per_replica_batch_size(12);
      return numbers().shard(context.num_input_pipelines, context.input_pipeline_id).batch(size);
    });
  });
  expect_each(workers, kExamples, 1);
  for (const float number : {0.f, 1.f}) EXPECT_EQ(workers.at(static_cast<int>(number))[0][0], number);
}

INSTANTIATE_TEST_SUITE_P(Workers, Sharding,
                         testing::Values(WorkerOptions{.workers = 2}, WorkerOptions{.workers = 3},
                                         WorkerOptions{.workers = 2, .replicas = 2}),
                         [](const auto& test) {
                           return std::to_string(test.param.workers) + "of" + std::to_string(test.param.replicas);
                         });

TEST(ShardingErrors, FewerFilesThanWorkersIsAnErrorThatSaysSo) {
  const Files files(2);
  const auto errors = run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    under(AutoShardPolicy::file, files.dataset())(strategy);
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error,
              "a data set of 2 files (Dataset::from_files) cannot be divided by files among 3; divide it by "
              "AutoShardPolicy::data");
  }
}

// A worker does not read again the examples in its cache.
TEST(ShardingErrors, ACacheUnderFilesIsFilledOnce) {
  const Files files(6);
  std::mutex mutex;
  std::map<int, int> reads;
  expect_no_errors(run_workers({.workers = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    const auto data = files.dataset()
                          .map([&](Example example) {
                            const std::lock_guard lock(mutex);
                            ++reads[strategy.worker_rank()];
                            example.y = example.x.fmod(3).to(at::kLong);
                            example.x = example.x.repeat({6});
                            return example;
                          })
                          .cache()
                          .batch(4);
    auto model = make_model(at::kFloat, SGD());
    model.fit(data, {.epochs = 1, .verbose = 0});
    const int after_one = reads[strategy.worker_rank()];
    model.fit(data, {.epochs = 3, .verbose = 0});
    EXPECT_LE(reads[strategy.worker_rank()], after_one + 8);  // the first batch is looked at before a fit
  }));
}

TEST(ShardingErrors, CountsAreOfAllFilesAndSoNotDividedByThem) {
  const Files files(6);
  EXPECT_EQ(files.dataset().num_files(), 6);
  EXPECT_EQ(files.dataset().shuffle(3).batch(2).repeat(2).num_files(), 6);
  for (const auto& data : {files.dataset().take(3), files.dataset().skip(3), files.dataset().shard(2, 1)}) {
    EXPECT_EQ(data.num_files(), 0);
  }
  const auto workers = walk({.workers = 2}, under(AutoShardPolicy::automatic, files.dataset().take(13)));
  expect_each(workers, 13, 1);
}

// The random order of reading a file is the same in every run and on every worker.
TEST(ShardingErrors, AFileIsReadAlikeHoweverOftenAndWherever) {
  const Files files(4);
  const auto order = [&](std::int64_t num_shards, std::int64_t index, int epochs_before) {
    set_random_seed(5);
    const auto data = Dataset::from_files({"0", "1", "2", "3"}, [](const std::string& path) {
      return Dataset::from_tensor_slices(at::arange(10) + 10 * std::stoi(path)).shuffle(10);
    });
    const auto part = num_shards == 1 ? data : data.shard_files(num_shards, index);
    for (int epoch = 0; epoch < epochs_before; ++epoch) {
      for (auto iterator = part.iterate({.epoch = epoch}); iterator.next();) {
      }
    }
    std::vector<std::int64_t> all;
    auto iterator = part.iterate({.epoch = 7});
    while (const auto example = iterator.next()) all.push_back(example->x.item<std::int64_t>());
    return all;
  };
  const auto whole = order(1, 0, 0);
  EXPECT_EQ(order(1, 0, 2), whole);
  auto expected = std::vector(whole.begin() + 10, whole.begin() + 20);
  expected.insert(expected.end(), whole.begin() + 30, whole.end());
  EXPECT_EQ(order(2, 1, 1), expected);
}

// fit and evaluate over uneven files: the sums are exact.
TEST(ShardingErrors, FitAndEvaluateOverFilesCountEachExampleOnce) {
  const Files files(5);
  Collected<std::vector<Tensor>> weights;
  expect_no_errors(run_workers({.workers = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    set_random_seed(3);
    const auto data = files.dataset().map([](Example example) {
      example.y = example.x.fmod(3).to(at::kLong);
      example.x = example.x.repeat({6}).div(15);
      return example;
    });
    auto model = make_model(at::kFloat, SGD({.learning_rate = 0.1}));
    EXPECT_EQ(model.fit(data.batch(4), {.epochs = 2, .verbose = 0}).epoch.size(), 2u);
    weights.add(strategy, weights_of(model));
    const auto by_file = model.evaluate(data.batch(4));
    const auto by_data = model.evaluate(data.with_options({.auto_shard_policy = AutoShardPolicy::data}).batch(4));
    for (const auto& [name, value] : by_data) EXPECT_NEAR(by_file[name], value, 1e-6) << name;
    EXPECT_EQ(model.predict(data.batch(4)).size(0), files.examples());
  }));
  EXPECT_TRUE(equal_bits(weights.values().at(0), weights.values().at(1)));
}

// A loss that is a sum, where the chief's files hold no examples of the step: the others' count all the same.
TEST(ShardingWhereTheChiefHasNone, ASumIsOfAllWhoHaveExamples) {
  const auto read = [](const std::string& path) {
    const bool chiefs = path == "0";
    const auto x = at::ones({chiefs ? 2 : 8, 3}, at::kDouble);
    return Dataset::from_tensor_slices(x, x.sum(1, /*keepdim=*/true));
  };
  const auto train = [&](const Strategy& strategy, const Dataset& data, int batches) {
    const auto scope = strategy.scope();
    Sequential model({Dense(1, {.kernel_initializer = "zeros"})});
    model.compile(
        {.optimizer = SGD({.learning_rate = 0.001}),
         .loss = Loss(
             "sum", [](const Tensor& y, const Tensor& p) { return (p - y).square().sum(-1); }, Reduction::sum)});
    model.fit(data, {.verbose = 0});
    EXPECT_EQ(model.iterations(), batches);
    return weights_of(model);
  };
  Collected<std::vector<Tensor>> weights;
  const std::vector<std::string> paths{"0", "1"};
  expect_no_errors(run_workers({.workers = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto data =
        Dataset::from_files(paths, read).with_options({.auto_shard_policy = AutoShardPolicy::file}).batch(2);
    weights.add(strategy, train(strategy, data, 8));  // the chief has examples in two of the steps
  }));
  EXPECT_TRUE(equal_bits(weights.values().at(0), weights.values().at(1)));
  // One process makes the same sums: over each step's examples of both workers.
  std::vector<std::int64_t> sizes{2, 2, 1, 1, 1, 1, 1, 1};
  auto w = at::zeros({3, 1}, at::kDouble), b = at::zeros({1}, at::kDouble);
  const auto ones = at::ones({1, 3}, at::kDouble);
  double examples = 0;
  for (const auto size : sizes) examples += static_cast<double>(size);
  EXPECT_EQ(examples, 10);  // each once
  for (const auto size : sizes) {
    const auto gradient = 2 * (at::mm(ones, w) + b - 3) * static_cast<double>(size);
    w = w - 0.001 * at::mm(ones.t(), gradient);
    b = b - 0.001 * gradient.flatten();
  }
  EXPECT_LT((weights.chiefs()[0] - w).abs().max().item<double>(), 1e-12);
}

}  // namespace
}  // namespace lockstep
