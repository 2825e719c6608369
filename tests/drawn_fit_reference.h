// For tests: what a drawn program of fit computes, by a plain loop of LibTorch in one process.
#pragma once

#include <ATen/autocast_mode.h>

#include <array>
#include <stdexcept>

#include "data/stored_tensor.h"
#include "tests/drawn_fit.h"
#include "train/layers/stack.h"

namespace lockstep {

struct Snapshot {
  Values weights;  // and buffers
  Values results;  // of the epoch, and of evaluate and predict
};

constexpr int kAfterFit = 1000;  // as an epoch

// [phase, fit, epoch], and what lies in the files then.
struct Expected {
  std::map<std::array<int, 3>, Snapshot> snapshots;
  std::map<std::string, Values> files;
};

struct FitData {
  DrawnData train, validation;
  Tensor weight, validation_weight;
  std::map<std::int64_t, double> class_weight;
};

// Each tensor once, under its first name.
inline std::vector<std::pair<std::string, Tensor>> distinct(const torch::OrderedDict<std::string, Tensor>& all) {
  std::vector<std::pair<std::string, Tensor>> found;
  for (const auto& each : all) {
    const auto same = [&](const auto& other) { return other.second.is_same(each.value()); };
    if (std::none_of(found.begin(), found.end(), same)) found.emplace_back(each.key(), each.value());
  }
  return found;
}

// The program trains nothing, so that it must be refused.
class NothingToTrain : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One thread.
class PlainFits {
 public:
  // `rounded`: computes as the program's precision says; else in double precision.
  PlainFits(const FitProgram& program, const FitData& data, std::string initial, bool rounded)
      : program_(program),
        data_(data),
        initial_(std::move(initial)),
        rounded_(rounded),
        indices_(program.data.of(Dataset::from_tensor_slices(at::arange(program.data.examples)))) {}

  Expected run() {
    for (std::size_t i = 0; i < program_.phases.size(); ++i) {
      const auto& phase = program_.phases[i];
      phase_ = static_cast<int>(i);
      begin(phase);
      for (std::size_t fit = 0; fit < phase.fits.size(); ++fit) this->fit(phase.fits[fit], static_cast<int>(fit));
      expected_.files[text("phase", i, "_weights")] = expected_.files[text("phase", i, "_full")] = weights();
    }
    return expected_;
  }

 private:
  // --- between phases

  void begin(const DrawnPhase& phase) {
    const bool goes_on = phase.from != DrawnPhase::nothing;
    const auto before = goes_on ? weights() : Values();
    const auto averages = goes_on ? averaged() : std::vector<Tensor>();
    const auto parts_before = buffers_.size();
    const bool after_servers =
        phase_ > 0 && program_.phases[static_cast<std::size_t>(phase_ - 1)].on.kind == DrawnStrategy::servers;
    make_module();
    const at::NoGradGuard no_grad;
    for (auto& [name, value] : parameters_) {
      if (goes_on) value.copy_(before.at(name));
    }
    const auto parts = static_cast<std::size_t>(phase.on.parts());
    const bool full = phase.from == DrawnPhase::full || phase.from == DrawnPhase::backup;
    if (!full) {
      states_.clear();
      iterations_ = data_epochs_ = 0;
      override_.reset();
    }
    if (!full || parts != parts_before || after_servers) {
      spread(goes_on ? averages : copies(module_buffers_), parts);
    }
    on_ = phase.on;
    const at::AutoGradMode with_gradients(true);
    Epoch unused;
    if (program_.trains_on_batch_in(phase)) step(indices_.iterate().next()->x, unused, false);
  }

