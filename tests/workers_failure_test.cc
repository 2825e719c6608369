// An error on one worker, or a difference between workers, is said on all.
#include "base/expect_says_testing.h"
#include "base/text.h"
#include "strategy/unwrap.h"
#include "tests/workers.h"

#include <ATen/ATen.h>

namespace lockstep {
namespace {

void expect_all_say(const std::vector<std::string>& errors, const std::string& part) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_NE(errors[rank].find(part), std::string::npos) << "worker " << rank << " says: " << errors[rank];
}

TEST(WorkersDiffer, InTheirModels) {
  const auto errors = run_workers({.workers = 3}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    Sequential model({Dense(strategy.worker_rank() == 2 ? 4 : 3)});
    model.build({6});
  });
  expect_all_say(
      errors,
      "the workers' models differ: worker 0 has dense.weight Float [3, 6], worker 2 has dense.weight Float [4, 6]");
}

// All workers throw, on every backend, also those whose value most others have too. None waits for another.
TEST(WorkersDiffer, InTheShapesThatTheyReduceOrGather) {
  const auto reduce = [](const std::string& backend, auto value) {
    return run_workers({.workers = 3, .replicas = 2, .communication = {.backend = backend}}, [&](const auto& strategy) {
      value(strategy, [](at::IntArrayRef a, at::IntArrayRef b) {
        return PerReplica<Tensor>({at::ones(a, at::kDouble), at::ones(b, at::kDouble)});
      });
    });
  };
  for (const char* backend : {"shm", "tcp"}) {
    SCOPED_TRACE(backend);
    const std::vector<std::vector<std::int64_t>> others{{3, 2}, {6}, {1, 3}};
    for (const auto& other : others) {
      expect_all_say(
          reduce(backend,
                 [&](const auto& strategy, const auto& parts) {
                   const auto mine = strategy.worker_rank() == 2 ? other : std::vector<std::int64_t>{2, 3};
                   strategy.reduce(ReduceOp::sum, parts(mine, mine));
                 }),
          text("Strategy::reduce: worker 0's value is Double [2, 3], worker 2's Double [", join(other), "]"));
    }
    const auto one_fails = reduce(backend, [](const auto& strategy, const auto& parts) {
      strategy.reduce(ReduceOp::sum, strategy.worker_rank() == 1 ? parts({2}, {1}) : parts({2}, {2}));
    });
    expect_says(one_fails[0], "the values of worker 1's replicas do not fit each other");
    expect_says(one_fails[1], "replica 0's value is Double [2], replica 1's Double [1]");
    expect_says(one_fails[2], "the values of worker 1's replicas do not fit each other");
    expect_all_say(reduce(backend,
                          [](const auto& strategy, const auto& parts) {
                            if (strategy.worker_rank() == 1) {
                              strategy.gather(parts({2, 2, 3}, {2, 2, 3}));
                            } else {
                              strategy.gather(parts({2, 6}, {2, 6}));
                            }
                          }),
                   "Strategy::gather: worker 0's value is Double [any, 6], worker 1's Double [any, 2, 3]");
    expect_no_errors(reduce(backend, [](const auto& strategy, const auto& parts) {
      EXPECT_EQ(strategy.reduce(ReduceOp::sum, parts({2, 3}, {2, 3})).sum().template item<double>(), 36);
      const auto rows = strategy.worker_rank() + 1;
      EXPECT_EQ(strategy.gather(parts({rows, 2}, {1, 2})).size(0), 9);
      EXPECT_EQ(strategy.gather(parts({2, rows}, {2, 1}), -1).size(1), 9);
    }));
  }
}

