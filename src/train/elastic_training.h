// A training whose workers are lost, leave and join.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "elastic/membership.h"
#include "train/training.h"

namespace lockstep::train {

class ElasticTraining final : public Training {
 public:
  ElasticTraining(TrainingWorker& worker, const SignalGuard* signals)
      : Training(worker, signals), sections_(worker, worker.strategy().workers().completed_sections()) {}

  bool take_part(const std::function<std::string()>& describe) override;
  void end() override;
  void run(const std::function<Numbers()>& act, const Finish& finish) override;
  Numbers run_or_act(const std::function<Numbers()>& act) override;
  bool& updated() override { return sections_.updated; }
  bool goes_on_after(const std::exception& error, const std::string& what) override;
  std::string launchers_rank(int rank) const override;
  void change_workers(const std::function<void()>& save) override;
  void wait_for_newcomers(const std::function<void()>& save) override;

 private:
  Says says(bool stops) override;

  bool agreed_by_these_workers() const { return strategy().workers().completed_sections().generation == agreed_in_; }
  void agree_again();
  bool change(bool leaves);
  std::vector<int> rows_that_leave();
  int rows() const;  // rows of the mesh, each with one copy of the model
  bool too_few() const;

  StrategyImpl& strategy() const { return worker_.strategy(); }
  const ElasticOptions& options() const { return strategy().workers().elastic(); }

  elastic::Sections sections_;
  std::unique_ptr<elastic::OpenTraining> open_;  // from take_part to the end
  std::int64_t agreed_in_ = 0;                   // the generation of the last agreement
  bool has_waited_ = false;                      // the chief has waited for newcomers as long as it may
  bool told_to_leave_ = false;                   // whether it was, in this worker's last agreement
};

}  // namespace lockstep::train
