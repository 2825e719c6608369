// The trace of one step: which variables it uses, what the host gives it before each run, and the program's text.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/parameter_hook.h"
#include "ops/traced_program.h"
#include "tpu/trace.h"
#include "tpu/variable.h"

namespace lockstep::tpu {

// How the arguments and results of a program's text are those of a step.
struct StepLayout {
  struct Used {
    std::shared_ptr<Variable> variable;
    int argument = 0;
    int result = -1;  // that is its new value; -1: it stays as it is
  };
  struct Number {
    int argument = 0;
    at::ScalarType dtype = at::kFloat;
    std::function<double(std::int64_t update)> value;
  };

  std::vector<Used> variables;
  std::vector<int> inputs;  // arguments
  std::vector<Number> numbers;
  std::optional<int> seed;         // argument
  int arguments = 0, results = 0;  // results: those of the step; new values of variables come after them
  std::vector<std::function<void()>> after_update;
};

// VariableTable::find.
using FindVariable = std::function<std::shared_ptr<Variable>(const at::Tensor& host)>;

// The ops::StepTrace. It lives while a step's function is called, in that thread.
class TracedStep final : public ops::StepTrace {
 public:
  TracedStep(int replicas, bool for_cpu, FindVariable find);
  ~TracedStep() override;
  TracedStep(const TracedStep&) = delete;
  TracedStep& operator=(const TracedStep&) = delete;

  // A replica's inputs, like those given.
  std::vector<at::Tensor> add_inputs(const std::vector<at::Tensor>& like);

  // The program's text, of `steps` steps.
  std::string finish(const std::vector<at::Tensor>& results, int steps);

  const StepLayout& layout() const { return layout_; }

  int replicas() const override { return replicas_; }
  at::Tensor value_of(ops::DeviceVariable& variable) override;
  std::vector<at::Tensor> all_reduce(ReduceOp op, const std::vector<at::Tensor>& values) override;
  std::int64_t number_of_update(const void* optimizer) override { return updates_[optimizer]++; }
  at::Tensor all_gather(const at::Tensor& value, std::int64_t axis) override;
  at::Tensor number(at::ScalarType dtype, std::function<double(std::int64_t)> value) override;
  void set_counts(const at::Tensor& counts) override { counts_ = counts; }
  at::Tensor counted(std::int64_t rows) override;
  void keep_without_examples(ops::DeviceVariable& variable) override;
  void after_update(std::function<void()> act) override { layout_.after_update.push_back(std::move(act)); }

 private:
  at::Tensor use(const std::shared_ptr<Variable>& variable);
  bool see(const ops::OperatorCall& call);
  void check_in_place(const ops::OperatorCall& call) const;
  bool replace_host_tensors(const ops::OperatorCall& call);
  bool compose(const ops::OperatorCall& call);

  // 1 for each of `rows` that counts, else 0; undefined where all do.
  at::Tensor row_counts(std::int64_t rows) const;

  Trace trace_;
  const int replicas_;
  const FindVariable find_;
  StepLayout layout_;
  std::vector<at::Tensor> leaves_;                 // of layout_.variables
  std::map<const Variable*, std::size_t> places_;  // in layout_.variables
  at::Tensor counts_;
  std::map<const void*, std::int64_t> updates_;  // so far, by optimizer
  const ops::OperatorMode mode_;
};

}  // namespace lockstep::tpu