TEST(WorkersDiffer, InTheirDataAndBatchSizes) {
  const auto fit = [](const std::function<Dataset(int worker)>& data) {
    return run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kDouble, SGD());
      model.fit(data(strategy.worker_rank()), {.verbose = 0});
    });
  };
  const auto all = make_data(at::kDouble);
  expect_all_say(fit([&](int worker) { return all.batch(worker == 1 ? 8 : 7).take(3); }),
                 "first batch x [7, 6], worker 1 has first batch x [8, 6]");
  expect_all_say(fit([&](int worker) { return all.batch(7).take(worker == 1 ? 2 : 3); }),
                 "batches in the data set 3, worker 1 has batches in the data set 2");
  expect_all_say(fit([&](int worker) { return all.shuffle(26, {.seed = worker == 1 ? 1U : 2U}).batch(7); }),
                 "first batch's contents (hash; set_random_seed makes shuffles equal)");
}

TEST(WorkersDiffer, InWhatTheyCompiled) {
  const auto fit = [](const std::function<CompileOptions(int worker)>& options, at::ScalarType labels = at::kLong) {
    return run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      Model model([] { return torch::nn::Linear(6, 4); });
      model.compile(options(strategy.worker_rank()));
      const auto y = at::arange(12).fmod(4).to(strategy.worker_rank() == 1 ? labels : at::kLong);
      model.fit(Dataset::from_tensor_slices(at::ones({12, 6}), y).batch(4), {.verbose = 0});
    });
  };
  const auto sparse = [](Reduction reduction) { return SparseCategoricalCrossentropy({.reduction = reduction}); };
  const auto mean = Reduction::sum_over_batch_size;
  expect_all_say(fit([&](int worker) {
                   return CompileOptions{.optimizer = SGD(), .loss = sparse(worker == 1 ? Reduction::sum : mean)};
                 }),
                 "reduction of the loss");
  expect_all_say(fit([&](int worker) {
                   return CompileOptions{
                       .optimizer = SGD(),
                       .loss = sparse(mean),
                       .metrics = worker == 1 ? std::vector<Metric>{} : std::vector<Metric>{"accuracy"}};
                 }),
                 "metrics accuracy, worker 1 has metrics none");
  expect_all_say(
      fit([&](int) { return CompileOptions{.optimizer = SGD(), .loss = sparse(mean)}; }, at::kInt),
      "dtypes of the first batch's x and y Float, Long, worker 1 has dtypes of the first batch's x and y Float, Int");
}

// Without metrics, evaluating would add up as many numbers as the workers' agreement on whether to go on. This metric
// adds three.
struct ExamplesSeen final : MetricFunction {
  std::string name() const override { return "seen"; }
  std::size_t state_size() const override { return 3; }
  void update(std::span<double> state, const Tensor& y_true, const Tensor&, const Tensor&) const override {
    state[0] += static_cast<double>(y_true.size(0));
  }
  double result(std::span<const double> state) const override { return state[0]; }
};

struct EvaluatesOnChief final : Callback {
  explicit EvaluatesOnChief(Dataset given) : data(std::move(given)) {}
  bool only_on_chief() const override { return true; }
  void on_epoch_end(int, const Logs&) override { model().evaluate(data, {.verbose = 0}); }
  Dataset data;
};

TEST(WorkersDiffer, InWhatACallbackOfTheChiefAloneDoes) {
  const auto data = make_data(at::kDouble).batch(7).take(1);
  for (const std::vector<Metric>& metrics : {std::vector<Metric>{Metric(std::make_shared<ExamplesSeen>())}, {}}) {
    const auto errors = run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      Sequential model({Dense(3)});
      model.compile(
          {.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = metrics});
      model.build({6}, at::kDouble);
      model.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {EvaluatesOnChief(data)}});
    });
    EXPECT_NE(errors[0], "") << "the chief went on";
    expect_says(errors[1],
                metrics.empty() ? "the workers do not make the same calls; does a callback that only" : "calls differ");
  }
}

