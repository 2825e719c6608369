// Loops of one's own, drawn by a seed: DistributedDataParallel, ShardedOptimizer, fully_shard, Horovod's optimizer and
// Strategy::run against a plain loop of LibTorch over all ranks' examples.
#include <lockstep/ddp.h>
#include <lockstep/horovod.h>
#include <lockstep/horovod/optimizer.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>

#include <cmath>

#include "front_ends/horovod/session.h"
#include "lockstep/collective/make_group.h"
#include "tests/drawn_loop.h"
#include "tests/drawn_ranks.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

// One rank's view of a loop.
struct RankLoop {
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::function<void(const std::function<void()>&)> without_sync;
  std::function<void()> zero_grad, clip, step, wrap_anew = {};
  std::function<void(int)> tell = {};
};

void run_loop(const DrawnLoop& loop, int rank, DrawnNetImpl& net, const DrawnData& data, const RankLoop& own) {
  std::int64_t next = 0;
  const auto labels = [&](std::int64_t examples) { return examples * (loop.net.tokens ? loop.net.positions : 1); };
  for (std::size_t i = 0; i < static_cast<std::size_t>(loop.steps_of(rank)); ++i) {
    const auto& step = loop.steps[i];
    const bool is_odd = loop.odd != Odd::nothing && rank == 0 && i + 1 == loop.steps.size();
    if (static_cast<int>(i) == loop.freezes_at) train_front(net, false);
    if (static_cast<int>(i) == loop.thaws_at) {
      train_front(net, true);
      own.wrap_anew();
    }
    own.zero_grad();
    at::Tensor sum;
    std::int64_t counted = 0;
    for (std::size_t part = 0; part < step.examples.size(); ++part) {
      const auto& sizes = step.examples[part];
      const auto before = std::accumulate(sizes.begin(), sizes.begin() + rank, std::int64_t{0});
      const auto all = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
      const auto mine = data.slice(next + before, next + before + sizes[static_cast<std::size_t>(rank)]);
      next += all;
      if (own.tell) own.tell(static_cast<int>(mine.x.size(0)));
      const auto outputs = own.forward(mine.x);
      if (step.logs == rank && mine.x.size(0) > 0) own.forward(mine.x);
      const auto loss = drawn_loss(outputs, mine.y);
      if (step.one_backward) {
        const auto count = labels(mine.x.size(0));
        sum = sum.defined() ? sum + loss * static_cast<double>(count) : loss * static_cast<double>(count);
        counted += count;
        if (part + 1 == step.examples.size())
          (sum / static_cast<double>(std::max<std::int64_t>(1, counted))).backward();
      } else if (part + 1 < step.examples.size() && !loop.syncs_each_part) {
        own.without_sync([&] { loss.backward(); });
      } else if (!is_odd || loop.odd == Odd::one_backward_more) {
        loss.backward({}, /*keep_graph=*/is_odd);
        if (is_odd) loss.backward();
      }
    }
    if (loop.clips) own.clip();
    own.step();
    if (step.evaluates) {
      const torch::NoGradGuard no_grad;
      net.eval();
      own.forward(data.x.slice(0, 0, 2 + rank));
      net.train();
    }
  }
}

