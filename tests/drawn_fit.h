// For tests: a program of fit that is drawn by a seed: what it trains, how, and by which strategies.
#pragma once

#include "tests/drawn_fit_pieces.h"

namespace lockstep {

enum class DrawnPrecision { float64, float32, mixed_bfloat16, sent_bfloat16, sent_float16 };

// --- who trains

struct DrawnStrategy {
  enum Kind { one_device, mirrored, hierarchical, to_one, central, workers, servers, ranks } kind = one_device;
  int workers_ = 1, replicas = 1, servers_ = 1;
  bool sharded = false, elastic = false, asynchronous = false, hosts_differ = false;
  int parts() const { return workers_ * replicas; }

  std::string text() const {
    static const char* const names[] = {"one device", "mirrored", "hierarchical", "to one",
                                        "central",    "workers",  "servers",      "ranks of an optimizer"};
    return lockstep::text(names[kind], " ", workers_, " x ", replicas, sharded ? " sharded" : "",
                          elastic ? " elastic" : "", hosts_differ ? " hosts" : "",
                          kind == servers ? lockstep::text(asynchronous ? " asynchronous " : " ", servers_) : "");
  }
};

// --- one fit, and what happens around it

struct DrawnFit {
  int epochs = 2;
  bool compiles_anew = false;
  int freezes = -1, unfreezes = -1;  // numbers of parameters, modulo how many there are, before it
  bool saves_weights = false, saves_all = false, background = false, backs_up = false;
  bool best_only = false, early_stopping = false, restores_best = false;  // by val_loss, or loss
  int patience = 0;
  int stop_epoch = -1, stop_batch = -1;
  bool halves_rate = false;   // LearningRateScheduler
  int sets_rate_at = -1;      // a batch of each epoch, at whose end a callback does
  bool loads_first = false;   // at the end of the second epoch, the weights of the first
  bool saves_itself = false;  // a callback calls save_weights and save_checkpoint
  bool evaluates = false;     // and evaluate and predict

  std::string text() const {
    const auto if_set = [](bool set, const char* word) { return set ? std::string(" ") + word : ""; };
    return lockstep::text("fit ", epochs, if_set(compiles_anew, "compiled"),
                          freezes < 0 ? "" : lockstep::text(" freezes ", freezes),
                          unfreezes < 0 ? "" : lockstep::text(" unfreezes ", unfreezes),
                          if_set(saves_weights, "weights"), if_set(saves_all, "full"), if_set(background, "background"),
                          if_set(backs_up, "backup"), if_set(best_only, "best"), if_set(early_stopping, "early"),
                          if_set(restores_best, "restored"), early_stopping ? lockstep::text(" ", patience) : "",
                          stop_epoch < 0 ? "" : lockstep::text(" stops after epoch ", stop_epoch),
                          stop_batch < 0 ? "" : lockstep::text(" stops after batch ", stop_batch),
                          if_set(halves_rate, "halves"), if_set(sets_rate_at >= 0, "sets rate"),
                          if_set(loads_first, "loads"), if_set(saves_itself, "saves"), if_set(evaluates, "evaluates"));
  }
};

// A strategy's program: a model of its own, which goes on from what the one before has saved.
struct DrawnPhase {
  enum From { nothing, weights, full, backup } from = nothing;
  DrawnStrategy on;
  std::vector<DrawnFit> fits;
};

struct FitProgram {
  DrawnModel model;
  DrawnLoss loss;
  DrawnOptimizer optimizer;
  DrawnBatches data;
  DrawnPrecision precision = DrawnPrecision::float64;
  bool jit_compile = false;
  bool trains_on_batch = false;  // before the first fit
  std::int64_t steps_per_execution = 1;
  std::vector<DrawnPhase> phases;

