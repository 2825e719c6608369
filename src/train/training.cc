#include "train/training.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"
#include "train/elastic_training.h"

namespace lockstep::train {

std::unique_ptr<Training> Training::of(TrainingWorker& worker, const SignalGuard* signals) {
  if (worker.strategy().workers().is_elastic()) return std::make_unique<ElasticTraining>(worker, signals);
  return std::make_unique<Training>(worker, signals);
}

void Training::run(const std::function<Numbers()>& act, const Finish& finish) {
  updated_ = false;
  finish(act());
}

Training::Says Training::says(bool stops) {
  const int signal = received();
  Says mine{};
  mine[stops_] = stops ? 1 : 0;
  mine[interrupted] = signal == SIGINT ? 1 : 0;
  mine[terminated] = signal == SIGTERM ? 1 : 0;
  mine[mark] = kMark;
  return mine;
}

Training::Numbers Training::checked(const std::function<Numbers()>& sum) const {
  std::string how;
  try {
    auto sums = sum();
    if (sums.back() == kMark * worker_.peers().size()) return sums;
  } catch (const collective::RefusedByAll&) {
    throw;
  } catch (const InvalidArgument& error) {  // thrown by the Group, which has seen that the calls differ
    how = text(" (", error.what(), ")");
  }
  throw InvalidArgument(text(worker_.what(),
                             ": the workers do not make the same calls; does a callback that only the chief calls ",
                             "(only_on_chief) save, evaluate or train a model?", how));
}

Training::Numbers Training::sum_with_agreement(bool stops, Numbers numbers, const Sum& sum) {
  const auto mine = says(stops);
  numbers.insert(numbers.end(), mine.begin(), mine.end());
  return checked([&] { return sum(numbers); });
}

std::span<const double> Training::take_agreement(const Numbers& sums) {
  std::copy_n(sums.end() - kSize, kSize, agreed_.begin());
  has_agreed_ = true;
  return std::span(sums).first(sums.size() - kSize);
}

Training::Numbers Training::sum_with_agreement(bool stops, Numbers numbers) {
  return sum_with_agreement(stops, std::move(numbers), [this](std::span<const double> all) {
    Numbers sums(all.begin(), all.end());
    worker_.peers().sum(sums);
    return sums;
  });
}

void Training::agree(bool stops) {
  run([&] { return sum_with_agreement(stops, {}); }, [this](const Numbers& sums) { take_agreement(sums); });
}

int Training::signal() const {
  if (worker_.peers().size() == 1) return received();
  return agreed_[terminated] > 0 ? SIGTERM : agreed_[interrupted] > 0 ? SIGINT : 0;
}

}  // namespace lockstep::train
