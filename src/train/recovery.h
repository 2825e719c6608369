// How fit goes on when workers are lost, leave and join.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "elastic/newcomers.h"
#include "elastic/sections.h"
#include "train/model_impl.h"

namespace lockstep::train {

// The sections of a fit (elastic/sections.h). Where the strategy is not elastic each is called once, and nothing else
// here does anything.
//
// One thread, while no replica runs.
class Recovery {
 public:
  // `on_become_chief`: called where this worker has become the chief.
  Recovery(ModelImpl& impl, std::function<void()> on_become_chief);
  ~Recovery();

  // The training has ended on all workers: nobody can join it any more.
  void end();

  // As Sections'.
  using Numbers = elastic::Sections::Numbers;
  void run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish);
  bool updated() const { return sections_.updated; }
  void set_updated() { sections_.updated = true; }

  // After an exception in what is not done again: where it is the loss of a worker with which fit can go on, goes on
  // behind it, with a warning that names `what`. Else false.
  bool goes_on_behind(const std::exception& error, const std::string& what);

  // Takes part in the training that the strategy's workers begin now: `description` has what must be the same for all
  // of them, in lines. A newcomer waits until they take it in, and gets their state; poll() is called meanwhile.
  void take_part(const std::string& description, const std::function<void()>& poll);

  // Whether newcomers wait, as the first worker of each host sees; false elsewhere.
  bool newcomers_wait();

  // Behind a section in which all agreed on it: takes in newcomers, and, where it `leaves`, lets this worker go. As
  // Sections' returns false where they have to agree again.
  bool change(bool leaves);

 private:
  class Worker;
  const ModelImpl& impl_;
  const std::unique_ptr<Worker> worker_;
  elastic::Sections sections_;
  std::int64_t training_ = -1;
  std::string description_;
  std::optional<elastic::Watch> watch_;  // of the first worker of a host
};

}  // namespace lockstep::train
