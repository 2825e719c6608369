// The gradients of a model that is split over ranks: their sums after backward, and their norm.
#pragma once

#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Adds to each gradient those of the other ranks, but for parameters of which the ranks have other parts. A parameter
// without a gradient on any rank stays so. Collective.
void sum_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks);

// True where the ranks have different parts of the parameter, each with the gradient of all ranks' losses.
bool is_divided_among(const Tensor& parameter, const Communicator& ranks);

class GradientNorm {
 public:
  // Adds the gradient, or this rank's part of it, which may be undefined; all ranks that have parts add them in the
  // same order.
  void add(const Tensor& parameter, const Tensor& gradient);

  // Collective: over the ranks that have the other parts of shards, of divided parameters, and the other stages.
  double over(const Communicator& shards, const Communicator& stages) const;

 private:
  // The sum of squares of parameters whose other parts `ranks` have.
  struct Parts {
    Communicator ranks;
    double squares = 0;
  };

  std::vector<Parts> parts_{{}};  // the first of parameters that are not divided
};

// Returns each parameter once: modules list a parameter under each of its names.
std::vector<Tensor> unique(const std::vector<Tensor>& parameters);

// The factor that clips gradients of this norm.
double clip_factor(double norm, double max_norm);

// Throws InvalidArgument where the norm is not above 0.
void check_max_norm(double max_norm);

}  // namespace lockstep::parallel
