// For tests: runs a drawn program of fit on the processes of its strategies, which are threads.
#pragma once

#include <mutex>

#include "tests/drawn_fit_reference.h"
#include "tests/server_job.h"

namespace lockstep {

inline Values values_in(const Archive& archive) {
  Values values;
  for (const auto& [name, stored] : archive.tensors) {
    const auto value = data::from_stored(stored);
    if (value.is_floating_point()) values[name] = value.to(at::kDouble);
  }
  return values;
}

// One process of a job: the values that it has seen, and why it ended.
struct Process {
  std::string name;
  std::map<std::array<int, 3>, Snapshot> snapshots;
  bool threw = false, is_ours = false;
  std::string what;
};

// A process of a strategy's job.
struct Place {
  const Strategy& strategy;
  std::string name;
  bool records = true;  // else the chief alone has the values
  int rank = 0;
  const Group* group = nullptr;  // of an optimizer's ranks
};

inline std::optional<DType> sent_as(DrawnPrecision precision) {
  if (precision == DrawnPrecision::sent_bfloat16) return DType::bfloat16;
  if (precision == DrawnPrecision::sent_float16) return DType::float16;
  return {};
}

// Runs body on each process of the job at once.
inline void run_on(const DrawnStrategy& on, DrawnPrecision precision, const std::function<void(const Place&)>& body) {
  const auto devices = devices_for(on.replicas);
  using Kind = DrawnStrategy::Kind;
  switch (on.kind) {
    case Kind::one_device: return body({OneDeviceStrategy(devices[0], 1), "the process"});
    case Kind::central:
      return body({CentralStorageStrategy({.compute_devices = devices, .threads_per_replica = 1}), "the process"});
    case Kind::workers:
      run_workers({.workers = on.workers_,
                   .replicas = on.replicas,
                   .communication = {.gradient_dtype = sent_as(precision)},
                   .hosts_differ = on.hosts_differ,
                   .shard_optimizer_state = on.sharded,
                   .elastic = on.elastic},
                  [&](const auto& strategy) {
                    const int rank = strategy.worker_rank();
                    body({strategy, text("worker ", rank), true, rank});
                  });
      return;
    case Kind::servers:
      run_job({.workers = on.workers_,
               .servers = on.servers_,
               .options = {.devices = devices, .synchronous = !on.asynchronous, .gradient_dtype = sent_as(precision)}},
              [&](const auto& strategy) {
                const auto name = text(strategy.task_type(), " ", strategy.task_index());
                body({strategy, name, strategy.is_chief(), strategy.is_chief() ? 0 : 1});
              });
      return;
    case Kind::ranks: {
      const auto groups = make_thread_groups(on.workers_);
      std::vector<std::jthread> threads;
      for (const auto& group : groups) {
        threads.emplace_back([&] {
          try {
            body({MirroredStrategy(
                      {.devices = devices_for(on.replicas, group.rank() * on.replicas), .threads_per_replica = 1}),
                  text("rank ", group.rank()), true, group.rank(), &group});
          } catch (const std::exception& error) {
            group.abort(error.what());
          }
        });
      }
      return;
    }
    default: {
      const auto ops = on.kind == Kind::mirrored       ? CrossDeviceOps::automatic
                       : on.kind == Kind::hierarchical ? CrossDeviceOps::hierarchical_copy_all_reduce
                                                       : CrossDeviceOps::reduction_to_one_device;
      return body(
          {MirroredStrategy({.devices = devices, .cross_device_ops = ops, .threads_per_replica = 1}), "the process"});
    }
  }
}

// --- a process of the program

class Training {
 public:
  Training(const FitProgram& program, const FitData& data, int phase, const Place& place, std::string folder,
           Process& process)
      : program_(program),
        phase_(program.phases[static_cast<std::size_t>(phase)]),
        number_(phase),
        place_(place),
        folder_(std::move(folder)),
        own_folder_(place.group != nullptr && place.rank > 0 ? text(folder_, "/rank", place.rank) : folder_),
        process_(process),
        train_(program.data.of(slices(data.train, data.weight))),
        validation_(slices(data.validation, data.validation_weight).batch(program.data.validation_batch)),
        class_weight_(data.class_weight) {}