  void make_module() {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    const auto dtype = rounded_ || program_.precision == DrawnPrecision::float64 ? program_.dtype() : at::kFloat;
    if (program_.model.net) {
      auto options = *program_.model.net;
      options.dtype = dtype;
      DrawnNet net(options);
      module_ = net.ptr();
      forward_ = [net](const Tensor& x) mutable { return net->forward(x); };
    } else {
      model_.emplace(program_.model.make(dtype));
      model_->build(program_.model.input_shape(), program_.model.ids() ? at::kLong : dtype);
      model_->load_weights(initial_);
      const auto stack = model_->module<train::StackModule>();
      module_ = stack;
      forward_ = [stack](const Tensor& x) { return stack->forward(x); };
    }
    if (!rounded_) module_->to(at::kDouble);
    parameters_ = distinct(module_->named_parameters());
    module_buffers_.clear();
    for (const auto& [name, tensor] : distinct(module_->named_buffers())) {
      if (tensor.is_floating_point()) module_buffers_.emplace_back(name, tensor);
    }
  }

  // --- running statistics: each replica's own, by the examples that it has had

  static std::vector<Tensor> copies(const std::vector<std::pair<std::string, Tensor>>& of) {
    std::vector<Tensor> all;
    for (const auto& [name, tensor] : of) all.push_back(tensor.clone());
    return all;
  }
  void spread(const std::vector<Tensor>& values, std::size_t parts) {
    buffers_.assign(parts, {});
    for (auto& of_part : buffers_) {
      for (const auto& value : values) of_part.push_back(value.clone());
    }
    seen_.assign(parts, 0);
  }
  void put(const std::vector<Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) module_buffers_[i].second.copy_(values[i]);
  }
  std::vector<Tensor> averaged() const {
    double all = 0;
    for (const double seen : seen_) all += seen;
    std::vector<Tensor> means;
    for (std::size_t i = 0; i < module_buffers_.size(); ++i) {
      auto mean = at::zeros(buffers_[0][i].sizes(), at::kDouble);
      for (std::size_t part = 0; part < buffers_.size(); ++part) {
        mean += buffers_[part][i] * (all > 0 ? seen_[part] / all : 1 / static_cast<double>(buffers_.size()));
      }
      means.push_back(mean.to(buffers_[0][i].scalar_type()));
    }
    return means;
  }

  Values weights() const {
    Values values;
    for (const auto& [name, value] : parameters_) values[name] = value.detach().to(at::kDouble).clone();
    const auto means = averaged();
    for (std::size_t i = 0; i < means.size(); ++i) values[module_buffers_[i].first] = means[i].to(at::kDouble).clone();
    return values;
  }
  void load(const Values& values) {
    const at::NoGradGuard no_grad;
    for (auto& [name, value] : parameters_) value.copy_(values.at(name));
    std::vector<Tensor> of_buffers;
    for (const auto& [name, value] : module_buffers_) of_buffers.push_back(values.at(name).to(value.scalar_type()));
    spread(of_buffers, buffers_.size());
  }

  // --- a step

  Tensor outputs(const Tensor& x) {
    const bool mixed = rounded_ && program_.precision == DrawnPrecision::mixed_bfloat16;
    if (mixed) {
      at::autocast::set_autocast_cache_enabled(false);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_enabled(at::kCPU, true);
    }
    const auto out = forward_(x.is_floating_point() ? x.to(rounded_ ? program_.dtype() : at::kDouble) : x);
    if (mixed) at::autocast::set_autocast_enabled(at::kCPU, false);
    return mixed ? out.to(at::kFloat) : out;
  }

  struct Terms {
    Tensor sum;
    double divisor = 0;
  };
  Terms terms(const DrawnData& some, const Tensor& weight, const Tensor& out, bool by_class) const {
    auto values = program_.loss.values(some.y, out);
    auto weights = weight.defined() || (by_class && !data_.class_weight.empty()) ? at::ones_like(values) : Tensor();
    if (weight.defined())
      weights = weights * weight.view({-1}).unflatten(
                              0, some.y.dim() > 1 ? std::vector<std::int64_t>{-1, 1} : std::vector<std::int64_t>{-1});
    if (by_class && !data_.class_weight.empty()) {
      auto of_classes = at::ones({DrawnModel::kClasses}, weights.options());
      for (const auto& [label, by] : data_.class_weight) of_classes[label] = by;
      weights = weights * of_classes.index_select(0, some.y.flatten()).view(some.y.sizes());
    }
    auto divisor = static_cast<double>(values.numel());
    if (program_.loss.reduction == Reduction::sum) divisor = 1;
    if (program_.loss.reduction == Reduction::mean_with_sample_weight && weights.defined()) {  // as they are given
      divisor = (by_class && !data_.class_weight.empty() ? weights : weight).sum().item<double>();
    }
    return {(weights.defined() ? values * weights.detach() : values).sum(), divisor};
  }

