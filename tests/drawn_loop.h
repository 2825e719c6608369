// For tests: training loops of one's own, drawn by a seed, and what a plain loop of LibTorch makes of them.
#pragma once

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "tests/drawn_net.h"

namespace lockstep {

constexpr double kClip = 0.5;

enum class Way { ddp, sharded_optimizer, fully_shard, horovod, replicas, workers };

struct DrawnStep {
  std::vector<std::vector<int>> examples;  // [part][rank]; a part has one forward on each rank
  bool one_backward = false;               // of all parts; else each part has its own, and gradients add up
  bool evaluates = false;                  // all ranks predict after it, in eval() and without gradients
  int logs = -1;                           // this rank alone makes one more forward, whose result it throws away
};

// At one step one rank does this otherwise than the others: such a program must end with an error.
enum class Odd { nothing, one_backward_more, one_backward_less };

struct DrawnLoop {
  NetOptions net;
  Way way = Way::ddp;
  int ranks = 2;
  bool adamw = false, clips = false, set_to_none = true, syncs_each_part = false;
  bool by_examples = true;  // else each rank counts once
  bool tells = false;       // calls the module itself, and tells the examples
  bool joins = false;       // a rank ends its loop after its last examples
  int freezes_at = -1;      // the step before which the front is frozen
  int thaws_at = -1;        // or from which on it is trained, by a wrapper that is made anew
  Odd odd = Odd::nothing;
  std::vector<DrawnStep> steps;

  int all_examples() const {
    int sum = 0;
    for (const auto& step : steps) {
      for (const auto& part : step.examples) sum += std::accumulate(part.begin(), part.end(), 0);
    }
    return sum;
  }

  int steps_of(int rank) const {
    const auto has_examples = [&](const DrawnStep& step) {
      return step.examples[0][static_cast<std::size_t>(rank)] > 0;
    };
    const auto last = std::find_if(steps.rbegin(), steps.rend(), has_examples);
    return static_cast<int>(joins ? steps.rend() - last : std::ssize(steps));
  }

  bool is_ddp() const { return way == Way::ddp || way == Way::sharded_optimizer; }
  bool is_strategy() const { return way == Way::replicas || way == Way::workers; }

