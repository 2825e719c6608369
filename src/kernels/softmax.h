// Softmax cross-entropy of rows and its gradient, each in one pass.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// Matrices are [rows][classes] without gaps, labels are from 0 to classes - 1. Any thread may call.
struct SoftmaxKernels {
  // loss[row] = -log(softmax(logits[row])[label]); `probability` gets the softmax.
  void (*cross_entropy)(const float* logits, const std::int64_t* label, std::int64_t rows, std::int64_t classes,
                        float* loss, float* probability);

  // grad_logits = grad_loss[row * step] * (probability - 1 at the label); with a step of 0 one gradient serves all
  // rows.
  void (*cross_entropy_backward)(const float* grad_loss, std::int64_t step, const float* probability,
                                 const std::int64_t* label, std::int64_t rows, std::int64_t classes,
                                 float* grad_logits);
};

const SoftmaxKernels& softmax_kernels();

}  // namespace lockstep::kernels