  void run() {
    const auto scope = place_.strategy.scope();
    auto model = program_.model.make(program_.dtype());
    compile(model);
    if (!program_.model.net) {
      model.build(program_.model.input_shape(), program_.model.ids() ? at::kLong : program_.dtype());
      if (phase_.from == DrawnPhase::nothing || phase_.from == DrawnPhase::backup)
        model.load_weights(folder_ + "/initial");
    }
    if (phase_.from == DrawnPhase::weights) model.load_weights(folder_ + "/phase0_weights");
    if (phase_.from == DrawnPhase::full) model.load_checkpoint(folder_ + "/phase0_full");
    if (program_.trains_on_batch_in(phase_)) model.train_on_batch(*train_.iterate().next());
    for (std::size_t i = 0; i < phase_.fits.size(); ++i) fit(model, static_cast<int>(i));
    model.save_weights(text(own_folder_, "/phase", number_, "_weights"));
    model.save_checkpoint(text(own_folder_, "/phase", number_, "_full"));
  }

 private:
  Dataset slices(const DrawnData& data, const Tensor& weight) const {
    const auto x = data.x.is_floating_point() ? data.x.to(program_.dtype()) : data.x;
    return Dataset::from_tensor_slices(x, program_.loss.labels(data.y, program_.dtype()),
                                       weight.defined() ? weight.to(program_.dtype()) : Tensor());
  }

  void compile(Model& model) const {
    auto optimizer = program_.optimizer.make();
    if (place_.group != nullptr) {
      auto options = optimizer.options();
      options.gradient_ranks =
          GradientRanks{.ranks = *place_.group, .gradient_dtype = sent_as(program_.precision), .own_data = false};
      optimizer = Optimizer(optimizer.shared_rule(), options);
    }
    model.compile({.optimizer = optimizer,
                   .loss = program_.loss.make(),
                   .metrics = {"accuracy"},
                   .jit_compile = program_.jit_compile,
                   .steps_per_execution = program_.steps_per_execution});
  }

  // An epoch's end, by a callback of the user's.
  class Own : public Callback {
   public:
    Own(Training& training, const DrawnFit& fit, int number) : training_(training), fit_(fit), number_(number) {}
    void on_train_batch_end(std::int64_t batch, const Logs&) override {
      if (fit_.sets_rate_at >= 0 && batch >= fit_.sets_rate_at) model().set_learning_rate(0.003);
      if (fit_.stop_batch >= 0 && batch >= fit_.stop_batch) model().stop_training();
    }
    void on_epoch_end(int epoch, const Logs& logs) override {
      const auto path = [&](const char* what) {
        return text(training_.own_folder_, "/", what, "_", training_.number_, "_", number_);
      };
      if (fit_.saves_itself) {  // first: nothing else has read the values before
        model().save_weights(text(path("own_weights"), "_", epoch + 1));
        model().save_checkpoint(text(path("own_full"), "_", epoch + 1));
      }
      Snapshot now;
      for (const char* name : {"loss", "accuracy", "val_loss"}) {
        const bool is_ones_own = training_.place_.group != nullptr && std::string(name) != "val_loss";
        const bool is_rounded =
            std::string(name) == "accuracy" && training_.program_.precision != DrawnPrecision::float64;
        if (logs.contains(name) && !is_ones_own && !is_rounded)
          now.results[name] = at::scalar_tensor(logs[name], at::kDouble);
      }
      if (fit_.evaluates) training_.evaluate_into(now, model());
      training_.add(now, model(), number_, epoch);
      if (fit_.loads_first && epoch == 0) model().save_weights(path("first"));
      if (fit_.loads_first && epoch == 1) model().load_weights(path("first"));
      if (epoch == fit_.stop_epoch) model().stop_training();
    }

   private:
    Training& training_;
    const DrawnFit& fit_;
    const int number_;
  };

  void evaluate_into(Snapshot& snapshot, Model& model) const {
    const double loss = model.evaluate(validation_)["loss"];
    if (!place_.records) return;
    snapshot.results["evaluate"] = at::scalar_tensor(loss, at::kDouble);
    snapshot.results["predict"] = model.predict(validation_).to(at::kDouble);
  }

