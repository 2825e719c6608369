// The gradients of a model that is split over ranks: their sums after backward, and their norm.
#pragma once

#include <utility>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Adds to each gradient those of the other ranks, but for parameters of which the ranks have other parts. A parameter
// without a gradient on any rank stays so. Collective.
void sum_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks);

// True where the ranks have different parts of the parameter, each with the gradient of all ranks' losses.
bool is_divided_among(const Tensor& parameter, const Communicator& ranks);

// The norm of the whole model's gradients. `gradients`: of each parameter, or this rank's part, which may be undefined;
// all ranks that have parts give them in the same order. Collective: over the ranks that have the other parts of
// shards, of divided parameters, and the other stages.
double norm_of(const std::vector<std::pair<Tensor, Tensor>>& gradients, const Communicator& shards,
               const Communicator& stages);

// Returns each parameter once: modules list a parameter under each of its names.
std::vector<Tensor> unique(const std::vector<Tensor>& parameters);

// The factor that clips gradients of this norm.
double clip_factor(double norm, double max_norm);

// Throws InvalidArgument where the norm is not above 0.
void check_max_norm(double max_norm);

}  // namespace lockstep::parallel