// The data are equal in the first batch of the first epoch, and not later.
TEST(WorkersDiffer, InTheirDataOfALaterEpochOrStep) {
  const auto fit = [](const std::function<Dataset(int worker)>& data, std::int64_t every) {
    return run_workers(
        {},
        [&](const MultiWorkerMirroredStrategy& strategy) {
          const auto scope = strategy.scope();
          auto model = make_model(at::kDouble, SGD());
          model.fit(data(strategy.worker_rank()), {.epochs = 3, .verbose = 0});
        },
        every);
  };
  torch::manual_seed(4);
  const auto x = torch::randn({26, 6}, at::kDouble);
  const auto y = torch::randint(3, {26}, torch::kLong);
  // The generator of worker 1 gives other examples from its second call on.
  const auto later_epoch = [&](int worker) {
    const auto epoch = std::make_shared<int>(0);
    return Dataset::from_generator([=]() -> Dataset::Generator {
             const double added =
                 worker == 1 && ++*epoch > 2 ? 1 : 0;  // the first is looked at before it is trained on
             return [=, at = std::int64_t{0}]() mutable -> std::optional<Example> {
               if (at == 21) return std::nullopt;
               const auto i = at++;
               return Example{x[i] + added, y[i]};
             };
           })
        .batch(7);
  };
  expect_all_say(fit(later_epoch, 1000), "the workers' data differ");
  const auto later_step = [&](int worker) {
    auto own = x.clone();
    if (worker == 1) own.slice(0, 14) += 1;
    return Dataset::from_tensor_slices(own, y).batch(7);
  };
  expect_all_say(fit(later_step, 3), "at step 3 of epoch 1");
}

TEST(WorkersDiffer, InTheirCallbacks) {
  const auto data = make_data(at::kDouble).batch(7);
  expect_all_say(run_workers({},
                             [&](const MultiWorkerMirroredStrategy& strategy) {
                               const auto scope = strategy.scope();
                               auto model = make_model(at::kDouble, SGD());
                               std::vector<AnyCallback> callbacks{CSVLogger("/dev/null")};
                               if (strategy.worker_rank() == 0) callbacks.push_back(EarlyStopping({.monitor = "loss"}));
                               model.fit(data, {.verbose = 0, .callbacks = callbacks});
                             }),
                 "the workers' callbacks differ: worker 0 has callback lockstep::EarlyStopping, worker 1 has nothing");
}

TEST(WorkersAgree, ThatALossOfOneThatIsNoNumberEndsAll) {
  Collected<std::size_t> epochs;
  expect_no_errors(run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    auto x = torch::ones({28, 6}, at::kDouble);
    x[13].fill_(NAN);  // of the second batch, in worker 1's part
    const auto data = Dataset::from_tensor_slices(x, torch::zeros({28}, torch::kLong)).batch(7);
    const auto history = model.fit(data, {.epochs = 5, .verbose = 0, .callbacks = {TerminateOnNaN()}});
    epochs.add(strategy, history.epoch.size());
  }));
  EXPECT_EQ(epochs.values(), (std::map<int, std::size_t>{{0, 1}, {1, 1}}));
}

TEST(WorkersDiffer, InTheirNumbersOfReplicas) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::string> errors(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        MultiWorkerMirroredStrategy(
            {.devices = rank == 0 ? std::vector<std::string>{"cpu:0"} : std::vector<std::string>{"cpu:0", "cpu:1"},
             .cluster = Cluster{.world = {.rank = rank, .size = 2}, .store = store.address()},
             .start_timeout_seconds = 20});
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();
  expect_all_say(
      errors, "the workers' strategies differ: worker 0 has number of replicas 1, worker 1 has number of replicas 2");
}