Values run_ddp(const DrawnLoop& loop, const Group& group, const DrawnData& data) {
  DrawnNet net(loop.net);
  convert_sync_batchnorm(*net, group);
  if (loop.thaws_at >= 0) train_front(*net, false);
  std::optional<DistributedDataParallel<DrawnNetImpl>> ddp;
  const auto wrap = [&] {
    ddp.reset();
    ddp.emplace(net, Communicator(group, kDrawnTimeoutSeconds),
                DistributedDataParallelOptions{.weigh_by_examples = loop.by_examples});
  };
  wrap();
  std::unique_ptr<torch::optim::Optimizer> plain;
  std::optional<ShardedOptimizer<torch::optim::SGD>> sgd;
  std::optional<ShardedOptimizer<torch::optim::AdamW>> adamw;
  if (loop.way == Way::ddp) {
    plain = make_optimizer(loop, each_once(net->parameters()));
  } else if (loop.adamw) {
    adamw.emplace(*ddp, torch::optim::AdamWOptions(0.02).eps(1e-3).weight_decay(0.1));
  } else {
    sgd.emplace(*ddp, torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  const auto with_optimizer = [&](const auto& call) {
    if (plain) call(*plain);
    if (sgd) call(*sgd);
    if (adamw) call(*adamw);
  };
  const auto forward = [&](const at::Tensor& x) {
    if (!loop.tells) return (*ddp)(x);
    ddp->prepare();
    return net(x);
  };
  const auto run = [&] {
    run_loop(loop, group.rank(), *net, data,
             {.forward = forward,
              .without_sync =
                  [&](const std::function<void()>& body) {
                    const auto no_sync = ddp->no_sync();
                    body();
                  },
              .zero_grad = [&] { with_optimizer([&](auto& each) { each.zero_grad(loop.set_to_none); }); },
              .clip = [&] { torch::nn::utils::clip_grad_norm_(each_once(net->parameters()), kClip); },
              .step = [&] { with_optimizer([](auto& each) { each.step(); }); },
              .wrap_anew = wrap,
              .tell =
                  [&](int examples) {
                    if (loop.tells) ddp->add_examples(examples);
                  }});
  };
  if (loop.joins)
    ddp->join(run);
  else
    run();
  return values_of(*net);
}

Values run_fully_sharded(const DrawnLoop& loop, const Group& group, const DrawnData& data) {
  DrawnNet net(loop.net);
  convert_sync_batchnorm(*net, group);
  auto sharded = fully_shard(net, Communicator(group, kDrawnTimeoutSeconds), {.units = {"block0"}});
  const auto optimizer = make_optimizer(loop, sharded.parameters());
  run_loop(loop, group.rank(), *net, data,
           {.forward = [&](const at::Tensor& x) { return sharded(x); },
            .without_sync = {},
            .zero_grad = [&] { optimizer->zero_grad(loop.set_to_none); },
            .clip = [&] { sharded.clip_grad_norm(kClip); },
            .step = [&] { optimizer->step(); }});
  auto values = values_of(*net);
  for (const auto& [name, value] : sharded.gather()) values[name] = value.to(at::kDouble);
  return group.rank() == 0 ? values : Values();
}

Values run_horovod(const DrawnLoop& loop, const Group& group, const DrawnData& data) {
  const World world{.rank = group.rank(), .size = group.size(), .local_rank = group.rank(), .local_size = group.size()};
  const horovod::Session::Use use(
      std::make_shared<horovod::Session>(horovod::Session::Position{world}, Communicator(group, kDrawnTimeoutSeconds)));
  DrawnNet net(loop.net);
  convert_sync_batchnorm(*net, group);
  horovod::broadcast_parameters(*net, 0);
  const auto inner = make_optimizer(loop, each_once(net->parameters()));
  horovod::DistributedOptimizer optimizer(
      *inner, {.backward_passes_per_step = static_cast<int>(loop.steps[0].examples.size())}, net->named_parameters());
  run_loop(loop, group.rank(), *net, data,
           {.forward = [&](const at::Tensor& x) { return net(x); },
            .without_sync = {},
            .zero_grad = [&] { optimizer.zero_grad(loop.set_to_none); },
            .clip = [&] { torch::nn::utils::clip_grad_norm_(each_once(net->parameters()), kClip); },
            .step = [&] { optimizer.step(); }});
  return values_of(*net);
}

// A loop of Strategy::run over a dataset whose batches are the steps'.
Values run_strategy(const DrawnLoop& loop, const Strategy& strategy, const DrawnData& data) {
  auto net = strategy.replicate([&] { return DrawnNet(loop.net); });
  const auto optimizer = strategy.optimizer(SGD({.learning_rate = 0.1, .momentum = 0.9}), net);
  std::int64_t next = 0;
  for (const auto& step : loop.steps) {
    const auto size = std::accumulate(step.examples[0].begin(), step.examples[0].end(), std::int64_t{0});
    const auto batch = data.slice(next, next + size);
    next += size;
    const auto labels = static_cast<double>(batch.y.numel());
    for (auto& one : strategy.distribute(Dataset::from_tensor_slices(batch.x, batch.y).batch(size))) {
      const auto losses = strategy.run(
          [&](ReplicaContext& replica, DrawnNet& own, const Example& part) {
            const auto loss =
                drawn_loss(own(part.x), part.y) * static_cast<double>(std::max<std::int64_t>(1, part.y.numel()));
            optimizer.minimize(replica, loss, static_cast<double>(part.y.numel()));
            return loss.detach();
          },
          net, one);
      const auto loss = strategy.reduce(ReduceOp::sum, losses).item<double>() / labels;
      if (!std::isfinite(loss)) throw std::logic_error("a loss is not finite");
    }
  }
  return values_of(*net[0]);
}

using LoopEnd = Ended<Values>;

// [replica or worker]: what each throws, if it does.
LoopEnd ended_by(const std::vector<std::string>& errors, std::vector<Values> values) {
  LoopEnd end{std::move(values)};
  for (const auto& error : errors) {
    if (!error.empty() && !end.refused) end.refused = error;
  }
  return end;
}

LoopEnd run_many(const DrawnLoop& loop, const DrawnData& data) {
  const auto on_ranks = [&](const auto& run) {
    return on_drawn_ranks(loop.ranks, false, [&](const Group& group) { return run(loop, group, data); });
  };
  switch (loop.way) {
    case Way::fully_shard: return on_ranks(run_fully_sharded);
    case Way::horovod: return on_ranks(run_horovod);
    case Way::replicas: {
      std::vector<Values> values(1);
      std::string error;
      try {
        values[0] = run_strategy(loop, MirroredStrategy(loop.ranks), data);
      } catch (const Error& refused) {
        error = refused.what();
      }
      return ended_by({error}, std::move(values));
    }
    case Way::workers: {
      std::vector<Values> values(static_cast<std::size_t>(loop.ranks));
      const auto errors = run_workers({.workers = loop.ranks}, [&](const auto& strategy) {
        values[static_cast<std::size_t>(strategy.worker_rank())] = run_strategy(loop, strategy, data);
      });
      return ended_by(errors, std::move(values));
    }
    default: return on_ranks(run_ddp);
  }
}

DrawnResult run_program(std::uint64_t seed) {
  const auto loop = draw_loop(seed);
  const auto data = make_drawn_data(loop.net, loop.all_examples(), seed);
  const auto ended = run_many(loop, data);
  DrawnResult result{loop.text(), ended.refused, ended.wrong, loop.odd != Odd::nothing};
  if (result.refused || !result.wrong.empty()) return result;
  if (loop.odd != Odd::nothing) {
    result.wrong = "one rank made other calls, and nothing was said";
    return result;
  }

  auto options = loop.net;
  options.dtype = at::kDouble;
  options.recomputes = false;
  const auto in_double = [&](const at::Tensor& x) { return x.is_floating_point() ? x.to(at::kDouble) : x; };
  DrawnNet exact(options);
  {
    const torch::NoGradGuard no_grad;  // what 16 bits have of the first values
    DrawnNet net(loop.net);
    for (const auto& each : net->named_parameters()) exact->named_parameters()[each.key()].copy_(each.value());
  }
  const auto values = train_plainly(loop, exact, {in_double(data.x), data.y});
  std::vector<Values> in_16_bits;  // of the same examples in several orders, in which LibTorch rounds otherwise
  for (std::uint64_t order = 0; loop.net.dtype != at::kDouble && order < 4; ++order) {
    DrawnNet net(loop.net);
    in_16_bits.push_back(train_plainly(loop, net, order == 0 ? data : reordered(loop, data, order)));
  }
  for (std::size_t rank = 0; rank < ended.values.size(); ++rank) {
    if (rank > 0 && loop.way == Way::fully_shard) continue;  // rank 0 has gathered them
    const auto wrong = differences(ended.values[rank], values, in_16_bits);
    if (!wrong.empty()) result.wrong += text("rank ", rank, ": ", wrong, "\n");
  }
  return result;
}

TEST(DrawnLoops, EqualAPlainLoopOrAreRefused) { check_drawn_programs({}, 100, 0.05, run_program); }

}  // namespace
}  // namespace lockstep