  std::string text() const {
    static const char* const ways[] = {"ddp", "ShardedOptimizer", "fully_shard", "horovod", "replicas", "workers"};
    std::vector<std::string> words{ways[static_cast<int>(way)], lockstep::text(ranks, " ranks"), net.text(),
                                   adamw ? "AdamW" : "SGD"};
    if (clips) words.emplace_back("clips");
    if (!set_to_none) words.emplace_back("zeros");
    if (syncs_each_part) words.emplace_back("syncs each part");
    if (!by_examples) words.emplace_back("by ranks");
    if (tells) words.emplace_back("tells");
    if (joins) words.emplace_back("joins");
    if (thaws_at >= 0) words.push_back(lockstep::text("thaws at ", thaws_at));
    if (freezes_at >= 0) words.push_back(lockstep::text("freezes at ", freezes_at));
    if (odd != Odd::nothing)
      words.emplace_back(odd == Odd::one_backward_more ? "one backward more" : "one backward less");
    for (const auto& step : steps) {
      std::string word;
      for (const auto& part : step.examples) word += (word.empty() ? "" : "+") + join(part, ",");
      if (step.one_backward) word += " at once";
      if (step.evaluates) word += " evaluates";
      if (step.logs >= 0) word += lockstep::text(" logs on ", step.logs);
      words.push_back("(" + word + ")");
    }
    return join(words, " ");
  }
};

inline DrawnLoop draw_loop(std::uint64_t seed) {
  Draw draw(seed);
  DrawnLoop loop;
  loop.way = draw.one_of({Way::ddp, Way::ddp, Way::ddp, Way::sharded_optimizer, Way::fully_shard, Way::fully_shard,
                          Way::horovod, Way::replicas, Way::workers});
  const auto some_of_all = [&] {
    std::vector<Block> blocks{Block::linear,        Block::tied,       Block::masked,    Block::shared, Block::frozen,
                              Block::frozen_weight, Block::layer_norm, Block::attention, Block::unused};
    if (!loop.is_strategy()) blocks.push_back(Block::batch_norm);
    return blocks;
  };
  loop.net = draw_net(draw, some_of_all());
  const bool has_statistics = std::count(loop.net.blocks.begin(), loop.net.blocks.end(), Block::batch_norm) > 0;
  // Running statistics of 16 bits have a test of their own: an error of the weights shows enlarged in them.
  if (draw.chance(15) && !has_statistics && !loop.is_strategy() && loop.way != Way::sharded_optimizer) {
    loop.net.dtype = at::kBFloat16;
  }
  loop.ranks = draw.between(2, 4);
  loop.adamw = draw.chance(40) && !loop.is_strategy() && loop.way != Way::horovod;
  loop.clips = draw.chance(30) && !loop.is_strategy();
  loop.set_to_none = draw.chance(70);
  loop.syncs_each_part = draw.chance(30) || loop.way == Way::fully_shard || loop.way == Way::horovod;
  loop.by_examples = loop.way != Way::horovod && !(loop.is_ddp() && draw.chance(15));
  loop.tells = loop.way == Way::ddp && loop.by_examples && draw.chance(15);
  loop.joins = loop.is_ddp() && !has_statistics && !loop.clips && loop.by_examples && draw.chance(20);
  const int steps = draw.between(2, 4);
  if (draw.chance(20) && loop.way != Way::horovod && !loop.is_strategy()) loop.freezes_at = draw.between(1, steps - 1);
  if (loop.freezes_at < 0 && loop.way == Way::ddp && !loop.joins && draw.chance(20))
    loop.thaws_at = draw.between(1, steps - 1);
  if (draw.chance(8) && !loop.is_strategy() && !has_statistics && !loop.joins) {
    loop.odd = loop.way == Way::horovod ? Odd::one_backward_more
                                        : draw.one_of({Odd::one_backward_more, Odd::one_backward_less});
  }
  const int parts = loop.is_strategy() || loop.joins || loop.odd != Odd::nothing ? 1 : draw.one_of({1, 1, 2});
  for (int i = 0; i < steps; ++i) {
    DrawnStep step;
    for (int part = 0; part < parts; ++part) {
      std::vector<int> examples;
      for (int rank = 0; rank < loop.ranks; ++rank) examples.push_back(draw.one_of({0, 1, 2, 3, 3}));
      examples[static_cast<std::size_t>(draw.between(0, loop.ranks - 1))] += 2;  // so that there are some
      step.examples.push_back(examples);
    }
    step.one_backward = parts == 2 && loop.way != Way::horovod && draw.chance(40);
    step.evaluates = draw.chance(30);
    if (!has_statistics && loop.way != Way::fully_shard && !loop.joins && draw.chance(20)) {
      step.logs = draw.between(0, loop.ranks - 1);
    }
    loop.steps.push_back(step);
  }
  loop.net.recomputes = !loop.is_strategy() && draw.chance(20);
  for (int rank = 0; loop.joins && rank < loop.ranks; ++rank) {
    if (!draw.chance(50)) continue;
    for (int i = draw.between(0, steps - 1); i < steps; ++i) {  // others have examples in each step
      auto& examples = loop.steps[static_cast<std::size_t>(i)].examples[0];
      examples[static_cast<std::size_t>(rank)] = 0;
      if (std::accumulate(examples.begin(), examples.end(), 0) == 0) examples[0] = 2;
    }
  }
  return loop;
}

// --- one process

// LibTorch's parameters() has those of a shared layer twice, which its optimizers and clip_grad_norm_ take for two.
inline std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& all) {
  std::vector<at::Tensor> parameters;
  for (const auto& each : all) {
    if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& other) { return other.is_same(each); })) {
      parameters.push_back(each);
    }
  }
  return parameters;
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const DrawnLoop& loop,
                                                               const std::vector<at::Tensor>& parameters) {
  if (loop.adamw) {
    return std::make_unique<torch::optim::AdamW>(parameters,
                                                 torch::optim::AdamWOptions(0.02).eps(1e-3).weight_decay(0.1));
  }
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

inline void train_front(DrawnNetImpl& net, bool trains) {
  (net.options.embedding ? net.token->weight : net.front->weight).set_requires_grad(trains);
}

// Each rank has the same examples of each part, in another order.
inline DrawnData reordered(const DrawnLoop& loop, const DrawnData& data, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> order;
  std::int64_t begin = 0;
  for (const auto& step : loop.steps) {
    for (const auto& part : step.examples) {
      for (const int examples : part) {
        order.push_back(at::randperm(examples, generator) + begin);
        begin += examples;
      }
    }
  }
  const auto rows = at::cat(order);
  return {data.x.index_select(0, rows), data.y.index_select(0, rows)};
}

// The weight of the mean over one rank's examples of a part in the step's gradient.
inline double weight_of(const DrawnLoop& loop, const DrawnStep& step, std::size_t part, std::size_t rank) {
  const auto sum_of = [](const std::vector<int>& examples) {
    return static_cast<double>(std::accumulate(examples.begin(), examples.end(), 0));
  };
  const double mine = step.examples[part][rank];
  double all = 0, of_rank = 0;
  for (const auto& examples : step.examples) {
    all += sum_of(examples);
    of_rank += examples[rank];
  }
  if (!loop.by_examples) return (step.one_backward ? mine / std::max(1.0, of_rank) : 1.0) / loop.ranks;
  if (step.one_backward) return mine / all;
  // Parts that are reduced together are one mean, which counts once for each backward.
  return loop.syncs_each_part ? mine / sum_of(step.examples[part])
                              : static_cast<double>(step.examples.size()) * mine / all;
}

// The values to which a plain loop over all ranks' examples comes.
inline Values train_plainly(const DrawnLoop& loop, DrawnNet& net, const DrawnData& data) {
  if (loop.thaws_at >= 0) train_front(*net, false);
  const auto optimizer = make_optimizer(loop, each_once(net->parameters()));
  std::int64_t next = 0;
  for (std::size_t i = 0; i < loop.steps.size(); ++i) {
    const auto& step = loop.steps[i];
    if (static_cast<int>(i) == loop.freezes_at) train_front(*net, false);
    if (static_cast<int>(i) == loop.thaws_at) train_front(*net, true);
    optimizer->zero_grad(loop.set_to_none);
    for (std::size_t k = 0; k < step.examples.size(); ++k) {
      const auto& examples = step.examples[k];
      const auto part = data.slice(next, next + std::accumulate(examples.begin(), examples.end(), std::int64_t{0}));
      next += part.x.size(0);
      const auto outputs = net(part.x);
      auto loss = outputs.sum() * 0;
      std::int64_t begin = 0;
      for (std::size_t rank = 0; rank < examples.size(); begin += examples[rank++]) {
        const auto end = begin + examples[rank];
        loss = loss +
               drawn_loss(outputs.slice(0, begin, end), part.y.slice(0, begin, end)) * weight_of(loop, step, k, rank);
      }
      loss.backward();
    }
    if (loop.clips) torch::nn::utils::clip_grad_norm_(each_once(net->parameters()), kClip);
    optimizer->step();
  }
  return values_of(*net);
}

}  // namespace lockstep