  at::ScalarType dtype() const { return precision == DrawnPrecision::float64 ? at::kDouble : at::kFloat; }
  bool trains_on_batch_in(const DrawnPhase& phase) const {
    return trains_on_batch && phase.on.kind != DrawnStrategy::servers && phase.from != DrawnPhase::backup;
  }
  std::string monitor() const { return data.validation > 0 ? "val_loss" : "loss"; }
  std::string text() const {
    static const char* const precisions[] = {"float64", "float32", "mixed_bfloat16", "sent in bfloat16",
                                             "sent in float16"};
    static const char* const sources[] = {"", " from weights", " from a checkpoint", " from a backup"};
    auto said = lockstep::text(precisions[static_cast<int>(precision)], "; ", model.text(), "; ", loss.text(), "; ",
                               optimizer.text(), "; ", data.text());
    if (jit_compile) said += "; jit_compile";
    if (trains_on_batch) said += "; train_on_batch";
    if (steps_per_execution > 1) said += lockstep::text("; ", steps_per_execution, " steps per execution");
    for (const auto& phase : phases) {
      said += lockstep::text("; on ", phase.on.text(), sources[phase.from], ":");
      for (const auto& fit : phase.fits) said += lockstep::text(" ", fit.text(), ",");
    }
    return said;
  }
};

// --- drawing

inline DrawnModel draw_model(Draw& draw) {
  DrawnModel model;
  if (draw.chance(50)) {
    model.net =
        draw_net(draw, {Block::linear, Block::tied, Block::masked, Block::shared, Block::frozen, Block::frozen_weight,
                        Block::layer_norm, Block::batch_norm, Block::attention, Block::unused});
    return model;
  }
  for (int i = draw.between(0, 3); i > 0; --i) {
    model.pieces.push_back(draw.one_of({Piece::dense, Piece::twice, Piece::nested, Piece::layer_norm, Piece::batch_norm,
                                        Piece::dropout, Piece::module, Piece::activation}));
  }
  model.embedding = draw.chance(30);
  model.images = !model.embedding && draw.chance(30);
  model.tokens = !model.images && draw.chance(30);
  return model;
}

inline DrawnOptimizer draw_optimizer(Draw& draw, bool in_16_bits) {
  DrawnOptimizer optimizer;
  using Kind = DrawnOptimizer::Kind;
  optimizer.kind = in_16_bits
                       ? Kind::sgd
                       : draw.one_of({Kind::sgd, Kind::sgd, Kind::adam, Kind::adamw, Kind::rmsprop, Kind::adagrad});
  if (optimizer.kind == Kind::sgd && draw.chance(50)) {
    optimizer.momentum = 0.9;
    optimizer.nesterov = draw.chance(40);
  }
  optimizer.decays = draw.chance(25);
  const int clips = draw.between(1, 100);
  if (clips <= 10) optimizer.clipnorm = 0.05;
  if (clips > 10 && clips <= 20) optimizer.clipvalue = 0.02;
  if (clips > 20 && clips <= 30) optimizer.global_clipnorm = 0.1;
  optimizer.scaled_loss = draw.chance(10);
  return optimizer;
}

inline DrawnBatches draw_batches(Draw& draw, bool float_weights) {
  DrawnBatches data;
  data.examples = draw.between(1, 24);
  data.batch = draw.between(1, 9);
  data.seed = static_cast<std::uint64_t>(draw.between(1, 1000));
  data.weights = float_weights && draw.chance(30);
  data.class_weight = draw.chance(15);
  data.shuffle = draw.chance(25);
  data.drops = data.batch <= data.examples && draw.chance(15);
  data.prefetches = draw.chance(15);
  if (draw.chance(30)) {
    data.steps_per_epoch = draw.between(1, 5);
    const int repeats = draw.between(1, 100);
    data.repeats = repeats <= 45;
    data.repeats_examples = repeats > 45 && repeats <= 90;
  }
  if (draw.chance(60)) {
    data.validation = draw.between(1, 9);
    data.validation_batch = draw.between(1, 5);
  }
  return data;
}

inline DrawnStrategy draw_strategy(Draw& draw) {
  DrawnStrategy on;
  using Kind = DrawnStrategy::Kind;
  on.kind = draw.one_of({Kind::one_device, Kind::mirrored, Kind::mirrored, Kind::hierarchical, Kind::to_one,
                         Kind::central, Kind::workers, Kind::workers, Kind::workers, Kind::workers, Kind::servers,
                         Kind::servers, Kind::servers, Kind::ranks});
  const bool several = on.kind == Kind::workers || on.kind == Kind::servers || on.kind == Kind::ranks;
  if (several) on.workers_ = draw.between(2, 3);
  on.replicas = on.kind == Kind::one_device ? 1 : several ? draw.between(1, 2) : draw.between(2, 4);
  on.sharded = on.kind == Kind::workers && draw.chance(40);
  on.elastic = on.kind == Kind::workers && draw.chance(30);
  on.hosts_differ = on.kind == Kind::workers && draw.chance(30);
  on.servers_ = draw.between(1, 2);
  on.asynchronous = on.kind == Kind::servers && draw.chance(50);
  if (on.asynchronous) on.workers_ = 1;
  return on;
}

inline DrawnFit draw_fit(Draw& draw, const DrawnStrategy& on, bool is_first) {
  DrawnFit fit;
  const bool servers = on.kind == DrawnStrategy::servers, own_logs = on.kind == DrawnStrategy::ranks;
  fit.epochs = draw.between(1, 3);
  if (draw.chance(is_first ? 15 : 60)) fit.freezes = draw.between(0, 20);
  if (draw.chance(is_first ? 5 : 30)) fit.unfreezes = draw.between(0, 20);
  fit.compiles_anew = fit.unfreezes >= 0 || draw.chance(10);
  fit.saves_weights = draw.chance(30);
  fit.saves_all = draw.chance(30);
  fit.background = !servers && draw.chance(20);
  fit.backs_up = draw.chance(25);
  fit.best_only = !own_logs && draw.chance(25);
  fit.early_stopping = !own_logs && draw.chance(25);
  fit.restores_best = draw.chance(70);
  fit.patience = draw.between(0, 1);
  if (draw.chance(10)) fit.stop_epoch = draw.between(0, 1);
  if (!servers && draw.chance(10)) fit.stop_batch = draw.between(0, 2);
  fit.halves_rate = draw.chance(15);
  if (!servers && draw.chance(10)) fit.sets_rate_at = draw.between(0, 2);
  fit.loads_first = draw.chance(15);
  fit.saves_itself = draw.chance(40);
  fit.evaluates = draw.chance(40);
  return fit;
}

inline FitProgram draw_program(std::uint64_t seed) {
  Draw draw(seed);
  FitProgram program;
  const int precision = draw.between(1, 100);
  program.precision = precision <= 68   ? DrawnPrecision::float64
                      : precision <= 78 ? DrawnPrecision::float32
                      : precision <= 90 ? DrawnPrecision::mixed_bfloat16
                      : precision <= 95 ? DrawnPrecision::sent_bfloat16
                                        : DrawnPrecision::sent_float16;
  program.model = draw_model(draw);
  using Kind = DrawnLoss::Kind;
  program.loss.kind = draw.one_of({Kind::sparse, Kind::sparse, Kind::sparse, Kind::sparse_last_one, Kind::categorical,
                                   Kind::binary, Kind::mse, Kind::huber, Kind::own});
  const int reduction = draw.between(1, 100);
  if (reduction > 75) program.loss.reduction = Reduction::sum;
  if (reduction > 87) program.loss.reduction = Reduction::mean_with_sample_weight;
  program.optimizer = draw_optimizer(draw, program.precision != DrawnPrecision::float64);
  program.data = draw_batches(draw, true);
  program.jit_compile = draw.chance(15);
  if (draw.chance(10)) program.steps_per_execution = draw.between(2, 3);
  if (!program.model.net && program.model.ids() && program.precision == DrawnPrecision::float64) {
    program.precision = DrawnPrecision::float32;  // Embedding makes float32
    program.optimizer = draw_optimizer(draw, true);
  }
  const int phases = draw.chance(55) ? 2 : 1;
  for (int i = 0; i < phases; ++i) {
    DrawnPhase phase;
    phase.on = draw_strategy(draw);
    if (program.model.normalizes_batches()) {  // by replica: here those are known which normalize together
      if (phase.on.kind == DrawnStrategy::ranks) phase.on.kind = DrawnStrategy::workers;
      if (phase.on.kind == DrawnStrategy::servers) phase.on.workers_ = 1;
    }
    if (i > 0) phase.from = draw.one_of({DrawnPhase::weights, DrawnPhase::full, DrawnPhase::full, DrawnPhase::backup});
    const int fits = draw.chance(35) ? 2 : 1;
    for (int fit = 0; fit < fits; ++fit) phase.fits.push_back(draw_fit(draw, phase.on, fit == 0));
    if (phase.from == DrawnPhase::backup) {
      auto& before = program.phases[0].fits;
      before.resize(1);
      before[0].backs_up = true;
      phase.fits = {{.epochs = before[0].epochs + draw.between(1, 2), .saves_weights = true, .backs_up = true}};
    }
    program.phases.push_back(phase);
  }
  for (auto& phase : program.phases) {
    if (phase.on.kind == DrawnStrategy::servers && program.precision == DrawnPrecision::sent_float16)
      program.precision = DrawnPrecision::sent_bfloat16;
    if (phase.on.kind == DrawnStrategy::ranks && phase.from == DrawnPhase::backup)  // which each rank has of its own
      phase.on.kind = DrawnStrategy::workers;
  }
  if (program.precision != DrawnPrecision::float64) {                               // the best epoch may be another one
    if (program.loss.kind == DrawnLoss::own) program.loss.kind = DrawnLoss::huber;  // diverges
    if (program.loss.reduction == Reduction::sum) program.loss.reduction = Reduction::sum_over_batch_size;  // diverges
    for (auto& phase : program.phases) {
      for (auto& fit : phase.fits) fit.best_only = fit.early_stopping = false;
    }
  }
  if (program.data.steps_per_epoch == 0) program.data.repeats = program.data.repeats_examples = false;
  if (program.data.steps_per_epoch > 0 && phases > 1) program.data.shuffle = false;
  program.trains_on_batch = draw.chance(15);
  return program;
}

}  // namespace lockstep