  struct Epoch {
    double loss = 0, examples = 0, right = 0, labels = 0;
    void add(const Terms& all, std::int64_t count) {
      loss += (all.divisor == 0 ? 0 : all.sum.item<double>() / all.divisor) * static_cast<double>(count);
      examples += static_cast<double>(count);
    }
    void add_right(const Tensor& out, const Tensor& y) {
      right += out.argmax(-1).eq(y).sum().item<double>();
      labels += static_cast<double>(y.numel());
    }
  };

  static Tensor rows(const Tensor& of, const Tensor& indices) {
    return of.defined() ? of.index_select(0, indices) : Tensor();
  }

  void step(const Tensor& indices, Epoch& epoch, bool by_class = true) {
    module_->train();
    const bool divided = program_.model.normalizes_batches() || program_.precision >= DrawnPrecision::sent_bfloat16;
    const int parts = divided ? on_.parts() : 1, replicas = divided ? on_.replicas : 1;
    const std::int64_t count = indices.numel(), each = count / parts, larger = count % parts;
    Terms all{at::zeros({}, at::kDouble), 0};
    std::vector<Tensor> gradients(parameters_.size());
    for (int part = 0; part < parts; ++part) {
      const auto begin = each * part + std::min<std::int64_t>(part, larger), size = each + (part < larger ? 1 : 0);
      if (size > 0) {
        const auto own = indices.slice(0, begin, begin + size);
        const DrawnData some{rows(data_.train.x, own), rows(data_.train.y, own)};
        auto& buffers = buffers_[static_cast<std::size_t>(part)];
        put_in(buffers);
        const auto out = outputs(some.x);
        const auto of_part = terms(some, rows(data_.weight, own), out, by_class);
        if (!of_part.sum.requires_grad()) throw NothingToTrain("no loss has a gradient");
        of_part.sum.backward();
        for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(module_buffers_[i].second);
        seen_[static_cast<std::size_t>(part)] += static_cast<double>(size);
        all.sum += of_part.sum.detach();
        all.divisor += of_part.divisor;
        epoch.add_right(out.detach(), some.y);
      }
      if ((part + 1) % replicas == 0) take_gradients(gradients);
    }
    if (program_.loss.reduction == Reduction::sum) all.divisor = 1;
    epoch.add(all, count);
    if (all.divisor == 0) return;  // no example counts: no step is made
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient /= all.divisor;
    }
    update(gradients);
  }

  void put_in(const std::vector<Tensor>& buffers) {
    const at::NoGradGuard no_grad;
    put(buffers);
  }

  // Adds a worker's gradients, as they are sent.
  void take_gradients(std::vector<Tensor>& into) {
    const bool sent = rounded_ && program_.precision >= DrawnPrecision::sent_bfloat16 && on_.workers_ > 1;
    const auto type = program_.precision == DrawnPrecision::sent_float16 ? at::kHalf : at::kBFloat16;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto own = parameters_[i].second.grad();
      if (!own.defined()) continue;
      parameters_[i].second.mutable_grad() = Tensor();
      if (sent) own = own.to(type).to(own.scalar_type());
      into[i] = into[i].defined() ? into[i] + own : own;
    }
  }

  // --- the optimizer, by Keras's formulas

  double rate() const { return override_ ? *override_ : program_.optimizer.rate(iterations_); }

  void update(std::vector<Tensor>& gradients) {
    const at::NoGradGuard no_grad;
    const auto& optimizer = program_.optimizer;
    const double lr = rate(), t = static_cast<double>(++iterations_);
    double squares = 0;
    for (const auto& gradient : gradients) {
      if (gradient.defined()) squares += gradient.square().sum().item<double>();
    }
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      auto g = gradients[i];
      if (!g.defined()) continue;
      const auto shrink = [&](double norm, double bound) { return norm > bound ? g * (bound / norm) : g; };
      if (optimizer.clipvalue) g = g.clamp(-*optimizer.clipvalue, *optimizer.clipvalue);
      if (optimizer.clipnorm) g = shrink(g.norm().item<double>(), *optimizer.clipnorm);
      if (optimizer.global_clipnorm) g = shrink(std::sqrt(squares), *optimizer.global_clipnorm);
      auto& [name, value] = parameters_[i];
      auto& state = states_[name];
      if (state.empty()) {
        const double first = optimizer.kind == DrawnOptimizer::adagrad ? 0.1 : 0;
        state = {at::full_like(g, first), at::zeros_like(g)};
      }
      auto &a = state[0], &b = state[1];
      value.sub_(value * (lr * optimizer.weight_decay()));
      switch (optimizer.kind) {
        case DrawnOptimizer::adam:
        case DrawnOptimizer::adamw:
          a = a * 0.9 + g * 0.1;
          b = b * 0.999 + g.square() * 0.001;
          value.sub_(a * (lr * std::sqrt(1 - std::pow(0.999, t)) / (1 - std::pow(0.9, t))) / (b.sqrt() + 1e-7));
          break;
        case DrawnOptimizer::rmsprop:
          a = a * 0.9 + g.square() * 0.1;
          value.sub_(g * lr / (a + 1e-7).sqrt());
          break;
        case DrawnOptimizer::adagrad:
          a = a + g.square();
          value.sub_(g * lr / (a + 1e-7).sqrt());
          break;
        case DrawnOptimizer::sgd:
          a = a * optimizer.momentum - g * lr;
          value.add_(optimizer.nesterov ? a * optimizer.momentum - g * lr : a);
          break;
      }
    }
  }

  // --- evaluation

  double evaluate(Tensor* predictions = nullptr) {
    const at::NoGradGuard no_grad;
    put(averaged());
    module_->eval();
    const auto& [x, y] = data_.validation;
    Epoch epoch;
    std::vector<Tensor> all;
    for (std::int64_t begin = 0; begin < x.size(0); begin += program_.data.validation_batch) {
      const auto end = std::min(begin + program_.data.validation_batch, x.size(0));
      const auto out = outputs(x.slice(0, begin, end));
      const auto weight = data_.validation_weight.defined() ? data_.validation_weight.slice(0, begin, end) : Tensor();
      epoch.add(terms(data_.validation.slice(begin, end), weight, out, false), end - begin);
      all.push_back(out);
    }
    if (predictions != nullptr) *predictions = at::cat(all);
    return epoch.loss / epoch.examples;
  }

  void evaluate_into(Values& results) {
    Tensor predictions;
    results["evaluate"] = at::scalar_tensor(evaluate(&predictions), at::kDouble);
    results["predict"] = predictions.to(at::kDouble);
  }

  // --- fit

  void fit(const DrawnFit& fit, int number);
  bool train_epoch(const DrawnFit& fit, Epoch& sums, bool& stopping);
  bool end_epoch(const DrawnFit& fit, int number, int epoch, const Epoch& sums);

  struct Monitor {
    std::optional<double> best;
    Values best_weights;
    std::optional<double> best_saved;
    int wait = 0;
  };

  const FitProgram& program_;
  const FitData& data_;
  const std::string initial_;
  const bool rounded_;
  const Dataset indices_;  // batches of examples' numbers
  Expected expected_;
  int phase_ = 0, ended_epochs_ = 0;
  bool stopped_ = false;
  DrawnStrategy on_;

  std::optional<Model> model_;
  std::shared_ptr<torch::nn::Module> module_;
  std::function<Tensor(const Tensor&)> forward_;
  std::vector<std::pair<std::string, Tensor>> parameters_, module_buffers_;
  std::vector<std::vector<Tensor>> buffers_;  // [replica][buffer]
  std::vector<double> seen_;
  std::map<std::string, std::vector<Tensor>> states_;
  std::int64_t iterations_ = 0, data_epochs_ = 0;
  std::optional<double> override_;
  std::optional<DatasetIterator> batches_;
  Monitor monitor_;
};

}  // namespace lockstep