TEST(WorkersDiffer, InTheirOptimizers) {
  const auto message = [](const Optimizer& chiefs, const Optimizer& others) {
    const auto errors = run_workers({.workers = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      make_model(at::kDouble, strategy.is_chief() ? chiefs : others);
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  EXPECT_EQ(message(Adam(), SGD()), "the workers' optimizers differ: worker 0 has rule adam, worker 1 has rule sgd");
  EXPECT_EQ(message(SGD({.learning_rate = 0.5}), SGD({.learning_rate = 0.25})),
            "the workers' optimizers differ: worker 0 has learning rates at iterations 0, 1, 1000 0.5, 0.5, 0.5, "
            "worker 1 has learning rates at iterations 0, 1, 1000 0.25, 0.25, 0.25");
  EXPECT_EQ(message(SGD({.clipnorm = 1}), SGD()),
            "the workers' optimizers differ: worker 0 has clipnorm 1, worker 1 has clipnorm none");
  const auto betas = message(Adam({.beta_2 = 0.999}), Adam({.beta_2 = 0.99900001}));
  EXPECT_NE(betas.find("hyperparameters, by what three numbers become"), std::string::npos) << betas;
}

TEST(WorkersFail, OneThatThrowsIsHeardByAll) {
  const auto data = make_data(at::kDouble).batch(7);
  const auto errors = run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    LambdaCallback::Functions functions;
    functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 2 && strategy.worker_rank() == 1) throw IoError("my disk is full");
    };
    model.fit(data, {.verbose = 0, .callbacks = {LambdaCallback(functions)}});
  });
  expect_all_say(errors, "my disk is full");
  EXPECT_NE(errors[0].find("worker 1"), std::string::npos) << errors[0];
}

TEST(WorkersFail, AReplicaThatThrowsInAStepIsHeardByAll) {
  const auto errors = run_workers({.workers = 2, .replicas = 2}, [](const MultiWorkerMirroredStrategy& strategy) {
    strategy.run([](ReplicaContext& replica) {
      if (replica.replica_id() == 3) throw std::out_of_range("no such thing");
      replica.all_reduce(ReduceOp::sum, at::ones({2}));
    });
  });
  expect_all_say(errors, "no such thing");
}

TEST(WorkersFail, DataThatCannotBeReadOnOneIsHeardByAll) {
  const auto errors = run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    const auto data = Dataset::from_generator([&]() -> Dataset::Generator {
      return [&, given = 0]() mutable -> std::optional<Example> {
        if (strategy.worker_rank() == 2 && given == 20) throw IoError("no such file");
        return ++given > 40 ? std::nullopt
                            : std::optional(Example{at::ones({6}, at::kDouble), at::ones({}, at::kLong)});
      };
    });
    model.fit(data.batch(4), {.verbose = 0});
  });
  expect_all_say(errors, "no such file");
}

TEST(WorkersFail, AMissingCheckpointIsHeardByAll) {
  const auto errors = run_workers({}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    model.load_weights("/proc/nowhere/weights");
  });
  expect_all_say(errors, "/proc/nowhere/weights.safetensors");
}

// Alters a copy as a broken processor would.
TEST(WorkersDiffer, InTheirCopiesAfterAWhile) {
  const auto data = make_data(at::kDouble).batch(7).repeat();
  const auto errors = run_workers({.workers = 3, .replicas = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    LambdaCallback::Functions functions;
    functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 30 && strategy.worker_rank() == 2) {
        const at::NoGradGuard no_grad;
        unwrap(model.module()).parameter(0, 2).add_(1e-12);
      }
    };
    model.fit(data, {.verbose = 0, .callbacks = {LambdaCallback(functions)}, .steps_per_epoch = 1000});
    ADD_FAILURE() << "nobody noticed";
  });
  expect_all_say(errors, "the workers' copies differ: worker 0 has dense_1.weight with the hashes ");
  expect_all_say(errors, ", worker 2 has dense_1.weight with the hashes ");
}

// One worker may want to stop where the others would go on.
TEST(WorkersAgree, OnTheStepAfterWhichTheyStop) {
  Collected<std::int64_t> steps;
  const auto data = make_data(at::kDouble).batch(2);
  expect_no_errors(run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    LambdaCallback::Functions functions;
    functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 1 && strategy.worker_rank() == 2) model.stop_training();
    };
    model.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {LambdaCallback(functions)}});
    steps.add(strategy, model.iterations());
  }));
  for (const auto& [rank, count] : steps.values()) EXPECT_EQ(count, 3) << rank;
}

}  // namespace
}  // namespace lockstep
