// Losses that layers add to the one that a model is compiled with. Follows tf.keras.layers.Layer.add_loss.
#pragma once

#include "lockstep/ops/tensor.h"

namespace lockstep {

// Adds a scalar of one element, such as 0.01 * moe->balance_loss(), to the loss of the batch that fit, train_on_batch
// or evaluate computes in this thread: for a layer's forward. Each replica's counts by its share of the batch. Does
// nothing in predict, and in loops of your own, which add such losses themselves.
//
// Throws InvalidArgument for another tensor, and where the model's loss is a sum (Reduction::sum). Throws it in layers
// that are recomputed or lie in stages of a pipeline, where the loss would have no gradient.
void add_loss(const Tensor& scalar);

}  // namespace lockstep
