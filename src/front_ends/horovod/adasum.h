// Adasum: sums gradients that agree as their mean, and those that are orthogonal as their sum.
//
//   adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
//
// Pairs of ranks combine theirs, then pairs of pairs, and so on.
//
// Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "front_ends/horovod/session.h"

namespace lockstep::horovod {

// Throws InvalidArgument where the number of ranks is no power of two.
void check_adasum(const std::string& caller, const at::Tensor& tensor, int ranks);

// tensor <- adasum over all ranks, with the same bits on all. `tensor`: flat, floating-point, in host memory on all
// ranks or on the session's GPU. For tasks of the session, after negotiate.
void adasum(const Session& session, const at::Tensor& tensor);

}  // namespace lockstep::horovod
