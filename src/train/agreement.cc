#include "train/agreement.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions(50);  // whether newcomers have come

}  // namespace

std::array<double, Agreement::kSize> Agreement::mine(bool stops) {
  const int signal = signals_.received();
  const auto one_if = [](bool holds) { return holds ? 1.0 : 0.0; };
  told_to_leave_ = signal == SIGTERM;
  return {one_if(stops),
          one_if(signal == SIGINT),
          one_if(signal == SIGTERM),
          one_if(recovery_.newcomers_wait()),
          one_if(has_waited_),
          kMark};
}

void Agreement::finish(std::span<const double> sums) { std::copy_n(sums.end() - kSize, kSize, agreed_.begin()); }

std::vector<double> Agreement::checked(const std::function<std::vector<double>()>& sum) const {
  std::string how;
  try {
    auto sums = sum();
    if (sums.back() == kMark * peers_().size()) return sums;
  } catch (const collective::RefusedByAll&) {
    throw;
  } catch (const InvalidArgument& error) {  // the Group's, which has seen that the calls differ
    how = text(" (", error.what(), ")");
  }
  throw InvalidArgument(text(worker_.what(),
                             ": the workers do not make the same calls; does a callback that only the chief calls ",
                             "(only_on_chief) save, evaluate or train a model?", how));
}

void Agreement::agree(bool stops) {
  const auto sum = [&] {
    const auto here = mine(stops);
    return checked([&] {
      std::vector<double> sums(here.begin(), here.end());
      peers_().sum(sums);
      return sums;
    });
  };
  recovery_.run(sum, [this](const auto& sums) { finish(sums); });
  end();
}

int Agreement::signal() const {
  if (peers_().size() == 1) return signals_.received();
  return agreed_[terminated] > 0 ? SIGTERM : agreed_[interrupted] > 0 ? SIGINT : 0;
}

void Agreement::change_workers(const std::function<void()>& save) {
  if (!worker_.strategy().is_elastic() || agreed_[interrupted] > 0 || stopping()) return;
  if (!is_of_these_workers()) return agree_again();
  if (too_few()) wait_for_newcomers(save);
  std::vector<int> leaving;
  if (agreed_[terminated] > 0) {
    leaving = rows_that_leave();
    if (!is_of_these_workers()) return agree_again();
    if (rows() - static_cast<int>(leaving.size()) < elastic().min_workers) leaving.clear();
    if (worker_.leaves_in_turn() && !leaving.empty()) leaving.resize(1);  // the others behind the next steps
  }
  if (agreed_[newcomers] == 0 && leaving.empty()) return;
  const int row = worker_.rank() / worker_.row_size();
  const bool leaves = std::find(leaving.begin(), leaving.end(), row) != leaving.end();
  if (recovery_.change(leaves) && leaves) throw Interrupted(SIGTERM);
  if (!leaving.empty()) agree_again();
}

// Whether the sections since, in callbacks, were completed by those that agreed.
bool Agreement::is_of_these_workers() const { return worker_.strategy().completed_sections().generation == agreed_in_; }

// Who is told to leave says so again behind the next step.
void Agreement::agree_again() { agreed_[terminated] = 0; }

// Those with a worker that was told to end. Collective.
std::vector<int> Agreement::rows_that_leave() {
  std::vector<int> leaving;
  const auto gather = [this] {
    std::vector<double> told(static_cast<std::size_t>(peers_().size()));
    told[static_cast<std::size_t>(peers_().rank())] = told_to_leave_ ? 1 : 0;
    peers_().sum(told);
    return told;
  };
  recovery_.run(gather, [&](const auto& told) {
    for (std::size_t rank = 0; rank < told.size(); ++rank) {
      const int row = static_cast<int>(rank) / worker_.row_size();
      if (told[rank] > 0 && (leaving.empty() || leaving.back() != row)) leaving.push_back(row);
    }
  });
  return leaving;
}

// Those that remain wait together, for a bounded time. Newcomers that come meanwhile do too, until there are enough.
void Agreement::wait_for_newcomers(const std::function<void()>& save) {
  const auto deadline = Deadline::after(std::chrono::duration<double>(elastic().join_seconds));
  worker_.waits = true;
  const std::shared_ptr<void> ends(nullptr, [this](void*) { worker_.waits = has_waited_ = false; });
  do {
    std::this_thread::sleep_for(kBetweenQuestions);
    has_waited_ = worker_.strategy().topology().is_chief() && deadline.passed();
    agree(false);
    if (agreed_[terminated] + agreed_[interrupted] > 0) break;
    if (agreed_[newcomers] > 0) {
      recovery_.change(false);
    } else if (agreed_[waited] > 0 && too_few()) {
      save();
      throw ClusterError(text("workers were lost, and ", rows(), worker_.row_size() > 1 ? " rows of the mesh" : "",
                              " remain; elastic.min_workers is ", elastic().min_workers,
                              ", and nobody has joined them for ", elastic().join_seconds, " s"));
    }
  } while (too_few());
}

// By the last agreement, which is the same for all.
int Agreement::rows() const { return static_cast<int>(workers()) / worker_.row_size(); }
bool Agreement::too_few() const { return rows() < elastic().min_workers; }

}  // namespace lockstep::train