  void add(Snapshot& snapshot, const Model& model, int fit, int epoch) {
    if (!place_.records) return;
    Archive archive;
    model.module().trackable().save(archive, "");
    snapshot.weights = values_in(archive);
    const auto& parameters = unwrap(model.module());
    for (int replica = 1; replica < parameters.replicas(); ++replica)
      EXPECT_TRUE(equal_bits(weights_of(model, replica), weights_of(model))) << "replica " << replica;
    process_.snapshots[{number_, fit, epoch}] = snapshot;
  }

  void fit(Model& model, int number) {
    const auto& fit = phase_.fits[static_cast<std::size_t>(number)];
    const auto set_trained = [&](int parameter, bool trained) {
      if (parameter < 0) return;
      auto all = distinct(model.module<torch::nn::Module>()->named_parameters());
      all[static_cast<std::size_t>(parameter) % all.size()].second.set_requires_grad(trained);
    };
    set_trained(fit.freezes, false);
    set_trained(fit.unfreezes, true);
    if (fit.compiles_anew) compile(model);
    model.fit(train_, {.epochs = fit.epochs,
                       .verbose = 0,
                       .callbacks = callbacks_of(fit, number),
                       .validation_data = program_.data.validation > 0 ? std::optional(validation_) : std::nullopt,
                       .class_weight = class_weight_,
                       .steps_per_epoch = program_.data.steps_per_epoch});
    Snapshot end;
    evaluate_into(end, model);
    add(end, model, number, kAfterFit);
  }

  std::vector<AnyCallback> callbacks_of(const DrawnFit& fit, int number) {
    const auto path = [&](const char* what, int phase) {
      return text(own_folder_, "/", what, "_", phase, "_", number);
    };
    std::vector<AnyCallback> callbacks;
    if (fit.saves_weights) {
      callbacks.emplace_back(ModelCheckpoint(path("weights", number_) + "_{epoch}",
                                             {.save_weights_only = true, .background = fit.background}));
    }
    if (fit.best_only) {
      callbacks.emplace_back(ModelCheckpoint(
          path("best", number_), {.monitor = program_.monitor(), .save_best_only = true, .save_weights_only = true}));
    }
    if (fit.early_stopping) {
      callbacks.emplace_back(EarlyStopping(
          {.monitor = program_.monitor(), .patience = fit.patience, .restore_best_weights = fit.restores_best}));
    }
    if (fit.halves_rate) callbacks.emplace_back(LearningRateScheduler([](int, double rate) { return rate / 2; }));
    callbacks.emplace_back(std::make_shared<Own>(*this, fit, number));
    if (fit.saves_all)
      callbacks.emplace_back(ModelCheckpoint(path("full", number_) + "_{epoch}", {.background = fit.background}));
    if (fit.backs_up) {
      callbacks.emplace_back(BackupAndRestore(path("backup", phase_.from == DrawnPhase::backup ? 0 : number_),
                                              {.delete_checkpoint = false, .background = fit.background}));
    }
    return callbacks;
  }

  const FitProgram& program_;
  const DrawnPhase& phase_;
  const int number_;
  const Place& place_;
  const std::string folder_, own_folder_;
  Process& process_;
  const Dataset train_, validation_;
  const std::map<std::int64_t, double> class_weight_;
};

inline std::vector<Process> run_phase(const FitProgram& program, const FitData& data, int phase,
                                      const std::string& folder) {
  std::mutex mutex;
  std::vector<Process> processes;
  const auto body = [&](const Place& place) {
    Process process{.name = place.name};
    const auto keep = [&] {
      const std::lock_guard lock(mutex);
      processes.push_back(process);
    };
    try {
      Training(program, data, phase, place, folder, process).run();
      keep();
    } catch (const std::exception& error) {
      process.threw = true;
      process.is_ours = dynamic_cast<const Error*>(&error) != nullptr;
      process.what = error.what();
      keep();
      throw;  // which ends the others
    }
  };
  try {
    run_on(program.phases[static_cast<std::size_t>(phase)].on, program.precision, body);
  } catch (const std::exception&) {  // the only process: it is kept
  }
  return processes;
}

}  // namespace lockstep
